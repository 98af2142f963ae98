"""The Pareto front of a search: for every number of GPUs of every cluster its fastest layout, less what others beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sim.sizing.search.best_first import ROUND, Found, Tighten, search
from sim.sizing.space.layouts import Space

Floats = npt.NDArray[np.float64]

#: Columns of a row that the front trades off, less of each is better.
AXES = ("step_time_s", "gpus", "cost", "energy_kwh")
#: Of requests, whose cost is that of a million tokens; of those without a further token the first axis is the step.
SERVED_AXES = ("time_per_token_s", "gpus", "cost")


#: Takes better rows into what was found of some, which it is told as they are now; whether it came to its end.
Beside = Callable[[Found, Callable[[], npt.NDArray[np.bool_]]], bool]


class Stopped(Protocol):
    """Asked between rounds; True ends the search early."""

    def __call__(self) -> bool: ...


def complete(space: Space, bounds: Callable[[], Floats], value: Callable[[Sequence[int]], Sequence[float]],
             stop: Stopped, tighten: Tighten = lambda rows: None, beside: Beside = lambda found, mine: True) -> bool:
    """Simulate what the front needs: the best row of every number of GPUs of every cluster, by time or energy.

    Of one cluster and number of GPUs the fastest row has the least GPU-hours and cost as well, so these rows hold the
    front over time, GPUs and cost. On one cluster a row is of interest only if it is better than every row on fewer
    GPUs.

    Args:
        bounds: lower bounds of what is sought as they are now, inf for rows ruled out; shape (rows,).
        tighten: tighter bounds, as `search` asks for them.
        value: of rows simulated, inf for what does not fit.
        beside: told what was found of each, looks for better rows that the space has not yet, and adds them.

    Returns:
        Whether every search came to its end.
    """
    best = math.inf
    groups = sorted(set(zip(space.gpus.tolist(), space.columns["cluster"].tolist(), strict=True)))
    for group in groups:
        mine = partial(_of_group, space, *group)

        def mended(rows: Sequence[int], mine: Callable[[], npt.NDArray[np.bool_]] = mine) -> Floats | None:
            tighter = tighten(rows)
            return None if tighter is None else np.where(mine(), tighter, np.inf)

        found = search(np.where(mine(), bounds(), np.inf), value, 1, stop=stop, tighten=mended,
                       limit=best if len(space.clusters) == 1 else math.inf)
        if not found.complete or (found.best and not beside(found, mine)):
            return False
        if found.best:
            best = min(best, found.best[0][0])
    return True


def _of_group(space: Space, gpus: int, cluster: int) -> npt.NDArray[np.bool_]:
    """Rows on so many GPUs of a cluster."""
    mine: npt.NDArray[np.bool_] = (space.gpus == gpus) & (space.columns["cluster"] == cluster)
    return mine


def complete_served(bounds: Callable[[], Floats], values: Callable[[Sequence[int]], Floats], stop: Stopped,
                    tighten: Callable[[Sequence[int]], bool]) -> bool:
    """Simulate what the front of a space of requests needs: until every row left is beaten, whatever it takes beyond
    its bounds, by a row that was simulated.

    Args:
        bounds: of the front's axes, never above the truth, inf for rows ruled out; shape (rows, axes).
        values: of rows simulated, inf for what breaks a limit, does not fit or is refused; shape (rows asked, axes).
        tighten: makes bounds of rows finer; whether any were.

    Returns:
        Whether the search came to its end.
    """
    least, done, found = bounds(), np.zeros(len(bounds()), dtype=bool), np.zeros((0, bounds().shape[1]))
    while True:
        left = np.isfinite(least).all(axis=1) & ~done
        for value in found:
            left &= ~(value <= least).all(axis=1)
        rows = np.flatnonzero(left)
        if not len(rows):
            return True
        if stop():
            return False
        first = rows[_unbeaten(least[rows])][:ROUND].tolist()
        if tighten(first):
            least = bounds()
            continue
        done[first] = True
        found = np.concatenate((found, values(first)))


def _unbeaten(values: Floats) -> list[int]:
    """Rows that no other row equals or beats in all axes, the lowest of the first axis first; of equal rows the
    first."""
    # what beats a row stands before it in this order, so each row needs to be held against the front so far alone
    order = np.lexsort((np.arange(len(values)), *values.T[::-1]))
    front: list[int] = []
    for row in order.tolist():
        if not front or not bool((values[front] <= values[row]).all(axis=1).any()):
            front.append(row)
    return front


def pareto(rows: Sequence[Mapping[str, Any]], axes: Sequence[str] = AXES) -> list[int]:
    """Indices of rows that no other row equals or beats in all axes; of equal rows the first. Fewest GPUs first."""
    values = np.array([[float(row[axis]) for axis in axes] for row in rows]).reshape(len(rows), len(axes))
    front = _unbeaten(values)
    return sorted(front, key=lambda row: (rows[row]["gpus"], rows[row][axes[0]], row))
