"""Experts spread over ranks: who reduces what with whom, tokens that travel, sizes that slices hold; by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.api import hardware_for
from sim.errors import UserError
from sim.model.mixture import busiest
from sim.parallel import lower
from sim.parallel.data.buckets import Bucket, apart
from sim.parallel.lower import cut_groups, layout_of
from sim.parallel.model.expert import sent_once
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve
from sim.scenario.fields.model import Moe

LAYERS, HIDDEN, SEQUENCE, FFN, EXPERTS, TOP_K = 4, 256, 128, 384, 8, 2


def scenario(moe: dict[str, Any] | None = None, framework: str = "megatron", year: int = 2024, nodes: int = 1,
             precision: str = "pure-bf16", model: dict[str, Any] | None = None, fsdp: int = 2, **parallel: Any) -> Any:
    """A small mixture of experts on A100 nodes, two micro-batches of two sequences per replica."""
    cut = parallel.get("tensor", 1) * parallel.get("context", 1) * parallel.get("pipeline", 1)
    return resolve({
        "name": "experts", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "ffn": 512, "vocab": 1024,
                  "positions": "rotary", "norm": "rmsnorm", "bias": False, "dropout": False, "gated_mlp": True,
                  "tied_embeddings": False, "max_positions": SEQUENCE,
                  "moe": {"experts": EXPERTS, "top_k": TOP_K, "expert_ffn": FFN, **(moe or {})}, **(model or {})},
        "training": {"micro_batch": 2, "global_batch": 4 * 8 * nodes // cut, "sequence": SEQUENCE,
                     "precision": precision, "optimizer": "adam", "attention": "flash"},
        "parallel": {"strategy": "ddp", **parallel},
        "software": {"framework": framework, "year": year, "modules": "megatron", "fsdp": fsdp}})


def moved(what: Any, kind: str) -> Counter[int]:
    """Bytes of a kind of collective per step, by the ranks of its group; the norm's four bytes left out."""
    found: Counter[int] = Counter()
    for row in traffic_totals(lower(what).job):
        if row["kind"] == kind and row["bytes"] // row["count"] > 4:
            found[row["ranks"]] += row["bytes"]
    return found


#: Elements of one expert, of all of them in the model, and of everything else.
EXPERT = 3 * HIDDEN * FFN
ROUTED = LAYERS * EXPERTS * EXPERT


def dense(what: Any) -> int:
    return lower(what).architecture.parameters - ROUTED


def resident(what: Any, category: str) -> int:
    return sum(size for _, size, kind in lower(what).job.programs[0].resident if kind == category)


