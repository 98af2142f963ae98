"""What training stacks keep beside the textbook's bytes per parameter, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.parallel.lower import Lowered
from sim.scenario import resolve

LAYERS, HIDDEN, VOCAB = 8, 1024, 8192
#: query, key, value, projection, up and down of a block.
MATRICES = LAYERS * 12 * HIDDEN**2
BF16_SUMS = {"compute": "bf16", "parameters": "bf16", "master": "fp32", "gradients": "fp32", "optimizer": "fp32",
             "gather": "bf16", "reduce": "bf16"}


def lowered(precision: Any, parallel: dict[str, Any], software: dict[str, Any], gpu: str = "dgx-a100-80g",
            **training: Any) -> Lowered:
    return lower(resolve({
        "name": "x", "cluster": {"topology": gpu, "nodes": 1},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "vocab": VOCAB, "bias": False,
                  "dropout": False},
        "training": {"global_batch": 32, "micro_batch": 1, "sequence": 128, "precision": precision, "optimizer": "adam",
                     **training},
        "parallel": parallel, "software": software}))


def held(found: Lowered, category: str) -> int:
    return sum(size for _, size, kind in found.job.programs[0].resident if kind == category)


@pytest.mark.parametrize(("strategy", "bytes_each"), [("zero1", 4), ("zero2", 0)])
def test_deepspeed_sums_bf16_gradients_in_fp32_on_every_rank(strategy: str, bytes_each: int) -> None:
    found = lowered(BF16_SUMS, {"strategy": strategy}, {"framework": "deepspeed", "year": 2022})
    assert held(found, "gradients") == bytes_each * found.architecture.parameters
    plain = lowered("mixed-bf16", {"strategy": strategy}, {"framework": "deepspeed", "year": 2022})
    assert held(plain, "gradients") == 0


@pytest.mark.parametrize(("precision", "bytes_each"), [("megatron-fp16", 4), ("megatron-bf16", 0)])
def test_half_gradients_are_copied_for_an_fp32_master(precision: str, bytes_each: int) -> None:
    found = lowered(precision, {"strategy": "ddp"}, {"framework": "megatron", "year": 2021})
    section = found.job.programs[0].sections[-1]
    temporary = [op.size_bytes for op in section.memory if op.tensor == "optimizer temporaries" and op.size_bytes > 0]
    assert sum(temporary) == bytes_each * found.architecture.parameters


@pytest.mark.parametrize(("year", "bytes_each"), [(2023, 4), (2024, 2)])
def test_matrices_in_8_bits_replace_their_16_bit_copy(year: int, bytes_each: int) -> None:
    """Two narrow copies, row by row and transposed; until 2023 the bf16 weight beside them."""
    found = lowered("fp8", {"strategy": "zero1"}, {"framework": "megatron", "year": year}, "dgx-h100")
    rest = found.architecture.parameters - MATRICES
    assert held(found, "parameters") == bytes_each * MATRICES + 2 * rest


def test_chunks_on_two_stages_share_a_communicator() -> None:
    """Stages of a row have a neighbour on one side or both, stages of a ring on both, whatever the chunks."""
    def nccl(parallel: dict[str, Any]) -> int:
        found = lowered("megatron-bf16", parallel, {"framework": "megatron", "year": 2023})
        assert found.outside is not None
        return found.outside[0].nccl_bytes

    two = nccl({"pipeline": 2, "schedule": "1f1b"})
    assert nccl({"pipeline": 2, "schedule": "interleaved", "virtual_stages": 4}) == two
    four = nccl({"pipeline": 4, "schedule": "interleaved", "virtual_stages": 2})
    assert four > two


@pytest.mark.parametrize(("year", "shared"), [(2023, True), (2024, False)])
def test_frozen_tensors_of_a_mixed_unit_have_gradients(year: int, shared: bool) -> None:
    found = lowered("pure-bf16", {"strategy": "fsdp", "reduce_every_micro_step": False},
                    {"framework": "pytorch", "year": year, "fsdp": 1}, recompute="full",
                    finetune={"method": "lora", "rank": 8, "targets": ["query", "value"], "base": "bf16"})
    use = peak(found.job.programs[0])
    trained = found.architecture.parameters
    whole = 2 * (MATRICES + trained)
    assert use.category_peaks["gradients"] >= whole if shared else use.category_peaks["gradients"] < whole / 2
