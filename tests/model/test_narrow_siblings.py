"""Linear layers that read one input: how often it is cast to 8 bits."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model import build
from sim.model.architecture import Layer
from sim.scenario import resolve
from sim.software import stack_for


def block_of(compiled: bool, framework: str = "torchtitan", year: int = 2025, **model: Any) -> Layer:
    scenario = resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "nodes": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 6144,
                  "vocab": 32768, "positions": "rotary", "bias": False, "dropout": False, "activation": "silu",
                  "gated_mlp": True, "norm": "rmsnorm", **model},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 4096, "attention": "flash",
                     "precision": {"compute": "fp8", "parameters": "fp32", "master": "none", "gradients": "fp32",
                                   "optimizer": "fp32", "gather": "fp8", "reduce": "fp32"}},
        "parallel": {"strategy": "fsdp"},
        "software": {"framework": framework, "year": year, "compile": compiled}})
    return build(scenario, stack_for(framework, year, compile_=compiled), 1).stack[1]


@pytest.mark.parametrize(("compiled", "forward", "backward"), [(True, 4, 10), (False, 7, 14)])
def test_compiled_layers_share_the_cast_of_their_input(compiled: bool, forward: int, backward: int) -> None:
    """Seven layers read four tensors; backward casts seven gradients and every input again, compiled that of down
    with the gradients of up and gate."""
    block = block_of(compiled)

    def casts(direction: str) -> int:
        return sum(kernel.variant == "quantise" for op in block.operators for kernel in getattr(op, direction))

    assert (casts("forward"), casts("backward")) == (forward, backward)


def test_torchtitan_has_three_matrices_for_queries_keys_and_values_until_0_3() -> None:
    def names(**asked: Any) -> list[str]:
        return [p.name for p in block_of(True, **asked).parameters if len(p.shape) == 2]

    assert names()[:3] == ["q.weight", "k.weight", "v.weight"]
    assert names(framework="pytorch")[0] == "qkv.weight"
    assert stack_for("torchtitan", 2026).separate_qkv
    assert not stack_for("torchtitan", 2026, versions={"torchtitan": "0.3.0"}).separate_qkv
