"""The snapshot is a plain pickle in PyTorch's format, and its books balance."""

from __future__ import annotations

import pickle
import pickletools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import sim
from sim.memory.allocator import Allocator
from sim.memory.tensors import TensorReplay
from sim.report.snapshot import snapshot, write_snapshot
from sim.scenario import resolve

#: What the viewer's reader knows: the opcodes that CPython 3.8 to 3.13 writes for a real snapshot (protocol 4).
OPCODES = {"APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINUNICODE", "EMPTY_DICT",
           "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE",
           "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
ACTIONS = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom"}


def plan(**sets: Any) -> Any:
    return sim.plan_memory(resolve({
        "name": "small", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 4, "hidden": 512, "heads": 8, "vocab": 8192, "positions": "rotary"},
        "training": {"micro_batch": 2, "global_batch": 32, "sequence": 512, "precision": "fsdp-bf16"},
        "parallel": {"strategy": "fsdp"}}, "small", sets))


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise AssertionError(f"{module}.{name} is needed to read the snapshot")


def read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        found = _Plain(file).load()
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("changes", [
    {}, {"parallel.strategy": "ddp", "training.precision": "amp-bf16"},
    {"software.framework": "megatron", "parallel.strategy": "zero1", "parallel.pipeline": 2,
     "training.precision": "megatron-bf16"},
    {"training.mode": {"inference": {"prompt": 8, "generate": 8, "batch": 1}}, "parallel.strategy": "none",
     "cluster.gpus_per_node": 1, "training.global_batch": 2, "training.precision": "pure-bf16"},
], ids=["fsdp", "ddp", "pipeline", "inference"])
def test_events_lead_to_the_segments_at_the_end(changes: dict[str, Any], tmp_path: Path) -> None:
    one = plan(**changes)
    write_snapshot(tmp_path / "s.pickle", one.memory, one.fullest.layers)
    found = read(tmp_path / "s.pickle")
    assert {opcode.name for opcode, _, _ in pickletools.genops((tmp_path / "s.pickle").read_bytes())} <= OPCODES
    assert set(found) == {"segments", "device_traces", "external_annotations", "allocator_settings"}
    (events,) = found["device_traces"]
    assert {event["action"] for event in events} <= ACTIONS
    assert [event["time_us"] for event in events] == sorted({event["time_us"] for event in events})
    live: dict[int, int] = {}
    asked: Counter[int] = Counter()
    segments: dict[int, int] = {}
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert address not in live
            assert any(start <= address and address + size <= start + total for start, total in segments.items())
            live[address] = size
        elif event["action"] == "free_requested":
            asked[address] += 1
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
            asked[address] -= 1
            assert asked[address] == 0
        elif event["action"] == "segment_alloc":
            segments[address] = size
    assert {s["address"]: s["total_size"] for s in found["segments"]} == segments
    blocks = {b["address"]: b for s in found["segments"] for b in s["blocks"]}
    assert {a: b["requested_size"] for a, b in blocks.items() if b["state"] != "inactive"} == live
    for segment in found["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        assert segment["allocated_size"] == sum(b["size"] for b in segment["blocks"]
                                                if b["state"] == "active_allocated")


def test_segments_that_grow_are_told_page_by_page(tmp_path: Path) -> None:
    one = plan(**{"software.allocator": {"expandable_segments": True, "max_split_size_mb": 64}})
    write_snapshot(tmp_path / "s.pickle", one.memory, one.fullest.layers)
    found = read(tmp_path / "s.pickle")
    (events,) = found["device_traces"]
    mapped = sum(event["size"] * {"segment_map": 1, "segment_unmap": -1}.get(event["action"], 0) for event in events)
    assert mapped == sum(s["total_size"] for s in found["segments"]) == one.memory.reserved_bytes > 0
    assert all(s["is_expandable"] and s["allocated_size"] <= s["total_size"] for s in found["segments"])
    told = found["allocator_settings"]
    assert told["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True,max_split_size_mb:64"
    assert told["expandable_segments"] and told["max_split_size"] == 64 * 2**20
    assert one.memory.reserved_bytes < plan().memory.reserved_bytes


def test_recording_changes_nothing() -> None:
    one = plan()
    allocator = Allocator()
    replay = TensorReplay(one.memory.program, allocator)
    replay.construct()
    replay.step()
    replay.step()
    found = snapshot(one.memory.program, one.fullest.layers)
    assert sum(s["total_size"] for s in found["segments"]) == allocator.reserved == allocator.top_reserved
    assert sum(s["allocated_size"] for s in found["segments"]) == allocator.allocated


def test_frames_name_category_operator_layer_phase_and_step() -> None:
    one = plan()
    (events,) = snapshot(one.memory.program, one.fullest.layers)["device_traces"]
    made = [{frame["filename"]: frame["name"] for frame in event["frames"]} for event in events
            if event["action"] == "alloc"]
    assert {"category": "activations", "operator": "qkv", "layer": "block1", "phase": "forward"}.items() <= next(
        frames for frames in made if frames.get("layer") == "block1" and frames.get("operator") == "qkv").items()
    assert {frames["step"] for frames in made} == {"model construction", "first step", "steady step"}
    assert {"parameters", "gathered_parameters", "logits", "optimizer_states"} <= {f.get("category") for f in made}
    states = [f for f in made if f["category"] == "optimizer_states"]
    assert all(f["step"] == "first step" for f in states)  # PyTorch's optimizers are lazy


def test_running_out_of_memory_is_the_last_event() -> None:
    one = plan(**{"training.micro_batch": 4096, "training.global_batch": 8 * 4096})
    assert not one.memory.fits
    (events,) = snapshot(one.memory.program, one.fullest.layers, one.memory.limit_bytes)["device_traces"]
    assert events[-1]["action"] == "oom"
    assert "addr" not in events[-1]
    assert events[-1]["size"] > events[-1]["device_free"]
