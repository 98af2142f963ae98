"""A scenario changed and tried: what a change does to memory, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from sim.beside import each
from sim.errors import UserError
from sim.report.advice.candidates import Sets
from sim.report.numbers.memory import MemoryResult
from sim.scenario import Scenario
from sim.scenario.change import Changed, Changing
from sim.scenario.fields.schema import Inference

#: Seconds that lowering what is to be simulated took, from which on processes are started for it: simulating takes ten
#: and more times as long, and a process some hundredths of a second.
_LONG_S = 0.3


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
        gpu_time: GPU-seconds of a sequence over those without the change: what a change costs that takes more GPUs, or
            answers fewer sequences at once.
        count: single changes it takes, two where no one suffices or each that does is dear, three where no two do.
        more_gpus: whether it takes more GPUs than the job has.
        filled: what of a job that fits leaves no memory free (`MemoryResult.filled`).
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
    filled: str = ""

    @property
    def roomy(self) -> bool:
        """Whether the job fits and leaves memory free (`MemoryResult.roomy`)."""
        return self.fits and self.filled in ("", "pages")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"set": dict(self.set), "what": self.what, "fits": self.fits, "headroom_bytes": self.headroom_bytes,
                "gpus": self.gpus, "step_time_s": self.step_time_s, "slowdown": self.slowdown,
                "gpu_time": self.gpu_time, "count": self.count, "missing_bytes": self.missing_bytes,
                "host_missing_bytes": self.host_missing_bytes, "filled": self.filled}


class Tried(NamedTuple):
    """A change and the scenario and memory with it; `parts` are the single changes it consists of, in words and as they
    were asked for (`sets` is what of them has to be said); `lowered_s`: wall-clock seconds that lowering it took."""

    what: str
    sets: Sets
    scenario: Scenario
    trial: Trial
    after: MemoryResult
    parts: tuple[tuple[str, Sets], ...]
    lowered_s: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """What is still missing: of tensors on the GPU, then on the host."""
        return self.after.missing_bytes, self.after.host_missing_bytes


@dataclass(frozen=True)
class Trials:
    """How changes are tried and priced, against a step of `now_s` of the scenario `now`; what was simulated in another
    process is kept in `work`, seconds as of `Trial.work_s`."""

    change: Changing
    lowered: Callable[[Scenario], Trial]
    now_s: float
    now: Scenario
    work: dict[Trial, float] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """GPUs of the job without a change."""
        return self.now.gpus

    def one(self, *parts: tuple[str, Sets]) -> Tried | None:
        """The scenario with changes, each in words and as fields; None where that is ruled out."""
        try:
            other, said = self.change({name: value for _, sets in parts for name, value in sets.items()})
            started = time.perf_counter()
            one = self.lowered(other)
        except UserError:
            return None
        lowered_s = time.perf_counter() - started
        *most, last = (what for what, _ in parts)
        return Tried(f"{', '.join(most)} and {last}" if most else last, said, other, one, one.memory, parts,
                     lowered_s)

    def fewest(self, one: Tried) -> dict[str, Any]:
        """The fields that have to be said for it."""
        return dict(self.change.fewest(Changed(one.scenario, one.sets)))

    def gpu_time(self, step_s: float, one: Tried) -> float:
        """GPU time of a sequence, over the job's own."""
        work = one.scenario.gpus / self.gpus * _sequences(self.now) / _sequences(one.scenario)
        return step_s / self.now_s * work

    def priced(self, tries: Sequence[Tried]) -> list[Change]:
        """What is said of changes, with the step of each with which the job fits."""
        fitting = [one for one in tries if one.after.fits]
        self.replay(fitting)
        # where cached blocks fill the GPU the allocator's replay takes longer than the step
        filled = sum(not one.after.headroom_bytes for one in fitting)
        found = each(lambda one: (one.trial.step_time_s(), one.trial.work_s(), one.after.known), fitting,
                     _long(fitting) or filled > 1)
        steps = dict[Trial, float]()
        for one, (step_s, work_s, known) in zip(fitting, found, strict=True):
            steps[one.trial], self.work[one.trial] = step_s, work_s
            one.after.remember(known)
        return [self._said(one, steps.get(one.trial)) for one in tries]

    def replay(self, tries: Sequence[Tried]) -> None:
        """Finds out whether changes with which the job fits leave memory free, side by side."""
        new = [one for one in tries if not one.after.known]
        found = each(lambda one: (one.after.roomy, one.after.known), new, _long(new))
        for one, (_, known) in zip(new, found, strict=True):
            one.after.remember(known)

    def works(self, tries: Sequence[Tried]) -> list[float]:
        """Seconds of the step of each, whether it fits or not (`Trial.work_s`)."""
        new = [one for one in tries if one.trial not in self.work]
        self.work.update(zip((one.trial for one in new), each(lambda one: one.trial.work_s(), new, _long(new)),
                             strict=True))
        return [self.work[one.trial] for one in tries]

    def _said(self, one: Tried, step_s: float | None) -> Change:
        after = one.after  # what the allocator adds is a replay, and no answer for tensors that have no room alone
        headroom = after.headroom_bytes if after.fits_device else -after.missing_bytes
        plain = Change(self.fewest(one), one.what, after.fits, headroom, one.scenario.gpus, count=len(one.parts),
                       more_gpus=one.scenario.gpus > self.gpus, missing_bytes=after.missing_bytes,
                       host_missing_bytes=after.host_missing_bytes, filled=after.filled)
        if step_s is None:
            return plain
        return replace(plain, step_time_s=step_s, slowdown=step_s / self.now_s, gpu_time=self.gpu_time(step_s, one))


def _sequences(scenario: Scenario) -> int:
    """Sequences of a step, or of the requests that all replicas answer at once."""
    mode = scenario.training.mode
    if isinstance(mode, Inference):
        return scenario.data_parallel * mode.inference.batch
    return scenario.training.global_batch


def _long(tries: Sequence[Tried]) -> bool:
    """Whether simulating them is worth processes of their own."""
    return sum(one.lowered_s for one in tries) > _LONG_S
