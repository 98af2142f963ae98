"""Stages of a pipeline: the seconds of each sum to the step, the bubble is the closed form's, the slow one is named."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.report.numbers.stages import critical
from sim.report.result import Result
from sim.report.terminal.render import as_text
from sim.report.trace import trace
from sim.scenario import resolve


def job(**sets: Any) -> Result:
    return sim.run(resolve({
        "name": "pipeline", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 16, "hidden": 4096, "heads": 32, "vocab": 1024, "positions": "rotary"},
        "training": {"micro_batch": 1, "global_batch": 32, "sequence": 2048, "precision": "megatron-bf16"},
        "parallel": {"strategy": "zero1", "tensor": 2, "pipeline": 4, "schedule": "1f1b"},
        "software": {"framework": "megatron"}}, "pipeline", sets))


@pytest.fixture(scope="module")
def even() -> Result:
    return job()


def test_no_pipeline_has_no_stages() -> None:
    one = job(**{"parallel.pipeline": 1})
    assert one.stages == []
    assert "stages" not in one.to_json()
    assert "stages, share" not in as_text(one)


def test_a_stage_s_seconds_sum_to_the_step(even: Result) -> None:
    assert [stage.blocks for stage in even.stages] == [4, 4, 4, 4]
    for stage in even.stages:
        parts = stage.busy_s + stage.bubble_s + stage.transfers_s + stage.collectives_s + stage.host_s
        assert parts == pytest.approx(even.step_time_s, rel=1e-6)
    assert even.to_json()["stages"] == [stage.to_json() for stage in even.stages]


def test_the_bubble_is_that_of_the_closed_form_on_every_stage(even: Result) -> None:
    """(p - 1) / (m + p - 1): the wait of the first stages for the last comes at the start, that of the last at the end,
    where the norm of all gradients makes it wait for the first."""
    shares = [stage.bubble_s / even.step_time_s for stage in even.stages]
    assert shares == pytest.approx([3 / 35] * 4, rel=0.25)
    assert even.breakdown.pipeline_bubble == pytest.approx(
        next(s.bubble_s for s in even.stages if s.stage == critical(even.stages).stage))


def test_a_stage_that_is_through_waits_for_the_others_without_a_norm_too() -> None:
    """The ideal stack clips nothing, so nothing joins the stages at the end: middle ones wait for the next step."""
    free = job(**{"software.framework": "ideal", "parallel.strategy": "ddp", "model.tied_embeddings": False})
    for stage in free.stages:
        assert stage.host_s == pytest.approx(0, abs=1e-3 * free.step_time_s)
        assert stage.bubble_s > 2 / 35 * free.step_time_s


def test_an_uneven_split_names_its_slow_stage() -> None:
    one = job(**{"parallel.split": [3, 3, 7, 3]})
    assert critical(one.stages).stage == 2
    assert [stage.blocks for stage in one.stages] == [3, 3, 7, 3]
    text = as_text(one)
    assert "critical: stage 2 (rank" in text
    assert one.stages[2].bubble_s < min(one.stages[n].bubble_s for n in (0, 1, 3))


def test_the_report_has_a_line_per_stage(even: Result) -> None:
    lines = as_text(even).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("stages, share"))
    assert [line.split()[0] for line in lines[begin + 2:begin + 6]] == ["0", "1", "2", "3"]
    assert max(len(line) for line in as_text(even, 60).splitlines()) <= 60


def test_the_trace_has_a_process_per_stage(even: Result) -> None:
    events = trace(even)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[0] == "stage 0: rank 0 (stands for 2 ranks), embedding to block3"
    assert len(names) == 4
    for process, stage in enumerate(even.stages):
        streams = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == process}
        assert {"host", "stream compute"} <= streams
        allocated = [e["args"]["bytes"] for e in events if e["name"] == "allocated" and e["pid"] == process]
        reserved = {e["args"]["bytes"] for e in events if e["name"] == "reserved" and e["pid"] == process}
        assert max(allocated) == stage.peak_allocated_bytes
        assert len(reserved) == 1
        assert min(reserved) >= max(allocated)


def test_the_trace_is_valid_trace_event_json(even: Result) -> None:
    """Trace Event Format: every event has ph, pid and name; X has ts and dur, C has ts and numbers, M has args; threads
    with events are named; times are finite and not negative in length."""
    import json
    import math

    found = json.loads(json.dumps(trace(even), allow_nan=False))
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    named = {(e["pid"], e["tid"]) for e in found["traceEvents"] if e["name"] == "thread_name"}
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["ph"] in ("X", "C", "M")
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            continue
        assert math.isfinite(event["ts"])
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
        else:
            assert event["args"]
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())


@pytest.mark.parametrize(("schedule", "first", "last"), [("gpipe", 7, 0), ("1f1b", 0, 7)])
def test_actions_carry_their_micro_batch(schedule: str, first: int, last: int) -> None:
    one = job(**{"parallel.schedule": schedule, "training.global_batch": 8})
    done = [e["args"] for e in trace(one)["traceEvents"]
            if e["ph"] == "X" and e["pid"] == 1 and "micro_batch" in e["args"]
            and e["cat"] not in ("host", "communication")]
    forward = [args["micro_batch"] for args in done if args["phase"] == "forward"]
    backward = [args["micro_batch"] for args in done if args["phase"] == "backward"]
    assert forward == list(range(8))
    assert backward[0] == first
    assert backward == sorted(backward, reverse=first > last)
