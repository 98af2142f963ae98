"""What a whole run takes: tokens, steps, days, GPU-hours and money, with the time that failures cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.model.kernels import width
from sim.model.update.optimizer import layers_state_bytes
from sim.parallel import Lowered
from sim.parallel.layout import REPLICAS
from sim.parallel.lower import layout_of
from sim.scenario.fields.schema import Inference, Scenario

#: Training tokens per parameter at the compute-optimal point (Hoffmann et al. 2022, table 3: 20.0 to 21.6).
CHINCHILLA_TOKENS_PER_PARAMETER = 20

_DAY_S = 86_400.0


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between two checkpoints that loses least time, seconds.

    Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006), eq. 37;
    its first term is Young's (1974).
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The best interval to first order, seconds (Young, A first order approximation to the optimum checkpoint interval,
    CACM 17 (1974))."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def overheads(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> dict[str, float]:
    """Shares of the time that are not work kept, by cause.

    An interval of work t and its checkpoint d meets e^{(t+d)/M} - 1 failures on average before it is through (each try
    succeeds with e^{-(t+d)/M}), and each takes M (e^{R/M} - 1) of restarts, which may fail as well; the sum of all is
    Daly's equation 20. What is left is work and checkpoints that a failure undid.

    Args:
        interval_s, checkpoint_s, restart_s, mtbf_s: as in `goodput`.
    """
    kept = goodput(interval_s, checkpoint_s, restart_s, mtbf_s)
    if kept <= 0:
        return {}
    wall_s = interval_s / kept
    failures = math.expm1((interval_s + checkpoint_s) / mtbf_s)
    restarts = failures * mtbf_s * math.expm1(restart_s / mtbf_s) / wall_s
    writing = checkpoint_s / wall_s
    return {"checkpoints": writing, "restarts": restarts, "lost_work": max(0.0, 1 - kept - writing - restarts)}


def goodput(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that is work kept: the rest is checkpoints, restarts and work done twice.

    Failures are a Poisson process and may strike during checkpoints and restarts (Daly 2006, eq. 20).

    Args:
        interval_s: work between two checkpoints.
        mtbf_s: mean time between failures of the whole job.
    """
    exponent, restarts = (interval_s + checkpoint_s) / mtbf_s, restart_s / mtbf_s
    if exponent + restarts > 700:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restarts) * math.expm1(exponent))


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """`budget` of result.md. What the scenario does not give is None.

    Attributes:
        days: with what failures cost; None (as GPU-hours and cost) where they leave no goodput: the run never ends.
        cost: at `price_per_gpu_hour`, in its currency.
        goodput: share of the days that is work kept; 1 where no failures are asked for.
        checkpoint_s: writing one checkpoint to the disks of the nodes that hold it.
        checkpoint_every_s: as given, or the best interval.
        in_time: whether the deadline is kept.
        energy_kwh: of the GPUs alone, without hosts, network and cooling.
        mtbf_s: mean time between failures of the whole job.
        restart_s: from a failure until work goes on from the last checkpoint.
        young_every_s: the best interval to first order, beside which `checkpoint_every_s` can be judged.
        overhead: share of the days lost to checkpoints, restarts and work done twice; with goodput they sum to 1.
    """

    tokens: float
    steps: int
    days: float | None
    gpu_hours: float | None
    cost: float | None
    goodput: float
    checkpoint_s: float | None
    checkpoint_every_s: float | None
    in_time: bool | None
    energy_kwh: float | None = None
    mtbf_s: float | None = None
    restart_s: float | None = None
    young_every_s: float | None = None
    overhead: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) != {}}


def budget_result(scenario: Scenario, lowered: Lowered, step_s: float, tokens_per_step: float,
                  step_j: float | None = None) -> BudgetResult | None:
    """The whole run at a steady step; None without `budget.tokens` and for inference.

    Args:
        step_s: time of one optimizer step.
        tokens_per_step: of the whole job.
        step_j: energy of all GPUs over one step, joules.
    """
    asked = scenario.budget
    if asked is None or asked.tokens is None or isinstance(scenario.training.mode, Inference):
        return None
    tokens = tokens_of(asked.tokens, _parameters(lowered))
    steps = math.ceil(tokens / tokens_per_step)
    loss = _losses(scenario, lowered)
    price, deadline = price_per_gpu_hour(scenario), asked.deadline
    if loss.goodput <= 0:
        never = None if deadline is None else False
        return BudgetResult(tokens, steps, None, None, None, loss.goodput, loss.checkpoint_s, loss.every_s, never, None,
                            loss.mtbf_s, loss.restart_s, loss.young_s)
    wall_s = steps * step_s / loss.goodput
    hours = wall_s / 3600 * lowered.job.ranks
    energy = None if step_j is None else steps * step_j / loss.goodput / 3.6e6
    return BudgetResult(tokens, steps, wall_s / _DAY_S, hours, None if price is None else hours * price, loss.goodput,
                        loss.checkpoint_s, loss.every_s, None if deadline is None else wall_s <= deadline, energy,
                        loss.mtbf_s, loss.restart_s, loss.young_s, loss.overhead)


