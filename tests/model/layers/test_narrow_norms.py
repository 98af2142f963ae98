"""What a norm makes for the product in 8 bits behind it, by hand (2,048 tokens of 1,024)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model import build
from sim.model.architecture import Layer, Operator
from sim.scenario import resolve
from sim.software import stack_of
from sim.work import Kernel

TOKENS, HIDDEN = 2 * 1024, 1024


def block(year: int, precision: str = "fp8", tensor: int = 1, topology: str = "dgx-h100",
          **model: Any) -> Layer:
    scenario = resolve({
        "name": "x", "cluster": {"topology": topology, "gpus_per_node": tensor},
        "model": {"kind": "decoder", "norm": "rmsnorm", "positions": "rotary", "gated_mlp": True, "layers": 2,
                  "hidden": HIDDEN, "heads": 8, "ffn": 4096, "vocab": 32768, **model},
        "training": {"micro_batch": 2, "global_batch": 2, "sequence": 1024, "precision": precision},
        "parallel": {"strategy": "zero1", "tensor": tensor, "sequence_parallel": tensor > 1},
        "software": {"framework": "megatron", "year": year}})
    style = build(scenario, stack_of(scenario.software), 2)
    return next(layer for layer in style.stack if layer.kind == "block")


def operator(layer: Layer, name: str) -> Operator:
    return next(o for o in layer.operators if o.name == name)


def variants(kernels: tuple[Kernel, ...]) -> list[tuple[str, float]]:
    return [(k.variant, k.bytes / (TOKENS * HIDDEN)) for k in kernels if k.variant in ("quantise", "transpose")]


@pytest.mark.parametrize(("norm", "reader"), [("norm1", "qkv"), ("norm2", "up")])
def test_under_delayed_scales_the_norm_writes_the_copy(norm: str, reader: str) -> None:
    layer = block(2024)
    forward, = operator(layer, norm).forward
    assert forward.bytes == TOKENS * HIDDEN * (2 + 1)
    found = operator(layer, reader)
    assert variants(found.forward) == []
    assert variants(found.backward)[-1] == ("transpose", 2.0)
    names = [k.variant for k in found.backward]
    assert names.index("nn") < names.index("transpose") < names.index("nt")


def test_a_current_scale_s_maximum_is_found_by_the_norm() -> None:
    layer = block(2025)
    assert operator(layer, "norm1").forward[0].bytes == TOKENS * HIDDEN * 4
    for name in ("qkv", "up"):  # read once, written twice
        assert variants(operator(layer, name).forward) == [("quantise", 2.0 + 2.0)]
        assert operator(layer, name).forward[0].launches == 1
    cast = operator(layer, "projection").forward[0]  # attention's output is read for its maximum too
    assert (cast.bytes, cast.launches) == (TOKENS * HIDDEN * (2.0 + 2.0 + 2.0), 2)


def test_tensor_ranks_transpose_what_they_gathered_once() -> None:
    found = operator(block(2024, tensor=2), "qkv")
    assert variants(found.forward) == []
    assert [name for name, _ in variants(found.backward)] == ["quantise", "transpose"]


def test_norms_that_stand_alone_write_wide() -> None:
    wide = TOKENS * HIDDEN * 4
    experts = block(2024, moe={"experts": 4, "top_k": 2})
    assert operator(experts, "norm1").forward[0].bytes < wide == operator(experts, "norm2").forward[0].bytes
    for layer in (block(2024, "megatron-bf16"), block(2026, "mxfp8", topology="hgx-b200")):
        assert operator(layer, "norm1").forward[0].bytes == wide
