"""ZeRO against DeepSpeed's own code on a driver that does nothing: memory, and every collective of a step.

`data/real_deepspeed.yaml` is what `tests/driver/deepspeed_steps.py` printed (torch 2.3.1, DRIVER_LATE=1).
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from sim import api
from sim.parallel import lower
from sim.program import Kind
from sim.scenario import Scenario, resolve


@cache
def _jobs() -> list[dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "data" / "real_deepspeed.yaml").read_text())


def _scenario(job: dict[str, Any]) -> Scenario:
    zero = job["zero"]
    parallel: dict[str, Any] = {"strategy": f"zero{zero['stage']}" if zero["stage"] else "ddp",
                                "overlap": zero.get("overlap_comm", zero["stage"] == 3)}
    if "reduce_bucket_size" in zero:
        parallel["bucket_mb"] = 2 * zero["reduce_bucket_size"] / 2**20
    if "offload_optimizer" in zero:
        parallel["offload"] = {"optimizer": zero["offload_optimizer"]["device"]}
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": job["world"] // 8},
        "model": {"kind": "decoder", "layers": job["layers"], "hidden": job["hidden"], "heads": job["heads"],
                  "vocab": job["vocab"], "positions": "learned", "norm": "layernorm", "bias": True, "dropout": False,
                  "tied_embeddings": False, "max_positions": job["sequence"]},
        "training": {"micro_batch": job["batch"], "global_batch": job["batch"] * job["micro_steps"] * job["world"],
                     "sequence": job["sequence"], "precision": f"mixed-{job['precision']}",
                     "recompute": job["recompute"], "optimizer": "adamw", "attention": "sdpa"},
        "parallel": parallel,
        "software": {"framework": "deepspeed", "year": 2024, "modules": "plain",
                     "versions": {"torch": "2.3", "deepspeed": job["deepspeed"]}}})


def _calls(of: Scenario) -> dict[str, list[int]]:
    """How many collectives of a kind, and their bytes."""
    program = lower(of).job.programs[0]
    count: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for number, repeats in program.schedule:
        section = program.sections[number]
        for kind, payload in zip(section.kind, section.payload, strict=True):
            if kind == Kind.COLLECTIVE:
                call = program.collectives[payload]
                count[call.kind] += repeats
                moved[call.kind] += repeats * call.size_bytes
    return {kind: [count[kind], moved[kind]] for kind in sorted(count)}


@pytest.mark.parametrize("job", _jobs(), ids=str)
def test_collectives_of_a_step_are_deepspeeds(job: dict[str, Any]) -> None:
    """As many of each kind, and as many bytes but for padding and what a few numbers take."""
    found = _calls(_scenario(job))
    assert {kind: calls for kind, (calls, _) in found.items()} == {
        kind: calls for kind, (calls, _) in job["calls"].items()}
    for kind, (_, size) in job["calls"].items():
        assert found[kind][1] == pytest.approx(size, rel=1e-5, abs=16)


def test_memory_is_what_deepspeed_takes() -> None:
    """A sum over rows takes up to 110 MiB for a moment, which is not counted; reserved bytes hang on which block fits
    best, and on the first step, in which ZeRO-3 gathers without a trace and states come behind other tensors."""
    errors = []
    for job in _jobs():
        memory = api.run(_scenario(job)).to_json(traffic=False)["memory"]
        errors.append((100 * abs(memory["peak_allocated_bytes"] / job["allocated"] - 1),
                       100 * abs(memory["peak_reserved_bytes"] / job["reserved"] - 1)))
    allocated, reserved = zip(*errors, strict=True)
    assert fmean(allocated) < 0.6 and max(allocated) < 1.5, errors
    assert fmean(reserved) < 6.5 and max(reserved) < 22.5, errors
