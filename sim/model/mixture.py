"""A mixture of experts as one slice of a model holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sim.network import expected_maximum


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` routed experts of width `ffn`, `top_k` per token, `shared` ones that see every
    token; one block of `every` is a mixture, and the first `first_dense` are not.

    Attributes:
        ffn: of a routed expert as this slice holds it; shared_ffn: of all shared experts together.
        held: routed experts of this slice.
        tensor: slices an expert's width is cut into (1 where the experts are spread over the tensor ranks too).
        load: rows of the slice that is asked most, over the mean of all.
        alike: slices of the experts that all have the same tokens; each computes its own experts' rows of them.
        padded: whether every expert computes as many rows as any other, empty or not.
    """

    count: int
    top_k: int
    ffn: int
    shared: int
    every: int
    first_dense: int
    held: int
    shared_ffn: int
    tensor: int = 1
    load: float = 1.0
    alike: int = 1
    padded: bool = False


def experts_of(scenario: Any, ffn: int) -> Experts | None:
    """The experts of a slice; shared ones are cut over the tensor ranks like any dense part."""
    moe, parallel = scenario.model.moe, scenario.parallel
    if moe is None:
        return None
    width, held = moe.expert_ffn or ffn, moe.experts // parallel.expert
    return Experts(moe.experts, moe.top_k, width // scenario.expert_tensor, moe.shared_experts, moe.every,
                   moe.first_dense, held, moe.shared_experts * width // parallel.tensor, scenario.expert_tensor,
                   busiest(moe, parallel.expert, held), padded=bool(moe.capacity and moe.padded))


def busiest(moe: Any, slices: int, held: int) -> float:
    """Rows of the slice of experts that is asked most, over the mean: every block waits for it.

    Loads of experts are taken as independent, with a standard deviation of `imbalance` means; a slice of `held` of them
    varies by a share of sqrt(held) less, and the slowest of `slices` is the expected maximum of that many, or the most
    there is (`most`). With a capacity every expert computes as many rows, empty or not (Lepikhin et al.
    2020, arXiv 2006.16668, section 2.2), or at most as many (`padded`).
    """
    if moe.capacity and moe.padded:
        return float(moe.capacity)
    asked = min(most(moe.top_k, slices, held), 1.0 + float(moe.imbalance) / math.sqrt(held) * expected_maximum(slices))
    return min(asked, float(moe.capacity)) if moe.capacity else asked


def most(top_k: int, slices: int, held: int) -> float:
    """The most rows a slice of `held` experts can be asked for, over the mean: every token for as many of its `top_k`
    different experts as the slice has."""
    return slices * min(held, top_k) / top_k
