"""Pipeline schedules as data: for every pipeline rank the order of its forward and backward actions.

A schedule says nothing of time: the engine runs each rank's list in order, and waits where an input has not come.
"""

from __future__ import annotations

from functools import lru_cache

from sim.parallel.pipeline.actions import (
    UNIFORM,
    Action,
    Costs,
    Places,
    check,
    placement,
    places,
    predecessor,
    split,
    successor,
)
from sim.parallel.pipeline.automatic import searched
from sim.parallel.pipeline.zero_bubble import bidirectional, handcrafted, v_shaped

__all__ = ["Action", "Costs", "Places", "check", "order", "placement", "places", "predecessor", "split", "successor"]


def order(schedule: str, pipeline: int, virtual: int, micro_batches: int, costs: Costs = UNIFORM,
          kept_for_weights: float = 1.0, ahead: int = 0, all_first: bool = True) -> list[list[Action]]:
    """Actions of every pipeline rank, in the order in which it runs them.

    Args:
        costs: of one chunk; only the schedules found by search (zb-1p, zb-2p) look at them.
        kept_for_weights: share of a micro-batch's activations that stays between "B" and "W" (M_W / M_B of Qi et al.
            2023); only zb-1p and zb-2p look at it.
        ahead: forwards by which warm-up of interleaved chunks is longer. Where a forward and a backward run as one it
            is 1, for the last rank's first backward needs the forward in front of it (Megatron-LM `schedules.py`,
            get_pp_rank_microbatches, overlap_moe_expert_parallel_comm).
        all_first: interleaved chunks with as many micro-batches as ranks run all forwards first, as Megatron-LM's do.

    Raises:
        UserError: as `check`.
    """
    check(schedule, pipeline, virtual, micro_batches)
    return [list(actions) for actions in _ordered(schedule, pipeline, virtual, micro_batches, costs, kept_for_weights,
                                                  ahead, all_first)]


def forget() -> None:
    """Empty the memo of order lists (benchmarks do)."""
    _ordered.cache_clear()


@lru_cache(maxsize=32)
def _ordered(schedule: str, pipeline: int, virtual: int, micro_batches: int, costs: Costs,
             kept_for_weights: float, ahead: int, all_first: bool) -> list[list[Action]]:
    if schedule == "gpipe":
        return _gpipe(pipeline, micro_batches)
    if schedule == "interleaved" and virtual > 1:
        return _interleaved(pipeline, virtual, micro_batches, ahead, all_first)
    if schedule in ("zb-h1", "zb-h2"):
        return handcrafted(pipeline, micro_batches, schedule == "zb-h2")
    if schedule in ("zb-1p", "zb-2p"):
        return searched(pipeline, micro_batches, costs, pipeline * (1 + (schedule == "zb-2p")), kept_for_weights)
    if schedule == "zb-v":
        return v_shaped(pipeline, micro_batches)
    if schedule == "dualpipe":
        return bidirectional(pipeline, micro_batches)
    return _one_forward_one_backward(pipeline, micro_batches)


def _gpipe(pipeline: int, micro_batches: int) -> list[list[Action]]:
    """All forwards, then all backwards in reverse (Huang et al. 2019, arXiv 1811.06965, figure 2c)."""
    forward = [Action("F", 0, micro) for micro in range(micro_batches)]
    backward = [Action("B", 0, micro) for micro in reversed(range(micro_batches))]
    return [forward + backward for _ in range(pipeline)]


def _one_forward_one_backward(pipeline: int, micro_batches: int) -> list[list[Action]]:
    """1F1B: min(m, p - rank - 1) forwards of warm-up, then a forward and a backward in turn.

    Source: Megatron-LM `core/pipeline_parallel/schedules.py`, forward_backward_pipelining_without_interleaving.
    """
    forward = [Action("F", 0, micro) for micro in range(micro_batches)]
    backward = [Action("B", 0, micro) for micro in range(micro_batches)]
    return [_alternating(forward, backward, min(micro_batches, pipeline - rank - 1)) for rank in range(pipeline)]


def _interleaved(pipeline: int, virtual: int, micro_batches: int, ahead: int, all_first: bool) -> list[list[Action]]:
    """Groups of p micro-batches through one chunk after another; 2(p - rank - 1) + (v - 1)p forwards of warm-up.

    Sources: Megatron-LM `core/pipeline_parallel/schedules.py`, get_pp_rank_microbatches and get_schedule_table; torch
    2.6.0 `distributed/pipelining/schedules.py`, ScheduleInterleaved1F1B, which has no `all_first`.
    """
    groups = range(0, micro_batches, pipeline)
    forward = [Action("F", chunk, group + i) for group in groups for chunk in range(virtual) for i in range(pipeline)]
    backward = [Action("B", chunk, group + i) for group in groups for chunk in reversed(range(virtual))
                for i in range(pipeline)]
    if micro_batches == pipeline and all_first:
        return [forward + backward for _ in range(pipeline)]
    return [_alternating(forward, backward, min(len(forward), 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline
                                                    + ahead))
            for rank in range(pipeline)]


def _alternating(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then what is left."""
    actions = forward[:ahead]
    for pair in zip(forward[ahead:], backward, strict=False):
        actions += pair
    return actions + backward[len(forward) - ahead:]
