"""Times of one layer, published apart from any step: Korthikanti et al. 2022 (arXiv 2205.05198), Table 4, 22B, ms.

Forward and backward together, micro-batches of four over eight A100; from memory. The simulator has no layer to time:
it is what eight more layers add to a step, without what they add to the optimizer's part.
"""

from __future__ import annotations

import pytest

from sim.api import run
from sim.report.result import Result
from sim.scenario import resolve


def step(layers: int, recompute: str, sequence_parallel: bool) -> Result:
    return run(resolve({
        "name": "22B", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "positions": "learned", "norm": "layernorm", "bias": True, "dropout": True,
                  "tied_embeddings": True, "max_positions": 2048, "vocab": 51200, "layers": layers, "hidden": 6144,
                  "heads": 64},
        "training": {"micro_batch": 4, "global_batch": 4, "sequence": 2048, "precision": "megatron-fp16",
                     "optimizer": "adam", "recompute": recompute, "attention": "eager"},
        "parallel": {"strategy": "none", "tensor": 8, "sequence_parallel": sequence_parallel},
        "software": {"framework": "megatron", "year": 2022}}))


@pytest.mark.parametrize(("recompute", "sequence_parallel", "measured_ms"), [
    ("none", False, 19.6), ("none", True, 19.0), ("full", False, 27.2), ("selective", False, 20.9),
    ("selective", True, 20.3)])
def test_a_layer_of_22b_takes_what_was_published(recompute: str, sequence_parallel: bool, measured_ms: float) -> None:
    few, many = (step(layers, recompute, sequence_parallel) for layers in (8, 16))
    seconds = [found.step_time_s - found.to_json()["breakdown_s"]["compute"]["optimizer"] for found in (few, many)]
    assert (seconds[1] - seconds[0]) / 8 * 1e3 == pytest.approx(measured_ms, rel=0.02)
