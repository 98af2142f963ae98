"""nanotron's gradients: one fp32 buffer, all-reduced whole with ZeRO-1 and in DDP's buckets without, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.parallel.lower import Lowered
from sim.program.columns import Kind
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve

#: qkv, o, gate and up as one, down, two norms; embedding, head, last norm.
PER_BLOCK, BESIDE = 6, 3


def lowered(layers: int = 4, micro_steps: int = 2, nodes: int = 2, precision: str = "megatron-bf16",
            framework: str = "nanotron", **parallel: Any) -> Lowered:
    ranks = nodes * 8 // parallel.get("pipeline", 1)
    return lower(resolve({
        "name": "x", "cluster": {"topology": "p5", "nodes": nodes},
        "model": {"kind": "decoder", "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                  "layers": layers, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32768, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": micro_steps * ranks, "sequence": 1024, "precision": precision},
        "parallel": {"strategy": "zero1", **parallel}, "software": {"framework": framework, "year": 2025}}))


def calls(found: Lowered, phase: str, kind: str) -> list[dict[str, Any]]:
    return [row for row in traffic_totals(found.job) if (row["phase"], row["kind"]) == (phase, kind)]


def held(found: Lowered, category: str) -> int:
    return sum(size for _, size, kind in found.job.programs[0].resident if kind == category)


def test_zero_1_reduces_all_gradients_whole_by_one_call_and_gathers_once() -> None:
    found = lowered()
    (reduced,), (gathered,) = calls(found, "backward", "all_reduce"), calls(found, "optimizer", "all_gather")
    assert (reduced["count"], reduced["bytes"]) == (1, 4 * found.architecture.parameters)
    assert (gathered["count"], gathered["bytes"]) == (1, 2 * found.architecture.parameters)
    assert not calls(found, "backward", "reduce_scatter")


def test_overlap_changes_nothing_where_the_model_is_not_wrapped() -> None:
    """The last call of backward is the reduction, behind every kernel of it."""
    for overlap in (True, False):
        program = lowered(overlap=overlap).job.programs[0]
        section = program.sections[program.schedule[-2][0]]
        kinds = list(section.kind)
        assert kinds.count(Kind.COLLECTIVE) == 1
        behind = kinds[kinds.index(Kind.COLLECTIVE) + 1:]
        assert behind == [Kind.KERNELS]  # what waits for it


def test_ddp_s_buckets_are_cut_by_half_gradients_and_reduced_in_fp32() -> None:
    """25 MiB of bf16 are 13.1M gradients: a block of 16.8M closes two buckets (down with gate and up; the rest goes on
    to the next block), the head travels alone and so does the embedding."""
    found = lowered(strategy="ddp", layers=1)
    (reduced,) = calls(found, "backward", "all_reduce")
    block, table = 4 * 1024**2 + 3 * 1024 * 4096, 32768 * 1024
    assert reduced["bytes"] == 4 * (block + 2 * table + 3 * 1024) == 4 * found.architecture.parameters
    # the last norm's and the block's first norm's gradients are too small for a bucket of their own
    assert reduced["count"] == 3
    assert held(found, "buffers") >= 2 * found.architecture.parameters  # DDP's buckets, in the model's dtype


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_every_rank_s_piece_of_every_parameter_is_copied_by_itself(nodes: int) -> None:
    found = lowered(nodes=nodes)
    program = found.job.programs[0]
    launches = [kernel.launches for kernel in program.kernels if kernel.variant == "parameter pieces"]
    ranks, tensors = 8 * nodes, PER_BLOCK * 4 + BESIDE
    assert sorted(launches) == sorted({ranks, ranks + 1, ranks * tensors})


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from(["zero1", "ddp"]), st.sampled_from([1, 2]))
def test_memory_returns_to_where_the_step_began(layers: int, micro_steps: int, strategy: str, pipeline: int) -> None:
    found = lowered(layers=2 * layers, micro_steps=micro_steps * pipeline, strategy=strategy, pipeline=pipeline,
                    **({"schedule": "1f1b"} if pipeline > 1 else {}))
    for program in found.job.programs:
        assert peak(program).steady


def test_half_gradients_live_beside_the_buffer_until_backward_is_through() -> None:
    """A head of 134M gradients whose activations are few: what backward leaves is 2 bytes each beside the 4."""
    own, other = (peak(lowered(layers=1, framework=name).job.programs[0]) for name in ("nanotron", "megatron"))
    parameters = lowered(layers=1).architecture.parameters
    assert own.category_peaks["gradients"] == pytest.approx(6 * parameters, rel=0.01)
    assert other.category_peaks["gradients"] == pytest.approx(4 * parameters, rel=0.01)


def test_gradients_that_are_not_accumulated_in_fp32_are_ddp_s() -> None:
    found = lowered(precision="pure-bf16")
    (reduced,) = calls(found, "backward", "all_reduce")
    assert reduced["count"] > 1 and reduced["bytes"] == 2 * found.architecture.parameters
