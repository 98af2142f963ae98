"""What cannot be of a mixture of experts, and of experts spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from sim.scenario.findings import Finding, divisors_near
from sim.scenario.schema import Scenario


def mixture(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Sizes of a mixture that contradict each other."""
    moe = s.model.moe
    if moe is None:
        return
    if moe.top_k > moe.experts:
        yield "model.moe.top_k", f"top_k {moe.top_k} is more than experts {moe.experts}", f"at most {moe.experts}"
    if moe.first_dense > s.model.layers:
        yield ("model.moe.first_dense", f"first_dense {moe.first_dense} is more than layers {s.model.layers}", "")
    if moe.experts % moe.groups:
        yield ("model.moe.groups", f"groups {moe.groups} does not divide the {moe.experts} experts",
               divisors_near(moe.experts, moe.groups))
    elif moe.top_groups > moe.groups:
        yield ("model.moe.top_groups", f"top_groups {moe.top_groups} is more than groups {moe.groups}",
               f"at most {moe.groups}")
    elif moe.top_groups * (moe.experts // moe.groups) < moe.top_k <= moe.experts:
        yield ("model.moe.top_groups", f"{moe.top_groups} groups of {moe.experts // moe.groups} experts are fewer than "
               f"top_k {moe.top_k}", "take experts from more groups")


def spread(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Experts that cannot be spread over the ranks."""
    p, moe = s.parallel, s.model.moe
    if p.overlap_experts is not None and moe is None:
        yield ("parallel.overlap_experts", "overlap_experts hides all-to-alls of experts, and the model has none",
               "give model.moe, or remove it")
    if p.expert == 1:
        return
    ranks = s.replica_ranks * p.tensor
    if moe is None:
        yield ("parallel.expert", f"expert {p.expert} but the model has no experts", "give model.moe, or remove it")
    elif moe.experts % p.expert:
        yield (
            "parallel.expert",
            f"expert {p.expert} does not divide the model's {moe.experts} experts",
            divisors_near(moe.experts, p.expert),
        )
    if ranks % p.expert:
        yield (
            "parallel.expert",
            f"expert {p.expert} does not divide data {s.data_parallel} · context {p.context} · tensor "
            f"{p.tensor} = {ranks} ranks",
            divisors_near(ranks, p.expert),
        )
