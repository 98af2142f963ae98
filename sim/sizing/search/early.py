"""Layouts to simulate first where time is limited: of every family the one with the lowest bound that leaves room.

A best-first search begins with the lowest bounds of time, and bounds of memory are so far below the truth that its
first rounds may hold nothing that fits; without limit that costs a few rounds, under one it may be all there is time
for. These rows change no proof: they are rows like others, evaluated before their turn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sim.sizing.search.best_first import ROUND
from sim.sizing.search.ranking import Ranking
from sim.sizing.space.families import kinds_of

#: Shares of a GPU's memory that a row may take by its lower bound, tried in turn: of the first most rows fit.
_ROOMY = (0.6, 0.75, 0.9)
#: Times that a family's lowest rows are bounded finely before what is at hand is taken: with time, and without.
_TURNS, _AT_LEAST = 20, 2
#: More sequences than any micro-batch has.
_MANY = np.iinfo(np.int32).max


def early(ranking: Ranking, stop: Callable[[], bool]) -> list[int]:
    """At most a round of rows, the lowest bounds first.

    Args:
        stop: whether the time is over, after which little is bounded.
    """
    rows = []
    for kind in kinds_of(ranking.space).values():
        mine = np.flatnonzero(kind & np.isfinite(ranking.values))
        sizes = ranking.space.columns["micro_batch"][mine]
        small = mine[sizes == sizes.min(initial=_MANY)]
        found = (_roomy(ranking, some, share, stop) for share in _ROOMY for some in (mine, small))
        rows.append(next((row for row in found if row is not None), None))
    return sorted((row for row in rows if row is not None), key=lambda row: (ranking.values[row], row))[:ROUND]


def _roomy(ranking: Ranking, mine: npt.NDArray[np.intp], share: float, stop: Callable[[], bool]) -> int | None:
    """The row of some with the lowest bound of those that are bounded finely and leave room; None if none is."""
    of = ranking.of
    if not len(mine):
        return None
    for turn in range(_TURNS):
        fine = ~of.coarse[mine]
        room = of.memory_bytes[mine] <= share * (of.capacity_bytes[mine] - ranking.wish.margin_bytes)
        values = np.where(room, ranking.values[mine], np.inf)  # of coarse rows memory is 0
        lowest = int(np.argmin(values))
        if not np.isfinite(values[lowest]):
            return None
        if fine[lowest]:
            return int(mine[lowest])
        if (turn >= _AT_LEAST and stop()) or not ranking.tighten_only([int(mine[lowest])]):
            break
    known = np.where(fine, values, np.inf)
    lowest = int(np.argmin(known))
    return int(mine[lowest]) if np.isfinite(known[lowest]) else None
