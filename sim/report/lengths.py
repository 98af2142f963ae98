"""How long a whole run takes and what it costs, in words."""

from __future__ import annotations

from sim.report.numbers.budget import BudgetResult
from sim.report.units import figure
from sim.report.units import seconds as in_units

#: Kilowatt-hours from which on energy is told in thousands of them.
_MEGA = 1000
#: Lengths that no one waits for, a thousand years, where failures and not the work are why: goodput below which.
_FOREVER_DAYS, _HARDLY = 365_000.0, 0.01
#: Numbers from which on parts of one are not told.
_MANY = 100
_DAY_S = 86_400.0


def never(found: BudgetResult) -> str:
    """Why a run has no length, "" where it has one."""
    if found.days is None:
        return "failures leave no time for work: it never ends"
    if found.days > _FOREVER_DAYS and found.goodput < _HARDLY:
        return "failures leave hardly any time for work: it would take more than a thousand years"
    return ""


def length(found: BudgetResult) -> list[str]:
    """Days, GPU-hours, money and energy of a run, those that are known; of one that never ends, why."""
    if why := never(found):
        return [why]
    assert found.days is not None and found.gpu_hours is not None, "days and GPU-hours come together"
    parts = [f"{found.days:.4g} days" if found.days >= 1 else time(_DAY_S * found.days),
             f"{_count(found.gpu_hours)} GPU-hours"]
    if found.cost is not None:
        parts.append(f"{_count(found.cost)} USD")
    if found.energy_kwh is not None:
        energy = f"{found.energy_kwh / 1000:,.4g} MWh" if found.energy_kwh >= _MEGA else f"{found.energy_kwh:.4g} kWh"
        parts.append(f"{energy} of the GPUs alone")
    return parts


def cells(found: BudgetResult | None) -> tuple[str, str]:
    """A run's length and its cost for a table, "-" for what is not known and "never" for the length of one without."""
    if found is None:
        return "-", "-"
    if never(found) or found.days is None:
        return "never", "-"
    return length(found)[0], "-" if found.cost is None else f"{_count(found.cost)}"


def time(seconds: float) -> str:
    """A time in the largest unit of which it has two."""
    for unit, size in (("days", _DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{figure(seconds / size)} {unit}"
    return in_units(seconds)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= _MANY or not value else figure(value)
