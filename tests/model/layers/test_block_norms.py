"""Norms of queries, keys and of what a sub-layer adds, and bounds on scores and logits: counted by hand, and Gemma's
memory beside PyTorch's (Qwen3's and OLMo-2's, to the byte: `tests/validation/data/oracle_memory_norms.yaml`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.errors import UserError
from sim.model import Architecture, build
from sim.model.inference.kinds import rank_of
from sim.model.inference.rank import Sum
from sim.model.inference.weights import Weights
from sim.model.scenario_style import style_of
from sim.parallel import lower
from sim.scenario import resolve
from sim.scenario.fields.schema import Scenario
from sim.software import stack_for
from sim.validation.cases.files import Case, read
from sim.validation.cases.oracle import compare_exact

#: Four query heads of 16 on two of keys and values; 64 tokens.
HIDDEN, HEADS, KV, HEAD, FFN, VOCAB, TOKENS = 48, 4, 2, 16, 96, 128, 64
GEMMA = read(Path(__file__).parents[1] / "data" / "gemma_memory.yaml").cases


def scenario(parallel: dict[str, Any] | None = None, training: dict[str, Any] | None = None,
             software: dict[str, Any] | None = None, **model: Any) -> Scenario:
    return resolve({
        "name": "t", "cluster": {"topology": "dgx-h100"},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV, "head_dim": HEAD,
                  "ffn": FFN, "vocab": VOCAB, "gated_mlp": True, "positions": "rotary", "norm": "rmsnorm",
                  "bias": False, "tied_embeddings": False} | model,
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": TOKENS, "precision": "pure-bf16"} | (
            training or {}),
        "parallel": parallel or {}, "software": {"framework": "pytorch", "modules": "transformers"} | (software or {})})


def made(**model: Any) -> Architecture:
    return build(scenario(**model), stack_for("pytorch", modules="transformers"), 1)


def names(architecture: Architecture) -> list[str]:
    return [op.name for op in architecture.stack[1].operators]


@pytest.mark.parametrize(("fields", "operators"), [
    ({}, "norm1 qkv rotary attention projection residual1 norm2 up activation down residual2"),
    ({"qk_norm": "head"},
     "norm1 qkv query_norm key_norm rotary attention projection residual1 norm2 up activation down residual2"),
    ({"block_norms": "output"},
     "qkv rotary attention projection post_norm1 residual1 up activation down post_norm2 residual2"),
    ({"block_norms": "both"},
     "norm1 qkv rotary attention projection post_norm1 residual1 norm2 up activation down post_norm2 residual2"),
])
def test_norms_stand_where_they_are_asked_for(fields: dict[str, Any], operators: str) -> None:
    assert names(made(**fields)) == operators.split()


@pytest.mark.parametrize(("fields", "more"), [
    ({"qk_norm": "head"}, 2 * HEAD), ({"qk_norm": "whole"}, (HEADS + KV) * HEAD), ({"block_norms": "output"}, 0),
    ({"block_norms": "both"}, 2 * HIDDEN), ({"score_softcap": True, "logit_softcap": True}, 0),
    ({"norm": "rmsnorm-fp32"}, 0)])
def test_parameters_of_a_block_by_hand(fields: dict[str, Any], more: int) -> None:
    plain, changed = made(), made(**fields)
    assert changed.parameters - plain.parameters == 2 * more
    assert changed.forward_flops == plain.forward_flops


@pytest.mark.parametrize(("kind", "rows", "cols"), [
    ("head", (TOKENS * HEADS, TOKENS * KV), (HEAD, HEAD)), ("whole", (TOKENS, TOKENS), (HEADS * HEAD, KV * HEAD))])
def test_rows_and_bytes_of_the_norms_of_queries_and_keys(kind: str, rows: tuple[int, int],
                                                          cols: tuple[int, int]) -> None:
    """One fused kernel reads and writes every element once; one projection's parts are copied for it, read and written
    once more."""
    asked = scenario(qk_norm=kind, software={"modules": "megatron", "framework": "megatron"})
    block = build(asked, stack_for("megatron", 2025), 1).stack[1]
    norms = [op for op in block.operators if op.name in ("query_norm", "key_norm")]
    assert [op.forward[-1].shape for op in norms] == list(zip(rows, cols, strict=True))
    for op, r, c in zip(norms, rows, cols, strict=True):
        assert [k.bytes for k in op.forward] == [2 * 2 * r * c] * 2


def test_a_weight_that_multiplies_in_fp32_keeps_four_bytes_an_element() -> None:
    half, wide = (next(op for op in made(norm=norm).stack[1].operators if op.name == "norm1")
                  for norm in ("rmsnorm", "rmsnorm-fp32"))
    kept = [sum(t.elements * {"fp32": 4, "bf16": 2}[t.dtype] for t in op.saved) for op in (half, wide)]
    assert kept == [TOKENS * (HIDDEN * (4 + 2) + 4), TOKENS * (HIDDEN * (4 + 4) + 4)]
    for way in ("forward", "backward"):
        moved = [sum(k.bytes for k in getattr(op, way)) for op in (half, wide)]
        assert moved[1] > moved[0]


def test_what_is_broadcast_or_cast_up_is_handled_one_element_at_a_time() -> None:
    """An RMSNorm in operators: forward the cast to fp32 and two products, backward two products, a cast and the mean's
    div: on fake tensors of torch 2.13.0 the kernels whose operands are not all contiguous and of one dtype."""
    norm = next(op for op in made(norm="rmsnorm").stack[1].operators if op.name == "norm1")
    assert [(k.kernel, k.shape[0] // (TOKENS * HIDDEN), k.launches) for k in norm.forward] == [
        ("", 1, 5), ("scalar", 3, 3)]
    assert [(k.kernel, k.shape[0] // (TOKENS * HIDDEN), k.launches) for k in norm.backward] == [
        ("", 1, 12), ("scalar", 4, 4)]


def test_bounds_are_three_operators_each_way() -> None:
    """x / cap, tanh, times cap: 12 bytes an element of bf16; backward a product, tanh's own, a quotient: 14."""
    plain, bounded = made(), made(logit_softcap=True)
    (op,) = [op for op in bounded.stack[-1].operators if op.name == "softcap"]
    assert [k.bytes for k in (*op.forward, *op.backward)] == [12 * TOKENS * VOCAB, 14 * TOKENS * VOCAB]
    assert len(bounded.stack[-1].operators) == len(plain.stack[-1].operators) + 1
    eager = {"attention": "eager"}
    scores = [build(scenario(training=eager, score_softcap=cap), stack_for("pytorch", modules="transformers"), 1)
              for cap in (False, True)]
    more = [sum(k.bytes for op in one.stack[1].operators if op.core for k in (*op.forward, *op.backward))
            for one in scores]
    assert more[1] - more[0] == (12 + 14) * HEADS * TOKENS * TOKENS


