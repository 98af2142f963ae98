"""Axes with so many values that neighbours hardly differ: which of them a search tries.

* The first k of a pipeline rank's blocks recomputed: every so many, so that a search has at most `NUMBERS` of them.
  Recomputation of all costs about a third of a step, so what is between two differs from them by less than 3%; next to
  the best it is tried too (`sim.sizing.search.finer`).
* Chunks of an interleaved pipeline: of those numbers whose largest chunk has as many blocks the smallest. The largest
  chunk sets how long the pipeline takes to fill; more chunks than it needs send more.
* Micro-batches: from the smallest on each time the largest that is at most twice the last (the next where there is
  none): of 960 sequences eleven numbers for 28. Twice the tokens change what kernels reach of a GPU by little once they
  fill it, and of what lies between two a step takes no less than the larger would if it fitted; what fits between a
  micro-batch that does and twice as many sequences that do not is tried next to the best (`sim.sizing.search.between`).
* Ranks of context: while each keeps as many tokens as a flash kernel takes queries at once. Fewer leave its products
  no work, and the exchange of keys is what it was.

What a user asks for by name, and what the scenario itself has, is tried whatever its value.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sim.scenario import Scenario
from sim.scenario.fields.schema import RecomputeLayers

#: Numbers of recomputed blocks that are tried at most, full recomputation among them.
NUMBERS = 12
#: Queries of a block of FlashAttention-2's forward (flash_fwd_launch_template.h: kBlockM 128 of most head sizes).
TOKENS = 128


class Own(NamedTuple):
    """What a scenario has of these axes: recomputed blocks (0 = by another policy), chunks, ranks of context, sequences
    of a micro-batch."""

    blocks: int = 0
    chunks: int = 1
    context: int = 1
    micro_batch: int = 1


def own_of(scenario: Scenario) -> Own:
    """Of the scenario that is searched."""
    recompute, parallel = scenario.training.recompute, scenario.parallel
    return Own(int(recompute.layers) if isinstance(recompute, RecomputeLayers) else 0, parallel.virtual_stages,
               parallel.context, scenario.training.micro_batch)


def stride(blocks: int) -> int:
    """Blocks from one number to the next, of a pipeline rank's."""
    return -(-blocks // NUMBERS)


def numbers(blocks: int, own: Own) -> list[int]:
    """Recomputed blocks that are tried, fewer than all."""
    return sorted({*range(stride(blocks), blocks, stride(blocks)), *({own.blocks} if 0 < own.blocks < blocks else ())})


def chunks(blocks: int, pipeline: int, own: Own, asked: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Chunks of every rank of an interleaved pipeline, and how many numbers of chunks each stands for.

    Args:
        asked: by name; those alone then.
    """
    most = (blocks + 2) // pipeline  # with embedding and head in slots of their own
    if asked:
        yield from ((count, 1) for count in sorted(set(asked)) if 2 <= count <= most)
        return
    tried = [count for count in range(2, most + 1) if count == own.chunks or count == 2
             or -(-blocks // (pipeline * count)) < -(-blocks // (pipeline * (count - 1)))]
    yield from ((count, after - count) for count, after in zip(tried, [*tried[1:], most + 1], strict=False))


def micro_batches(able: Sequence[int], own: Own, asked: Iterable[int]) -> list[tuple[int, int]]:
    """Of micro-batches that a layout can have, ascending, those that are tried, and how many each stands for.

    Args:
        asked: by name; those alone then.
    """
    if named := set(asked):
        return [(micro, 1) for micro in able if micro in named]
    places = [0]
    while places[-1] < len(able) - 1:
        last = places[-1]
        places.append(max(last + 1, bisect_right(able, 2 * able[last]) - 1))
    tried = sorted({*places, *(place for place, micro in enumerate(able) if micro == own.micro_batch)})
    return [(able[place], after - place) for place, after in zip(tried, [*tried[1:], len(able)], strict=True)]


def contexts(degrees: Iterable[int], sequence: int, own: Own, asked: Iterable[int]) -> list[int]:
    """Of ranks that may share a sequence those that are tried.

    Args:
        asked: by name; those alone then.
    """
    named = set(asked)
    return [degree for degree in degrees if (degree in named if named else (
        degree in (1, own.context) or sequence // degree >= TOKENS))]
