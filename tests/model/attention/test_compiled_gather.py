"""Gradients of queries, keys and values that compiled code writes side by side, by hand."""

from __future__ import annotations

import pytest

from sim.parallel import lower
from sim.scenario import resolve

TOKENS, HIDDEN, KV = 2 * 512, 1024, 256


@pytest.mark.parametrize(("positions", "compiled", "width"), [
    ("learned", True, HIDDEN + 2 * KV), ("rotary", True, KV), ("learned", False, HIDDEN + 2 * KV),
    ("rotary", False, HIDDEN + 2 * KV)])
def test_what_rotary_positions_write_is_not_written_again(positions: str, compiled: bool, width: int) -> None:
    low = lower(resolve({
        "name": "t", "cluster": {"topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 8, "kv_heads": 2, "vocab": 1024,
                  "positions": positions, "dropout": False},
        "training": {"micro_batch": 2, "global_batch": 2, "sequence": 512, "precision": "pure-bf16"},
        "parallel": {"strategy": "none"}, "software": {"framework": "pytorch", "year": 2025, "compile": compiled}}))
    qkv = next(op for op in low.architecture.stack[1].operators if op.name == "qkv")
    assert [k.bytes for k in qkv.backward if k.variant == "qkv_gradient_cat"] == [2 * 2 * TOKENS * width]
