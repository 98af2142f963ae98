"""Searches whose optimizer is Muon: only layouts that some code runs, and bounds below what is simulated."""

from __future__ import annotations

from typing import Any

import pytest
from sizing_once import Once

from sim.scenario import resolve
from sim.sizing import Choice
from sim.sizing.bounds.steps import bounds
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import STRATEGIES, build_space

SPARSE = {"preset": "mixtral-8x7b", "layers": 4, "hidden": 512, "ffn": 1024, "vocab": 4096, "heads": 8, "kv_heads": 4}
DENSE = {"preset": "llama-3.2-1b", "layers": 4, "hidden": 512, "ffn": 1024, "vocab": 4096, "heads": 8}


@pytest.mark.parametrize(("software", "precision", "model", "strategies", "cut"), [
    ({"framework": "megatron", "year": 2026}, "megatron-bf16", SPARSE, {"none", "ddp", "zero1"}, True),
    ({"framework": "torchtitan", "year": 2026, "versions": {"torchtitan": "0.3"}}, "fsdp-bf16", SPARSE,
     {"zero2", "fsdp"}, False),
    ({"framework": "pytorch", "year": 2026}, "amp-bf16", DENSE, {"ddp"}, False),
])
def test_bounds_of_what_can_be_run(once: Once, software: dict[str, Any], precision: str, model: dict[str, Any],
                                   strategies: set[str], cut: bool) -> None:
    base = alone(resolve({
        "name": "small", "cluster": {"topology": "dgx-a100-80g"}, "model": model, "software": software,
        "training": {"micro_batch": 1, "global_batch": 16, "sequence": 128, "precision": precision,
                     "optimizer": "muon"}}, "small"), None)
    space = build_space([base], Choice([8], recompute=["none"], partial_recompute=False, micro_batch=[1]))
    columns = space.columns
    assert {STRATEGIES[i] for i in columns["strategy"]} == strategies
    assert (columns["tensor"].max() > 1) == cut
    rows = range(0, len(space), max(1, len(space) // 12))
    outcomes = [once(("", following(base), space.sets(row), 8)) for row in rows]
    assert {one.outcome for one in outcomes} == {"ok"}
    below = bounds(space)
    assert all(0 < below.time_s[row] <= one.step_time_s and 0 < below.memory_bytes[row] <= one.device_used_bytes
               for row, one in zip(rows, outcomes, strict=True))
