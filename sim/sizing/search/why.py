"""Why the best wins: its terms against the runner-up's, and the best simulated layout of each family beside it.

What differs from the best in what it recomputes and in its numbers of chunks alone says that these cost what they cost:
the runner-up is the next layout that differs in something else, where one was simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.report.result import Result
from sim.sizing.compare import Comparison, compare
from sim.sizing.space.families import kinds_of
from sim.sizing.space.layouts import Space

Floats = npt.NDArray[np.float64]
Row = Mapping[str, Any]
#: Fields that make no other layout.
_FINE = ("training.recompute", "parallel.virtual_stages")


@dataclass(frozen=True)
class Contrast:
    """The best against another layout.

    Attributes:
        row: the other, as a row of `Sizing.best`.
        found: the best (first) and the other side by side: which terms moved, by how much, and why.
        margin_bytes: device memory left free by the best and by the other.
        prices: USD of a GPU-hour of the best and of the other, and `usd` what they cost; None where money is not known.
    """

    row: Row
    found: Comparison
    margin_bytes: tuple[int, int]
    prices: tuple[float, float] | None = None
    usd: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data; seconds and bytes are the other's less the best's."""
        return {"row": dict(self.row), "moved_s": dict(self.found.moved[0]), "why": self.found.why[0],
                "memory_moved_bytes": dict(self.found.memory_moved[0]), "margin_bytes": list(self.margin_bytes),
                **({} if self.prices is None or self.usd is None else {
                    "usd_per_gpu_hour": list(self.prices), "usd": list(self.usd)})}


@dataclass(frozen=True)
class Family:
    """Layouts of one kind.

    Attributes:
        name: of `space.families.FAMILIES`.
        covered, simulated: its rows, and those simulated.
        best: the best simulated row that is not the winner; None where there is none.
        nearest: value of the lowest bound of its rows not simulated (units of the objective), None where none is left.
        settled: whether no row left can beat `best`.
        ruled_out: of its rows, those that lowering, memory or a limit ruled out before any simulation.
        holds_best: whether the winner is of this family.
    """

    name: str
    covered: int
    simulated: int
    best: Row | None
    nearest: float | None
    settled: bool
    ruled_out: int
    holds_best: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"name": self.name, "covered": self.covered, "simulated": self.simulated, "ruled_out": self.ruled_out,
                "best": None if self.best is None else dict(self.best), "nearest": self.nearest,
                "settled": self.settled, "holds_best": self.holds_best}


@dataclass(frozen=True)
class Why:
    """Attributes: runner_up: the best against the next layout, None without one; between: rows between them, which are
    the best's layout; families: in the order of `FAMILIES` of `space.families`; contrasts: the best against the best of
    other families, by name."""

    runner_up: Contrast | None = None
    between: list[Row] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    contrasts: dict[str, Contrast] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"runner_up": None if self.runner_up is None else self.runner_up.to_json(),
                "between": [dict(row) for row in self.between],
                "families": [one.to_json() for one in self.families],
                "contrasts": {name: one.to_json() for name, one in self.contrasts.items()}}


def families(space: Space, bounds: Floats, values: Mapping[int, float], row_of: Callable[[int], Row],
             winner: int | None) -> list[Family]:
    """The families of a space after a search.

    Args:
        bounds: of each row in units of the objective, inf where it was ruled out.
        values: of the rows simulated; inf for what does not fit.
        row_of: a row for a table.
        winner: row of the best, None where nothing fits.
    """
    found = []
    left = bounds.copy()
    left[list(values)] = np.inf
    for name, mine in kinds_of(space).items():
        simulated = [row for row in values if mine[row]]
        others = sorted((values[row], row) for row in simulated if row != winner and np.isfinite(values[row]))
        if winner is not None and mine[winner]:  # another layout, where there is one
            others = [one for one in others if not same_layout(space.sets(one[1]), space.sets(winner))] or others
        nearest = float(left[mine].min())
        settled = not np.isfinite(nearest) or bool(others and others[0][0] <= nearest)
        found.append(Family(name, int(mine.sum()), len(simulated), row_of(others[0][1]) if others else None,
                            nearest if np.isfinite(nearest) else None, settled,
                            int((mine & ~np.isfinite(bounds)).sum()), winner is not None and bool(mine[winner])))
    return found


def same_layout(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the fields of two rows of one cluster differ in what is recomputed and in numbers of chunks alone."""
    return all(value == other.get(name) for name, value in one.items() if name not in _FINE)


def explain(best: Sequence[Row], found: list[Family], run: Callable[[Row], Result]) -> Why:
    """Why the first of `best` wins; it and what it is held against are simulated once more, for their terms.

    Args:
        best: rows, the best first, those of its layout behind it, the runner-up last.
        run: simulates a row.
    """
    if not best:
        return Why(families=found)
    first = run(best[0])

    def against(row: Row) -> Contrast:
        other = run(row)
        free = [r.memory.capacity_bytes - r.memory.device_used_bytes for r in (first, other)]
        return Contrast(row, compare([first, other]), (free[0], free[1]), *_money(best[0], row))

    others = {one.name: against(one.best) for one in found if one.best is not None and not one.holds_best}
    return Why(against(best[-1]) if len(best) > 1 else None, list(best[1:-1]), found, others)


def _money(*rows: Row) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """What a GPU-hour of two rows costs, and what the rows do; None where that is not known."""
    if any(row.get("usd") is None for row in rows):
        return None, None
    first, other = (float(row["usd"]) for row in rows)
    return (first / rows[0]["gpu_hours"], other / rows[1]["gpu_hours"]), (first, other)
