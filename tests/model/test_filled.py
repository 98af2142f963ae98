"""What PyTorch's deterministic mode fills: counted by hand from its operators, profiled with torch 2.13."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.model import filled
from sim.model.architecture import Layer
from sim.parallel import lower
from sim.scenario import resolve

TOKENS, HIDDEN, HEADS, FFN = 2 * 256, 512, 8, 2048


def layer(kind: str = "block", **software: Any) -> Layer:
    found = lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 1},
        "model": {"kind": "decoder", "positions": "learned", "norm": "layernorm", "bias": False, "layers": 2,
                  "hidden": HIDDEN, "heads": HEADS, "ffn": FFN, "vocab": 1024, "dropout": False,
                  "tied_embeddings": False},
        "training": {"micro_batch": 2, "global_batch": 2, "sequence": 256, "precision": "megatron-bf16",
                     "attention": "flash"},
        "software": {"framework": "pytorch", "year": 2025, "deterministic": True, **software}}))
    return next(layer for layer in found.architecture.stack if layer.kind == kind)


def fills(found: Layer, direction: str) -> float:
    return sum(k.bytes for o in found.operators for k in getattr(o, direction) if k.variant == "fill")


def test_a_block_of_pytorch_fills_norms_and_attention() -> None:
    row = 2 * TOKENS * HIDDEN
    assert fills(layer(), "forward") == 3 * row  # two norms, attention's output
    assert fills(layer(), "backward") == 5 * row  # two norms, gradients of queries, keys and values


def test_megatron_fills_what_its_products_make_too() -> None:
    norms_and_core = 3 * HIDDEN
    made = 3 * HIDDEN + HIDDEN + FFN + HIDDEN
    assert fills(layer(framework="megatron"), "forward") == 2 * TOKENS * (norms_and_core + made)
    passed = 3 * HIDDEN + FFN  # products hand back gradients of their inputs; weights' go into their buffer
    assert fills(layer(framework="megatron"), "backward") == 2 * TOKENS * (5 * HIDDEN + passed)
    norm, wide_logits = 2 * TOKENS * HIDDEN, 4 * TOKENS * 1024
    assert fills(layer("head", framework="megatron"), "forward") == norm + wide_logits


def test_every_copy_that_is_filled_is_a_kernel_that_somebody_makes() -> None:
    room = Path(filled.__file__).parent
    code = "".join(path.read_text(encoding="utf-8") for path in room.rglob("*.py") if path.name != "filled.py")
    assert [name for name in filled._COPIES if f'"{name}"' not in code] == []


@pytest.mark.parametrize("software", [{"deterministic": False}, {"compile": True}, {"year": 2023}])
def test_nothing_is_filled(software: dict[str, Any]) -> None:
    assert fills(layer(**software), "forward") == fills(layer(**software), "backward") == 0.0


def test_a_gpu_of_ones_own_has_its_own_number_of_parts() -> None:
    own = {"name": "own", "gpu": {"like": "a100-80g-sxm", "name": "mine", "sms": 60}, "gpus_per_node": 1,
           "intra": {"kind": "none"}, "inter": {"kind": "none"}}
    found = lower(resolve({
        "name": "x", "cluster": {"topology": own}, "model": {"preset": "gpt3-1.3b"},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 256, "attention": "flash"},
        "software": {"year": 2025, "deterministic": True}})).architecture.stack[1].program
    assert found is not None and found.style.gradient_parts == -(-60 // found.style.heads)


def test_sums_of_a_fixed_order_stand_in_parts_while_backward_runs() -> None:
    def parts(**software: Any) -> int:
        found = layer(**software).program
        assert found is not None
        return found.style.gradient_parts
    assert parts() == 7  # 108 SMs over 2 sequences of 8 heads
    assert parts(deterministic=False) == 1
