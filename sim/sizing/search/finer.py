"""Numbers of recomputed blocks between those that a space tries, where they may be among the best.

A step takes the longer the more blocks are recomputed, and holds the less memory, until what is left is so little that
the allocator runs short and steps take longer again. So between two numbers of the space there is something to gain
where the fewer do not fit or are slower for want of memory: there the fewest blocks are looked for with which a step is
quicker than with the more of the two, by bisection. They become rows of the space: their bounds are those of their
neighbours, of time the one with fewer blocks, of memory the one with more.

Looked at are layouts of which the more of two numbers takes so little longer than the worst of the best found, as it is
simulated or else by its bound, that what is between may be better than that: not only those that are among the best
themselves, or what is found would depend on how many of them are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from sim.sizing.search.best_first import Found
from sim.sizing.search.ranking import Floats, Ranking
from sim.sizing.search.runner import Runner
from sim.sizing.space.layouts import Space
from sim.sizing.space.policies import POLICIES, blocks_of, of_blocks

#: What lies between two numbers is less than 3% off (`thinned`).
_WITHIN = 1.03
#: So many times a bound is no looseness of the bound: the allocator runs short.
_SLOW = 2.0
#: Layouts that are refined at most, and looked at for it; the lowest first.
MOST, _LOOKED_AT = 8, 128


class Finer:
    """Looks between the blocks of rows that a search has evaluated, or left; see the module.

    Attributes:
        times: whether the search is for the quickest, and not for what is best.
    """

    def __init__(self, space: Space, ranking: Ranking, runner: Runner, times: bool = False) -> None:
        self.space, self.ranking, self.runner, self.times = space, ranking, runner, times
        self.evaluate = runner.steps if times else runner.values

    @property
    def bounds(self) -> Floats:
        """Of all rows that there are by now."""
        return self.ranking.times if self.times else self.ranking.values

    def __call__(self, found: Found, mine: npt.NDArray[np.bool_], top: int, stop: Callable[[], bool],
                 most: int = MOST) -> bool:
        """Simulates what may be among the `top` best of `found`, which takes it in; beside the first layout whatever
        `stop` says. Returns whether that did not end it.

        Args:
            mine: rows whose layouts are looked at, shape (rows,).
            most: layouts that are refined.
        """
        refined = 0
        for row in self._near(found, mine, top):
            if refined == most:
                break
            if refined and stop():
                return False
            fewer = self._fewer(row)
            between = range((0 if fewer is None else self._blocks(fewer)) + 1, self._blocks(row))
            if between and self._worthwhile(found, row, fewer, top):
                refined += 1
                if row not in found.values:
                    found.add([(self.evaluate([row])[0], row)], top)
                if self._worthwhile(found, row, fewer, top):
                    new = self.ranking.add(row, fewer, [of_blocks(blocks) for blocks in between])
                    self._take(found, self._fewest(new, found.values[row]), top)
        return True

    def _worthwhile(self, found: Found, row: int, fewer: int | None, top: int) -> bool:
        """Whether between two rows, as far as they are known, something may be among the best."""
        worst = _worst(found, top)
        return self._value(found, row) <= worst * _WITHIN and self._short(found, row, fewer, worst)

    def _near(self, found: Found, mine: npt.NDArray[np.bool_], top: int) -> list[int]:
        """Rows that recompute so many blocks, or all, and may be near enough to the best: those that were simulated
        before others, the lowest first."""
        limit = _worst(found, top) * _WITHIN
        if not math.isfinite(limit):
            return []
        policies = self.space.columns["recompute"]
        able = np.flatnonzero(mine & ((policies >= len(POLICIES)) | (policies == POLICIES.index("full"))))
        while True:
            values = self.bounds[able]
            known = [place for place, row in enumerate(able.tolist()) if row in found.values]
            values[known] = [found.values[row] for row in able[known].tolist()]
            near = able[np.argsort(values, kind="stable")[:min(_LOOKED_AT, int((values <= limit).sum()))]]
            if not self.ranking.tighten_only([row for row in near.tolist() if row not in found.values]):
                return sorted(near.tolist(), key=lambda row: row not in found.values)

    def _value(self, found: Found, row: int) -> float:
        return float(found.values.get(row, self.bounds[row]))

    def _short(self, found: Found, row: int, fewer: int | None, worst: float) -> bool:
        """Whether the fewer of two numbers of blocks do not fit, or are no quicker for it, and what is between may be
        better than the worst of the best."""
        if fewer is None:
            return True
        slow = found.values.get(fewer, math.inf)
        return self._least(fewer) < worst and slow >= self._value(found, row) * (1.0 if row in found.values else _SLOW)

    def _least(self, row: int) -> float:
        """The bound of a row whatever it holds."""
        return float(self.ranking.of.time_s[row]) if self.times else self.ranking.least(row)

    def _take(self, found: Found, tried: Collection[tuple[float, int]], top: int) -> None:
        fewest = min(tried, default=None)
        for one in tried:  # of what fits the others only led to it
            if one != fewest and math.isfinite(one[0]):
                del self.runner.rows[one[1]]
        found.add([one for one in tried if one[1] in self.runner.rows], top)

    def _fewest(self, rows: list[int], above: float) -> list[tuple[float, int]]:
        """Values of what was simulated to find the first of rows, each with more blocks than the one before, that is
        better than the value of the row above them."""
        tried: list[tuple[float, int]] = []
        low, high = 0, len(rows)
        while low < high:
            middle = (low + high) // 2
            value = self.evaluate([rows[middle]])[0]
            tried.append((value, rows[middle]))
            low, high = (low, middle) if value < above else (middle + 1, high)
        return tried

    def _fewer(self, row: int) -> int | None:
        """The row of a row's layout with the next fewer recomputed blocks; None if there is none."""
        blocks = self._blocks(row)
        alike = np.ones(len(self.space), dtype=bool)
        for name, column in self.space.columns.items():
            if name != "recompute":
                alike &= column == column[row]
        found = [(self._blocks(one), one) for one in np.flatnonzero(alike).tolist()]
        fewer = [(number, one) for number, one in found if 0 <= number < blocks]
        return max(fewer)[1] if fewer else None

    def _blocks(self, row: int) -> int:
        """Recomputed blocks of a row's fullest pipeline rank; -1: another policy."""
        model, columns = self.space.clusters[0].model, self.space.columns
        return blocks_of(int(columns["recompute"][row]),
                         -(-(model.layers + model.decoder_layers) // int(columns["pipeline"][row])))


def _worst(found: Found, top: int) -> float:
    """Value of the last of the `top` best; of fewer the last there is."""
    return found.best[:top][-1][0] if found.best else math.inf
