"""Corners of pipelined layouts: whatever can be asked for is simulated or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.api import machine_for
from sim.engine import simulate
from sim.errors import UserError
from sim.parallel import lower
from sim.program import Job
from sim.scenario import resolve

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "dualpipe")


def scenario(gpus: int, micro_batches: int, model: dict[str, Any] | None = None, framework: str = "megatron",
             training: dict[str, Any] | None = None, **parallel: Any) -> dict[str, Any]:
    replicas = gpus // (parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("context", 1))
    return {
        "name": "corner", "software": {"framework": framework, "year": 2024},
        "cluster": {"topology": "dgx-a100-80g", "nodes": -(-gpus // 8), "gpus_per_node": min(8, gpus)},
        "model": {"kind": "decoder", "layers": 8, "hidden": 256, "heads": 8, "ffn": 1024, "vocab": 1024,
                  "max_positions": 512, **(model or {})},
        "training": {"micro_batch": 1, "global_batch": micro_batches * replicas, "sequence": 256,
                     "precision": "megatron-bf16", **(training or {})},
        "parallel": {"strategy": "zero1", **parallel}}


def simulated(mapping: dict[str, Any], fold: bool = True) -> tuple[float, Job]:
    resolved = resolve(mapping)
    lowered = lower(resolved, fold=fold)
    return simulate(lowered.job, machine_for(resolved, lowered)).step_time_s, lowered.job


@pytest.mark.parametrize("model", [
    {"vocab": 1024, "max_positions": 2048},  # a quarter of the table is smaller than the table of positions
    {"kind": "encoder", "vocab": 512, "hidden": 512},  # and than the head's transformation
])
def test_tied_copies_are_reduced_as_one_table(model: dict[str, Any]) -> None:
    """First and last stage add up the gradients of the shared table, not of the largest matrix each of them has."""
    mapping = scenario(8, 4, {"tied_embeddings": True, "positions": "learned", **model}, tensor=4, pipeline=2)
    step_s, job = simulated(mapping)
    assert step_s > 0
    number = job.programs[0].communicators.index("embedding")
    calls = {call for program in job.programs for call in program.collectives if call.communicator == number}
    hidden = mapping["model"]["hidden"]
    assert [call.size_bytes for call in calls] == [mapping["model"]["vocab"] // 4 * hidden * 4]


@pytest.mark.parametrize("changes", [
    {"pipeline": 8}, {"pipeline": 8, "strategy": "fsdp"}, {"pipeline": 4, "split": [3, 3, 0, 0]}])
def test_rank_without_layer_is_refused_by_name(changes: dict[str, Any]) -> None:
    mapping = scenario(8, 8, {"layers": 6 if "split" in changes else 5, "tied_embeddings": False}, **changes)
    with pytest.raises(UserError) as caught:
        simulated(mapping)
    fault = caught.value.faults[0]
    assert fault.field == ("parallel.split" if "split" in changes else "parallel.pipeline")
    assert ("holds no block, embedding or head" if "split" in changes else "only 5 blocks") in fault.message


def test_a_virtual_stage_may_hold_no_layer() -> None:
    """22 blocks in 24 virtual stages, as Qi et al. 2024 (table 4) cut their 1.5B."""
    mapping = scenario(8, 24, {"layers": 22}, pipeline=8, schedule="interleaved", virtual_stages=3,
                       split=[2, 3, 3, 3, 3, 3, 3, 2], strategy="none")
    assert simulated(mapping)[0] > 0


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_layout_runs_or_is_refused(data: st.DataObject) -> None:
    """Schedules, cuts, sharding, recomputation, ties: no layout ends in anything but a time or a named fault."""
    def one(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    schedule, pipeline = one(*SCHEDULES), one(2, 3, 4)
    tensor, context, replicas = one(1, 2), one(1, 2), one(1, 2)
    virtual = one(2, 3) if schedule == "interleaved" else 2 if schedule in ("zb-v", "dualpipe") else 1
    micro_batches = pipeline * one(2, 4) if virtual > 1 else one(1, 3, 8)
    mapping = scenario(
        pipeline * tensor * context * replicas, micro_batches,
        {"layers": one(6, 7, 12), "tied_embeddings": one(True, False), "vocab": one(512, 8000),
         "positions": one("learned", "rotary")}, one("megatron", "pytorch", "torchtitan", "deepspeed", "ideal"),
        {"recompute": one("none", "full", "selective"), "precision": one("megatron-bf16", "amp-bf16")},
        strategy=one("zero1", "ddp", "fsdp"), tensor=tensor, pipeline=pipeline, context=context, schedule=schedule,
        virtual_stages=virtual, overlap_p2p=one(True, False), sequence_parallel=tensor > 1 and one(True, False),
        context_exchange=one("ring", "all-gather"), overlap=one(True, False))
    try:
        step_s, _ = simulated(mapping)
    except UserError as refused:
        assert all(fault.field and fault.message for fault in refused.faults)
        return
    assert step_s > 0
    if pipeline * tensor * context * replicas <= 8:
        assert simulated(mapping, fold=False)[0] == pytest.approx(step_s, rel=1e-9)
