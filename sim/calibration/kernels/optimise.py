"""Nelder-Mead within bounds: enough for fits of a few physical figures, and no dependency."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def minimise(cost: Callable[[Vector], float], start: Vector, low: Vector, high: Vector, rounds: int = 250,
             restarts: int = 3) -> Vector:
    """The point within [low, high] of least `cost` that the simplex search (Nelder and Mead 1965) finds.

    Deterministic. Points outside are clipped to the bounds; each restart begins with a fresh simplex at the best point;
    the better of two first simplices, above and below the start, counts.
    """
    best, least = start, np.inf
    for sign in (1.0, -1.0):
        found = np.clip(start, low, high)
        for restart in range(restarts):
            step = sign * 0.2 / (1 + restart) * (high - low)
            found = np.clip(_search(lambda x: cost(np.clip(x, low, high)), found, step, rounds), low, high)
        value = cost(found)
        if value < least:
            best, least = found, value
    return best


def _search(cost: Callable[[Vector], float], start: Vector, step: Vector, rounds: int) -> Vector:
    size = len(start)
    points = [start] + [start + step[i] * np.eye(size)[i] for i in range(size)]
    costs = [cost(point) for point in points]
    for _ in range(rounds):
        order = np.argsort(costs, kind="stable")
        points, costs = [points[i] for i in order], [costs[i] for i in order]
        centre = np.mean(points[:-1], axis=0)
        reflected = 2 * centre - points[-1]
        value = cost(reflected)
        if value < costs[0]:
            further = 3 * centre - 2 * points[-1]
            far = cost(further)
            points[-1], costs[-1] = (further, far) if far < value else (reflected, value)
        elif value < costs[-2]:
            points[-1], costs[-1] = reflected, value
        else:
            nearer = 0.5 * (centre + points[-1])
            near = cost(nearer)
            if near < costs[-1]:
                points[-1], costs[-1] = nearer, near
            else:
                points = [points[0]] + [0.5 * (points[0] + point) for point in points[1:]]
                costs = [costs[0]] + [cost(point) for point in points[1:]]
        if max(costs) - min(costs) < 1e-7:
            break
    best: Vector = points[int(np.argmin(costs))]
    return best
