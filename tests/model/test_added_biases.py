"""Biases of linear layers that a kernel of its own adds, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.parallel import Lowered, lower
from sim.scenario import resolve

TOKENS, HIDDEN = 4 * 512, 1024


def lowered(torch: str, kind: str = "decoder", **changes: Any) -> Lowered:
    return lower(resolve({
        "name": "t", "cluster": {"topology": "single-v100-32g-sxm"},
        "model": {"kind": kind, "layers": 2, "hidden": HIDDEN, "heads": 16, "vocab": 30528},
        "training": {"micro_batch": 4, "global_batch": 4, "sequence": 512, "precision": "pure-fp16"},
        "parallel": {"strategy": "none"},
        "software": {"framework": "pytorch", "year": 2021, "versions": {"torch": torch}}}, "t", changes))


def added(low: Lowered, layer: int = 1) -> dict[str, float]:
    """Bytes per token and hidden unit that additions of biases move, by operator."""
    found: dict[str, float] = {}
    for op in low.architecture.stack[layer].operators:
        for kernel in op.forward:
            if kernel.variant == "bias_add":
                assert kernel.kernel == "scalar"  # what is broadcast over rows is no vectorised kernel
                found[op.name] = found.get(op.name, 0.0) + kernel.bytes / TOKENS / HIDDEN
    return found


def test_before_1_12_every_linear_layer_s_bias_is_read_and_written_over_the_product() -> None:
    assert added(lowered("1.11.0")) == {"qkv": 3 * 4, "projection": 4, "up": 4 * 4, "down": 4}


def test_from_1_12_on_it_is_the_product_s() -> None:
    assert added(lowered("1.12.0")) == {}


def test_bert_s_vocabulary_has_one_too() -> None:
    assert added(lowered("1.6.0", "encoder")) == {"qkv": 3 * 4, "projection": 4, "up": 4 * 4, "down": 4}
    assert added(lowered("1.6.0", "encoder"), -1)["logits"] == 4 * 30528 / HIDDEN


@pytest.mark.parametrize("changes", [{"software.framework": "megatron"}, {"model.bias": False}])
def test_megatron_s_are_counted_elsewhere_and_what_has_none_adds_none(changes: dict[str, Any]) -> None:
    assert added(lowered("1.8.0", **changes)) == {}