def tokens_of(asked: float | str, parameters: int) -> float:
    """Tokens of a run: as asked, or "chinchilla" as many as are optimal for the parameters."""
    return float(CHINCHILLA_TOKENS_PER_PARAMETER * parameters) if isinstance(asked, str) else float(asked)


def price_per_gpu_hour(scenario: Scenario) -> float | None:
    """The budget's price, else the topology's own (its file names the source); None where neither has one."""
    asked = scenario.budget
    given = None if asked is None else asked.price_per_gpu_hour
    return scenario.cluster.topology.price_per_gpu_hour if given is None else given


@dataclass(frozen=True, slots=True)
class _Losses:
    """What failures and checkpoints take; names as in `BudgetResult`."""

    goodput: float = 1.0
    checkpoint_s: float | None = None
    every_s: float | None = None
    mtbf_s: float | None = None
    restart_s: float | None = None
    young_s: float | None = None
    overhead: dict[str, float] = field(default_factory=dict)


def _losses(scenario: Scenario, lowered: Lowered) -> _Losses:
    asked = scenario.budget
    if asked is None or (asked.mtbf_per_gpu is None and asked.checkpoint_every is None):
        return _Losses()
    write_s, read_s = checkpoint_times_s(scenario, lowered)
    restart_s = (asked.restart or 0.0) + read_s
    if asked.mtbf_per_gpu is None:
        every_s = asked.checkpoint_every
        assert every_s is not None, "one of the two is given"
        kept = every_s / (every_s + write_s)
        return _Losses(kept, write_s, every_s, overhead={"checkpoints": 1 - kept})
    mtbf_s = asked.mtbf_per_gpu / lowered.job.ranks
    every_s = asked.checkpoint_every or best_interval_s(write_s, mtbf_s)
    kept = goodput(every_s, write_s, restart_s, mtbf_s)
    return _Losses(kept, write_s, every_s, mtbf_s, restart_s, young_interval_s(write_s, mtbf_s),
                   overheads(every_s, write_s, restart_s, mtbf_s))


def checkpoint_times_s(scenario: Scenario, lowered: Lowered) -> tuple[float, float]:
    """Seconds to write and to read one checkpoint: the nodes that hold one set of states, each over its own disks, all
    together no faster than `budget.storage`."""
    host, size, nodes = scenario.cluster.topology.host, checkpoint_bytes(scenario, lowered), writing_nodes(scenario)
    shared = math.inf if scenario.budget is None or scenario.budget.storage is None else scenario.budget.storage
    return size / min(nodes * host.nvme_write, shared), size / min(nodes * host.nvme_read, shared)


def checkpoint_bytes(scenario: Scenario, lowered: Lowered) -> float:
    """Bytes of one checkpoint: the full-precision weights once, with the optimizer's states of the trained ones."""
    dtypes = scenario.training.precision
    weights = dtypes.master if dtypes.master != "none" else dtypes.parameters
    states = layers_state_bytes(lowered.architecture.stack, dtypes, scenario.training.optimizer)
    return float(lowered.architecture.parameters * width(weights) + states)


def _parameters(lowered: Lowered) -> int:
    return lowered.architecture.parameters + lowered.architecture.frozen_parameters


def writing_nodes(scenario: Scenario) -> int:
    """Nodes that hold one whole set of states, all pipeline stages, tensor slices and experts: replicas of it write
    nothing."""
    parallel, layout = scenario.parallel, layout_of(scenario)
    shards = 1 if parallel.strategy in ("none", "ddp") else parallel.sharding_factor
    apart = -(-parallel.expert * scenario.expert_tensor // parallel.tensor)  # replicas that hold different experts
    holders = layout.group(REPLICAS)[:, :max(shards, apart)]
    return len(np.unique(holders // scenario.cluster.gpus_per_node))
