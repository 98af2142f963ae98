"""The buffer that Megatron's own modules share, and its softmax's gradient in place, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.program import Program
from sim.scenario import resolve

HIDDEN, HEADS, VOCAB, TOKENS, BATCH = 1024, 8, 32768, 2048, 2
#: Bytes of one rank's scores in bf16, and of the stream.
SCORES, STREAM = (2 * BATCH * n for n in (HEADS * TOKENS**2, TOKENS * HIDDEN))


def program(year: int, attention: str, framework: str = "megatron", *, stage: int = 0, **parallel: Any) -> Program:
    job = lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 4, "hidden": HIDDEN, "heads": HEADS, "dropout": False, "vocab": VOCAB,
                  "max_positions": TOKENS},
        "training": {"micro_batch": BATCH, "micro_steps": 4, "sequence": TOKENS, "precision": "megatron-bf16",
                     "optimizer": "adam", "attention": attention},
        "parallel": {"strategy": "zero1", **parallel}, "software": {"framework": framework, "year": year}})).job
    return job.programs[job.classes[stage].program]


def held(found: Program) -> int:
    return sum(size for name, size, _ in found.resident if name == "shared buffer")


@pytest.mark.parametrize(("year", "whole"), [(2021, 0), (2022, SCORES), (2024, SCORES)])
def test_scores_that_are_spelled_out_stay_allocated(year: int, whole: int) -> None:
    assert held(program(year, "eager")) == whole
    assert held(program(year, "eager", tensor=4)) == whole // 4
    assert held(program(year, "flash")) == 0
    assert held(program(year, "eager", "deepspeed")) == 0


@pytest.mark.parametrize(("year", "first"), [(2021, 0), (2022, STREAM), (2024, 0)])
def test_what_is_gathered_goes_there_too(year: int, first: int) -> None:
    """From 2024 on TransformerEngine's modules make tensors of their own; the head is Megatron's."""
    cut = {"tensor": 4, "sequence_parallel": True}
    assert held(program(year, "flash", **cut)) == (STREAM if year > 2021 else 0)
    assert held(program(year, "flash", **cut, pipeline=2)) == first
    assert held(program(year, "flash", **cut, pipeline=2, stage=1)) == (STREAM if year > 2021 else 0)


def test_the_gradient_of_softmax_is_written_over_its_outputs() -> None:
    """Backward holds one tensor of scores beside what forward kept and the buffer, not two."""
    use = peak(program(2023, "eager", pipeline=4))
    assert use.where is not None and use.where.operator == "attention" and use.where.phase == "backward"
    # the buffer, the gradient of the scores; that of the residual stream, of the core's output and of the values;
    # cuBLAS's workspaces
    assert use.at_peak["workspace"] == 2 * SCORES + 3 * STREAM + 2 * 8_519_680
