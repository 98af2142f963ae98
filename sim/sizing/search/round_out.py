"""A layout that fits of every family, where the search for the best needed none: what a user's plan B would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sim.sizing.search.best_first import search
from sim.sizing.search.ranking import Floats, Ranking
from sim.sizing.search.runner import Runner
from sim.sizing.space.families import kinds_of

#: Bytes by which the lower bound of a row's memory stays below a GPU's, tried in turn: its simulation adds to it.
_SLACKS = tuple(gib * 2.0**30 for gib in (0, 1, 2, 4, 8, 16))
#: Rows simulated with each.
_ROWS = 4


def round_out(ranking: Ranking, runner: Runner, stop: Callable[[], bool]) -> None:
    """Simulates a few rows, the lowest bounds first, of each family without one that fits.

    The best and its proof do not change: no row here has a bound below the best. What is found is not the best of its
    family, since others of it stay as they are.
    """
    for mine in kinds_of(ranking.space).values():
        if not any(mine[row] and np.isfinite(runner.value(row)) for row in runner.rows):
            first_fitting(ranking, runner, np.flatnonzero(mine), stop)


def best_of_each(ranking: Ranking, runner: Runner, stop: Callable[[], bool]) -> None:
    """Simulates of each family what its best takes, where bounds are so close that this is little."""
    for mine in kinds_of(ranking.space).values():
        def tighten(rows: Sequence[int], mine: npt.NDArray[np.bool_] = mine) -> Floats | None:
            values = ranking.tighten(rows)
            return None if values is None else np.where(mine, values, np.inf)

        search(np.where(mine, ranking.values, np.inf), runner.values, 1, stop=stop, tighten=tighten)


def first_fitting(ranking: Ranking, runner: Runner, mine: np.ndarray[tuple[int], np.dtype[np.int64]],
                  stop: Callable[[], bool]) -> None:
    """Simulates a few of some rows at once, the lowest bounds first, until one fits: those that hold less in turn."""
    of = ranking.of
    for slack in _SLACKS:
        while not stop():
            roomy = mine[of.memory_bytes[mine] <= of.capacity_bytes[mine] - ranking.wish.margin_bytes - slack]
            left = [int(row) for row in roomy[np.argsort(ranking.values[roomy], kind="stable")]
                    if np.isfinite(ranking.values[row]) and int(row) not in runner.rows][:_ROWS]
            if ranking.tighten(left) is not None:
                continue
            if left and np.isfinite(runner.values(left)).any():
                return
            break
