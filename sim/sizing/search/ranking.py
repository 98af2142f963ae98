"""Bounds of rows in units of the objective, made finer where a search comes to, and what ruled which rows out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from sim.sizing.bounds.requests import ServedBounds
from sim.sizing.bounds.steps import Bounds, Rows
from sim.sizing.space.layouts import Space
from sim.sizing.wish import Wish

Floats = npt.NDArray[np.float64]


class Ranking:
    """Lower bounds of all rows for one wish.

    Attributes:
        values: in units of the objective, inf where a bound rules the row out; shape (rows,).
        times: of a step in seconds, inf likewise.
    """

    def __init__(self, space: Space, of: Bounds | ServedBounds, wish: Wish) -> None:
        self.space, self.of, self.wish = space, of, wish
        self.gpus, self._prices = space.gpus, np.array([wish.price(one) for one in space.clusters])
        self.alive = np.zeros(len(space), dtype=bool)
        self.values: Floats = np.full(len(space), np.inf)
        self.times: Floats = np.full(len(space), np.inf)
        self._renew(slice(None))

    def _renew(self, rows: Rows) -> None:
        """Take over what the bounds of rows have become."""
        of, step_s = self.of, self.of.time_s[rows]
        bounded = np.isfinite(step_s) & ~of.unbounded[rows]
        alive = bounded & (of.memory_bytes[rows] <= of.capacity_bytes[rows] - self.wish.margin_bytes)
        value = self._valued(rows, alive)
        self.alive[rows], self.values[rows] = alive, value
        self.times[rows] = np.where(np.isfinite(value), step_s, np.inf)

    def _valued(self, rows: Rows, alive: npt.NDArray[np.bool_]) -> Floats:
        """Bounds of some rows in units of the objective, inf where they are not alive."""
        of = self.of
        energy = of.energy_j(rows) if self.wish.objective == "energy" else 0.0
        price = self._prices[self.space.columns["cluster"][rows]]
        return np.where(alive, self.wish.value(np.where(alive, of.time_s[rows], 0.0), self.gpus[rows], price, energy,
                                               of.request(rows)), np.inf)

    def least(self, row: int) -> float:
        """The bound of a row whatever it holds; inf where it is impossible or breaks a limit."""
        rows = np.array([row], dtype=np.int64)
        return float(self._valued(rows, np.isfinite(self.of.time_s[rows]))[0])

    def add(self, row: int, fewer: int | None, recompute: Sequence[int]) -> list[int]:
        """Rows of the space like one, which recompute less than it and more than another; their numbers."""
        assert isinstance(self.of, Bounds)
        rows = self.space.add(row, recompute)
        self.of.add(fewer, row, len(rows))
        return self._added(rows)

    def add_micro_batch(self, row: int, micro_batch: int, recompute: Sequence[int]) -> list[int]:
        """Rows of the space like one, with another micro-batch and each of some policies; their numbers."""
        assert isinstance(self.of, Bounds)
        rows = self.space.add(row, recompute, micro_batch)
        self.of.add(None, row, len(rows))
        self.of.bound(rows)
        return self._added(rows)

    def _added(self, rows: list[int]) -> list[int]:
        count = len(rows)
        self.gpus = self.space.gpus
        self.alive = np.concatenate((self.alive, np.zeros(count, dtype=bool)))
        self.values, self.times = (np.concatenate((one, np.full(count, np.inf))) for one in (self.values, self.times))
        self._renew(np.array(rows, dtype=np.int64))
        return rows

    def go_on(self) -> None:
        """Bound more rows of those that have no bound yet, as many as there is time for."""
        self.of.go_on()
        self._renew(slice(None))

    def bound_at(self, rows: npt.NDArray[np.int64]) -> bool:
        """Bound those of some rows that have no bound yet, and what goes with them; whether there were any."""
        if not isinstance(self.of, Bounds) or not self.of.unbounded[rows].any():
            return False
        before = self.of.unbounded.copy()
        self.of.bound_at(rows)
        self._renew(np.flatnonzero(before & ~self.of.unbounded))
        return True

    def at_hand(self, count: int, besides: Collection[int]) -> list[int]:
        """The rows with the lowest values of those that are bounded finely and may fit; if there are none, of all."""
        values = self.values.copy()
        values[list(besides)] = np.inf
        fine = np.where(self.of.coarse, np.inf, values)
        values = fine if np.isfinite(fine).any() else values
        return [int(row) for row in np.argsort(values, kind="stable")[:count] if np.isfinite(values[row])]

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

    def tighten_only(self, rows: Sequence[int]) -> bool:
        """Make the bounds of some rows fine, and of no others than go with them; whether any was coarse."""
        changed = self.of.refine_at([row for row in rows if self.of.coarse[row]])
        self._renew(changed)
        return bool(len(changed))

    def _refined(self, rows: Sequence[int], ranked: Floats) -> bool:
        coarse = [row for row in rows if self.of.coarse[row]]
        if not coarse:
            return False
        # what is as good in the objective; the bounds themselves go a little further
        self._renew(self.of.refine(float(self.of.time_s[coarse].max()), ranked <= ranked[coarse].max() * _FURTHER))
        return True

    def pruned(self) -> dict[str, int]:
        """Rows that were ruled out, by what did it; "time": those a search may leave."""
        of, wish = self.of, self.wish
        possible = np.isfinite(of.time_s) & ~of.unbounded
        alive = self.alive
        found = {"memory": int(possible.sum() - alive.sum())}
        run_s = of.time_s * wish.steps
        if wish.deadline_s is not None:
            late = alive & (run_s > wish.deadline_s)
            found["deadline"], alive = int(late.sum()), alive & ~late
        if wish.budget is not None:
            price = self._prices[self.space.columns["cluster"]]
            dear = alive & (run_s / 3600 * self.gpus * price > wish.budget)
            found["budget"] = int(dear.sum())
        if wish.served_limits:
            found["limits"] = int((alive & ~np.isfinite(self.values)).sum())
        found["time"] = int(np.isfinite(self.values).sum())
        return found


#: Rows whose bound is so much higher are made finer at once.
_FURTHER = 1.04
