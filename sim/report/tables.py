"""Results as tables for notebooks: a pandas DataFrame where pandas is installed, else a list of mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.report.result import Result

#: A `pandas.DataFrame`, or a list of rows without pandas. Columns carry their units in their names (`_s`, `_bytes`).
Frame = Any


def as_table(rows: Sequence[Mapping[str, Any]]) -> Frame:
    """Rows as a DataFrame, or as they are where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame(list(rows))


def row_of(result: Result) -> dict[str, Any]:
    """The main numbers of one run, one column each; those of a sweep's point begin with its `set`.

    It needs no detail of the run, so results that were released (`Result.release`) have a row as well.
    """
    exposed = {f"exposed_{kind}_{group}_s": seconds
               for kind, groups in result.breakdown.exposed_communication.items() for group, seconds in groups.items()}
    budget = {} if result.budget is None else {
        "days": result.budget.days, "gpu_hours": result.budget.gpu_hours, "cost": result.budget.cost,
        "energy_kwh": result.budget.energy_kwh, "goodput": result.budget.goodput}
    return {
        **{path: _plain(value) for path, value in result.set.items()},
        "name": result.scenario.name, "gpus": result.gpus, "gpu": result.gpu, "step_time_s": result.step_time_s,
        "tokens_per_second": result.tokens_per_second,
        "tokens_per_second_per_gpu": result.tokens_per_second_per_gpu,
        "model_tflops_per_gpu": result.model_tflops_per_gpu, "mfu": result.mfu, "hfu": result.hfu,
        "bound": result.bound, "exposed_communication_s": result.breakdown.exposed_s,
        **{f"{name}_s": seconds for name, seconds in result.breakdown.compute.items()}, **exposed,
        "pipeline_bubble_s": result.breakdown.pipeline_bubble, "host_s": result.breakdown.host,
        "offload_s": result.breakdown.offload, "device_used_bytes": result.memory.device_used_bytes,
        "capacity_bytes": result.memory.capacity_bytes, "fits": result.memory.fits, **budget}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