def test_sums_of_tensor_ranks_come_before_the_norm_of_what_is_added() -> None:
    asked = scenario(block_norms="both", parallel={"tensor": 2, "sequence_parallel": False})
    style = style_of(asked, stack_for("pytorch", modules="transformers"), 1)
    rank = rank_of(style, 1, TOKENS, 0, Weights("", False, False))
    block = rank.architecture().stack[1]
    items = [item for item in rank.forward(block) if isinstance(item, Sum) or item.op in ("norm", "gemm")]
    chains = [i for i, item in enumerate(items) if isinstance(item, Sum)]
    assert len(chains) == 2
    ahead = [items[i - 1] for i in chains]
    assert all(not isinstance(one, Sum) and one.op == "gemm" for one in ahead)  # the product whose parts are summed


def test_a_norm_of_all_heads_cannot_be_cut() -> None:
    with pytest.raises(UserError, match="a norm of all heads together needs them on one rank"):
        lower(scenario(qk_norm="whole", parallel={"tensor": 2}))
    lower(scenario(qk_norm="head", parallel={"tensor": 2}))


@pytest.mark.parametrize(("fields", "message"), [
    ({"parallel_block": True, "block_norms": "both"}, "read one norm and have none behind them"),
    ({"qk_norm": "head", "mla": {"q_rank": 0, "kv_rank": 16, "nope_dim": 16, "rope_dim": 8, "value_dim": 16}},
     "latent attention has norms of its own"),
    ({"parallel_norms": 2}, "two norms are those of attention and MLP side by side"),
    ({"kind": "encoder", "qk_norm": "head", "positions": "learned"}, "a norm of queries and keys is for kind decoder"),
    ({"kind": "encoder", "block_norms": "both", "positions": "learned"}, "norms elsewhere are for kind decoder"),
])
def test_what_has_no_place_for_them_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        scenario(**fields)


@pytest.mark.parametrize("case", GEMMA, ids=lambda c: c.id)
def test_gemma_s_memory_is_pytorch_s(case: Case) -> None:
    """Measured worst 0.011%: 1 + weight, which every norm keeps in fp32 (4 bytes a column), is not counted."""
    record = compare_exact(case)
    assert all(abs(error) <= 0.0002 for error in record["error"].values()), record["reason"]
    assert record["equal"]["peak_phase"]
