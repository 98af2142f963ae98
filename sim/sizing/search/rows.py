"""Rows of a search's tables: what was simulated, its fields, and what that comes to in money and energy."""

from __future__ import annotations

import math
from typing import Any

from sim.report.result import tokens_per_sample
from sim.scenario import Scenario
from sim.sizing.search.runner import Runner
from sim.sizing.search.store import Outcome
from sim.sizing.space.layouts import Space
from sim.sizing.space.requests import ServedSpace
from sim.sizing.wish import Wish

_J_PER_KWH, _MILLION = 3.6e6, 1e6


def table_row(space: Space, runner: Runner, row: int, wish: Wish) -> dict[str, Any]:
    """A simulated row. GPU-hours, cost and energy are of the whole run; of requests, of a million tokens."""
    one = runner.rows[row]
    times: dict[str, Any]
    where = {"cluster": space.clusters[int(space.columns["cluster"][row])].cluster.topology.name, "gpus": one.gpus}
    if isinstance(space, ServedSpace):
        made = _MILLION / float(space.tokens[row])
        times = {"replicas": space.replicas(row), "step_time_s": one.step_time_s, "prompt_time_s": one.prompt_time_s,
                 "time_per_token_s": one.time_per_token_s,
                 "tokens_per_second": float(space.tokens[row]) / one.step_time_s}
    else:
        made, times = wish.steps, {"step_time_s": one.step_time_s, "run_s": one.step_time_s * wish.steps,
                                   **_rates(space.clusters[0], one.step_time_s)}
    gpu_hours = one.step_time_s * made / 3600 * one.gpus
    cost = gpu_hours * runner.price(row)
    return {**where, **times, "gpu_hours": gpu_hours, "cost": cost, "usd": cost if wish.priced else None,
            "energy_kwh": one.step_energy_j * made / _J_PER_KWH, "step_energy_j": one.step_energy_j,
            "device_used_bytes": one.device_used_bytes, "set": space.sets(row)}


def _rates(scenario: Scenario, step_s: float) -> dict[str, float | None]:
    """Sequences and tokens a second of the whole job; None where there are no tokens, or no step."""
    samples = (scenario.training.global_batch or 0) / step_s if math.isfinite(step_s) else None
    tokens = None if samples is None or scenario.model.kind == "layers" else samples * tokens_per_sample(scenario)
    return {"tokens_per_second": tokens, "samples_per_second": samples}


def kept_row(row: dict[str, Any], one: Outcome) -> dict[str, Any]:
    """A row of `Sizing.rows`; what is not finite is None."""
    plain = {name: None if value == math.inf else value for name, value in row.items()}
    return {**plain, "fits": one.fits, "outcome": one.outcome, "reason": one.reason}
