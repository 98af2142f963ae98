"""Small decoders on one node, for tests of reports."""

from __future__ import annotations

from typing import Any

from sim.scenario import Scenario, resolve


def small(hidden: int, micro_batch: int, precision: str, strategy: str, **sets: Any) -> Scenario:
    """Eight rotary blocks on eight A100, 64 sequences of 1,024 tokens a step; `sets` are dotted paths on top."""
    return resolve({
        "name": "small", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 8, "hidden": hidden, "heads": 16, "vocab": 32000, "positions": "rotary"},
        "training": {"micro_batch": micro_batch, "global_batch": 64, "sequence": 1024, "precision": precision},
        "parallel": {"strategy": strategy}}, "small", sets)
