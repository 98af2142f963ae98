"""Memory against torchtitan's own model and parallelisms, on a driver that does nothing (tests/driver)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sim import api
from sim.scenario import resolve

_JOBS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "data" / "real_torchtitan.yaml").read_text())


def _memory(job: dict[str, Any]) -> dict[str, Any]:
    ranks = job["tensor"] * job["data"]
    cut = {"tensor": job["tensor"], "sequence_parallel": True} if job["tensor"] > 1 else {}
    sizes = {"layers": job["layers"]} | ({"vocab": job["vocab"]} if "vocab" in job else {})
    return api.run(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": ranks // 8, "gpu": {"memory": "400 GiB"}},
        "model": {"preset": job["model"], **sizes},
        "training": {"micro_batch": job["micro_batch"], "global_batch": job["micro_batch"] * job["data"],
                     "sequence": 8192, "precision": "fsdp-bf16", "optimizer": "adamw", "recompute": job["recompute"],
                     "attention": "flash"},
        "parallel": {"strategy": "fsdp", **cut},
        "software": {"framework": "torchtitan", "year": 2025, "fsdp": 2, "optimizer_kernel": "fused",
                     "compile": job.get("compile", False),
                     "versions": {"torch": "2.6", "torchtitan": "0.0.2" if job.get("loss") == "eager" else "0.1"}},
    })).to_json(traffic=False)["memory"]


@pytest.mark.parametrize("job", _JOBS, ids=lambda job: "-".join(str(value) for value in job.values()))
def test_what_is_allocated_is_what_torchtitan_takes(job: dict[str, Any]) -> None:
    """To 0.03% where the loss has the peak; 0.2 to 1.9% where a compiled block has it."""
    memory = _memory(job)
    near = 0.02 if "vocab" in job else 3e-4
    assert memory["peak_allocated_bytes"] / 2**30 == pytest.approx(job["allocated"], rel=near)
    assert memory["peak_reserved_bytes"] / 2**30 == pytest.approx(job["reserved"], rel=0.06)
