"""What would make a job fit: every single change worth trying, and what it costs in step time, the cheapest first.

Memory follows the host's order, so that what a change frees is known without simulating a step; only changes after
which the job fits are simulated for their step time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple, Protocol

from sim.errors import UserError
from sim.garbage import seldom_searched
from sim.report.candidates import Sets, candidates
from sim.report.memory import MemoryResult
from sim.scenario import Scenario
from sim.scenario.change import Changed, Changing

#: Single changes of which pairs are tried, and pairs whose step is predicted.
_STRONGEST, _PRICED = 10, 8
#: GPU time of the cheapest single change, over the job's own, above which two lesser ones may be what a user wants.
DEAR = 1.3
#: Share of a GPU's memory that tensors may take without the allocator's cache mostly running short.
_ROOMY = 0.9

Measure = Callable[[Scenario], MemoryResult]


class Trial(Protocol):
    """A scenario that may be predicted: its memory, and its step if that is asked for."""

    @property
    def memory(self) -> MemoryResult: ...
    def step_time_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a scenario and what it does.

    Attributes:
        set: dotted fields and their new values.
        what: in words.
        fits: whether the job fits with it; headroom_bytes: by how much (negative: not).
        missing_bytes, host_missing_bytes: what tensors lack on the GPU, and what is offloaded on the host of a node.
        gpus: GPUs of the changed job.
        step_time_s, slowdown: the step with it, and over the step without; None where the job still does not fit.
        gpu_time: GPU-seconds of a step over those without the change: what a change to more GPUs costs.
        count: single changes it takes, two where no one suffices or each that does is dear.
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

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"set": dict(self.set), "what": self.what, "fits": self.fits, "headroom_bytes": self.headroom_bytes,
                "gpus": self.gpus, "step_time_s": self.step_time_s, "slowdown": self.slowdown,
                "gpu_time": self.gpu_time, "count": self.count, "missing_bytes": self.missing_bytes,
                "host_missing_bytes": self.host_missing_bytes}


@seldom_searched()
def advise(scenario: Scenario, memory: MemoryResult, trial: Callable[[Scenario], Trial], now_s: float) -> list[Change]:
    """Single changes that free memory: those that make the job fit first, the cheapest in GPU time before the others,
    then the rest by what they free on the GPU. Where none suffices, or the cheapest is dear, two of those that free
    most and alone leave the job without room may; beside single changes pairs are there only where they are cheaper.

    Of changes of one group (micro-batches of 8, 4, 2 ...) only the mildest that suffices is there, else the strongest;
    one that the scenario rules out, or that frees nothing, is left out.

    Args:
        memory: of the scenario as it is; `now_s`: its step.
        trial: lowers a scenario; only the steps of those that fit are asked for.
    """
    change = Changing(scenario)
    found: dict[str, _Tried] = {}

    def tried(group: str, what: str, sets: Sets) -> bool:
        """Whether the job fits with a change, which is kept if it frees anything."""
        try:
            other, said = change(sets)
            one = trial(other)
        except UserError:
            return False
        after = one.memory
        frees = (after.use.peak_allocated_bytes < memory.use.peak_allocated_bytes if not memory.fits_device else
                 after.fits_device and after.host_missing_bytes < memory.host_missing_bytes)
        if after.fits or frees:
            found[group] = _Tried(what, said, other, one, after)
        return after.fits

    for group, what, sets in candidates(scenario):
        if not (group in found and found[group].after.fits):
            tried(group, what, sets)
    if "recompute" in found and found["recompute"].after.fits:
        _fewest_blocks(scenario, lambda what, sets: tried("blocks", what, sets), found)
    tries = [one._replace(sets=change.fewest(Changed(one.scenario, one.sets))) for one in found.values()]
    priced = [_change(one, now_s, scenario.gpus) for one in tries]
    cheapest = min((c.gpu_time for c in priced if c.gpu_time is not None), default=math.inf)
    if not memory.fits and cheapest > DEAR:
        pairs = _pairs([one for one in tries if not one.after.fits or one.after.short],
                       change, trial, scenario.gpus)
        two = [_change(one._replace(sets=change.fewest(Changed(one.scenario, one.sets))), now_s, scenario.gpus)
               for one in pairs]
        priced += [c for c in two if (c.gpu_time or 0.0) < cheapest]
    return sorted(priced, key=lambda c: (not c.fits, c.gpu_time or 0.0, c.missing_bytes, c.host_missing_bytes))


class _Tried(NamedTuple):
    """A change and the scenario and memory with it."""

    what: str
    sets: Sets
    scenario: Scenario
    trial: Trial
    after: MemoryResult
    changes: int = 1


def _pairs(tries: list[_Tried], change: Changing, trial: Callable[[Scenario], Trial],
           gpus: int) -> list[_Tried]:
    """Two changes at once with which the job fits, of those that free most by themselves; without more GPUs before
    with more, and each with the mildest partner that suffices first."""
    strongest = sorted(tries, key=lambda one: one.after.use.peak_allocated_bytes)[:_STRONGEST]
    found = []
    for first, second in combinations(strongest, 2):
        if any(first.sets[field] != second.sets[field] for field in set(first.sets) & set(second.sets)):
            continue
        try:
            other, sets = change({**first.sets, **second.sets})
            both = trial(other)
        except UserError:
            continue
        after = both.memory
        if after.fits:
            found.append(_Tried(f"{first.what} and {second.what}", sets, other, both, after, 2))
    # whether the allocator would run short is a replay each; what takes little more than it holds is likely to
    found.sort(key=lambda one: (one.scenario.gpus > gpus, one.after.use.peak_allocated_bytes
                                > _ROOMY * one.after.capacity_bytes, -one.after.use.peak_allocated_bytes))
    return found[:_PRICED]


def _change(one: _Tried, now_s: float, gpus: int) -> Change:
    plain = Change(dict(one.sets), one.what, one.after.fits, one.after.headroom_bytes, one.scenario.gpus,
                   count=one.changes, missing_bytes=one.after.missing_bytes,
                   host_missing_bytes=one.after.host_missing_bytes)
    if not one.after.fits:
        return plain
    step_s = one.trial.step_time_s()
    return replace(plain, step_time_s=step_s, slowdown=step_s / now_s,
                   gpu_time=step_s / now_s * one.scenario.gpus / gpus)


def _fewest_blocks(scenario: Scenario, tried: Callable[[str, Sets], bool], found: dict[str, _Tried]) -> None:
    """The fewest recomputed blocks that suffice without the allocator running short, where all of them suffice."""
    blocks = scenario.model.layers + (scenario.model.decoder_layers or 0)
    sufficient: list[_Tried] = []  # the last that did, which is the one with the fewest

    def suffice(count: int) -> bool:
        what = f"full recomputation of {count} of {blocks} blocks"
        enough = tried(what, {"training.recompute": {"layers": count}}) and (
            found["blocks"].after.headroom_bytes > 0 and not found["blocks"].after.short)
        if enough:
            sufficient[:] = [found["blocks"]]
        return enough

    next_above(0, blocks, suffice)
    found.pop("blocks", None)  # the last one tried
    if sufficient:
        found["blocks"] = sufficient[0]


def next_above(low: int, high: int, suffices: Callable[[int], bool]) -> int:
    """The smallest number above `low` that suffices, where `high` is known to and so does everything above one."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
