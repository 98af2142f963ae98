"""CUDA_DEVICE_MAX_CONNECTIONS: never ignored without a word."""

from __future__ import annotations

from typing import Any

import pytest

from sim.api import run
from sim.report.warned.queues import unusual_queues
from sim.scenario import Scenario, resolve


def scenario(framework: str, tensor: int = 1, **software: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": 256, "heads": 8, "vocab": 1024},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128},
        "parallel": {"strategy": "ddp", "tensor": tensor}, "software": {"framework": framework, **software}})


@pytest.mark.parametrize(("framework", "usual"), [("megatron", 1), ("pytorch", 8), ("deepspeed", 8)])
def test_a_frameworks_own_number_is_no_news(framework: str, usual: int) -> None:
    assert unusual_queues(scenario(framework)) == unusual_queues(scenario(framework, max_connections=usual)) == []


def test_another_number_is_said_to_change_nothing_and_changes_nothing() -> None:
    usual, many = (run(scenario("megatron", 2, **more)) for more in ({}, {"max_connections": 32}))
    assert many.step_time_s == usual.step_time_s
    told = [text for text in many.warnings if "max_connections 32 changes nothing" in text]
    assert len(told) == 1
    assert "behind the products that hide them" in told[0]
    assert not [text for text in usual.warnings if "max_connections" in text]
    assert "behind the products" not in unusual_queues(scenario("pytorch", max_connections=1))[0]
