"""Passes around attention of Megatron's blocks, counted by hand and traced in megatron-core 0.12.0 on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model import build
from sim.model.architecture import Layer
from sim.model.eager import layer_profile
from sim.scenario import resolve
from sim.software import stack_of
from sim.work import Kernel

TOKENS, HIDDEN, HEADS, FFN = 2 * 1024, 1024, 8, 4096


def block(year: int, tensor: int = 1, attention: str = "eager", parallel: dict[str, Any] | None = None,
          software: dict[str, Any] | None = None, topology: str = "dgx-a100-80g", **model: Any) -> Layer:
    scenario = resolve({
        "name": "x", "cluster": {"topology": topology, "gpus_per_node": tensor},
        "model": {"kind": "decoder", "positions": "learned", "norm": "layernorm", "bias": True, "layers": 2,
                  "hidden": HIDDEN, "heads": HEADS, "ffn": FFN, "vocab": 32768, "max_positions": 1024,
                  "tied_embeddings": True, **model},
        "training": {"micro_batch": 2, "global_batch": 2, "sequence": 1024, "precision": "megatron-bf16",
                     "attention": attention},
        "parallel": {"strategy": "ddp", "tensor": tensor, **(parallel or {})},
        "software": {"framework": "megatron", "year": year, **(software or {})}})
    found = build(scenario, stack_of(scenario.software), 2)
    return next(layer for layer in found.stack if layer.kind == "block")


def named(layer: Layer, variant: str, way: str, operator: str = "") -> list[Kernel]:
    return [k for o in layer.operators if o.name == operator or not operator
            for k in getattr(o, way) if k.variant == variant]


def moved(layer: Layer, variant: str, way: str, operator: str = "") -> float:
    return sum(k.bytes for k in named(layer, variant, way, operator))


@pytest.mark.parametrize(("year", "added", "summed"), [(2021, 1, 1), (2023, 1, 1), (2024, 0, 0)])
def test_bias_of_queries_keys_and_values(year: int, added: int, summed: int) -> None:
    layer = block(year, attention="flash")
    assert moved(layer, "projection_bias", "forward") == added * 2 * 2 * TOKENS * 3 * HIDDEN
    assert moved(layer, "bias_gradient", "backward", "qkv") == summed * 2 * TOKENS * 3 * HIDDEN
    assert moved(layer, "bias_gradient", "backward", "up") == 2 * TOKENS * FFN


def test_other_stacks_add_it_in_the_product() -> None:
    layer = block(2021, software={"framework": "pytorch"})
    assert not named(layer, "projection_bias", "forward")
    assert moved(layer, "bias_gradient", "backward", "qkv") == 2 * TOKENS * 3 * HIDDEN


@pytest.mark.parametrize(("scattered", "rows"), [(False, TOKENS), (True, TOKENS // 4)])
def test_biases_behind_a_scattered_sum_add_up_their_own_tokens(scattered: bool, rows: int) -> None:
    layer = block(2022, 4, parallel={"sequence_parallel": scattered})
    for operator in ("projection", "down"):
        assert [k.shape for k in named(layer, "bias_gradient", "backward", operator)] == [(rows, HIDDEN)]
    assert [k.shape for k in named(layer, "bias_gradient", "backward", "up")] == [(TOKENS, FFN // 4)]


@pytest.mark.parametrize(("year", "framework", "found"), [
    (2019, "megatron", False), (2021, "megatron", True), (2023, "megatron", True), (2023, "pytorch", False)])
def test_the_scale_of_scores_in_a_product_is_two_kernels_backward(year: int, framework: str, found: bool) -> None:
    layer = block(year, software={"framework": framework})
    kernels = named(layer, "scaled_gradients", "backward", "attention")
    assert [(k.bytes, k.launches) for k in kernels] == [(2 * 2 * 2 * TOKENS * HIDDEN, 2)] * found
    assert not named(block(year, attention="flash"), "scaled_gradients", "backward")


def rotary(year: int, groups: int | None = None, **model: Any) -> Layer:
    own: dict[str, Any] = {"positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                           "tied_embeddings": False} | ({"kv_heads": groups} if groups else {})
    return block(year, attention="flash", topology="dgx-h100", **own | model)


@pytest.mark.parametrize(("year", "groups", "queries", "values"), [
    (2025, 2, HIDDEN, HIDDEN // 4), (2025, None, 0, HIDDEN), (2023, 2, HIDDEN, 0)])
def test_queries_of_groups_and_values_behind_rotary_positions_are_copied(
    year: int, groups: int | None, queries: int, values: int,
) -> None:
    layer = rotary(year, groups)
    assert moved(layer, "query_heads", "forward") == 2 * 2 * TOKENS * queries
    assert moved(layer, "value_heads", "forward") == 2 * 2 * TOKENS * values


def test_keys_that_no_positions_turn_are_copied_with_the_values_of_grouped_heads() -> None:
    layer = rotary(2025, 2, positions="learned")
    assert moved(layer, "value_heads", "forward") == 2 * 2 * TOKENS * 2 * HIDDEN // 4
    assert not named(rotary(2025, positions="learned"), "value_heads", "forward")


@pytest.mark.parametrize(("positions", "groups"), [("rotary", 2), ("rotary", None), ("learned", 2)])
def test_what_one_product_made_is_let_go_of(positions: str, groups: int | None) -> None:
    """A block keeps its heads once, as copies or not; before 2024 values hold the product of all three."""
    def kept(year: int) -> int:
        return sum(layer_profile(rotary(year, groups, positions=positions), "none", True).forward.net)
    kv = 2 * TOKENS * HIDDEN // (HEADS // (groups or HEADS))
    whole = 2 * TOKENS * HIDDEN + 2 * kv
    assert kept(2023) - kept(2025) == (whole - kv if positions == "rotary" else 2 * TOKENS * HIDDEN)


def test_a_norm_of_heads_copies_the_queries_itself() -> None:
    layer = rotary(2025, 2, qk_norm="head")
    assert not named(layer, "query_heads", "forward")
    assert moved(layer, "query_norm_contiguous", "forward") == 2 * 2 * TOKENS * HIDDEN


@pytest.mark.parametrize(("year", "topology", "heads", "apart", "together", "cat"), [
    (2025, "dgx-h100", 8, [], [], 0), (2025, "dgx-a100-80g", 8, [1], [1], 0), (2025, "dgx-a100-80g", 16, [3], [1], 0),
    (2023, "dgx-h100", 8, [], [], 1)])
def test_heads_that_one_product_laid_out_go_to_attention_as_they_lie(
    year: int, topology: str, heads: int, apart: list[int], together: list[int], cat: int,
) -> None:
    layer = block(year, attention="flash", topology=topology, heads=heads)
    whole = 2 * 2 * TOKENS * 3 * HIDDEN
    assert [(k.bytes, k.launches) for k in named(layer, "heads_apart", "forward")] == [(whole, n) for n in apart]
    assert [(k.bytes, k.launches) for k in named(layer, "heads_together", "backward")] == [(whole, n) for n in together]
    assert moved(layer, "qkv_gradient_cat", "backward") == cat * whole
    assert moved(rotary(2025), "qkv_gradient_cat", "backward") == whole


def test_the_causal_softmax_reads_what_a_query_sees_and_writes_whole_rows() -> None:
    scores = 2 * HEADS * 1024 * 1024
    seen = 2 * HEADS * sum(range(1, 1025))  # of row i the first i + 1, of the output and its gradient likewise
    layer = block(2021)
    forward, = [k for k in named(layer, "forward", "forward", "attention") if k.op == "softmax"]
    backward, = [k for k in named(layer, "backward", "backward", "attention") if k.op == "softmax"]
    assert (forward.bytes, backward.bytes) == (2 * (seen + scores), 2 * (2 * seen + scores))


@pytest.mark.parametrize(("year", "model"), [(2019, {}), (2021, {"kind": "encoder"})])
def test_other_softmaxes_read_all_scores(year: int, model: dict[str, Any]) -> None:
    layer = block(year, **model)
    scores = 2 * HEADS * 1024 * 1024
    found = [k for o in layer.operators for k in (*o.forward, *o.backward) if k.op == "softmax"]
    assert [k.bytes for k in found] == [2 * 2 * scores, 3 * 2 * scores]
