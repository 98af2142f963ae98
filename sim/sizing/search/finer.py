"""Numbers of recomputed blocks between those that a space tries, next to the best found.

A step takes the longer the more blocks are recomputed, and holds the less memory, until what is left is so little that
the allocator runs short and steps take longer again. So of the numbers between two of the space the fewest blocks are
looked for with which a step is quicker than with the more of the two, by bisection. They become rows of the space:
their bounds are those of their neighbours, of time the one with fewer blocks, of memory the one with more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sim.sizing.search.best_first import Found
from sim.sizing.search.ranking import Ranking
from sim.sizing.search.runner import Runner
from sim.sizing.space.layouts import Space
from sim.sizing.space.policies import blocks_of, of_blocks

#: Rows are refined that are at most so much above the best: what lies between two numbers is less than 3% (`thinned`).
_WITHIN = 1.03


def finer(space: Space, ranking: Ranking, runner: Runner, found: Found, top: int, stop: Callable[[], bool]) -> None:
    """Simulates what is between the best rows and those of their layouts with fewer recomputed blocks; next to the
    first row whatever `stop` says."""
    new: list[tuple[float, int]] = []
    near = [(value, row) for value, row in found.best if value <= found.best[0][0] * _WITHIN]
    for turn, (value, row) in enumerate(near):
        if turn and stop():
            break
        fewer = _fewer(space, row)
        between = range((0 if fewer is None else _blocks(space, fewer)) + 1, _blocks(space, row))
        if between:
            tried = _fewest(runner, ranking.add(row, fewer, [of_blocks(blocks) for blocks in between]), value)
            fewest = min(tried, default=None)
            for one in tried:  # of what fits the others only led to it
                if one != fewest and math.isfinite(one[0]):
                    del runner.rows[one[1]]
            new += [one for one in tried if one[1] in runner.rows]
    found.add(new, top)


def _fewest(runner: Runner, rows: Sequence[int], above: float) -> list[tuple[float, int]]:
    """Values of what was simulated to find the first of rows, each with more blocks than the one before, that is better
    than the value of the row above them."""
    tried: list[tuple[float, int]] = []
    low, high = 0, len(rows)
    while low < high:
        middle = (low + high) // 2
        value = runner.values([rows[middle]])[0]
        tried.append((value, rows[middle]))
        low, high = (low, middle) if value < above else (middle + 1, high)
    return tried


def _fewer(space: Space, row: int) -> int | None:
    """The row of a row's layout with the next fewer recomputed blocks; None if there is none."""
    blocks = _blocks(space, row)
    alike = np.ones(len(space), dtype=bool)
    for name, column in space.columns.items():
        if name != "recompute":
            alike &= column == column[row]
    found = [(_blocks(space, one), one) for one in np.flatnonzero(alike).tolist()]
    fewer = [(number, one) for number, one in found if 0 <= number < blocks]
    return max(fewer)[1] if fewer else None


def _blocks(space: Space, row: int) -> int:
    """Recomputed blocks of a row's fullest pipeline rank; -1: another policy."""
    model, columns = space.clusters[0].model, space.columns
    return blocks_of(int(columns["recompute"][row]),
                     -(-(model.layers + model.decoder_layers) // int(columns["pipeline"][row])))
