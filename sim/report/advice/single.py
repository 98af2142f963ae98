"""What would make a job fit: every single change worth trying, and what it costs in step time, the cheapest first.

Memory follows the host's order, so that what a change frees is known without simulating a step; only changes after
which the job fits are simulated for their step time, and where two are needed those that may be one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sim.garbage import seldom_searched
from sim.report.advice.candidates import FSDP_OVER_ALL, WHOLE, Sets, candidates, few_trained
from sim.report.advice.combined import DEAR, fewer_nodes, fewest_blocks, milder, together
from sim.report.advice.trials import Change, Trial, Trials, Tried
from sim.report.numbers.memory import MemoryResult
from sim.scenario import Scenario
from sim.scenario.change import Changing

#: The cheapest of several changes at once that are tried in a lesser degree.
_MADE_MILDER = 3


@seldom_searched()
def advise(scenario: Scenario, memory: MemoryResult, trial: Callable[[Scenario], Trial], now_s: float) -> list[Change]:
    """Single changes that free memory: those that make the job fit first, the cheapest in GPU time before the others,
    then the rest by what they free on the GPU. Where none suffices on as many GPUs, or the cheapest is dear, two or
    three of those that free most and alone leave the job without room may; several at once are there only where they
    are cheaper than single ones, those that leave memory free than the single ones that do; those that leave none also
    only where they are cheaper than several that do.

    Of changes of one group (micro-batches of 8, 4, 2 ...) the mildest that suffices is there, and where it leaves no
    room the mildest that does; where none suffices the strongest. One that the scenario rules out, or that frees
    nothing, is left out. Where nothing makes it fit on as many GPUs, what trains fewer weights is told.

    Args:
        memory: of the scenario as it is; `now_s`: its step.
        trial: lowers a scenario; only steps of those that fit are asked for, and what each of two adds for a pair.
    """
    trials = Trials(Changing(scenario), trial, now_s, scenario)
    found = _singles(scenario, memory, trials)
    tries = [one._replace(sets=trials.fewest(one)) for group in found.values() for one in group]
    priced = trials.priced(tries)
    if not memory.fits and _cheapest(priced, more=False, roomy=True) > DEAR:
        several = together([one for one in tries if not one.after.roomy], trials)
        several, costs = _worth_it(several, priced, trials)
        for of, more in ((milder, False), (fewer_nodes, True)):
            cheap = sorted((c.gpu_time or 0.0, place) for place, c in enumerate(costs[:len(several)])
                           if c.more_gpus == more)
            less = (of(scenario, several[place], trials) for _, place in cheap[:_MADE_MILDER])
            first = next((one for one in less if one is not None), None)
            costs += trials.priced([first] if first is not None else [])
        free = [c for c in costs if c.roomy]
        priced += [c for c in costs if (c.gpu_time or 0.0) < _cheapest(
            priced if c.roomy else [*priced, *free], more=c.more_gpus, roomy=c.roomy)]
    if not memory.fits and not any(c.fits and not c.more_gpus for c in priced):
        priced += trials.priced([one._replace(sets=trials.fewest(one)) for one in _few_trained(scenario, trials)])
    return sorted(priced, key=lambda c: (not c.fits, c.gpu_time or 0.0, c.missing_bytes, c.host_missing_bytes))


def _singles(scenario: Scenario, memory: MemoryResult, trials: Trials) -> dict[str, list[Tried]]:
    """Single changes by group, the mildest first."""
    found: dict[str, list[Tried]] = {}
    for group, what, sets in candidates(scenario):
        before = found.get(group, [])
        if before and before[-1].after.roomy:
            continue
        one = trials.one((what, sets))
        if one is None:
            continue
        if before and before[-1].after.fits:
            found[group] += [one] if one.after.roomy else []
        elif one.after.fits or _frees(one.after, memory):
            found[group] = [one]
    if "recompute" in found and found["recompute"][0].after.fits:
        fewest = fewest_blocks(scenario, lambda what, sets: trials.one((what, sets)))
        if fewest is not None:
            found["blocks"] = [fewest]
    return found


def _few_trained(scenario: Scenario, trials: Trials) -> list[Tried]:
    """LoRA and QLoRA, each with as little beside it as leaves room: nothing, full recomputation, micro-batches of 1,
    then the same under FSDP where ranks hold whole parameters."""
    found, training = [], scenario.training
    steps: list[tuple[str, Sets]] = []
    if training.recompute != "full":
        steps.append(("full recomputation", {"training.recompute": "full"}))
    if training.micro_batch > 1:
        steps.append((f"micro-batches of 1 instead of {training.micro_batch}", {"training.micro_batch": 1}))
    beside = [steps[:count] for count in range(len(steps) + 1)]
    if scenario.replica_ranks > 1 and scenario.parallel.strategy in WHOLE:
        beside += [[(FSDP_OVER_ALL.what, FSDP_OVER_ALL.set), *some] for some in beside]
    for _, what, sets in few_trained(scenario):
        tries = (trials.one((what, sets), *some) for some in beside)
        found += [one for one in tries if one is not None and one.after.roomy][:1]
    return found


def _worth_it(several: list[Tried], singles: list[Change], trials: Trials) -> tuple[list[Tried], list[Change]]:
    """Several changes at once with their prices, first those that leave memory free. Of the others, near the end of
    memory, the allocator's replay takes longer than all else: those that without its retries are dearer are left out.
    """
    trials.replay(several)
    roomy = [one for one in several if one.after.roomy]
    costs = trials.priced(roomy)
    tight = [one for one in several if not one.after.roomy]
    cheaper = [one for one, work_s in zip(tight, trials.works(tight), strict=True) if trials.gpu_time(work_s, one)
               < _cheapest([*singles, *costs], more=one.scenario.gpus > trials.gpus, roomy=False)]
    return [*roomy, *cheaper], costs + trials.priced(cheaper)


def _cheapest(singles: list[Change], *, more: bool, roomy: bool) -> float:
    """GPU time of the cheapest with which the job fits, on as many GPUs unless `more`, with memory left if `roomy`."""
    return min((c.gpu_time for c in singles if c.gpu_time is not None and (more or not c.more_gpus)
                and (c.roomy or not roomy)), default=math.inf)


def _frees(after: MemoryResult, before: MemoryResult) -> bool:
    """Whether a change frees anything of what is too much."""
    if not before.fits_device:
        return after.use.peak_allocated_bytes < before.use.peak_allocated_bytes
    return after.fits_device and after.host_missing_bytes < before.host_missing_bytes
