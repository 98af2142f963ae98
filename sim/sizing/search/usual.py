"""What the best of a search would gain by the precision that most runs of its kind have, where it was not tried."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sim import api
from sim.errors import UserError
from sim.report.units import seconds
from sim.report.warned.asked import autocast_alone, usual_half
from sim.scenario import Scenario
from sim.scenario.change import Changing


def with_usual_half(winner: Scenario, row: dict[str, Any], tried: Collection[str] = ()) -> list[str]:
    """A hint with the step that the best layout then takes, which is simulated for it; none where it is what it has.

    Args:
        row: the winner's in a table; tried: precisions that the search had.
    """
    if usual_half(winner) in tried:
        return []
    return [f"{hint}: {_step(winner, row['step_time_s'], usual_half(winner))}" for hint in autocast_alone(winner)]


def _step(winner: Scenario, now_s: float, usual: str) -> str:
    try:
        result = api.run(Changing(winner)({"training.precision": usual}).scenario)
    except UserError:
        return "not simulated for this layout"
    if not result.memory.fits:
        return "this layout would not fit with it"
    return (f"the best layout would take {seconds(result.step_time_s)} a step, "
            f"{100 * (result.step_time_s / now_s - 1):+.0f}% (--precision {usual} tries all layouts with it too)")
