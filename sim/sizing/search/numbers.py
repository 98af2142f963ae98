"""The numbers of GPUs that are asked for: a search under a time limit looks at each, and what came of none is told.

The fastest layouts have the most GPUs, and bounds come first that are lowest: what is asked of fewer GPUs would be left
for the last, and be told as what more GPUs buy from whatever was simulated of it. So before all else a layout that
leaves room is simulated of each number, and behind the climb of the families the layout of the best on each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.sizing.search.best_first import ROUND
from sim.sizing.search.early import climb, early
from sim.sizing.search.nearby import Nearby, within
from sim.sizing.search.precisions import roomier
from sim.sizing.search.ranking import Ranking
from sim.sizing.search.round_out import first_fitting
from sim.sizing.search.runner import Runner
from sim.sizing.space.layouts import Space

#: Share of a GPU's memory up to which a layout is hardly slow for want of it, by its lower bound.
_ROOMY = 0.9
Mask = npt.NDArray[np.bool_]


class Without(NamedTuple):
    """A number of GPUs of a cluster that came to nothing, and why."""

    cluster: str
    gpus: int
    reason: str


def each_number(ranking: Ranking, runner: Runner, stop: Callable[[], bool], over: Callable[[], bool]) -> None:
    """Simulates of each of several numbers of GPUs a layout that leaves room, a round of them at once, and where that
    does not fit some more.

    Args:
        stop: whether the time of the search is over; over: that of this.
    """
    rows = _by_number(ranking.space)
    if len(rows) == 1:
        return
    kinds = {str(place): mine for place, mine in enumerate(rows.values())}
    for mine in kinds.values():
        left = np.flatnonzero(mine & ranking.of.unbounded)
        if len(left) and not np.isfinite(ranking.values[mine]).any():  # no time was left for any: of two slices
            ranking.bound_at(left[[0, -1]])
    for first in range(0, len(kinds), ROUND):  # so many are found at once
        if not first or not over():
            some = list(kinds)[first:first + ROUND]
            runner.values(early(ranking, stop, {name: kinds[name] for name in some}))
    for mine in kinds.values():
        if not _fits(runner, mine):
            first_fitting(ranking, runner, np.flatnonzero(mine), over)


def climb_each(ranking: Ranking, runner: Runner, over: Callable[[float], bool]) -> None:
    """The best's layout on each of several numbers of GPUs, and then what is near the best of each.

    Args:
        over: whether so large a share of the time for this is over.
    """
    best = _best(runner, runner.rows)
    if best is None:
        return
    masks = [mine for mine in _by_number(ranking.space).values() if not mine[best]]
    near = Nearby(ranking.space, ranking)
    for mine in masks:
        if not over(1.0):
            _layout_on(ranking, runner, near.layout_on(best, mine))
    for turn, mine in enumerate(masks, 1):
        own = _best(runner, [row for row in runner.rows if mine[row]])
        ends = partial(over, turn / len(masks))
        if own is not None and not ends():
            climb(ranking, runner, within(near, mine), [own], ends, {"": mine})


def _layout_on(ranking: Ranking, runner: Runner, rows: npt.NDArray[np.int64]) -> None:
    """Simulates of the rows of a layout the one with the lowest bound and, where it does not fit, others that recompute
    more."""
    while ranking.tighten_only(rows[np.isfinite(ranking.values[rows])].tolist()):
        pass
    if np.isfinite(ranking.values[rows]).any():
        lowest = int(rows[np.argmin(ranking.values[rows])])
        of = ranking.of
        room = rows[of.memory_bytes[rows] <= _ROOMY * of.capacity_bytes[rows]]
        roomy = room[np.argsort(ranking.values[room], kind="stable")[:1]].tolist()
        runner.values(sorted({lowest, *(row for row in roomy if np.isfinite(ranking.values[row]))}))
        roomier(ranking.space, ranking, runner, lowest)


def without(space: Space, ranking: Ranking, runner: Runner, asked: Sequence[int], front_proven: bool) -> list[Without]:
    """Numbers of GPUs that are asked for and of which nothing that fits was simulated, of each cluster.

    Args:
        front_proven: whether what is left can be on no front.
    """
    found = []
    rows = _by_number(space)
    for cluster in dict.fromkeys(one.cluster.topology.name for one in space.clusters):
        for gpus in asked:
            if (reason := _reason(rows.get((cluster, gpus)), ranking, runner, front_proven)) is not None:
                found.append(Without(cluster, gpus, reason))
    return found


def _reason(mine: Mask | None, ranking: Ranking, runner: Runner, front_proven: bool) -> str | None:
    if mine is None:
        return "no layout is possible"
    if _fits(runner, mine):
        return None
    simulated = [row for row in runner.rows if mine[row]]
    left = np.flatnonzero(mine & (np.isfinite(ranking.values) | ranking.of.unbounded))
    if not set(left.tolist()) - set(simulated):
        return "no layout fits" if not runner.wish.limited else "no layout fits within the limits"
    if front_proven:
        return f"none was simulated{' that fits' if simulated else ''}: none can be on the front"
    return "the search ended before any that fits was simulated"


def _by_number(space: Space) -> dict[tuple[str, int], Mask]:
    """Rows of each number of GPUs of each cluster, whatever is varied of it."""
    names = [one.cluster.topology.name for one in space.clusters]
    first = np.array([names.index(name) for name in names])[space.columns["cluster"]]
    groups = [(number, gpus) for number in np.unique(first).tolist()
              for gpus in np.unique(space.gpus[first == number]).tolist()]
    return {(names[number], gpus): (first == number) & (space.gpus == gpus) for number, gpus in groups}


def _fits(runner: Runner, mine: Mask) -> bool:
    return _best(runner, [row for row in runner.rows if mine[row]]) is not None


def _best(runner: Runner, rows: Collection[int]) -> int | None:
    values = [(value, row) for row in rows if np.isfinite(value := runner.value(row))]
    return min(values)[1] if values else None
