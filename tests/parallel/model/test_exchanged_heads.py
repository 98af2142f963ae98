"""Context ranks that exchange tokens for heads: what travels, between whom, beside what, and what is refused."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
from ring_slices import GROUPS, HEADS, TOKENS, WIDE, scenario, stack_of

import sim
from sim.errors import UserError
from sim.model import build
from sim.parallel import lower
from sim.parallel.model import context
from sim.parallel.model.calls import Calls, Items
from sim.program import InlineCall
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import Scenario, resolve
from sim.work import Kernel

ULYSSES = {"parallel.context_exchange": "all-to-all"}
HALF = {"training.precision": "pure-bf16"}


def exchanging(slices: int, framework: str = "megatron", sets: dict[str, Any] | None = None, **model: Any) -> Scenario:
    precision = HALF if framework != "megatron" else {}
    return scenario(slices, framework, {**ULYSSES, **precision, **(sets or {})}, **model)


def sent(of: Scenario) -> dict[tuple[str, str, int], tuple[int, float]]:
    """(phase, kind, ranks) of the context's collectives -> calls of a rank in a step, and bytes."""
    return {(row["phase"], row["kind"], row["ranks"]): (row["count"], row["bytes"])
            for row in traffic_totals(lower(of).job)
            if row["kind"] in ("all_to_all", "send") and row["ranks"] < of.replica_ranks}


Q, KV = 2 * TOKENS * HEADS * WIDE, 2 * TOKENS * GROUPS * WIDE  # bytes of a slice's queries, and of its keys
BOTH = ("forward", "backward")


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
def test_queries_keys_values_and_the_output_travel_there_and_back(framework: str) -> None:
    """Of two layers and four micro-steps, four tensors each way: N·h/P of queries and the output, as the paper has it
    (arXiv 2309.14509, section 3.2), and of grouped keys and values their share."""
    steps = 4 * 2
    assert sent(exchanging(4, framework)) == {
        (phase, "all_to_all", 4): (4 * steps, steps * (2 * Q + 2 * KV)) for phase in BOTH}


def test_nothing_is_copied_and_all_goes_at_once_at_best() -> None:
    steps = 4 * 2
    assert sent(exchanging(4, "ideal")) == {
        (phase, "all_to_all", 4): (2 * steps, steps * (2 * Q + 2 * KV)) for phase in BOTH}


def test_repeated_keys_travel_as_often_as_they_are_repeated() -> None:
    steps = 8 * 2
    assert sent(exchanging(8, "pytorch", {"software.modules": "transformers"})) == {
        (phase, "all_to_all", 8): (4 * steps, steps * (2 * Q + 2 * 2 * KV)) for phase in BOTH}


def test_recomputation_exchanges_again() -> None:
    for policy in ("full", "selective"):
        found = sent(exchanging(4, sets={"training.recompute": policy}))
        (calls, moved), (again, twice) = (found[phase, "all_to_all", 4] for phase in BOTH)
        # only the output's last copy is not wanted again where full recomputation stops early
        assert again == 2 * calls and twice == 2 * moved


def test_two_levels_exchange_among_neighbours_and_pass_on_across_them() -> None:
    """Sixteen ranks in sets of four: q, k, v and the output in sets, keys and values of four heads round a ring of four
    sets; in backward the output too comes to heads again."""
    of, steps = exchanging(16, sets={"parallel.context_all_to_all": 4, "cluster.nodes": 4}), 8 * 2
    assert sent(of) == {
        ("forward", "all_to_all", 4): (4 * steps, steps * (2 * Q + 2 * KV)),
        ("forward", "send", 4): (3 * steps, 3 * steps * 2 * KV),
        ("backward", "all_to_all", 4): (5 * steps, steps * (3 * Q + 2 * KV)),
        ("backward", "send", 4): (4 * steps, steps * (1 + 2 + 2 + 1) * 2 * KV)}
    groups = {one.name: one.ranks for one in lower(of).job.communicators}
    assert groups["context_heads"][:4].tolist() == [[4 * i + j for j in range(4)] for i in range(4)]
    assert groups["context_ring"][:4].tolist() == [[j + 4 * i for i in range(4)] for j in range(4)]


