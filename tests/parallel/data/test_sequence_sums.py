"""Megatron's small collectives at the end of a step, counted by hand (and against its own code: test_real_megatron)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.parallel import lower
from sim.program import Kind
from sim.scenario import resolve

LAYERS, HIDDEN = 3, 1024


def calls(framework: str = "megatron", precision: str = "megatron-bf16", strategy: str = "zero1", *, tensor: int = 4,
          sequence: bool = True) -> list[tuple[str, str, int]]:
    """Kind, communicator and bytes of the optimizer step's collectives, in order."""
    program = lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "vocab": 32768, "dropout": False,
                  "bias": True},
        "training": {"micro_batch": 1, "micro_steps": 2, "sequence": 512, "precision": precision, "optimizer": "adam"},
        "parallel": {"strategy": strategy, "tensor": tensor, "sequence_parallel": sequence},
        "software": {"framework": framework, "year": 2023}})).job.programs[0]
    section = program.sections[program.schedule[-1][0]]
    rows = [program.collectives[row] for kind, row in zip(section.kind, section.payload, strict=True)
            if kind == Kind.COLLECTIVE]
    return [(call.kind, program.communicators[call.communicator], call.size_bytes) for call in rows]


@pytest.mark.parametrize(("precision", "width"), [("megatron-bf16", 4), ("megatron-fp16", 2)])
def test_norms_and_biases_behind_row_cut_products_are_summed(precision: str, width: int) -> None:
    # two norms of two parameters and two biases a block, the final norm
    numel = HIDDEN * (LAYERS * (2 * 2 + 2) + 2)
    assert calls(precision=precision)[0] == ("all_reduce", "tensor", width * numel)


def test_nothing_is_summed_where_every_rank_has_all_tokens_or_another_way() -> None:
    assert all(size == 4 for kind, group, size in calls(sequence=False) if group == "tensor")
    assert all(size == 4 for kind, group, size in calls("deepspeed", "mixed-bf16") if group == "tensor")


@pytest.mark.parametrize(("precision", "times"), [("megatron-bf16", 1), ("megatron-fp16", 2)])
def test_parts_of_gradients_have_one_norm_and_one_answer(precision: str, times: int) -> None:
    found: list[Any] = [call[:2] for call in calls(precision=precision) if call[2] == 4]
    assert found == times * [("all_reduce", "data"), ("all_reduce", "tensor")]
    whole = [call[:2] for call in calls(precision=precision, strategy="ddp") if call[2] == 4]
    assert whole == times * [("all_reduce", "tensor")]
