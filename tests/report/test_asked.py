"""What is asked for in words and not done is said."""

from __future__ import annotations

from typing import Any

import pytest

from sim.report.asked import algorithm_in_vain, overlap_in_vain
from sim.scenario import Scenario, resolve


def scenario(year: int, **parallel: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": 4},
        "model": {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 8, "vocab": 1024},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128},
        "parallel": {"strategy": "ddp", "pipeline": 2, **parallel},
        "software": {"framework": "megatron", "year": year}})


def test_an_overlap_that_megatron_of_2021_has_not_is_said_to_change_nothing() -> None:
    (said,) = overlap_in_vain(scenario(2021, overlap=True))
    assert "megatron of 2021" in said and "when its pipeline has ended" in said


@pytest.mark.parametrize("other", [
    scenario(2021), scenario(2021, overlap=False), scenario(2024, overlap=True),
    scenario(2021, overlap=True, pipeline=1), scenario(2021, overlap=True, pipeline=4)])
def test_what_is_not_asked_or_done_is_no_news(other: Scenario) -> None:
    assert overlap_in_vain(other) == []


@pytest.mark.parametrize(("topology", "nodes", "algorithm", "said"), [
    ("dgx-a100-80g", 2, "nvls", "needs NVSwitches of Hopper"), ("dgx-h100", 2, "collnet", "is not simulated"),
    ("dgx-h100", 1, "nvls-tree", "and several nodes"), ("dgx-h100", 1, "nvls", ""), ("dgx-h100", 2, "nvls-tree", ""),
    ("dgx-a100-80g", 2, "tree", ""), ("dgx-a100-80g", 2, None, "")])
def test_an_algorithm_that_no_machine_of_the_cluster_runs_is_said_to_change_nothing(
        topology: str, nodes: int, algorithm: str | None, said: str) -> None:
    told = algorithm_in_vain(resolve({
        "name": "x", "cluster": {"topology": topology, "nodes": nodes}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "software": {"nccl": {"algorithm": algorithm}}}))
    assert [said in text for text in told] == ([True] if said else [])