def test_a_set_of_all_ranks_is_no_second_level() -> None:
    one, two = (sim.run(exchanging(4, sets=each)) for each in ({"parallel.context_all_to_all": 4}, {}))
    assert one.step_time_s == two.step_time_s and one.memory.use == two.memory.use


def around(framework: str, name: str, direction: str, **sets: Any) -> Items:
    of = exchanging(4, framework, sets)
    operator = next(op for layer in build(of, stack_of(of), 1).stack for op in layer.operators if op.name == name)
    assert operator.joint is not None
    return context.exchanged(Calls(("context",)), operator.joint, getattr(operator, direction))


def told(items: Items) -> list[str]:
    """First letters of copies, and of those beside a collective."""
    def letter(kernel: Kernel) -> str:
        return kernel.variant.removeprefix("heads_")[0]
    return [f"send({','.join(map(letter, item.beside))})" if isinstance(item, InlineCall) else letter(item)
            for item in items]


def test_transformer_engine_packs_and_orders_beside_what_travels() -> None:
    """The second tensor is packed while the first travels, the first put into order while the second does."""
    assert told(around("megatron", "to_heads", "forward")) == ["p", "send(p)", "send(p,r)", "send(r)", "r"]
    assert told(around("megatron", "to_heads", "backward")) == ["p", "send(p)", "send(p,r)", "send(r)", "r"]
    assert told(around("megatron", "to_tokens", "forward")) == ["p", "send()", "r"]


def test_deepspeed_sends_one_tensor_after_the_other() -> None:
    assert told(around("deepspeed", "to_heads", "forward")) == ["p", "send()"] * 3
    assert told(around("deepspeed", "to_heads", "backward")) == ["send()", "u"] * 3
    assert told(around("deepspeed", "to_tokens", "forward")) == ["send()", "u"]
    assert told(around("ideal", "to_heads", "forward")) == ["send()"]
    hugging = {"software.modules": "transformers"}
    assert told(around("deepspeed", "to_heads", "forward", **hugging)) == ["p", "send()"] * 3 + ["t"]
    assert told(around("deepspeed", "to_tokens", "forward", **hugging)) == ["t", "send()", "u"]


