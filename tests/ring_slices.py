"""A job whose sequence is cut into slices, small enough to work out ring attention by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.model import build
from sim.model.architecture import Operator
from sim.scenario import Scenario, resolve
from sim.software import Stack, stack_for
from sim.work import Kernel

TOKENS, HEADS, GROUPS, WIDE = 1024, 16, 4, 64  # of a slice


def scenario(slices: int, framework: str = "megatron", sets: Mapping[str, Any] | None = None, **model: Any) -> Scenario:
    """Two layers, all slices on one replica; `sets` and fields of the model on top."""
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "nodes": 2},
        "model": {"kind": "decoder", "layers": 2, "hidden": HEADS * WIDE, "heads": HEADS, "kv_heads": GROUPS,
                  "vocab": 1024, "positions": "rotary", "bias": False, "dropout": False, "tied_embeddings": False,
                  **model},
        "training": {"micro_batch": 1, "global_batch": 16, "sequence": TOKENS * slices, "precision": "megatron-bf16",
                     "attention": "flash"},
        "parallel": {"strategy": "ddp", "context": slices},
        "software": {"framework": framework, "year": 2025}}, "x", sets)


def stack_of(of: Scenario) -> Stack:
    """What the job's training stack does."""
    software = of.software
    return stack_for(software.framework, software.year, software.compile, modules=software.modules)


def attention(of: Scenario) -> Operator:
    """The core of attention in one block of a slice."""
    block = next(layer for layer in build(of, stack_of(of), 1).stack if layer.kind == "block")
    return next(op for op in block.operators if op.name == "attention")


def told(kernels: tuple[Kernel, ...]) -> list[tuple[str, float]]:
    """What puts steps together: names and bytes of all kernels but attention's own."""
    return [(k.variant, k.bytes) for k in kernels if k.op != "attention"]
