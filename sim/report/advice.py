"""What would make a job fit: every single change worth trying, and what it costs in step time, the cheapest first.

Memory follows the host's order, so that what a change frees is known without simulating a step; only changes after
which the job fits are simulated for their step time, and where two are needed those that may be one of them.
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
    def work_s(self) -> float: ...


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
        trial: lowers a scenario; only steps of those that fit are asked for, and what each of two adds for a pair.
    """
    trials = _Trials(Changing(scenario), trial, now_s, scenario.gpus)
    found: dict[str, _Tried] = {}
    for group, what, sets in candidates(scenario):
        if not (group in found and found[group].after.fits):
            one = trials.one(what, sets)
            if one is not None and (one.after.fits or _frees(one.after, memory)):
                found[group] = one
    if "recompute" in found and found["recompute"].after.fits:
        fewest = _fewest_blocks(scenario, trials.one)
        if fewest is not None:
            found["blocks"] = fewest
    priced = [trials.priced(one) for one in found.values()]
    cheapest = min((c.gpu_time for c in priced if c.gpu_time is not None), default=math.inf)
    if not memory.fits and cheapest > DEAR:
        pairs = _pairs([one for one in found.values() if not one.after.fits or one.after.short], trials)
        two = [trials.priced(one) for one in pairs]
        if two and (milder := _milder(scenario, min(zip(two, pairs, strict=True), key=_gpu_time)[1], trials)):
            two.append(trials.priced(milder))
        priced += [c for c in two if (c.gpu_time or 0.0) < cheapest]
    return sorted(priced, key=lambda c: (not c.fits, c.gpu_time or 0.0, c.missing_bytes, c.host_missing_bytes))


def _frees(after: MemoryResult, before: MemoryResult) -> bool:
    """Whether a change frees anything of what is too much."""
    if not before.fits_device:
        return after.use.peak_allocated_bytes < before.use.peak_allocated_bytes
    return after.fits_device and after.host_missing_bytes < before.host_missing_bytes


class _Tried(NamedTuple):
    """A change and the scenario and memory with it."""

    what: str
    sets: Sets
    scenario: Scenario
    trial: Trial
    after: MemoryResult
    changes: int = 1


class _Trials(NamedTuple):
    """How changes are tried and priced, against a step of `now_s` on `gpus`."""

    change: Changing
    lowered: Callable[[Scenario], Trial]
    now_s: float
    gpus: int

    def one(self, what: str, sets: Sets, changes: int = 1) -> _Tried | None:
        """The scenario with a change; None where it is ruled out."""
        try:
            other, said = self.change(sets)
            one = self.lowered(other)
        except UserError:
            return None
        return _Tried(what, said, other, one, one.memory, changes)

    def gpu_time(self, step_s: float, one: _Tried) -> float:
        """GPU time of a step, over the job's own."""
        return step_s / self.now_s * one.scenario.gpus / self.gpus

    def priced(self, one: _Tried) -> Change:
        """What is said of a change, with its step if the job fits with it."""
        plain = Change(dict(self.change.fewest(Changed(one.scenario, one.sets))), one.what, one.after.fits,
                       one.after.headroom_bytes, one.scenario.gpus, count=one.changes,
                       missing_bytes=one.after.missing_bytes, host_missing_bytes=one.after.host_missing_bytes)
        if not one.after.fits:
            return plain
        step_s = one.trial.step_time_s()
        return replace(plain, step_time_s=step_s, slowdown=step_s / self.now_s, gpu_time=self.gpu_time(step_s, one))


def _pairs(tries: list[_Tried], trials: _Trials) -> list[_Tried]:
    """Two changes at once with which the job fits, of those that free most by themselves: the cheapest by what each of
    the two costs alone, those that leave the allocator room before those that may not."""
    strongest = sorted(tries, key=lambda one: one.after.use.peak_allocated_bytes)[:_STRONGEST]
    alone = {one.what: trials.gpu_time(one.trial.work_s(), one) for one in strongest}
    found = []
    for first, second in combinations(strongest, 2):
        if any(first.sets[field] != second.sets[field] for field in set(first.sets) & set(second.sets)):
            continue
        both = trials.one(f"{first.what} and {second.what}", {**first.sets, **second.sets}, 2)
        if both is not None and both.after.fits:
            found.append((alone[first.what] * alone[second.what], both))
    # whether the allocator would run short is a replay each; what takes little more than it holds is likely to
    found.sort(key=lambda pair: (pair[1].after.use.peak_allocated_bytes > _ROOMY * pair[1].after.capacity_bytes,
                                 pair[0]))
    return [one for _, one in found[:_PRICED]]


def _gpu_time(pair: tuple[Change, _Tried]) -> float:
    return pair[0].gpu_time or 0.0


def _milder(scenario: Scenario, pair: _Tried, trials: _Trials) -> _Tried | None:
    """The same two changes with as few recomputed blocks as suffice, where full recomputation is one of them."""
    if pair.sets.get("training.recompute") != "full":
        return None
    rest = {field: value for field, value in pair.sets.items() if field != "training.recompute"}
    other = pair.what.replace("full recomputation and ", "").replace(" and full recomputation", "")
    return _fewest_blocks(scenario, lambda what, sets: trials.one(f"{what} and {other}", {**rest, **sets}, 2))


def _fewest_blocks(scenario: Scenario, tried: Callable[[str, Sets], _Tried | None]) -> _Tried | None:
    """The fewest recomputed blocks that suffice without the allocator running short, where all of them suffice."""
    blocks = scenario.model.layers + (scenario.model.decoder_layers or 0)
    sufficient: list[_Tried] = []  # the last that did, which is the one with the fewest

    def suffice(count: int) -> bool:
        one = tried(f"full recomputation of {count} of {blocks} blocks", {"training.recompute": {"layers": count}})
        enough = one is not None and one.after.fits and one.after.headroom_bytes > 0 and not one.after.short
        if one is not None and enough:
            sufficient[:] = [one]
        return enough

    next_above(0, blocks, suffice)
    return sufficient[0] if sufficient else None


def next_above(low: int, high: int, suffices: Callable[[int], bool]) -> int:
    """The smallest number above `low` that suffices, where `high` is known to and so does everything above one."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
