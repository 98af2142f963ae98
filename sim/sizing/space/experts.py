"""How a search spreads a mixture's experts over ranks, and into how many slices it cuts each.

An expert is cut over all tensor ranks, or whole (Megatron's `expert_tensor_parallel_size`: the tensor ranks or 1; the
half between is not simulated). Whole ones are spread over tensor ranks too, each of which then sends tokens of its own:
that needs sequence parallelism. Where the replicas do not divide by the degree nothing else is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.scenario import Scenario


class Spread(NamedTuple):
    """Attributes: expert: `parallel.expert`; slices: of an expert (`Scenario.expert_tensor`); own_tokens: whether
    tensor ranks must hold tokens of their own."""

    expert: int
    slices: int
    own_tokens: bool


def spreads(scenario: Scenario, scattered: bool, tensor: int, ranks: int, expert: Sequence[int],
            slices: Sequence[int]) -> list[Spread]:
    """Every way to spread experts.

    Args:
        scattered: the stack has no mixture on tensor ranks with the same tokens (`Stack.experts_scattered`).
        ranks: replicas and their context ranks.
        expert, slices: values asked for; every one if empty. A model without experts has no slices of them.
    """
    moe = scenario.model.moe
    if moe is None:
        return [Spread(1, tensor, False)] if (not expert or 1 in expert) and not slices else []
    width = moe.expert_ffn or scenario.model.ffn or 0
    found = [Spread(e, cut, cut < tensor or (scattered and tensor > 1)) for e in range(1, moe.experts + 1)
             if moe.experts % e == 0 and (ranks * tensor) % e == 0
             for cut in dict.fromkeys((tensor, 1))
             if (cut < tensor and e > 1) or (cut == tensor and ranks % e == 0 and width % cut == 0)]
    return [one for one in found if (not expert or one.expert in expert) and (not slices or one.slices in slices)]
