"""Why the best wins: its terms against the runner-up's, and the best simulated layout of each family beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.report.result import Result
from sim.sizing.compare import Comparison, compare
from sim.sizing.compare_text import change_of, moved_lines, seconds_of, words
from sim.sizing.served_space import ServedSpace
from sim.sizing.space import STRATEGIES, Space

Floats = npt.NDArray[np.float64]
Row = Mapping[str, Any]

#: Families of layouts, by the first of them that a layout uses: cuts of the model before how its states are kept.
FAMILIES = ("tensor + pipeline", "tensor", "pipeline", "context", "expert", "FSDP", "ZeRO", "DDP")
_BY_STRATEGY = {"none": "DDP", "ddp": "DDP", "fsdp": "FSDP", "zero1": "ZeRO", "zero2": "ZeRO", "zero3": "ZeRO"}
_GIB = 2.0**30


@dataclass(frozen=True)
class Contrast:
    """The best against another layout.

    Attributes:
        row: the other, as a row of `Sizing.best`.
        found: the best (first) and the other side by side: which terms moved, by how much, and why.
        margin_bytes: device memory left free by the best and by the other.
    """

    row: Row
    found: Comparison
    margin_bytes: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Plain data; seconds and bytes are the other's less the best's."""
        return {"row": dict(self.row), "moved_s": dict(self.found.moved[0]), "why": self.found.why[0],
                "memory_moved_bytes": dict(self.found.memory_moved[0]), "margin_bytes": list(self.margin_bytes)}


@dataclass(frozen=True)
class Family:
    """Layouts of one kind.

    Attributes:
        name: of `FAMILIES`.
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
    """Attributes: runner_up: the best against the second, None without one; families: in the order of `FAMILIES`;
    contrasts: the best against the best of other families, by name."""

    runner_up: Contrast | None = None
    families: list[Family] = field(default_factory=list)
    contrasts: dict[str, Contrast] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"runner_up": None if self.runner_up is None else self.runner_up.to_json(),
                "families": [one.to_json() for one in self.families],
                "contrasts": {name: one.to_json() for name, one in self.contrasts.items()}}


def families_of(space: Space) -> npt.NDArray[np.int64]:
    """Index into `FAMILIES` of every row, shape (rows,)."""
    columns = space.columns
    kept = np.array([FAMILIES.index(_BY_STRATEGY[name]) for name in STRATEGIES])
    index = kept[columns["strategy"]]
    for name in ("expert", "context", "pipeline", "tensor"):
        index = np.where(columns[name] > 1, FAMILIES.index(name), index)
    both: npt.NDArray[np.int64] = np.where((columns["tensor"] > 1) & (columns["pipeline"] > 1), 0, index)
    return both


def kinds_of(space: Space) -> dict[str, npt.NDArray[np.bool_]]:
    """Rows of each family that a space has, by its name."""
    if isinstance(space, ServedSpace):
        return space.kinds()
    index = families_of(space)
    return {name: index == number for number, name in enumerate(FAMILIES) if (index == number).any()}


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
        nearest = float(left[mine].min())
        settled = not np.isfinite(nearest) or bool(others and others[0][0] <= nearest)
        found.append(Family(name, int(mine.sum()), len(simulated), row_of(others[0][1]) if others else None,
                            nearest if np.isfinite(nearest) else None, settled,
                            int((mine & ~np.isfinite(bounds)).sum()), winner is not None and bool(mine[winner])))
    return found


def explain(best: Sequence[Row], found: list[Family], run: Callable[[Row], Result]) -> Why:
    """Why the first of `best` wins; it and what it is held against are simulated once more, for their terms.

    Args:
        best: rows, the best first.
        run: simulates a row.
    """
    if not best:
        return Why(families=found)
    first = run(best[0])

    def against(row: Row) -> Contrast:
        other = run(row)
        free = [r.memory.capacity_bytes - r.memory.device_used_bytes for r in (first, other)]
        return Contrast(row, compare([first, other]), (free[0], free[1]))

    others = {one.name: against(one.best) for one in found if one.best is not None and not one.holds_best}
    return Why(against(best[1]) if len(best) > 1 else None, found, others)


def why_lines(why: Why, tell: Callable[[Row], str], unit: Callable[[float], str]) -> Iterator[str]:
    """For a terminal: the runner-up term by term, then a line and the largest terms of each family.

    Args:
        tell: a row in words.
        unit: a value of the objective in words.
    """
    if (second := why.runner_up) is not None:
        yield f"why the best wins: what the runner-up ({tell(second.row)}) has more or less of:"
        yield f"  {_behind(second)}"
        yield from moved_lines(second.found, 1)
        yield f"  memory left free: {second.margin_bytes[0] / _GIB:.1f} GiB, runner-up {_free(second)}"
        yield ""
    if why.families:
        yield "the best simulated layout of each family, held against the best (of the best's own family, the next):"
    for one in why.families:
        yield f"  {one.name:18} {_family(one, tell, unit)}"
        if (other := why.contrasts.get(one.name)) is not None:
            terms = "; ".join(f"{words(term)} {seconds_of(value)}" for term, value in other.found.moved[0][:3])
            yield f"  {'':18} {_behind(other)}: {terms or 'no term moved'}; {_free(other)} left free"


def _behind(one: Contrast) -> str:
    winner, other = one.found.whole_s
    if abs(other - winner) < 1e-9 * winner:
        return "takes the same time"
    what = "" if one.found.served else "step "
    return f"{what}{change_of(one.found, other - winner)} ({100 * (other / winner - 1):+.1f}%)"


def _free(one: Contrast) -> str:
    return f"{one.margin_bytes[1] / _GIB:.1f} GiB"


def _family(one: Family, tell: Callable[[Row], str], unit: Callable[[float], str]) -> str:
    if one.best is not None:
        more = "" if one.settled or one.nearest is None else \
            f" (others not simulated, none below {unit(one.nearest)})"
        return ("(has the best) next " if one.holds_best else "") + tell(one.best) + more
    if one.ruled_out == one.covered:
        return f"none simulated: all {one.covered:,} ruled out by memory, limits or rules"
    if one.holds_best:
        return "only the best was simulated" + ("" if one.nearest is None else f", none below {unit(one.nearest)}")
    if one.simulated:
        return f"none of the {one.simulated:,} simulated fits" + (
            "" if one.nearest is None else f"; of the others none is below {unit(one.nearest)}")
    bound = "" if one.nearest is None else f", none can be below {unit(one.nearest)}"
    return f"none simulated of {one.covered:,}, {one.ruled_out:,} ruled out{bound}"
