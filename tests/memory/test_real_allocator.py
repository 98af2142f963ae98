"""Memory against PyTorch's own allocator: torch 2.3.1 (FSDP 2: 2.6.0) on a driver that does nothing (tests/driver)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from sim import api
from sim.scenario import resolve

_STRATEGIES: dict[str, dict[str, Any]] = {
    "one": {"strategy": "none"}, "ddp": {"strategy": "ddp", "reduce_every_micro_step": False},
    "fsdp": {"strategy": "fsdp", "sharding_factor": "full"}, "fsdp2": {"strategy": "fsdp", "sharding_factor": "full"}}
#: Errors in percent, of allocated and reserved bytes: means, and worst. A block whose rest is under a MiB is allocated
#: whole, which is no tensor's, and sums over rows take up to 110 MiB for a moment, which is not counted (small jobs of
#: FSDP 2); reserved bytes hang on which block fits best, so on everything before.
_BOUNDS = {"one": (0.4, 1.2, 1.5, 4.0), "ddp": (0.4, 1.0, 2.2, 6.5), "fsdp": (0.6, 1.6, 4.0, 8.5),
           "fsdp2": (1.0, 8.0, 4.2, 16.0)}


@cache
def _jobs() -> list[dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "data" / "real_allocator.yaml").read_text())


def _errors(job: dict[str, Any]) -> tuple[float, float]:
    kind, world = job["kind"], job.get("world", 1)
    parallel = dict(_STRATEGIES[kind])
    if kind == "ddp":
        parallel["gradient_as_bucket_view"] = job["view"]
    if "reshard" in job:
        parallel["reshard_after_forward"] = job["reshard"]
    precision: Any = job["precision"]
    if "reduce" in job:
        precision = {"name": precision, "reduce": job["reduce"]}
    memory = api.run(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": max(1, world // 8)} if world > 1 else {
            "topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "layers": job["layers"], "hidden": job["hidden"], "heads": job["heads"],
                  "vocab": job["vocab"], "positions": "learned", "norm": "layernorm", "bias": True, "dropout": False,
                  "tied_embeddings": kind in ("one", "ddp"), "max_positions": job["sequence"]},
        "training": {"micro_batch": job["batch"], "global_batch": job["batch"] * job["micro_steps"] * world,
                     "sequence": job["sequence"], "precision": precision, "recompute": job["recompute"],
                     "optimizer": "adamw", "attention": "sdpa"},
        "parallel": parallel,
        "software": {"framework": "pytorch", "year": 2025 if kind == "fsdp2" else 2024,
                     "fsdp": 2 if kind == "fsdp2" else 1, "optimizer_kernel": job["optimizer_kernel"],
                     "versions": {"torch": "2.6" if kind == "fsdp2" else "2.3"}}})).to_json(traffic=False)["memory"]
    return (100 * (memory["peak_allocated_bytes"] / job["allocated"] - 1),
            100 * (memory["peak_reserved_bytes"] / job["reserved"] - 1))


@pytest.mark.parametrize("kind", list(_STRATEGIES))
def test_what_is_allocated_and_reserved_is_what_pytorch_takes(kind: str) -> None:
    found = [_errors(job) for job in _jobs() if job["kind"] == kind]
    assert len(found) >= 10
    allocated, reserved = ([abs(one) for one in column] for column in zip(*found, strict=True))
    mean, worst, mean_reserved, worst_reserved = _BOUNDS[kind]
    assert fmean(allocated) < mean and max(allocated) < worst, found
    assert fmean(reserved) < mean_reserved and max(reserved) < worst_reserved, found
