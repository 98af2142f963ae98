"""Pipeline stages against DeepSpeed's own engine on a driver that does nothing: memory, transfers and reductions.

`data/real_deepspeed_pipe.yaml` is what `tests/driver/deepspeed_pipe.py` printed (torch 2.3.1, DRIVER_LATE=1; where
there are tensor ranks, megatron-core 0.8.0's layers), calls counted as (kind, bytes, dtype, how often).
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from sim.memory.ledger import peak
from sim.memory.reserved import fragmentation_bytes
from sim.parallel import lower
from sim.program import Kind, Program
from sim.scenario import resolve

#: What a sum over rows takes for a moment on an A100, which is not counted (sim/memory/README.md).
_SUMS = 108 * 2**20


@cache
def _jobs() -> list[dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "data" / "real_deepspeed_pipe.yaml").read_text())


def _program(job: dict[str, Any]) -> Program:
    tensor, stage = job.get("tensor", 1), job["zero"]["stage"]
    data = job["world"] // job["pipeline"] // tensor
    cut: dict[str, Any] = {"sequence_parallel": False} if tensor > 1 else {}
    lowered = lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": job["world"] // 8},
        "model": {"kind": "decoder", "layers": job["layers"], "hidden": job["hidden"], "heads": job["heads"],
                  "vocab": job["vocab"], "positions": "learned", "norm": "layernorm", "bias": True,
                  "dropout": job.get("dropout", 0) > 0, "tied_embeddings": job["tied"],
                  "max_positions": job["sequence"]},
        "training": {"micro_batch": job["batch"], "global_batch": job["batch"] * job["micro_steps"] * data,
                     "sequence": job["sequence"], "precision": f"mixed-{job['precision']}",
                     "recompute": job["recompute"], "optimizer": "adamw",
                     "attention": "eager" if tensor > 1 else "sdpa"},
        "parallel": {"tensor": tensor, "pipeline": job["pipeline"], "schedule": "1f1b", "overlap": False,
                     "strategy": f"zero{stage}" if stage else "ddp", **cut},
        "software": {"framework": "deepspeed", "year": 2024, **({} if tensor > 1 else {"modules": "plain"}),
                     "versions": {"torch": "2.3", "deepspeed": job["deepspeed"]}}}))
    own = next(one for one in lowered.job.classes if job["rank"] in one.members)
    return lowered.job.programs[own.program]


def _transfers(program: Program) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for number, repeats in program.schedule:
        section = program.sections[number]
        for kind, payload in zip(section.kind, section.payload, strict=True):
            if kind == Kind.COLLECTIVE and program.collectives[payload].kind in ("send", "recv", "all_reduce"):
                call = program.collectives[payload]
                found[call.kind, call.size_bytes] += repeats
    return found


@pytest.mark.parametrize("job", _jobs(), ids=str)
def test_a_stage_passes_on_and_reduces_what_deepspeeds_does(job: dict[str, Any]) -> None:
    """Shapes that go ahead of every share (72 bytes), what tensor ranks sum inside their layers, and what a few numbers
    take are left out; gradients of a stage's own are one call."""
    inside = {size for kind, size, _, number in job["calls"] if kind == "all_reduce" and number > 1}
    real = {(kind, size): number for kind, size, _, number in job["calls"]
            if size > 72 and kind in ("send", "recv", "all_reduce") and not (kind == "all_reduce" and size in inside)}
    found = {key: number for key, number in _transfers(_program(job)).items() if key[1] > 72}
    last = job["rank"] >= job["world"] * 3 // 4
    if last and job["tied"] and not job["zero"]["stage"]:  # its copy of the positions, of which nothing is used
        positions = 2 * job["sequence"] * job["hidden"]
        real = {(kind, size - positions if size == max(s for _, s in real) else size): n
                for (kind, size), n in real.items()}
    assert found == real


def test_what_a_stage_holds_is_what_deepspeeds_does() -> None:
    errors = []
    for job in _jobs():
        program = _program(job)
        height = peak(program).peak_allocated_bytes
        assert job["allocated"] - 1.25 * _SUMS < height < 1.008 * job["allocated"], job
        errors.append(100 * abs((height + fragmentation_bytes(program)) / job["reserved"] - 1))
    assert fmean(errors) < 4.0 and max(errors) < 14.5, errors
