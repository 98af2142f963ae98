"""Backward of norms as torch.compile writes it: a kernel over rows, one over columns; by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.parallel import lower
from sim.scenario import resolve
from sim.work import Kernel

TOKENS, HIDDEN = 2 * 512, 1024


def backward(norm: str, precision: str, **changes: Any) -> list[Kernel]:
    scenario: dict[str, Any] = {
        "name": "t", "cluster": {"topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 16, "vocab": 1024, "norm": norm,
                  "positions": "rotary", "dropout": False},
        "training": {"micro_batch": 2, "global_batch": 2, "sequence": 512, "precision": precision},
        "parallel": {"strategy": "none"}, "software": {"framework": "pytorch", "year": 2025, "compile": True}}
    block = lower(resolve(scenario, "t", changes)).architecture.stack[1]
    return list(next(op for op in block.operators if op.name == "norm2").backward)


def told(kernels: list[Kernel]) -> list[tuple[str, float, int]]:
    return [(k.op, k.bytes / TOKENS / HIDDEN, k.launches) for k in kernels]


@pytest.mark.parametrize("modules", ["plain", "transformers"])
@pytest.mark.parametrize(("precision", "over_rows", "over_columns"), [
    ("pure-bf16", 2 + 2 + 2, 2 + 2),   # the gradient, the stream and the branch that it is made again of
    ("amp-bf16", 2 + 4, 2 + 4)])       # the gradient in 16 bits, what was normalised in fp32
def test_a_kernel_over_rows_and_one_over_columns(
        modules: str, precision: str, over_rows: float, over_columns: float) -> None:
    found = backward("rmsnorm", precision, **{"software.modules": modules})
    assert told(found) == [("norm", over_rows, 1), ("reduction", over_columns, 1)]


def test_a_frozen_norm_has_no_sums_over_columns() -> None:
    found = backward("rmsnorm", "pure-bf16", **{
        "training.finetune": {"method": "lora", "rank": 8, "targets": "all", "base": "bf16"}})
    assert told(found) == [("norm", 6, 1)]


def test_eager_norms_keep_their_two_passes() -> None:
    found = backward("layernorm", "pure-bf16", **{"software.compile": False})
    assert told(found) == [("norm", 3 * 2, 1), ("norm", 2 * 2, 1)]
