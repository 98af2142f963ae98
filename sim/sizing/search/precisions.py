"""The best of each precision beside the best of all, and what the best's layout takes in each.

A search over several precisions proves the best of all, whatever is slower left as it is. Here the best of each is
looked for as a search of its own would: best first, then between micro-batches and numbers of recomputed blocks. None
of it changes what was proven. Where a search was ended early, the layout of the best is simulated in every precision
all the same, so that no precision goes without a figure, and none is ahead for its layout alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.sizing.search.best_first import ROUND, Found, search
from sim.sizing.search.between import between
from sim.sizing.search.early import climb, early
from sim.sizing.search.finer import Finer
from sim.sizing.search.nearby import Nearby, masked, within
from sim.sizing.search.ranking import Ranking
from sim.sizing.search.runner import Runner
from sim.sizing.search.store import Outcome
from sim.sizing.space.families import layouts_of
from sim.sizing.space.layouts import Space
from sim.sizing.space.precisions import clusters_of, twin
from sim.sizing.space.variants import PRECISION


@dataclass(frozen=True)
class OfPrecision:
    """A precision of a search.

    Attributes:
        name: of the precision.
        best: number of its best row; None where nothing that fits was found.
        proven: whether nothing better of it can be among what was covered (of no best: that nothing fits).
        alike: what the layout of the best of all comes to in it; None where that has no such variant, or there is no
            best.
        back: what the layout of its best comes to in the precision of the best of all; None likewise.
    """

    name: str
    best: int | None
    proven: bool
    alike: Outcome | None
    back: Outcome | None

    def to_json(self, row_of: Callable[[int], dict[str, Any]], own: str) -> dict[str, Any]:
        """Plain data.

        Args:
            row_of: a row for a table; own: the scenario's own precision.
        """
        return {"precision": self.name, "own": self.name == own, "proven": self.proven,
                "best": None if self.best is None else row_of(self.best),
                "with_the_best_layout": _plain(self.alike), "its_layout_in_the_best_precision": _plain(self.back)}


def _plain(one: Outcome | None) -> dict[str, Any] | None:
    return None if one is None else {
        "step_time_s": one.step_time_s if np.isfinite(one.step_time_s) else None, "fits": one.fits,
        "device_used_bytes": one.device_used_bytes, "outcome": one.outcome, "reason": one.reason}


def of_each(space: Space, ranking: Ranking, runner: Runner, result: Found, top: int, stop: Callable[[], bool],
            blocks: bool, interrupted: Callable[[], bool] = lambda: False) -> list[OfPrecision]:
    """Every precision of a search that has several, as they were asked for; `result` takes in what is found for it.

    Args:
        top: rows of `result.best`.
        stop: whether the time is over; a few simulations of each precision are not cut short.
        blocks: whether the first k recomputed blocks are looked at between those of the space.
        interrupted: whether those few are not wanted either.
    """
    clusters = clusters_of(space)
    for row in _twins(space, runner, result, clusters, top):
        if not result.complete and not interrupted():
            _take_in(result, roomier(space, ranking, runner, row), top)
    proven = {}
    for name, numbers in clusters.items():
        mine = _search(space, ranking, runner, numbers, stop)
        if mine.best and space.stepped:
            mine.add(between(space, ranking, runner, stop, np.isin(space.columns["cluster"], numbers)), 1)
        if mine.best and blocks and not interrupted():
            Finer(space, ranking, runner)(mine, np.isin(space.columns["cluster"], numbers), 1, stop)
        _take_in(result, {row: value for row, value in mine.values.items() if row in runner.rows}, top)
        proven[name] = mine.complete and not ranking.of.unbounded.any() and all(
            one.outcome != "fault" for row, one in runner.rows.items() if space.columns["cluster"][row] in numbers)
    _twins(space, runner, result, clusters, top)
    first = result.best[0][1] if result.best else None
    best = {name: _best(space, runner, numbers) for name, numbers in clusters.items()}
    return [OfPrecision(name, row, proven[name], _alike(space, runner, first, name),
                        _alike(space, runner, row, _leading(space, result))) for name, row in best.items()]


def _twins(space: Space, runner: Runner, result: Found, clusters: Mapping[str, Sequence[int]], top: int) -> list[int]:
    """The best's layout in every precision, and that of the best of each in the precision of the best, as far as they
    are rows: taken in until the best has none that is better. Returns the former."""
    while clusters and result.best:
        first, leading = result.best[0][1], _leading(space, result)
        like_best = [_twin_row(space, first, name) for name in clusters]
        others = [_best(space, runner, numbers) for numbers in clusters.values()]
        back = [None if row is None else _twin_row(space, row, leading) for row in others]
        new = {row for row in (*like_best, *back) if row is not None and row not in result.values}
        if not new:
            return [row for row in like_best if row is not None]
        _take_in(result, dict(zip(sorted(new), runner.values(sorted(new)), strict=True)), top)
    return []


def _leading(space: Space, result: Found) -> str:
    """The precision of the best; "" where there is none."""
    return space.clusters[int(space.columns["cluster"][result.best[0][1]])].training.precision.name if (
        result.best) else ""


def climb_in(space: Space, ranking: Ranking, runner: Runner, name: str, numbers: Sequence[int], own: Sequence[int],
             stop: Callable[[], bool], over: Callable[[], bool]) -> None:
    """The climb of a search under a time limit, of one precision for itself: the families of one that is slower would
    be left early, and what is told of it would be no more than that. It begins with the layouts that are the best of
    their families in the precisions before it.

    Args:
        name, numbers: of the precision and its clusters; own: rows before all others.
        stop: whether the time of the search is over; over: that of this climb.
    """
    mine = np.isin(space.columns["cluster"], numbers)
    kinds = {family: both for family, rows in layouts_of(space).items() if (both := rows & mine).any()}
    rows, known = [row for row in own if mine[row]], _leaders(space, runner)
    if not stop():
        twins = {family: row for family, one in known.items() if (row := _twin_row(space, one, name)) is not None}
        rows += [*twins.values(), *early(ranking, stop, {family: kind for family, kind in kinds.items()
                                                         if family not in twins})]
    climb(ranking, runner, within(Nearby(space, ranking), mine), list(dict.fromkeys(rows)), over, kinds)


def _leaders(space: Space, runner: Runner) -> dict[str, int]:
    """The best row so far of each family of layouts, whatever its precision."""
    values = sorted((value, row) for row in runner.rows if np.isfinite(value := runner.value(row)))
    found = {family: next((row for _, row in values if kind[row]), None) for family, kind in layouts_of(space).items()}
    return {family: row for family, row in found.items() if row is not None}


def roomier(space: Space, ranking: Ranking, runner: Runner, row: int) -> dict[int, float]:
    """Values of a row and, where it does not fit, of its layout with as much recomputed as need be: a round at most,
    lowest bounds first, each holding less than the one before, since what just fits may be slow for that."""
    found = {row: runner.value(row)}
    alike = space.columns["cluster"] == space.columns["cluster"][row]
    for column in (values for field, values in space.columns.items() if field not in ("cluster", "recompute")):
        alike &= column == column[row]
    rows, of = np.flatnonzero(alike), ranking.of
    if np.isfinite(found[row]):
        return found
    ranking.bound_at(rows)
    while len(found) <= ROUND:
        while ranking.tighten_only(rows[np.isfinite(ranking.values[rows])].tolist()):
            pass
        best = min(found.values())
        able = [one for one in rows.tolist() if one not in found and of.memory_bytes[one] < of.memory_bytes[row]
                and ranking.values[one] < best and not of.coarse[one]]
        if not able:
            break
        row = min(able, key=lambda one: (float(ranking.values[one]), one))
        found[row] = runner.values([row])[0]
    return found


def _take_in(result: Found, values: dict[int, float], top: int) -> None:
    result.add([(value, row) for row, value in values.items() if row not in result.values], top)


def _search(space: Space, ranking: Ranking, runner: Runner, numbers: Sequence[int],
            stop: Callable[[], bool]) -> Found:
    """The best row of some clusters, what is known of them first."""
    mine = np.isin(space.columns["cluster"], numbers)
    known = [row for row in runner.rows if mine[row]]
    near = within(Nearby(space, ranking), mine)
    return search(np.where(mine, ranking.values, np.inf), runner.values, 1, stop=stop, first=known, aside=near,
                  tighten=lambda rows: masked(ranking.tighten(rows), mine))


def _best(space: Space, runner: Runner, numbers: Sequence[int]) -> int | None:
    rows = [row for row in runner.rows if int(space.columns["cluster"][row]) in numbers]
    return min(((value, row) for row in rows if np.isfinite(value := runner.value(row))), default=(0.0, None))[1]


def _twin_row(space: Space, row: int, name: str) -> int | None:
    """The row that differs from one in its precision alone; None if there is none."""
    other = twin(space, int(space.columns["cluster"][row]), name)
    if other is None:
        return None
    same = space.columns["cluster"] == other
    for column in (values for field, values in space.columns.items() if field != "cluster"):
        same &= column == column[row]
    rows = np.flatnonzero(same)
    return int(rows[0]) if len(rows) else None


def _alike(space: Space, runner: Runner, row: int | None, name: str) -> Outcome | None:
    """The outcome of a row's layout in a precision, also where that is no row of it."""
    if row is None or (other := twin(space, int(space.columns["cluster"][row]), name)) is None:
        return None
    sets = {**space.sets(row), PRECISION: space.told[other][PRECISION]}
    one = runner.outcomes([(other, sets, int(space.gpus[row]))])[0]
    return replace(one, fits=runner.has_room(one, other))