KINDS: list[dict[str, Any]] = [
    {}, {"training.attention": "eager"}, {"training.recompute": "full"}, {"training.recompute": "selective-op"},
    {"parallel.tensor": 2, "parallel.sequence_parallel": True, "model.kv_heads": 8},
    {"parallel.pipeline": 2, "training.global_batch": 32},
    {"model.window": 256}, {"model.moe": {"experts": 8, "top_k": 2}, "parallel.expert": 4},
    {"model.mla": {"q_rank": 96, "kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32},
     "model.kv_heads": HEADS},
    {"model.kind": "encoder", "model.positions": "learned"},
    {"model.kind": "encoder-decoder", "model.decoder_layers": 2, "model.positions": "relative",
     "model.kv_heads": HEADS},
]


@pytest.mark.parametrize(("sets", "framework"), list(product(KINDS, ["megatron", "torchtitan", "ideal"])))
def test_as_much_is_computed_and_kept_as_without_a_cut(sets: dict[str, Any], framework: str) -> None:
    """FLOPs of a step, however the sequence is cut; no bytes are left behind; shares of activations."""
    if framework == "torchtitan":
        sets = {"parallel.strategy": "fsdp", **sets}
    long = {"training.sequence": 4 * TOKENS, "training.global_batch": 16 * (1 + ("parallel.pipeline" in sets))}
    if sets.get("model.kind") == "encoder-decoder":
        long["training.decoder_sequence"] = 4 * TOKENS
    cut, whole = (sim.run(of) for of in (
        exchanging(4, framework, {**sets, **long}),
        scenario(1, framework, {**(HALF if framework != "megatron" else {}), **sets, **long})))
    assert cut.hardware_flops == pytest.approx(whole.hardware_flops, rel=0.01)
    assert cut.memory.use.steady
    kept, alone = (one.memory.use.category_peaks["activations"] for one in (cut, whole))
    assert kept < 0.45 * alone


@pytest.mark.parametrize("overlap", ["none", "shared"])
def test_experts_hide_their_own_tokens_only(overlap: str) -> None:
    """All-to-alls of heads are as many, and as large, whatever hides the experts' tokens."""
    moe = {"model.moe": {"experts": 8, "top_k": 2, "shared_experts": 1}, "parallel.expert": 4}
    dense, mixed = (sent(exchanging(2, sets=sets)) for sets in ({}, {**moe, "parallel.overlap_experts": overlap}))
    assert {key: n for key, n in mixed.items() if key[2] == 2} == dense


def test_heads_travel_in_front_of_the_pair_that_hides_experts() -> None:
    moe = {"model.moe": {"experts": 8, "top_k": 2}, "parallel.expert": 4, "parallel.pipeline": 2,
           "parallel.schedule": "interleaved", "parallel.virtual_stages": 2, "model.layers": 4,
           "training.global_batch": 64}
    plain, paired = (sim.run(exchanging(2, sets={**moe, "parallel.overlap_experts": overlap}))
                     for overlap in ("none", "batches"))
    assert paired.breakdown.communication_total["all_to_all"]["context"] == pytest.approx(
        plain.breakdown.communication_total["all_to_all"]["context"], rel=0.2)
    assert paired.breakdown.exposed_communication["all_to_all"]["expert"] < (
        plain.breakdown.exposed_communication["all_to_all"]["expert"])


@pytest.mark.parametrize(("slices", "framework", "sets", "words"), [
    (8, "megatron", {}, "8 context ranks do not share the 4 heads of keys and values out evenly: TransformerEngine"),
    (4, "megatron", {"parallel.tensor": 2}, "the 2 heads of keys and values of each of 2 tensor ranks"),
    (16, "deepspeed", {"model.heads": 8, "model.head_dim": 64}, "16 context ranks do not share the 8 heads out evenly"),
    (4, "deepspeed", {"model.heads": 24, "model.kv_heads": 6, "model.head_dim": 64}, "neither divides the other"),
    (8, "deepspeed", {"parallel.context_all_to_all": 2}, "inside a ring is Megatron's"),
    (8, "megatron", {"parallel.context_all_to_all": 3}, "context_all_to_all 3 does not divide context 8"),
    (8, "megatron", {"parallel.context_exchange": "ring", "parallel.context_all_to_all": 2},
     "context_all_to_all is for context_exchange all-to-all, not ring"),
    (4, "megatron", {"training.sequence": 4 * 1023}, "does not divide into 8 parts"),
    (4, "deepspeed", {"software.modules": "transformers", "model.kv_heads": HEADS,
                      "model.mla": {"kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}},
     "keys and values of one width"),
    (4, "megatron", {"parallel.context_exchange": "a2a"}, "all-to-all"),
])
def test_what_cannot_be_is_refused(slices: int, framework: str, sets: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        lower(exchanging(slices, framework, sets))


def test_an_odd_slice_is_no_trouble_where_nobody_halves_it() -> None:
    assert lower(exchanging(4, "deepspeed", {"training.sequence": 4 * 1023})).job
    assert lower(exchanging(8, "ideal", {"training.sequence": 8 * 1023, "model.max_positions": 9000})).job
    with pytest.raises(UserError, match="does not divide into 8 parts"):
        lower(scenario(4, "deepspeed", {**HALF, "training.sequence": 4 * 1023}))


def test_llama_on_eight_gpus_sends_what_the_paper_says() -> None:
    """A rank of a model without grouped heads sends 4·N·h/P elements a layer in forward, and as many in backward."""
    of = resolve({
        "name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-2-7b", "max_positions": 65536},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 65536, "precision": "pure-bf16"},
        "parallel": {"strategy": "fsdp", "context": 8, "context_exchange": "all-to-all"}})
    total = Counter({phase: sum(r["bytes"] for r in traffic_totals(lower(of).job)
                                if r["kind"] == "all_to_all" and r["phase"] == phase)
                     for phase in ("forward", "backward")})
    assert total["forward"] == total["backward"] == 32 * 4 * 65536 * 4096 / 8 * 2
