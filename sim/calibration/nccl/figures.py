"""Figures of links as a fit sees them: shifts of priors, family by family and member by member."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.catalog import table
from sim.network.figures import catalogue

Floats = npt.NDArray[np.float64]
#: Families whose figures are shares of a nominal rate and cannot pass 1.
_SHARES = ("link_share", "pcie_share", "send_share", "one_way_share", "fabric_share", "ll128_share", "nvls_share",
           "nvls_tree_share", "tree_share", "push_share")
#: Spread (logarithm) of what a fit of other families holds.
_HELD = 1e-6


@dataclass(frozen=True, slots=True)
class Family:
    """Figures that share a meaning: a common shift of their priors (logarithm), and one of each member's own."""

    name: str
    members: Mapping[str, float]
    spread: float
    between: float
    unit: str
    about: str
    source: str


def families() -> list[Family]:
    """As in `data/nccl_priors.yaml`."""
    rows: Mapping[str, Mapping[str, Any]] = table("calibration/data/nccl_priors.yaml")["families"]
    return [Family(name, {str(k): float(v) for k, v in row["members"].items()}, float(row["spread"]),
                   float(row["between"]), str(row["unit"]), str(row["about"]), str(row["source"]))
            for name, row in rows.items()]


class Parameters:
    """The vector a fit moves: one common shift a family, one shift a member; zero is the prior.

    A family of one member has the common shift alone.

    Args:
        center: values that take the place of the priors, by name (a cluster's fit starts at the catalogue's).
        least: how far a member may at least differ from its family.
        only: families that move, the others stay where they are; none given: all.
    """

    def __init__(self, center: Mapping[str, float] | None = None, least: float = 0.0,
                 only: Collection[str] = ()) -> None:
        self.families = families()
        center = center or {}
        self.spreads: list[float] = []
        self.names: list[str] = []
        self._slots: dict[str, tuple[float, int, int]] = {}
        for family in self.families:
            held = bool(only) and family.name not in only
            common = self._add(family.name, _HELD if held else family.spread)
            for member, prior in family.members.items():
                alone = len(family.members) == 1
                between = _HELD if held else max(family.between, least)
                own = -1 if alone else self._add(f"{family.name}.{member}", between)
                name = f"{family.name}.{member}"
                self._slots[name] = (center.get(name, prior), common, own)

    def _add(self, name: str, spread: float) -> int:
        self.names.append(name)
        self.spreads.append(spread)
        return len(self.names) - 1

    def values(self, shifts: Floats) -> dict[str, float]:
        """Every figure at `shifts`, shape (len(names),)."""
        found = {}
        for name, (prior, common, own) in self._slots.items():
            value = prior * exp(shifts[common] + (shifts[own] if own >= 0 else 0.0))
            found[name] = min(value, 1.0) if name.startswith(_SHARES) else value
        return found

    def apply(self, shifts: Floats) -> None:
        """Put the figures at `shifts` in the place of the catalogue's (in this process)."""
        rows = catalogue()
        for name, value in self.values(shifts).items():
            rows[name] = value

    def shifts_of(self, name: str) -> list[int]:
        """Indices of the shifts that move one figure."""
        _, common, own = self._slots[name]
        return [i for i in (own, common) if i >= 0]

    def moved_by(self, names: Iterable[str]) -> frozenset[int]:
        """Indices of the shifts that move any of the figures named."""
        return frozenset(i for name in names for i in self.shifts_of(name))

    def figures(self) -> list[str]:
        """Names of all figures."""
        return list(self._slots)
