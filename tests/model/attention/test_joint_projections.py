"""One product of queries, keys and values, or of gate and up, as Hugging Face's modules have it: counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model.architecture import Layer
from sim.parallel import lower
from sim.report.warned.attention import joint_beside_frozen
from sim.scenario import resolve

BATCH, SEQUENCE, HIDDEN, HEADS, GROUPS, FFN = 2, 512, 1024, 16, 4, 2816
TOKENS, KV = BATCH * SEQUENCE, HIDDEN * GROUPS // HEADS
OUTPUTS = HIDDEN + 2 * KV


def scenario(model: dict[str, Any], **training: Any) -> Any:
    return resolve({
        "name": "x", "cluster": {"topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                  "layers": 2, "hidden": HIDDEN, "heads": HEADS, "kv_heads": GROUPS, "ffn": FFN, "vocab": 8000,
                  "tied_embeddings": False, **model},
        "training": {"micro_batch": BATCH, "global_batch": BATCH, "sequence": SEQUENCE, "precision": "pure-bf16",
                     **training},
        "software": {"framework": "pytorch", "year": 2025, "modules": "transformers"}})


def block(**model: Any) -> Layer:
    found = lower(scenario(model))
    return next(layer for layer in found.architecture.stack if layer.kind == "block")


def products(layer: Layer, name: str) -> list[tuple[int, ...]]:
    return [k.shape for o in layer.operators if o.name == name for k in o.forward if k.op == "gemm"]


def moved(layer: Layer, variant: str) -> float:
    return sum(k.bytes for o in layer.operators for k in (*o.forward, *o.backward) if k.variant == variant)


def kept(layer: Layer, name: str) -> list[int]:
    return [int(t.elements) for o in layer.operators for t in o.saved if t.name == name]


@pytest.mark.parametrize("layout", ["parts", "heads", "groups"])
def test_one_wide_product_has_the_parameters_of_three(layout: str) -> None:
    apart, joint = block(), block(fused_qkv=layout)
    assert products(apart, "qkv") == [(1, TOKENS, HIDDEN, HIDDEN), *[(1, TOKENS, KV, HIDDEN)] * 2]
    assert products(joint, "qkv") == [(1, TOKENS, OUTPUTS, HIDDEN)]
    assert joint.numel == apart.numel
    assert {p.numel for p in joint.parameters} > {OUTPUTS * HIDDEN}


def test_slices_fill_a_zeroed_whole_each_and_chunks_are_written_side_by_side() -> None:
    whole = TOKENS * OUTPUTS * 2
    # three fills, reads and writes of the parts, two sums of two wholes into one
    assert moved(block(fused_qkv="parts"), "qkv_gradient_slices") == (3 + 2 + 6) * whole
    assert moved(block(fused_qkv="heads"), "qkv_gradient_cat") == 2 * whole
    assert moved(block(), "qkv_gradient_cat") == moved(block(), "qkv_gradient_slices") == 0


def test_values_are_a_view_that_keeps_the_whole_projection() -> None:
    assert kept(block(), "values") == [TOKENS * KV]
    assert kept(block(fused_qkv="parts"), "values") == kept(block(fused_qkv="heads"), "values") == [TOKENS * OUTPUTS]


def test_falcon_copies_groups_out_to_all_heads() -> None:
    layer = block(fused_qkv="groups")
    assert kept(layer, "values") == kept(layer, "keys") == [TOKENS * HIDDEN]
    assert moved(layer, "key_value_index") == 2 * 2 * 2 * TOKENS * KV
    assert moved(layer, "key_value_heads") == 2 * 2 * 3 * TOKENS * HIDDEN
    (shape,) = [k.shape for o in layer.operators for k in o.forward if k.op == "attention"]
    assert shape[2] == HEADS
    assert kept(block(fused_qkv="groups", kv_heads=1), "values") == [TOKENS * HIDDEN // HEADS]


def test_gate_and_up_are_one_product() -> None:
    assert products(block(), "up") == [(1, TOKENS, FFN, HIDDEN)] * 2
    assert products(block(fused_gate=True), "up") == [(1, TOKENS, 2 * FFN, HIDDEN)]
    assert block(fused_gate=True).numel == block().numel


def test_cut_heads_are_joined_again_and_flash_writes_heads_first() -> None:
    whole, quarter = block(), block(rotary_share=0.25)
    assert moved(quarter, "rotary") == moved(whole, "rotary") / 4
    assert moved(quarter, "rotary_cat") == 2 * 2 * TOKENS * (HIDDEN + KV)
    assert kept(quarter, "attention_made") == [TOKENS * HIDDEN] and kept(whole, "attention_made") == []


@pytest.mark.parametrize("modules", ["plain", "megatron"])
def test_other_modules_project_as_ever(modules: str) -> None:
    def layer(**model: Any) -> Layer:
        asked = scenario(model)
        asked = asked.model_copy(update={"software": asked.software.model_copy(update={"modules": modules})})
        return next(layer for layer in lower(asked).architecture.stack if layer.kind == "block")
    assert layer(fused_qkv="parts", fused_gate=True, rotary_share=0.5) == layer()


def test_beside_frozen_weights_three_products_are_predicted_and_said() -> None:
    lora = {"finetune": {"method": "lora", "rank": 8}}
    asked = scenario({"fused_qkv": "parts"}, **lora)
    layer = next(layer for layer in lower(asked).architecture.stack if layer.kind == "block")
    assert products(layer, "qkv")[:1] == [(1, TOKENS, HIDDEN, HIDDEN)]
    assert "separate" in joint_beside_frozen(asked)[0]
    assert joint_beside_frozen(scenario({}, **lora)) == joint_beside_frozen(scenario({"fused_qkv": "parts"})) == []
