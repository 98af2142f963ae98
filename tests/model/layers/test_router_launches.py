"""Small kernels of a router, as counted in megatron-core's releases on a fake process group."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model import build
from sim.scenario import resolve
from sim.software import stack_of


def launched(**software: Any) -> tuple[int, int]:
    """Launches on the scores of all experts, forward and backward."""
    scenario = resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "gpus_per_node": 1},
        "model": {"kind": "decoder", "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                  "layers": 2, "hidden": 1024, "heads": 8, "ffn": 2048, "vocab": 32768, "tied_embeddings": False,
                  "moe": {"experts": 8, "top_k": 2}},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 1024, "precision": "pure-bf16"},
        "software": software})
    found = build(scenario, stack_of(scenario.software), 1)
    block = next(layer for layer in found.stack if layer.kind == "block")
    router = next(operator for operator in block.operators if operator.name == "router")
    forward, backward = (sum(k.launches for k in kernels if k.op == "elementwise")
                         for kernels in (router.forward, router.backward))
    return forward, backward


@pytest.mark.parametrize(("software", "wanted"), [
    ({"framework": "megatron", "year": 2024}, (26, 12)), ({"framework": "megatron", "year": 2025}, (32, 14)),
    ({"framework": "megatron", "year": 2026}, (6, 4)),
    ({"framework": "megatron", "year": 2026, "fused": False}, (32, 14)),
    ({"framework": "pytorch", "year": 2025}, (6, 4)),
    ({"framework": "pytorch", "year": 2025, "compile": True}, (4, 4))])
def test_kernels_of_the_choice_of_experts(software: dict[str, Any], wanted: tuple[int, int]) -> None:
    assert launched(**software) == wanted
