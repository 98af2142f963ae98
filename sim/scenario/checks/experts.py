"""What cannot be of a mixture of experts, and of experts spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from sim.scenario.checks.findings import Finding, divisors_near
from sim.scenario.fields.schema import Scenario


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
    yield from _cut(s)
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


def _cut(s: Scenario) -> Iterator[Finding]:
    """Slices of an expert that the ranks cannot hold."""
    p, field = s.parallel, "parallel.expert_tensor"
    cut = p.expert_tensor
    if cut is None:
        return
    if s.model.moe is None:
        yield field, f"expert_tensor {cut} but the model has no experts", "give model.moe, or remove it"
    elif s.training.mode != "train":
        yield field, "in inference experts are cut over tensor ranks, or whole where parallel.expert spreads them", (
            "remove it")
    elif cut not in (1, p.tensor):
        yield field, (f"experts are whole on every rank or cut over all {p.tensor} tensor ranks, and expert_tensor is "
                      f"{cut}"), "set it to 1" if p.tensor == 1 else f"set it to 1 or {p.tensor}"
    elif cut == 1 < p.tensor and p.expert == 1:
        yield field, f"whole experts on all {p.tensor} tensor ranks are not simulated unless they are spread", (
            "give parallel.expert, or remove expert_tensor")
    elif cut == p.tensor > 1 and s.replica_ranks % p.expert:
        yield field, (f"cut experts are spread over ranks of other tensor groups, and expert {p.expert} does not "
                      f"divide data {s.data_parallel} · context {p.context}"), "set it to 1, or use a smaller expert"
