"""What stands behind waiting for offload: bytes each way and the host's own time, by hand."""

from __future__ import annotations

import pytest

import sim
from sim.report.terminal.render import as_text
from sim.scenario.load import resolve
from sim.sizing import compare

OFFLOADED = {
    "name": "offloaded", "cluster": {"topology": "dgx-a100-40g"}, "model": {"preset": "gpt3-1.3b"},
    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 1024, "precision": "mixed-fp16"},
    "parallel": {"strategy": "zero3", "offload": {"optimizer": "cpu"}}, "software": {"framework": "deepspeed"}}


def test_bytes_to_and_from_the_host_are_told_with_what_they_take() -> None:
    kept = {**OFFLOADED, "parallel": {"strategy": "zero3"}}
    plain, result = (sim.run(resolve(one)) for one in (kept, OFFLOADED))
    assert plain.copied is None and result.copied is not None
    shard = result.detail.lowered.architecture.parameters / 8
    # two micro-steps' gradients in 16 bits to the host; back come the first one's, to be added to, and the parameters
    (out, out_s), (back, back_s) = result.copied.ways["d2h"], result.copied.ways["h2d"]
    assert out == pytest.approx(2 * 2 * shard, rel=0.01) and back == pytest.approx(2 * 2 * shard, rel=0.01)
    assert out_s > 0 and back_s > 0 and result.copied.on_cpu_s > 0
    assert "offload: " in as_text(result) and " to the host in " in as_text(result)
    assert result.to_json()["copies"]["d2h"]["bytes"] == out and "copies" not in plain.to_json()
    why = compare([plain, result]).why[0]["offload"]
    assert why == f"nothing outside the GPU -> {result.copied}" and why.endswith(" on the CPU")