def test_experts_are_reduced_by_the_ranks_that_hold_the_same() -> None:
    what = scenario(expert=4)
    assert moved(what, "all_reduce") == {8: 2 * dense(what), 2: 2 * ROUTED // 4}


def test_experts_that_no_other_rank_holds_are_not_reduced() -> None:
    what = scenario(expert=8)
    assert moved(what, "all_reduce") == {8: 2 * dense(what)}


def test_groups_of_experts_and_of_their_copies_partition_the_ranks() -> None:
    what = scenario(nodes=2, expert=4, tensor=2, sequence_parallel=True)
    groups = cut_groups(what, layout_of(what))
    assert groups["expert"].shape == (4, 4) and groups["expert_data"].shape == (8, 2)
    for spread in groups["expert"]:
        for copies in groups["expert_data"]:
            assert len(set(spread.tolist()) & set(copies.tolist())) <= 1
    # a copy of an expert lies in another expert group of the same tensor slice
    assert groups["expert_data"][0].tolist() == [0, 8]


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_distributed_optimizer_splits_each_kind_over_its_own_ranks(expert: int) -> None:
    what = scenario(expert=expert, strategy="zero1")
    elements = dense(what) / 8 + ROUTED / expert / (8 // expert)
    assert resident(what, "optimizer_states") == pytest.approx(2 * 2 * elements, rel=1e-3)
    assert resident(what, "parameters") == pytest.approx(2 * (dense(what) + ROUTED / expert), rel=1e-3)
    gathered = moved(what, "all_gather")
    gathered[expert] -= 2 * LAYERS * 8 * EXPERTS * expert if expert > 1 else 0  # rows of each expert, told to all
    assert gathered[8] == pytest.approx(2 * (dense(what) + (ROUTED if expert == 1 else 0)), rel=1e-3)
    if 1 < expert < 8:
        assert gathered[8 // expert] == 2 * ROUTED // expert


@pytest.mark.parametrize("fsdp", [1, 2])
def test_fsdp_shards_experts_over_the_ranks_that_hold_the_same(fsdp: int) -> None:
    what = scenario(expert=4, strategy="fsdp", framework="pytorch", year=2025, fsdp=fsdp, precision="fsdp-bf16")
    gathered, scattered = moved(what, "all_gather"), moved(what, "reduce_scatter")
    # two micro-batches, each gathers blocks twice and reduces them once; bf16 on the wire
    assert gathered[2] == 2 * 2 * 2 * ROUTED // 4
    assert scattered[2] == 2 * 2 * ROUTED // 4
    assert resident(what, "parameters") == pytest.approx(4 * (dense(what) + ROUTED) / 8, rel=1e-2)


def test_experts_over_tensor_ranks_are_whole_and_counted_exactly() -> None:
    what = scenario(expert=8, tensor=2, sequence_parallel=True)
    assert what.expert_tensor == 1
    # each rank: one whole expert a block, half of what tensor parallelism cuts, all of what it does not
    uncut = LAYERS * (2 * HIDDEN + HIDDEN * EXPERTS) + HIDDEN
    own = (dense(what) - uncut) / 2 + uncut + LAYERS * EXPERT
    assert resident(what, "parameters") == 2 * own


def test_experts_cut_by_tensor_ranks_hold_a_share_of_every_one() -> None:
    what = scenario(expert=4, tensor=2, sequence_parallel=True)
    assert what.expert_tensor == 2
    uncut = LAYERS * (2 * HIDDEN + HIDDEN * EXPERTS) + HIDDEN
    assert resident(what, "parameters") == 2 * ((dense(what) - uncut) / 2 + uncut + LAYERS * 2 * EXPERT / 2)


@pytest.mark.parametrize(("tensor", "expert"), [(1, 4), (2, 4), (2, 8), (4, 8)])
def test_a_tensor_rank_sends_its_own_tokens(tensor: int, expert: int) -> None:
    what = scenario(expert=expert, tensor=tensor, sequence_parallel=tensor > 1)
    rows = 2 * SEQUENCE * TOP_K // tensor
    # two micro-batches; dispatch and combine, forward and backward
    assert moved(what, "all_to_all")[expert] == 2 * 4 * LAYERS * rows * HIDDEN * 2


def test_whole_experts_can_be_asked_for_where_they_could_be_cut() -> None:
    """Megatron's --expert-tensor-parallel-size 1: two experts whole on each rank, where they would be halves."""
    what = scenario(expert=4, tensor=2, sequence_parallel=True, expert_tensor=1)
    cut = scenario(expert=4, tensor=2, sequence_parallel=True)
    assert (what.expert_tensor, cut.expert_tensor) == (1, 2)
    groups = cut_groups(what, layout_of(what))
    assert groups["expert"][0].tolist() == [0, 1, 2, 3] and groups["expert_data"][0].tolist() == [0, 4]
    assert resident(what, "parameters") - resident(cut, "parameters") == 2 * LAYERS * EXPERT
    # two ranks hold the same two experts; halves of an expert are on one data rank alone
    assert moved(what, "all_reduce")[2] - moved(cut, "all_reduce")[2] == 2 * LAYERS * 2 * EXPERT
    assert sim.run(what).model_flops == sim.run(cut).model_flops


@pytest.mark.parametrize(("changes", "match"), [
    ({"expert": 4, "tensor": 4, "expert_tensor": 2}, "set it to 1 or 4"),
    ({"expert": 8, "tensor": 2, "expert_tensor": 2}, "does not divide data 4"),
    ({"expert": 1, "tensor": 2, "expert_tensor": 1}, "unless they are spread"),
    ({"expert": 4, "tensor": 2, "expert_tensor": 1}, "sequence_parallel"),
    ({"expert_tensor": 1, "model": {"moe": None}}, "has no experts"),
])
def test_slices_of_experts_that_cannot_be(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        lower(scenario(**changes))


def test_cut_experts_gather_the_tokens_of_their_tensor_ranks() -> None:
    def gathers(expert: int) -> int:
        rows = traffic_totals(lower(scenario(expert=expert, tensor=2, sequence_parallel=True)).job)
        return sum(r["count"] for r in rows if r["kind"] == "all_gather" and r["phase"] == "forward")
    # whole experts need no gather in front of their products
    assert gathers(4) - gathers(8) == 2 * LAYERS


def test_flops_are_as_routed_however_experts_are_spread() -> None:
    def per_sequence(**parallel: Any) -> tuple[float, float]:
        what = scenario(**parallel)
        result = sim.run(what)
        return result.model_flops / what.training.global_batch, result.hardware_flops / what.training.global_batch
    plain = per_sequence()
    for tensor, expert in ((1, 8), (2, 4), (2, 8)):
        cut = per_sequence(tensor=tensor, expert=expert, sequence_parallel=tensor > 1)
        assert cut == pytest.approx(plain, rel=1e-6)


def test_the_busiest_slice_is_waited_for() -> None:
    even, uneven = sim.run(scenario(expert=8)), sim.run(scenario(expert=8, moe={"imbalance": 0.5}))
    assert uneven.breakdown.compute["gemm"] > even.breakdown.compute["gemm"]
    assert uneven.hardware_flops == pytest.approx(even.hardware_flops, rel=1e-2)
    load = busiest(Moe(experts=8, top_k=2, imbalance=0.5), 8, 1)
    assert load == pytest.approx(1 + 0.5 * 1.4236, rel=0.02)  # expected maximum of eight normal deviates
    sent = [moved(scenario(expert=8, moe=moe), "all_to_all")[8] for moe in ({}, {"imbalance": 0.5})]
    assert sent[1] == pytest.approx(load * sent[0], rel=1e-3)


def test_a_capacity_is_computed_full_or_empty() -> None:
    sent = [moved(scenario(expert=4, moe=moe), "all_to_all")[4] for moe in ({}, {"capacity": 1.25, "imbalance": 9})]
    assert sent[1] == pytest.approx(1.25 * sent[0])
    loads = [busiest(Moe(experts=8, top_k=2, capacity=1.25, padded=False, imbalance=spread), 4, 2)
             for spread in (0, 0.1, 9)]
    assert loads[0] == 1.0 < loads[1] < loads[2] == 1.25  # without padding it only bounds what imbalance asks for


@settings(max_examples=50, deadline=None)
@given(experts=st.sampled_from([8, 16, 64]), spread=st.sampled_from([1, 2, 4, 8]), top_k=st.integers(1, 8),
       imbalance=st.floats(0, 20))
def test_load_is_between_even_and_all_on_one(experts: int, spread: int, top_k: int, imbalance: float) -> None:
    """A token's experts are different ones: a slice gets at most as many of its rows as it has experts."""
    held = experts // spread
    load = busiest(Moe(experts=experts, top_k=top_k, imbalance=imbalance), spread, held)
    assert 1.0 <= load <= spread * min(held, top_k) / top_k
    assert load <= busiest(Moe(experts=experts, top_k=top_k, imbalance=2 * imbalance + 0.1), spread, held)


@settings(max_examples=50, deadline=None)
@given(top_k=st.integers(1, 16), places=st.integers(1, 64))
def test_a_token_sent_once_goes_to_no_more_places_than_there_are(top_k: int, places: int) -> None:
    copies = sent_once(top_k, places) * top_k
    assert 1.0 - 1e-9 <= copies <= min(top_k, places) + 1e-9
    assert math.isclose(sent_once(1, places), 1.0)


def test_limited_groups_are_on_fewer_places() -> None:
    # one of two groups, a place each: all rows go to one place; groups of two places each: as two places would
    assert sent_once(4, 2, 2, 1) * 4 == 1.0
    assert sent_once(4, 4, 2, 1) == pytest.approx(sent_once(4, 2))
    # DeepSeek-V3 on four nodes, two groups each, four groups chosen: a node has one of them in 4/7 of all draws, both
    # in 3/14, and is then missed by all eight experts with (3/4)^8 and (1/2)^8
    assert sent_once(8, 4, 8, 4) * 8 == pytest.approx(4 * (4 / 7 * (1 - 0.75**8) + 3 / 14 * (1 - 0.5**8)))


@given(top_k=st.integers(1, 16), places=st.sampled_from([1, 2, 4, 8, 16, 32]), groups=st.sampled_from([1, 2, 4, 8]),
       top_groups=st.integers(1, 8))
@settings(max_examples=50)
def test_a_limit_never_sends_more(top_k: int, places: int, groups: int, top_groups: int) -> None:
    top_groups = min(top_groups, groups)
    limited = sent_once(top_k, places, groups, top_groups)
    assert limited <= sent_once(top_k, places) * (1 + 1e-12)
    assert math.isclose(sent_once(top_k, places, groups, groups), sent_once(top_k, places), rel_tol=0.12)
    assert math.isclose(sent_once(1, places, groups, top_groups), 1.0)


def test_stacks_that_send_a_token_once_send_less() -> None:
    # one node: places are the four ranks, two experts a token: 4 (1 - (3/4)^2) = 1.75 copies instead of two
    often, once = (moved(scenario(expert=4, year=year), "all_to_all")[4] for year in (2024, 2025))
    assert once == pytest.approx(often * 1.75 / 2, rel=1e-4)


@pytest.mark.parametrize(("framework", "year"), [("megatron", 2024), ("megatron", 2026), ("torchtitan", 2026)])
def test_a_dispatcher_that_is_asked_for_is_had(framework: str, year: int) -> None:
    """As many bytes, and the same way over the links, whatever the release has of itself."""
    def of(dispatcher: str) -> Any:
        what = scenario(expert=4, framework=framework, year=year)
        return what.model_copy(update={"software": what.software.model_copy(update={"dispatcher": dispatcher})})
    often, once = of("alltoall"), of("flex")
    scores = 2 * 2 * LAYERS * 2 * SEQUENCE * TOP_K * 4 if (framework, year) == ("megatron", 2026) else 0
    rows = moved(often, "all_to_all")[4] - scores
    assert moved(once, "all_to_all")[4] == pytest.approx(rows * 1.75 / 2, rel=1e-4)
    assert not hardware_for(often)[1].one_sided and hardware_for(once)[1].one_sided


@pytest.mark.parametrize(("expert", "dispatcher", "copies"), [(4, "alltoall", 4), (8, "alltoall", 0), (4, "flex", 0)])
def test_rows_that_come_rank_by_rank_are_sorted_by_expert(expert: int, dispatcher: str, copies: int) -> None:
    """Of several experts a rank: behind the way there and in front of the way back, and likewise their gradients."""
    what = scenario(expert=expert, year=2026)
    what = what.model_copy(update={"software": what.software.model_copy(update={"dispatcher": dispatcher})})
    program = lower(what).job.programs[0]
    sorting = {row for row, kernel in enumerate(program.kernels) if kernel.variant.endswith("sort_rows")}
    one = next(seg for seg in program.segments if sorting & set(seg.kernels)) if sorting else None
    assert (sum(row in sorting for row in one.kernels) if one else 0) == copies // 2
    for row in sorting:  # what two nodes' micro-batch sends and gets, read and written in bf16
        assert program.kernels[row].bytes == 2 * SEQUENCE * TOP_K * HIDDEN * 4


@pytest.mark.parametrize(("year", "dispatcher", "copies"), [
    (2025, None, 4), (2026, None, 0), (2026, "alltoall", 4), (2026, "flex", 0)])
def test_rows_are_padded_for_narrow_products(year: int, dispatcher: str | None, copies: int) -> None:
    """Megatron's TEGroupedMLP in 8 bits, unless HybridEP has padded them on their way; never in bf16."""
    for precision, count in (("fp8", copies), ("megatron-bf16", 0)):
        what = resolve(scenario(expert=4, year=year, precision=precision).model_dump(mode="json", exclude_none=True) | {
            "cluster": {"topology": "dgx-h100"}})
        what = what.model_copy(update={"software": what.software.model_copy(update={"dispatcher": dispatcher})})
        program = lower(what).job.programs[0]
        rows = {row for row, kernel in enumerate(program.kernels) if kernel.variant.endswith("pad_rows")}
        found = [sum(row in rows for row in seg.kernels) for seg in program.segments]
        assert max(found) in (count // 2, count * LAYERS // 2), (precision, found)


def test_plain_dispatch_tells_counts_and_sends_scores() -> None:
    """Megatron's MoEAlltoAllTokenDispatcher: an all-gather of int64 counts forward; scores in fp32 both ways."""
    what = scenario(expert=4, year=2026)
    what = what.model_copy(update={"software": what.software.model_copy(update={"dispatcher": "alltoall"})})
    rows = [r for r in traffic_totals(lower(what).job) if r["ranks"] == 4]
    assert sum(r["bytes"] for r in rows if r["kind"] == "all_gather") == 2 * LAYERS * 8 * EXPERTS * 4
    assert sum(r["count"] for r in rows if r["kind"] == "all_to_all") == 2 * LAYERS * 6
    flex = what.model_copy(update={"software": what.software.model_copy(update={"dispatcher": "flex"})})
    assert sum(r["count"] for r in traffic_totals(lower(flex).job) if r["kind"] == "all_to_all") == 2 * LAYERS * 4


def test_shared_experts_run_beside_plain_all_to_alls_alone() -> None:
    assert scenario(expert=4, moe={"shared_experts": 1}, overlap_experts="shared").software.dispatcher == "alltoall"
    what = scenario(expert=4, moe={"shared_experts": 1}, overlap_experts="shared")
    flex = what.model_copy(update={"software": what.software.model_copy(update={"dispatcher": "flex"})})
    with pytest.raises(UserError, match="does not run beside shared experts"):
        lower(flex)


def test_dense_and_routed_gradients_never_share_a_bucket() -> None:
    made = apart(lambda routed, group: [Bucket(10, 3 if routed else 2, 1, group)], True)
    assert [bucket.group for bucket in made] == ["expert_data", "data"]
    assert apart(lambda routed, group: [Bucket(10, 3, 1, group)], False)[0].group == "data"


def test_latent_attention_gathers_what_is_narrow() -> None:
    mla = {"q_rank": 64, "kv_rank": 32, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
    what = scenario(tensor=2, sequence_parallel=True, model={"mla": mla, "moe": None})
    rows = [r for r in traffic_totals(lower(what).job) if r["kind"] == "all_gather" and r["phase"] == "forward"]
    tokens = 2 * SEQUENCE
    # per micro-batch: queries, keys and values with their rotary columns, feed-forward; the head's input once
    expected = LAYERS * tokens * (64 + 32 + 16 + HIDDEN) + tokens * HIDDEN
    assert sum(r["bytes"] for r in rows) == 2 * 2 * expected


@pytest.mark.parametrize(("changes", "match"), [
    ({"expert": 8, "tensor": 2}, "sequence_parallel"),
    ({"expert": 8, "strategy": "zero3", "framework": "deepspeed"}, "MoE not supported with Stage 3"),
    ({"expert": 8, "strategy": "fsdp", "sharding_factor": 4}, "does not divide the sharding factor"),
    ({"tensor": 4, "moe": {"expert_ffn": 386}}, "does not divide expert_ffn 386"),
])
def test_what_cannot_be_spread_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        lower(scenario(**changes))


@pytest.mark.parametrize("imbalance", [0.0, 0.3, 0.5, 2.0])
def test_flops_are_those_that_are_routed_whatever_the_load(imbalance: float) -> None:
    made = [lower(scenario(expert=4, moe={"imbalance": one})).architecture for one in (0.0, imbalance)]
    assert made[0].forward_flops == pytest.approx(made[1].forward_flops, rel=1e-12)
