"""FLOPs, parameters, kept tensors and gradient order against what real PyTorch does on fake tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.model import Architecture, build
from sim.scenario import resolve
from sim.software import stack_for

DATA = Path(__file__).parent / "data"
MIB = 1024 * 1024

def cases(name: str) -> list[Any]:
    rows = yaml.safe_load((DATA / f"{name}.yaml").read_text())["cases"]
    return [pytest.param(row, id=row["id"]) for row in rows]


def built(row: dict[str, Any]) -> Architecture:
    batch = row["training"]["micro_batch"]
    strategy = "fsdp" if "precision_fsdp" in row["id"] else "none"
    scenario = resolve({
        "name": row["id"], "cluster": {"topology": "single-a100-80g-sxm"}, "model": row["model"],
        "training": row["training"] | {"global_batch": batch}, "parallel": {"strategy": strategy},
        "software": {"framework": "pytorch", "year": 2026, "modules": row["modules"]}})
    return build(scenario, stack_for("pytorch", 2026, False, {}, row["modules"]), batch)


@pytest.mark.parametrize("row", cases("decoder_flops"))
def test_flops_and_parameters_equal_pytorchs(row: dict[str, Any]) -> None:
    architecture, measured = built(row), row["measured"]
    recompute = architecture.recompute_flops() if row["training"]["recompute"] == "full" else 0.0
    assert architecture.parameters == measured["parameters"]
    assert architecture.forward_flops == measured["forward_flops"]
    assert architecture.backward_flops + recompute == measured["backward_flops_with_recompute"]


def rounded(size_bytes: int) -> int:
    """The tracker counts storages in 512-byte blocks."""
    return math.ceil(size_bytes / 512) * 512


@pytest.mark.parametrize("row", cases("decoder_retained"))
def test_block_keeps_what_autograd_keeps(row: dict[str, Any]) -> None:
    architecture, recompute = built(row), row["training"]["recompute"]
    block = next(layer for layer in architecture.stack if layer.kind == "block")
    if recompute == "full":
        kept = rounded(block.input.size_bytes)
    else:
        operators = [op for op in block.operators if not (recompute == "selective" and op.core)]
        kept = sum(rounded(t.size_bytes) for op in operators for t in op.saved)
    assert kept == row["measured"]["block_retained"]
    assert architecture.parameters == row["measured"]["parameters"]


def buckets(architecture: Architecture, element_bytes: int, limit_mib: float) -> list[int]:
    """DDP's rule: add the tensor, then close when the size reaches the limit; the first limit is 1 MiB."""
    sizes, size = [], 0
    for layer in reversed(architecture.stack):
        for parameter in layer.gradient_order:
            size += parameter.numel * element_bytes
            if size >= (limit_mib * MIB if sizes else MIB):
                sizes.append(size)
                size = 0
    return [*sizes, size] if size else sizes


@pytest.mark.parametrize("row", cases("decoder_buckets"))
def test_ddp_buckets_come_out_of_gradient_order(row: dict[str, Any]) -> None:
    element_bytes = 2 if row["training"]["precision"] == "pure-bf16" else 4
    expected = [size for size, repeat in row["measured"]["buckets"] for _ in range(repeat)]
    assert buckets(built(row), element_bytes, row["parallel"]["bucket_mb"]) == expected


def test_weight_copies_of_autocast_are_two_bytes_per_matrix_parameter() -> None:
    row = next(c.values[0] for c in cases("decoder_retained") if "amp_bf16_opt_adamw_fused" in c.id)
    block = built(row).stack[1]
    hidden = row["model"]["hidden"]
    assert sum(t.size_bytes for op in block.operators for t in op.weight_copies) == 24 * hidden**2
