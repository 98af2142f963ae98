"""Micro-batches between those that a space tries, where they may be better than the best found.

Of the micro-batches that divide a replica's share the space has about one for each doubling (`space.thinned`). What the
larger of two would save is lost where it does not fit. So two kinds are tried beside them: between the micro-batches of
the best layouts and their neighbours, and, of layouts whose next micro-batch does not fit, what is between: those with
the lowest bounds, since of 1.5 times as many sequences a step may take as little as a part in 1.5 (what each
micro-batch takes whatever its size, as FSDP's gathers do). All are bounded with all policies of recomputation, and
simulated while any may be better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from sim.sizing.search.best_first import search
from sim.sizing.search.ranking import Ranking
from sim.sizing.search.runner import Runner
from sim.sizing.space.layouts import SCHEDULES, Space, divisors, ordered
from sim.sizing.space.thinned import micro_batches, own_of

#: The best of the layouts that are looked at are at most so many times the best: between two micro-batches that both
#: fit there is little to gain; and how many these are.
_WITHIN, _NEAR = 1.1, 4
#: Layouts whose next micro-batch does not fit that are tried, and looked at for it.
_CUT_OFF, _LOOKED_AT = 16, 64
#: Columns that are not of the layout.
_BESIDE = ("recompute", "micro_batch")


def between(space: Space, ranking: Ranking, runner: Runner, stop: Callable[[], bool],
            mine: npt.NDArray[np.bool_] | None = None) -> list[tuple[float, int]]:
    """Values and rows, new ones of the space, of micro-batches between those that the space has.

    Args:
        stop: asked before each layout and each round of simulations.
        mine: rows whose layouts are looked at, shape (rows,); all if not given.
    """
    mine = np.ones(len(space), dtype=bool) if mine is None else mine
    simulated = {row: runner.value(row) for row in runner.rows if mine[row]}
    best = min(simulated.values(), default=np.inf)
    new: list[int] = []
    for row, low, high in (*_near(space, simulated), *_cut_off(space, ranking, simulated, mine)):
        alike = _alike(space, row)
        policies, tried = (np.unique(space.columns[name][alike]).tolist() for name in _BESIDE)
        for micro in _able(space, row):
            if low < micro < high and micro not in tried and not stop():
                new += ranking.add_micro_batch(row, micro, policies)
    if not new:
        return []
    found = search(ranking.values[new], lambda places: runner.values([new[place] for place in places]), stop=stop,
                   limit=best)
    return [(value, new[place]) for place, value in found.values.items()]


def _near(space: Space, simulated: dict[int, float]) -> list[tuple[int, int, int]]:
    """The best row of each of the best layouts, and the micro-batches on both sides of its own."""
    values = sorted((value, row) for row, value in simulated.items() if np.isfinite(value))
    found: dict[tuple[int, ...], tuple[int, int, int]] = {}
    for value, row in values:
        if value <= _WITHIN * values[0][0] and _layout(space, row) not in found and len(found) < _NEAR:
            found[_layout(space, row)] = row, *_sides(space, row)
    return list(found.values())


def _cut_off(space: Space, ranking: Ranking, simulated: dict[int, float],
             mine: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Rows that may fit, the lowest bounds first, whose layout with the next micro-batch does not, with both."""
    values = ranking.values.copy()
    values[list(simulated)] = list(simulated.values())
    best = min(simulated.values(), default=np.inf)
    rows = np.flatnonzero((values < 2 * best) & np.isfinite(values) & ~ranking.of.coarse & mine)
    seen, found = set[tuple[tuple[int, ...], int]](), 0
    for row in rows[np.argsort(values[rows], kind="stable")].tolist():
        own, (_, high) = int(space.columns["micro_batch"][row]), _sides(space, row)
        if (name := (_layout(space, row), own)) in seen or not any(own < micro < high for micro in _able(space, row)):
            continue
        seen.add(name)
        larger = _alike(space, row)
        larger = larger[(space.columns["micro_batch"][larger] == high)
                        & (space.columns["recompute"][larger] == space.columns["recompute"][row])]
        if not np.isfinite(values[larger]).any():
            yield row, own, high
            found += 1
        if found == _CUT_OFF or len(seen) == _LOOKED_AT:
            return


def _layout(space: Space, row: int) -> tuple[int, ...]:
    return tuple(int(column[row]) for name, column in space.columns.items() if name not in _BESIDE)


def _alike(space: Space, row: int) -> npt.NDArray[np.int64]:
    """Rows of a row's layout."""
    alike = np.ones(len(space), dtype=bool)
    for name, column in space.columns.items():
        if name not in _BESIDE:
            alike &= column == column[row]
    return np.flatnonzero(alike)


def _sides(space: Space, row: int) -> tuple[int, int]:
    """Micro-batches of the space next to a row's; its own where there is none."""
    own = int(space.columns["micro_batch"][row])
    tried = [micro for micro, _ in micro_batches(_able(space, row), own_of(space.clusters[0]), ())]
    return max((micro for micro in tried if micro < own), default=own), min(
        (micro for micro in tried if micro > own), default=own)


def _able(space: Space, row: int) -> list[int]:
    """Micro-batches that a row's layout can have."""
    of = {name: int(space.columns[name][row]) for name in ("cluster", "tensor", "context", "pipeline", "schedule")}
    replicas = int(space.gpus[row]) // (of["tensor"] * of["context"] * of["pipeline"])
    share = (space.clusters[of["cluster"]].training.global_batch or 0) // replicas
    return [micro for micro in divisors(share) if of["pipeline"] == 1 or ordered(
        SCHEDULES[of["schedule"]], of["pipeline"], share // micro)]
