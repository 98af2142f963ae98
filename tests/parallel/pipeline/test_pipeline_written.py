"""Batches that are written once, steps that are not simulated to their end, stages that straddle nodes: all exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.api import machine_for
from sim.engine import simulate
from sim.errors import UserError
from sim.parallel import Lowered, lower
from sim.parallel.pipeline.whole import WholeStage
from sim.parallel.pipeline.written import Written
from sim.program import Kind, Program
from sim.scenario import Scenario, resolve

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "dualpipe")
ORDERS = (["tensor", "context", "expert", "data", "pipeline"], ["tensor", "context", "expert", "pipeline", "data"])


def pipeline(schedule: str, stages: int, micro_batches: int, replicas: int = 1, tensor: int = 1,
             per_node: int | None = None, year: int = 2023, recompute: str = "none", hidden: int = 512,
             **parallel: Any) -> Scenario:
    ranks = stages * replicas * tensor
    per_node = per_node or min(8, ranks)
    virtual = {"interleaved": 2, "zb-v": 2, "dualpipe": 2}.get(schedule, 1)
    return resolve({
        "name": "pipeline", "software": {"framework": "megatron", "year": year},
        "cluster": {"topology": "dgx-a100-80g", "nodes": -(-ranks // per_node), "gpus_per_node": per_node},
        "model": {"kind": "decoder", "layers": 8, "hidden": hidden, "heads": 8, "ffn": 4 * hidden, "vocab": 4096,
                  "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": micro_batches * replicas, "sequence": 256,
                     "precision": "megatron-bf16", "recompute": recompute},
        "parallel": {"strategy": "zero1", "tensor": tensor, "pipeline": stages, "schedule": schedule,
                     "virtual_stages": virtual, **parallel}})


def contents(program: Program) -> list[Any]:
    """Everything of a program, rows of tables replaced by what stands in them."""
    def payload(kind: int, number: int) -> Any:
        if kind == Kind.KERNELS:
            segment = program.segments[number]
            return tuple(program.by_row(lambda k: k, lambda i: (program.collectives[i.collective], i.beside))[row]
                         for row in segment.kernels), segment.host_s
        return program.collectives[number] if kind == Kind.COLLECTIVE else number

    sections = [(s.name, s.kind, s.stream, [payload(*item) for item in zip(s.kind, s.payload, strict=True)], s.host_s,
                 s.waits, s.joins, [program.labels[label] for label in s.label], s.memory, s.layers)
                for s in program.sections]
    return [sections, program.schedule, program.resident, program.host_resident, program.tensors, program.construction,
            program.managed_bytes, program.streams, program.communicators]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("changes", [{}, {"year": 2021, "overlap": False}, {"overlap_p2p": True, "replicas": 2},
                                     {"strategy": "ddp", "tensor": 2}], ids=str)
def test_what_is_written_again_is_what_would_be_written(schedule: str, changes: dict[str, Any],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = pipeline(schedule, 4, 8, **changes)
    again = lower(scenario)
    monkeypatch.setattr(WholeStage, "_recurs", lambda self, batch: False)
    monkeypatch.setattr(WholeStage, "_end", lambda self: None)
    monkeypatch.setattr(Written, "hold", lambda self, key, builder, make: make())
    anew = lower(scenario)
    for one, other in zip(again.job.programs, anew.job.programs, strict=True):
        assert contents(one) == contents(other)


@settings(max_examples=25, deadline=None)
@given(schedule=st.sampled_from(SCHEDULES), stages=st.sampled_from([2, 4]), groups=st.integers(2, 6),
       replicas=st.integers(1, 2), year=st.sampled_from([2021, 2023, 2025]), overlap=st.booleans(),
       apart=st.booleans(), recompute=st.sampled_from(["none", "full"]))
def test_steps_and_repeats_left_out_change_nothing(schedule: str, stages: int, groups: int, replicas: int, year: int,
                                                   overlap: bool, apart: bool, recompute: str) -> None:
    scenario = pipeline(schedule, stages, stages * groups, replicas, year=year, overlap=overlap, overlap_p2p=apart,
                        recompute=recompute)
    lowered = lower(scenario)
    machine = machine_for(scenario, lowered)
    short, full = (simulate(lowered.job, machine, skip_repeats=skip) for skip in (True, False))
    assert short.tasks <= full.tasks
    assert short.step_time_s == pytest.approx(full.step_time_s, rel=1e-9)
    for number in range(len(lowered.job.classes)):
        a, b = short.columns(number), full.columns(number)
        assert (a.section == b.section).all() and (a.task == b.task).all()
        for name in ("issue_s", "start_s", "end_s", "starved_s"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=0, atol=1e-9)


def test_the_second_step_of_a_pipeline_is_left_out() -> None:
    """1F1B of Megatron-LM: the second step goes on as the first as soon as the first forwards are through."""
    scenario = pipeline("1f1b", 4, 32)
    lowered = lower(scenario)
    machine = machine_for(scenario, lowered)
    one = simulate(lowered.job, machine, steps=1)
    both = simulate(lowered.job, machine, steps=2)
    assert both.steps == 2 and both.tasks < 1.15 * one.tasks


def step_s(scenario: Scenario, lowered: Lowered) -> float:
    return simulate(lowered.job, machine_for(scenario, lowered)).step_time_s


@settings(max_examples=25, deadline=None)
@given(schedule=st.sampled_from(SCHEDULES), stages=st.sampled_from([2, 4]), replicas=st.sampled_from([2, 3, 4]),
       tensor=st.sampled_from([1, 2]), per_node=st.sampled_from([2, 4, 8]), order=st.sampled_from(ORDERS),
       strategy=st.sampled_from(["zero1", "ddp", "fsdp"]), overlap=st.booleans(), hidden=st.sampled_from([256, 2048]))
def test_stages_that_straddle_nodes_are_folded_exactly(schedule: str, stages: int, replicas: int, tensor: int,
                                                       per_node: int, order: list[str], strategy: str, overlap: bool,
                                                       hidden: int) -> None:
    """Three replicas of a stage on nodes of four: some pass on inside a node and some across."""
    if stages * replicas * tensor % per_node or stages * replicas * tensor > 24:
        return
    try:
        scenario = pipeline(schedule, stages, 2 * stages, replicas, tensor, per_node, order=order, strategy=strategy,
                            overlap=overlap, hidden=hidden)
        folded = lower(scenario)
    except UserError:
        return
    whole = lower(scenario, fold=False)
    assert len(folded.job.classes) <= len(whole.job.classes)
    assert step_s(scenario, folded) == pytest.approx(step_s(scenario, whole), rel=1e-9)


def test_stages_of_whole_nodes_stay_one_class() -> None:
    lowered = lower(pipeline("1f1b", 4, 8, replicas=4, per_node=8))
    assert len(lowered.job.classes) == 4
    straddling = lower(pipeline("1f1b", 4, 8, replicas=3, per_node=4))
    assert 4 < len(straddling.job.classes) <= 12
