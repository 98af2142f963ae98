"""Layouts to simulate first where time is limited: of every family the one with the lowest bound that leaves room, and
then what is near the best of them.

A best-first search begins with the lowest bounds of time, and bounds of memory are so far below the truth that its
first rounds may hold nothing that fits; without limit that costs a few rounds, under one it may be all there is time
for. These rows change no proof: they are rows like others, evaluated before their turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from sim.sizing.search.best_first import ROUND, Aside, Found
from sim.sizing.search.ranking import Ranking
from sim.sizing.search.runner import Runner
from sim.sizing.space.families import kinds_of

#: Rows of families, by name.
Kinds = Mapping[str, npt.NDArray[np.bool_]]
#: Shares of a GPU's memory that a row may take by its lower bound, tried in turn: of the first most rows fit.
_ROOMY = (0.6, 0.75, 0.9)
#: Times that a family's lowest rows are bounded finely before what is at hand is taken: with time, and without.
_TURNS, _AT_LEAST = 20, 2
#: Rounds near a family's best that bring nothing, after which it is left.
_IN_VAIN = 2
#: Families whose best is so many times the best are not looked at closely.
_FAR = 2.0
#: More sequences than any micro-batch has.
_MANY = np.iinfo(np.int32).max


def early(ranking: Ranking, stop: Callable[[], bool], kinds: Kinds | None = None) -> list[int]:
    """At most a round of rows, the lowest bounds first.

    Args:
        stop: whether the time is over, after which little is bounded.
        kinds: families, all of the space if not given.
    """
    rows = []
    for kind in (kinds_of(ranking.space) if kinds is None else kinds).values():
        mine = np.flatnonzero(kind & np.isfinite(ranking.values))
        sizes = ranking.space.columns["micro_batch"][mine]
        small = mine[sizes == sizes.min(initial=_MANY)]
        found = (_roomy(ranking, some, share, stop) for share in _ROOMY for some in (mine, small))
        rows.append(next((row for row in found if row is not None), None))
    return sorted({row for row in rows if row is not None}, key=lambda row: (ranking.values[row], row))[:ROUND]


def climb(ranking: Ranking, runner: Runner, near: Aside, first: Sequence[int], stop: Callable[[], bool],
          kinds: Kinds | None = None) -> None:
    """Simulates `first`, then what is near the best of every family, a round of each in turn, while any of it may be
    better: where bounds are loose, one family's best says nothing of another's. Every other round is of the family that
    has the best. Where all rows are bounded a family is left after a few rounds that brought it nothing: the search
    that follows then proves more than they would.

    Args:
        near: as of a search, asked for rows.
        stop: whether the time for this is over.
        kinds: families, all of the space if not given.
    """
    known = dict(zip(first, runner.values(first), strict=True))
    left = [(kind, 0) for kind in (kinds_of(ranking.space) if kinds is None else kinds).values()]  # its rounds in vain
    patience = math.inf if ranking.of.unbounded.any() else _IN_VAIN
    for turn in count():
        if not left or stop():
            return
        best = sorted((value, row) for row, value in known.items() if np.isfinite(value))
        leads = [place for place, one in enumerate(left) if best and one[0][best[0][1]]] if turn % 2 else []
        kind, vain = left.pop(leads[0] if leads else 0)
        mine = [(value, row) for value, row in best if kind[row]]
        if not mine or mine[0][0] > _FAR * best[0][0]:
            continue
        rows = near(Found(mine, list(known), known))[0]
        known.update(zip(rows, runner.values(rows), strict=True))
        vain = 0 if min((known[row] for row in rows), default=np.inf) < mine[0][0] else vain + 1
        if rows and vain < patience:
            left.append((kind, vain))


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
