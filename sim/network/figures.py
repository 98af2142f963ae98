"""The measured figures of links and protocols: `figures.yaml`, with a cluster's own values in their place.

A figure has a dotted name, e.g. `step_us.nvlink.LL.ampere`; `figures.yaml` gives each a value, `figures_origin.yaml`
its unit, source and confidence (apart, because every run reads the one and hardly any the other). Both are written by
`python -m sim.calibration.fit_nccl`. A topology may carry `links:`, a mapping of such
names to values measured on that cluster (written by `drystep calibrate --nccl`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.catalog import table
from sim.errors import Fault, UserError


def catalogue() -> dict[str, float]:
    """All figures by name."""
    rows: dict[str, float] = table("network/figures.yaml")
    return rows


def origins() -> dict[str, dict[str, Any]]:
    """Where each figure comes from: name -> {unit, prior, source, confidence, sites}."""
    rows: dict[str, dict[str, Any]] = table("network/figures_origin.yaml")
    return rows


class Figures:
    """Look-up of figures by name, a cluster's own first.

    Args:
        own: name -> value of a topology's `links`.

    Raises:
        UserError: a name no figure has, or a value that is not a positive number.
    """

    __slots__ = ("_own", "_rows")

    def __init__(self, own: Mapping[str, float] | None = None) -> None:
        self._rows = catalogue()
        self._own = {str(name): _checked(str(name), value, self._rows) for name, value in (own or {}).items()}

    def __getitem__(self, name: str) -> float:
        value = self._own.get(name)
        return float(self._rows[name]) if value is None else value

    def own(self) -> dict[str, float]:
        """The cluster's own figures."""
        return dict(self._own)


def _checked(name: str, value: Any, rows: Mapping[str, Any]) -> float:
    where = f"cluster.topology.links.{name}"
    if name not in rows:
        raise UserError(Fault(f"no figure of links is called {name!r}", where,
                              hint="names are those of sim/network/figures.yaml"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise UserError(Fault(f"{name} must be a number from 0 on, not {value!r}", where))
    return float(value)
