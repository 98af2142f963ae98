"""`overlap: false`: compute and communication take turns, so nothing that moves parameters or gradients is hidden."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.scenario import resolve

WAYS: dict[str, dict[str, Any]] = {
    "fsdp 1": {"parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "fsdp": 1}},
    "fsdp 2": {"parallel": {"strategy": "fsdp"}, "software": {"framework": "torchtitan", "year": 2026}},
    "hybrid": {"parallel": {"strategy": "fsdp", "sharding_factor": 8}, "software": {"framework": "pytorch"}},
    "zero3": {"parallel": {"strategy": "zero3"}, "software": {"framework": "pytorch"}},
    "ddp": {"parallel": {"strategy": "ddp"}, "software": {"framework": "pytorch"}},
}


def run(way: str, overlap: bool, framework: str | None = None, **training: Any) -> Any:
    chosen = WAYS[way] if framework is None else WAYS[way] | {"software": {"framework": framework, "year": 2023}}
    return sim.run(resolve({
        "name": "small", "cluster": {"topology": "dgx-a100-80g", "nodes": 2}, "model": {"preset": "gpt2-large"},
        "training": {"micro_batch": 4, "global_batch": 64, "sequence": 1024, "precision": "mixed-bf16"} | training,
        "parallel": chosen["parallel"] | {"overlap": overlap}, "software": chosen["software"]}))


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_hidden(way: str) -> None:
    together, apart = run(way, True), run(way, False)
    assert apart.step_time_s > 1.02 * together.step_time_s
    for kind, groups in apart.breakdown.communication_json().items():
        for name, times in groups.items():
            assert times["exposed"] > 0.95 * times["total"], (kind, name, times)


@pytest.mark.parametrize("way", ["fsdp 1", "fsdp 2", "zero3"])
def test_kernels_meet_no_contention(way: str) -> None:
    assert run(way, False).breakdown.contention == pytest.approx(0.0, abs=1e-6)
    assert run(way, True).breakdown.contention > 1e-4


@pytest.mark.parametrize("way", ["fsdp 1", "fsdp 2", "zero3"])
def test_it_needs_no_more_memory(way: str) -> None:
    peaks = [run(way, overlap).memory.use.peak_allocated_bytes for overlap in (False, True)]
    assert peaks[0] <= peaks[1]


def test_deepspeed_s_zero3_takes_turns_whatever_is_asked() -> None:
    """The fact `coordinator_hides`, inferred from published steps."""
    together, apart = (run("zero3", overlap, framework="deepspeed") for overlap in (True, False))
    assert together.step_time_s == pytest.approx(apart.step_time_s)
    assert any("takes turns" in text for text in together.warnings)
    assert not any("takes turns" in text for text in apart.warnings)
