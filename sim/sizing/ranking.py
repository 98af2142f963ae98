"""Bounds of rows in units of the objective, made finer where a search comes to, and what ruled which rows out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sim.sizing.bounds import Bounds
from sim.sizing.space import Space
from sim.sizing.wish import Wish

Floats = npt.NDArray[np.float64]


class Ranking:
    """Lower bounds of all rows for one wish.

    Attributes:
        values: in units of the objective, inf where a bound rules the row out; shape (rows,).
        times: of a step in seconds, inf likewise.
    """

    def __init__(self, space: Space, of: Bounds, wish: Wish) -> None:
        self.space, self.of, self.wish = space, of, wish
        self.gpus = space.gpus
        self.price = np.array([wish.price(one) for one in space.clusters])[space.columns["cluster"]]
        self._renew()

    def _renew(self) -> None:
        of = self.of
        self.alive = np.isfinite(of.time_s) & of.fits
        step_s = np.where(self.alive, of.time_s, 0.0)
        value = self.wish.value(step_s, self.gpus, self.price, of.energy_j(step_s, self.gpus))
        self.values: Floats = np.where(self.alive, value, np.inf)
        self.times: Floats = np.where(np.isfinite(self.values), of.time_s, np.inf)

    @property
    def impossible(self) -> int:
        """Rows that lowering refuses."""
        return int((~np.isfinite(self.of.time_s)).sum())

    def tighten(self, rows: Sequence[int]) -> Floats | None:
        """New values if the bounds of any of the rows were coarse, else None."""
        return self.values if self._refined(rows, self.values) else None

    def tighten_times(self, rows: Sequence[int]) -> Floats | None:
        """The same of `times`."""
        return self.times if self._refined(rows, self.times) else None

    def _refined(self, rows: Sequence[int], ranked: Floats) -> bool:
        coarse = [row for row in rows if self.of.coarse[row]]
        if not coarse:
            return False
        # what is as good in the objective; the bounds themselves go a little further
        self.of.refine(float(self.of.time_s[coarse].max()), ranked <= ranked[coarse].max() * _FURTHER)
        self._renew()
        return True

    def pruned(self) -> dict[str, int]:
        """Rows that were ruled out, by what did it; "time": those a search may leave."""
        of, wish = self.of, self.wish
        possible = np.isfinite(of.time_s)
        alive = self.alive
        found = {"memory": int(possible.sum() - alive.sum())}
        run_s = of.time_s * wish.steps
        if wish.deadline_s is not None:
            late = alive & (run_s > wish.deadline_s)
            found["deadline"], alive = int(late.sum()), alive & ~late
        if wish.budget is not None:
            dear = alive & (run_s / 3600 * self.gpus * self.price > wish.budget)
            found["budget"] = int(dear.sum())
        found["time"] = int(np.isfinite(self.values).sum())
        return found


#: Rows whose bound is so much higher are made finer at once.
_FURTHER = 1.04
