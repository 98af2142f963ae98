"""Megatron's loss in place and TransformerEngine's placeholders of weight gradients, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.memory.ledger import MemoryUse, peak
from sim.parallel import lower
from sim.program import Program
from sim.scenario import resolve

MIB = 2**20
HIDDEN, FFN, VOCAB, TOKENS = 1024, 4096, 32768, 2048


def megatron(year: int, **parallel: Any) -> Program:
    return lower(resolve({
        "name": "x", "cluster": {"topology": "hgx-b200", "nodes": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 8, "ffn": FFN, "gated_mlp": True,
                  "norm": "rmsnorm", "positions": "rotary", "bias": False, "dropout": False, "vocab": VOCAB,
                  "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 8 // parallel.get("tensor", 1), "sequence": TOKENS,
                     "precision": "megatron-bf16", "optimizer": "adam", "attention": "flash"},
        "parallel": {"strategy": "zero1", **parallel},
        "software": {"framework": "megatron", "year": year}})).job.programs[0]


def held(program: Program, name: str) -> int:
    return sum(size for entry, size, _ in program.resident if entry == name)


@pytest.mark.parametrize("tensor", [1, 4])
def test_one_placeholder_for_each_shape_of_matrix(tensor: int) -> None:
    # qkv 3h x h, projection h x h, gate and up 2f x h, down h x f, in bf16; both blocks share them
    elements = (3 * HIDDEN + HIDDEN + 2 * FFN + FFN) * HIDDEN // tensor
    cut = {"tensor": tensor, "sequence_parallel": True} if tensor > 1 else {}
    program = megatron(2026, **cut)
    assert held(program, "weight placeholders") == 2 * elements
    assert len(program.tensors["weight placeholders"]) == 4
    assert held(megatron(2023, **cut), "weight placeholders") == 0


def test_blocks_make_no_gradient_where_a_placeholder_is_there() -> None:
    now, before = (peak(megatron(year)) for year in (2025, 2024))
    # both peak in the head, which makes its own in either case
    assert now.where is not None and now.where.layer == "head"
    placeholders = 2 * 16 * HIDDEN * HIDDEN
    assert now.peak_allocated_bytes - before.peak_allocated_bytes == pytest.approx(placeholders, abs=MIB)


def logits_bytes(use: MemoryUse) -> int:
    return use.category_peaks["logits"]


def test_the_loss_overwrites_the_wide_logits() -> None:
    # the product's bf16 logits and one fp32 copy, in which the softmax is made
    assert logits_bytes(peak(megatron(2025))) == pytest.approx((2 + 4) * TOKENS * VOCAB, abs=MIB)


def test_the_fused_loss_overwrites_the_logits_themselves() -> None:
    # what backward makes beside them: the table's gradient and that of the product's input
    made = VOCAB * HIDDEN + TOKENS * HIDDEN
    assert logits_bytes(peak(megatron(2026))) == pytest.approx(2 * (TOKENS * VOCAB + made), abs=MIB)


def test_megatron_core_of_2023_subtracts_the_maximum_beside_the_wide_logits() -> None:
    assert logits_bytes(peak(megatron(2023))) == pytest.approx((4 + 4) * TOKENS * VOCAB, abs=MIB)
