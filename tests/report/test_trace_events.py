"""The trace is valid trace-event JSON, complete, and no track overlaps itself."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sim
from sim.report.result import Result
from sim.report.trace import trace, write_trace
from sim.scenario import resolve

Make = Callable[..., Result]


def test_tracks_are_named_and_events_complete(result_of: Make) -> None:
    events = trace(result_of(2))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"host", "stream compute", "communicator shard"}
    (process,) = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert process == "rank 0 (stands for 8 ranks)"
    work = [e for e in events if e["ph"] == "X"]
    assert all({"pid", "tid", "name", "cat", "ts", "dur", "args"} <= e.keys() and e["dur"] >= 0 for e in work)
    assert {(e["pid"], e["tid"]) for e in work} == set(names)
    moved = [e for e in work if names[e["pid"], e["tid"]] == "communicator shard"]
    assert len(moved) == 6
    assert moved[0]["args"] == {"layer": "block0", "phase": "forward", "section": "micro-step", "bytes": 3,
                                "dtype": "bf16", "ranks": 8, "group": "shard", "algorithm": "Ring",
                                "protocol": "Simple"}


def test_a_slow_gpu_is_no_stage() -> None:
    result = sim.run(resolve({
        "name": "slow", "cluster": {"topology": "dgx-a100-80g", "slow_gpus": [{"gpu": 5, "clock": 0.7}]},
        "model": {"preset": "gpt2"}, "training": {"micro_batch": 1, "global_batch": 8, "sequence": 256}}))
    named = [e["args"]["name"] for e in trace(result)["traceEvents"] if e["ph"] == "M" and "name" in e["args"]]
    assert {"rank 5", "rank 0 (stands for 7 ranks)"} <= set(named)
    assert not [name for name in named if "stage" in name]


@pytest.mark.parametrize("micro_steps", [2, 12])
def test_no_track_overlaps_itself_and_repeats_are_drawn(result_of: Make, micro_steps: int) -> None:
    tracks = defaultdict(list)
    for event in trace(result_of(micro_steps))["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["tid"]].append((event["ts"], event["dur"]))
    assert len(tracks[100]) == 3 * micro_steps
    for spans in tracks.values():
        open_until: list[float] = []  # ends of the slices that the next one is inside of
        for start, duration in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 0.01:  # times are rounded to a nanosecond
                open_until.pop()
            assert not open_until or start + duration <= open_until[-1] + 0.01
            open_until.append(start + duration)


CUT = {"name": "cut", "cluster": {"topology": "dgx-h100", "nodes": 1},
       "model": {"preset": "llama-2-7b", "layers": 4},
       "training": {"micro_batch": 1, "micro_steps": 40, "sequence": 2048, "precision": "megatron-bf16"},
       "parallel": {"strategy": "zero1", "tensor": 4, "sequence_parallel": True, "overlap": False},
       "software": {"framework": "megatron", "year": 2025}}


def _moved(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append(event)
    return found


def test_collectives_that_chains_of_kernels_wait_for_have_a_track() -> None:
    result = sim.run(resolve(CUT))
    tracks = _moved(trace(result)["traceEvents"])
    total = sum(groups.get("tensor", 0.0) for groups in result.breakdown.communication_total.values())
    assert sum(e["dur"] for e in tracks["communicator tensor"]) == pytest.approx(total * 1e6, rel=0.02)
    assert {e["args"]["group"] for e in tracks["communicator tensor"]} == {"tensor"}
    kernels = [e for e in tracks["stream compute"] if "flops" in e["args"]]
    flops = sum(e["args"]["flops"] for e in kernels)
    model = result.detail.lowered.architecture
    whole = (model.forward_flops + model.backward_flops) * 40
    assert flops == pytest.approx(whole / 4, rel=2e-3)  # a slice's vocabulary is padded
    few = _moved(trace(result, event_limit=len(tracks["communicator tensor"]) + 2000)["traceEvents"])
    assert len(few["communicator tensor"]) == len(tracks["communicator tensor"])
    assert len(few["stream compute"]) < len(kernels)
    least = _moved(trace(result, event_limit=len(tracks["communicator tensor"]))["traceEvents"])
    assert 0 < len(least["communicator tensor"]) < len(tracks["communicator tensor"])


def test_the_traffic_of_a_result_is_where_the_trace_has_it() -> None:
    """Also of transfers that are over long before the attention that runs beside them."""
    result = sim.run(resolve({
        "name": "ring", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-3-8b", "layers": 2},
        "training": {"micro_batch": 1, "micro_steps": 3, "sequence": 16384, "precision": "fsdp-bf16"},
        "parallel": {"strategy": "fsdp", "context": 4}, "software": {"framework": "torchtitan", "year": 2025}}))
    events = [e for e in trace(result)["traceEvents"] if e.get("cat") == "communication"]
    drawn = sorted((e["args"]["group"], e["ts"], e["dur"]) for e in events)
    listed = sorted((t["group"], t["start_s"] * 1e6, (t["end_s"] - t["start_s"]) * 1e6) for t in result.traffic)
    assert len(drawn) == len(listed)
    for (group, start_us, length_us), (same, begin_us, time_us) in zip(drawn, listed, strict=True):
        assert same == group
        assert (start_us, length_us) == pytest.approx((begin_us, time_us), rel=1e-6, abs=2e-3)


def test_beyond_the_limit_repeats_are_marked(result_of: Make) -> None:
    result = result_of(40)
    events = [e for e in trace(result, event_limit=20)["traceEvents"] if e["ph"] == "X"]
    assert len(events) < 40
    assert any("more times" in e["args"].get("repeated", "") for e in events)


def test_a_gz_path_is_compressed_and_reproducible(result_of: Make, tmp_path: Path) -> None:
    result = result_of(1)
    write_trace(result, tmp_path / "t.json")
    write_trace(result, tmp_path / "t.json.gz")
    plain = (tmp_path / "t.json").read_bytes()
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == plain
    assert json.loads(plain)["otherData"]["step_time_s"] == result.step_time_s


@pytest.mark.parametrize("micro_steps", [1, 12])
def test_counters_follow_the_ledger(result_of: Make, micro_steps: int) -> None:
    result = result_of(micro_steps)
    counters = [e for e in trace(result)["traceEvents"] if e["ph"] == "C"]
    held = [e["args"] for e in counters if e["name"] == "memory"]
    assert max(sum(args.values()) for args in held) == result.memory.use.peak_allocated_bytes
    assert held[-1]["gathered_parameters"] == 0
    assert set(held[0]) == {"parameters", "optimizer_states", "gathered_parameters"}
    allocated = [e["args"]["bytes"] for e in counters if e["name"] == "allocated"]
    assert allocated == [sum(args.values()) for args in held]
    reserved = {e["args"]["bytes"] for e in counters if e["name"] == "reserved"}
    assert reserved == {result.memory.reserved_bytes}
    assert max(allocated) <= result.memory.reserved_bytes
    for name in ("memory", "allocated", "reserved"):
        stamps = [e["ts"] for e in counters if e["name"] == name]
        assert stamps == sorted(stamps)


def test_no_event_begins_before_zero_where_later_stages_are_ahead() -> None:
    """Perfetto drops events of negative times: their hosts issue the step before the first stage begins it."""
    cut = {**CUT, "training": {**CUT["training"], "micro_steps": 8},  # type: ignore[dict-item]
           "parallel": {"strategy": "zero1", "pipeline": 4}}
    result = sim.run(resolve(cut))
    drawn = trace(result)
    begin = drawn["otherData"]["step_begins_us"]
    events = [e for e in drawn["traceEvents"] if "ts" in e]
    assert begin > 0
    assert min(e["ts"] for e in events) == 0
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert last == pytest.approx(begin + result.step_time_s * 1e6, abs=0.01)
