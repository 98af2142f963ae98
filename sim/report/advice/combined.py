"""Several changes at once with which a job fits, where no single one suffices or each that does is dear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from sim.report.advice.candidates import Sets
from sim.report.advice.trials import Trials, Tried
from sim.scenario import Scenario

#: GPU time of the cheapest change, over the job's own, above which several lesser ones may be what a user wants.
DEAR = 1.3
#: Single changes of which several are tried at once; of those that fit, how many are priced, how many of these may take
#: more GPUs, and how many pairs stand beside triples; pairs that lack least, to which a third is added.
_STRONGEST, _PRICED, _ON_MORE, _TWOS, _EXTENDED = 10, 8, 3, 2, 8
#: Share of a GPU's memory that tensors may take without the allocator's cache mostly running short.
_ROOMY = 0.9
_BLOCKS, _NODES, _SHARDS = "training.recompute", "cluster.nodes", "parallel.sharding_factor"


def together(tries: Sequence[Tried], trials: Trials) -> list[Tried]:
    """Several changes at once with which the job fits, of those that free most by themselves: two, and three where all
    twos on as many GPUs leave the allocator no room or are dear. The cheapest by what each costs alone, those that
    leave room before those that may not, without more GPUs before with more."""
    strongest = sorted(tries, key=lambda one: one.after.use.peak_allocated_bytes)[:_STRONGEST]
    alone = {one.what: trials.gpu_time(work_s, one)
             for one, work_s in zip(strongest, trials.works(strongest), strict=True)}

    def cost(one: Tried) -> float:
        return math.prod(alone[what] for what, _ in one.parts)

    pairs = list(_pairs(strongest, trials))
    found = [one for one in pairs if one.after.fits]
    easy = [one for one in found if one.scenario.gpus <= trials.gpus and not _tight(one)]
    if not any(cost(one) <= DEAR and one.after.free_bytes > 0 for one in easy):
        found += _threes([one for one in pairs if not one.after.fits or _tight(one)],
                         [one for one in strongest if not one.after.fits], trials)
    found.sort(key=lambda one: (one.scenario.gpus > trials.gpus, _tight(one), cost(one)))
    here = [one for one in found if one.scenario.gpus <= trials.gpus]
    more = found[len(here):][:_ON_MORE if here else _PRICED]
    twos = [one for one in here if len(one.parts) == 2]
    threes = [one for one in here if len(one.parts) == 3][:_PRICED - len(more) - len(twos[:_TWOS])]
    return [*twos[:_PRICED - len(more) - len(threes)], *threes, *more]


def _tight(one: Tried) -> bool:
    """Whether the allocator is likely to run short, tensors taking about what it holds; to know is a replay each."""
    return one.after.use.peak_allocated_bytes > _ROOMY * one.after.capacity_bytes


def _pairs(strongest: Sequence[Tried], trials: Trials) -> Iterator[Tried]:
    for first, second in combinations(strongest, 2):
        both = _of(trials, first, second)
        if both is not None:
            yield both


def _threes(pairs: Sequence[Tried], strongest: Sequence[Tried], trials: Trials) -> Iterator[Tried]:
    """A third change beside the two that lack least, all on as many GPUs and of those that alone do not fit: with one
    that does, another leaves room."""
    seen = set()
    by_words = {one.what: one for one in strongest}
    lacking = sorted((one for one in pairs if one.scenario.gpus <= trials.gpus
                      and all(what in by_words for what, _ in one.parts)), key=lambda one: one.order)
    for pair in lacking[:_EXTENDED]:
        two = [by_words[what] for what, _ in pair.parts]
        for third in strongest:
            words = frozenset((*(one.what for one in two), third.what))
            if third.scenario.gpus > trials.gpus or len(words) < 3 or words in seen:
                continue
            seen.add(words)
            three = _of(trials, *two, third)
            if three is not None and three.after.fits:
                yield three


def _of(trials: Trials, *singles: Tried) -> Tried | None:
    """Changes at once; None where two of them say a field otherwise, one says nothing that the others do not, or they
    are ruled out."""
    said: dict[str, object] = {}
    for one in singles:
        if any(said.get(field, value) != value for field, value in one.sets.items()):
            return None
        said.update(one.sets)
    for one in singles:
        others = {field for other in singles if other is not one for field in other.sets}
        if others.issuperset(one.sets):
            return None
    return trials.one(*((one.what, one.sets) for one in singles))


def fewer_nodes(scenario: Scenario, one: Tried, trials: Trials) -> Tried | None:
    """The same changes on the fewest nodes that suffice, halved step by step, where more nodes are one of them."""
    found, now = None, scenario.cluster.nodes
    for part in one.parts:
        sets, rest = part[1], [other for other in one.parts if other is not part]
        if set(sets) - {_NODES, _SHARDS}:  # nodes that the cut itself needs
            continue
        nodes = int(sets.get(_NODES, 0)) // 2
        while nodes > now:
            less = trials.one((f"{nodes} nodes instead of {now}", {**sets, _NODES: nodes}), *rest)
            if less is None or not less.after.fits or less.after.short:
                break
            found, nodes = less, nodes // 2
    return found


def milder(scenario: Scenario, one: Tried, trials: Trials) -> Tried | None:
    """The same changes with as few recomputed blocks as suffice, where full recomputation is one of them."""
    rest = [(what, sets) for what, sets in one.parts if sets.get(_BLOCKS) != "full"]
    if len(rest) == len(one.parts):
        return None
    return fewest_blocks(scenario, lambda what, sets: trials.one((what, sets), *rest))


def fewest_blocks(scenario: Scenario, tried: Callable[[str, Sets], Tried | None]) -> Tried | None:
    """The fewest recomputed blocks that suffice without the allocator running short, where all of them suffice. They
    are counted on each pipeline rank (`training.recompute`), of which none is taken to hold twice its even share."""
    blocks, ranks = scenario.model.layers + (scenario.model.decoder_layers or 0), scenario.parallel.pipeline
    of = f"of {blocks}" if ranks == 1 else "of each pipeline rank's"
    most = blocks if ranks == 1 else min(blocks, 2 * -(-blocks // ranks))
    sufficient: list[Tried] = []  # the last that did, which is the one with the fewest

    def suffice(count: int) -> bool:
        one = tried(f"full recomputation of {count} {of} blocks", {"training.recompute": {"layers": count}})
        enough = one is not None and one.after.roomy
        if one is not None and enough:
            sufficient[:] = [one]
        return enough

    next_above(0, most, suffice)
    return sufficient[0] if sufficient else None


def next_above(low: int, high: int, suffices: Callable[[int], bool]) -> int:
    """The smallest number above `low` that suffices, where `high` is known to and so does everything above one."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
