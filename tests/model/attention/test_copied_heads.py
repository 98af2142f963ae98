"""Copies in front of fused attention and products of gate and up: which stack has them, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model.architecture import Layer
from sim.parallel import lower
from sim.scenario import resolve

TOKENS, HIDDEN, HEADS, GROUPS, FFN = 2 * 1024, 1024, 8, 2, 4096
KV = HIDDEN // HEADS * GROUPS


def block(framework: str, groups: int | None = None, **software: Any) -> Layer:
    model: dict[str, Any] = {"kind": "decoder", "positions": "rotary", "norm": "rmsnorm", "bias": False,
                             "gated_mlp": True, "layers": 2, "hidden": HIDDEN, "heads": HEADS, "ffn": FFN,
                             "vocab": 32768, "tied_embeddings": False}
    found = lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "gpus_per_node": 1},
        "model": model | ({"kv_heads": groups} if groups else {}),
        "training": {"micro_batch": 2, "global_batch": 2, "sequence": 1024, "precision": "pure-bf16"},
        "software": {"framework": framework, "year": 2025, **software}}))
    return next(layer for layer in found.architecture.stack if layer.kind == "block")


def moved(layer: Layer, variant: str) -> float:
    return sum(k.bytes for o in layer.operators for k in (*o.forward, *o.backward) if k.variant == variant)


def test_nanotron_copies_heads_between_the_projection_and_rotary_positions() -> None:
    layer = block("nanotron")
    assert moved(layer, "heads_first") == moved(layer, "heads_last") == 2 * 2 * 3 * TOKENS * HIDDEN
    assert moved(layer, "kv_cat") == moved(layer, "kv_interleaved") == 2 * 2 * 2 * TOKENS * HIDDEN
    assert moved(layer, "kv_gradient_cat") == 2 * 2 * 2 * TOKENS * HIDDEN
    assert moved(block("pytorch"), "heads_first") == 0


def test_gate_and_up_are_one_product_whose_gradients_are_copied_together() -> None:
    def ups(layer: Layer) -> list[tuple[int, ...]]:
        return [k.shape for o in layer.operators if o.name == "up" for k in o.forward if k.op == "gemm"]
    assert ups(block("nanotron")) == [(1, TOKENS, 2 * FFN, HIDDEN)]
    assert ups(block("pytorch")) == [(1, TOKENS, FFN, HIDDEN)] * 2
    assert moved(block("nanotron"), "gate_gradient_cat") == 2 * 2 * TOKENS * 2 * FFN
    assert block("nanotron").numel == block("pytorch").numel


@pytest.mark.parametrize(("framework", "software", "copied"), [
    ("pytorch", {}, True), ("torchtitan", {}, True), ("torchtitan", {"versions": {"torchtitan": "0.2.2"}}, False),
    ("nanotron", {}, False), ("composer", {}, False), ("pytorch", {"modules": "transformers"}, False)])
def test_grouped_keys_and_values_are_copied_to_every_query_head(framework: str, software: dict[str, Any],
                                                                copied: bool) -> None:
    layer = block(framework, GROUPS, **software)
    assert moved(layer, "expand_kv") == copied * 2 * 2 * TOKENS * (HIDDEN + KV)
    (shape,) = [k.shape for o in layer.operators for k in o.forward if k.op == "attention"]
    assert shape[2] == (HEADS if copied else GROUPS)
    assert moved(block(framework, None, **software), "expand_kv") == 0


def test_keys_and_values_are_kept_as_attention_reads_them() -> None:
    def kept(layer: Layer) -> int:
        return sum(t.size_bytes for o in layer.operators for t in o.saved if t.name in ("keys", "values"))
    assert kept(block("pytorch", GROUPS)) == 2 * 2 * TOKENS * HIDDEN
    assert kept(block("composer", GROUPS)) == 2 * 2 * TOKENS * KV
