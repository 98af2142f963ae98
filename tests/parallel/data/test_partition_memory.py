"""What DeepSpeed's ZeRO-1 holds at the end of a step: flat buckets, copies to look through, lists to gather into."""

from __future__ import annotations

from typing import Any

import pytest

from sim.memory.ledger import peak
from sim.parallel import Lowered, lower
from sim.program import MemoryOp
from sim.scenario import resolve

BUCKET = 500_000_000


def lowered(year: int = 2022, strategy: str = "zero1", **training: Any) -> Lowered:
    return lower(resolve({
        "name": "partition", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 12, "hidden": 4096, "heads": 32, "vocab": 32000},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 1024, "precision": "mixed-fp16", **training},
        "parallel": {"strategy": strategy}, "software": {"framework": "deepspeed", "year": year}}))


def operations(found: Lowered, name: str) -> list[MemoryOp]:
    program = found.job.programs[0]
    return [op for section in program.sections for op in section.memory if op.tensor == name]


def test_parameters_are_gathered_into_lists_of_equal_shards() -> None:
    """Each list's flat tensor is given back to the stream that gathers, as many as whole buckets fit."""
    found = lowered()
    numel = found.architecture.parameters
    made = [op.size_bytes for op in operations(found, "flat list") if op.size_bytes > 0]
    assert len(made) == numel // BUCKET > 1
    assert made == pytest.approx([2 * numel / len(made)] * len(made), abs=1)
    assert all(op.used_on for op in operations(found, "flat list") if op.size_bytes < 0)
    assert not operations(lowered(2024), "flat list")


def test_the_largest_gradient_of_the_part_is_looked_through_in_double() -> None:
    found = lowered()
    largest = max(p.numel for layer in found.architecture.stack for p in layer.parameters)
    part = -(-found.architecture.parameters // 8)
    norm = 8 * min(largest, part)
    assert [op.size_bytes for op in operations(found, "gradient norm")] == [norm, -norm]
    assert operations(found, "finite gradients")[0].size_bytes == 4 * min(largest, part)
    assert not operations(lowered(strategy="ddp"), "gradient norm")


def test_whole_gradients_go_once_they_are_reduced() -> None:
    """Behind backward a rank keeps the gradients of its part, tensors that reach into it whole."""
    use = peak(lowered().job.programs[0])
    numel = lowered().architecture.parameters
    assert use.phases["peak_in_backward"]["gradients"] == pytest.approx(2 * numel, rel=0.02)
    assert 2 * numel / 8 <= use.phases["optimizer_step"]["gradients"] < 2 * numel / 4


def test_zero_1_reduces_behind_backward_whatever_is_asked_for() -> None:
    found = lowered()
    assert [op.size_bytes for op in operations(found, "gradient buckets")] == [2 * BUCKET, -2 * BUCKET]
    zero2 = operations(lowered(strategy="zero2"), "gradient buckets")
    assert zero2[0].size_bytes == 2 * 2 * BUCKET  # two buffers, since reductions overlap


def test_sums_in_fp32_travel_in_a_whole_copy() -> None:
    precision = {"compute": "bf16", "parameters": "bf16", "master": "fp32", "gradients": "fp32", "optimizer": "fp32",
                 "gather": "bf16", "reduce": "bf16"}
    found = lowered(precision=precision)
    numel = found.architecture.parameters
    assert operations(found, "gradient buckets")[0].size_bytes == 2 * numel
    wide = lowered(precision={**precision, "reduce": "fp32"})
    assert not operations(wide, "gradient buckets")
