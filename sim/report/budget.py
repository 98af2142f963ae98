"""What a whole run takes: tokens, steps, days, GPU-hours and money, with the time that failures cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sim.model.kernels import width
from sim.parallel import Lowered
from sim.scenario.schema import Inference, Scenario

#: Training tokens per parameter at the compute-optimal point (Hoffmann et al. 2022, table 3: 20.0 to 21.6).
CHINCHILLA_TOKENS_PER_PARAMETER = 20

#: Moments an optimizer keeps per parameter; those not named are taken to keep two, which overstates a checkpoint.
_MOMENTS = {"none": 0, "sgd": 0, "sgd-momentum": 1}

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

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


def budget_result(scenario: Scenario, lowered: Lowered, step_s: float, tokens_per_step: float) -> BudgetResult | None:
    """The whole run at a steady step; None without `budget.tokens` and for inference.

    Args:
        step_s: time of one optimizer step.
        tokens_per_step: of the whole job.
    """
    asked = scenario.budget
    if asked is None or asked.tokens is None or isinstance(scenario.training.mode, Inference):
        return None
    tokens = (float(CHINCHILLA_TOKENS_PER_PARAMETER * _parameters(lowered)) if asked.tokens == "chinchilla"
              else float(asked.tokens))
    steps = math.ceil(tokens / tokens_per_step)
    kept, write_s, every_s = 1.0, None, None
    if asked.mtbf_per_gpu is not None:
        host, size = scenario.cluster.topology.host, checkpoint_bytes(scenario, lowered)
        nodes, mtbf_s = _writing_nodes(scenario), asked.mtbf_per_gpu / lowered.job.ranks
        write_s, read_s = size / (nodes * host.nvme_write), size / (nodes * host.nvme_read)
        every_s = asked.checkpoint_every or best_interval_s(write_s, mtbf_s)
        kept = goodput(every_s, write_s, read_s, mtbf_s)
    price, deadline = asked.price_per_gpu_hour, asked.deadline
    if kept <= 0:
        never = None if deadline is None else False
        return BudgetResult(tokens, steps, None, None, None, kept, write_s, every_s, never)
    wall_s = steps * step_s / kept
    hours = wall_s / 3600 * lowered.job.ranks
    return BudgetResult(tokens, steps, wall_s / _DAY_S, hours, None if price is None else hours * price, kept, write_s,
                        every_s, None if deadline is None else wall_s <= deadline)


def checkpoint_bytes(scenario: Scenario, lowered: Lowered) -> float:
    """Bytes of one checkpoint: the full-precision weights once, with the optimizer's moments of the trained ones."""
    training = scenario.training
    dtypes = training.precision
    weights = dtypes.master if dtypes.master != "none" else dtypes.parameters
    trained = lowered.architecture.parameters
    return float(trained * (width(weights) + _MOMENTS.get(training.optimizer, 2) * width(dtypes.optimizer)))


def _parameters(lowered: Lowered) -> int:
    return lowered.architecture.parameters + lowered.architecture.frozen_parameters


def _writing_nodes(scenario: Scenario) -> int:
    """Nodes that hold one whole set of states: replicas of it write nothing."""
    parallel = scenario.parallel
    if parallel.strategy in ("none", "ddp"):
        shards = 1
    elif isinstance(parallel.sharding_factor, int):
        shards = parallel.sharding_factor
    else:
        shards = scenario.data_parallel * parallel.context
    holders = shards * parallel.tensor * parallel.pipeline
    return max(1, min(scenario.cluster.nodes, math.ceil(holders / scenario.cluster.gpus_per_node)))
