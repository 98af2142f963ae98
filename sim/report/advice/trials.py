"""A scenario changed and tried: what a change does to memory, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from sim.errors import UserError
from sim.report.advice.candidates import Sets
from sim.report.numbers.memory import MemoryResult
from sim.scenario import Scenario
from sim.scenario.change import Changed, Changing


class Trial(Protocol):
    """A scenario that may be predicted: its memory, and its step if that is asked for."""

    @property
    def memory(self) -> MemoryResult: ...
    def step_time_s(self) -> float: ...
    def work_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a scenario and what it does.

    Attributes:
        set: dotted fields and their new values.
        what: in words.
        fits: whether the job fits with it; headroom_bytes: by how much (negative: what the tensors lack).
        missing_bytes, host_missing_bytes: what tensors lack on the GPU, and what is offloaded on the host of a node.
        gpus: GPUs of the changed job.
        step_time_s, slowdown: the step with it, and over the step without; None where the job still does not fit.
        gpu_time: GPU-seconds of a step over those without the change: what a change to more GPUs costs.
        count: single changes it takes, two where no one suffices or each that does is dear, three where no two do.
        more_gpus: whether it takes more GPUs than the job has.
    """

    set: dict[str, Any]
    what: str
    fits: bool
    headroom_bytes: int
    gpus: int
    step_time_s: float | None = None
    slowdown: float | None = None
    gpu_time: float | None = None
    count: int = 1
    missing_bytes: int = 0
    host_missing_bytes: int = 0
    more_gpus: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"set": dict(self.set), "what": self.what, "fits": self.fits, "headroom_bytes": self.headroom_bytes,
                "gpus": self.gpus, "step_time_s": self.step_time_s, "slowdown": self.slowdown,
                "gpu_time": self.gpu_time, "count": self.count, "missing_bytes": self.missing_bytes,
                "host_missing_bytes": self.host_missing_bytes}


class Tried(NamedTuple):
    """A change and the scenario and memory with it; `parts` are the single changes it consists of, in words and as they
    were asked for (`sets` is what of them has to be said)."""

    what: str
    sets: Sets
    scenario: Scenario
    trial: Trial
    after: MemoryResult
    parts: tuple[tuple[str, Sets], ...]

    @property
    def order(self) -> tuple[int, int]:
        """What is still missing: of tensors on the GPU, then on the host."""
        return self.after.missing_bytes, self.after.host_missing_bytes


class Trials(NamedTuple):
    """How changes are tried and priced, against a step of `now_s` on `gpus`."""

    change: Changing
    lowered: Callable[[Scenario], Trial]
    now_s: float
    gpus: int

    def one(self, *parts: tuple[str, Sets]) -> Tried | None:
        """The scenario with changes, each in words and as fields; None where that is ruled out."""
        try:
            other, said = self.change({field: value for _, sets in parts for field, value in sets.items()})
            one = self.lowered(other)
        except UserError:
            return None
        *most, last = (what for what, _ in parts)
        return Tried(f"{', '.join(most)} and {last}" if most else last, said, other, one, one.memory, parts)

    def fewest(self, one: Tried) -> dict[str, Any]:
        """The fields that have to be said for it."""
        return dict(self.change.fewest(Changed(one.scenario, one.sets)))

    def gpu_time(self, step_s: float, one: Tried) -> float:
        """GPU time of a step, over the job's own."""
        return step_s / self.now_s * one.scenario.gpus / self.gpus

    def priced(self, one: Tried) -> Change:
        """What is said of a change, with its step if the job fits with it."""
        after = one.after  # what the allocator adds is a replay, and no answer for tensors that have no room alone
        headroom = after.headroom_bytes if after.fits_device else -after.missing_bytes
        plain = Change(self.fewest(one), one.what, after.fits, headroom, one.scenario.gpus, count=len(one.parts),
                       more_gpus=one.scenario.gpus > self.gpus, missing_bytes=after.missing_bytes,
                       host_missing_bytes=after.host_missing_bytes)
        if not after.fits:
            return plain
        step_s = one.trial.step_time_s()
        return replace(plain, step_time_s=step_s, slowdown=step_s / self.now_s, gpu_time=self.gpu_time(step_s, one))
