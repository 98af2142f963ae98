"""GPUs that only a scenario knows: figures beside a GPU of the catalogue, or figures alone."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.errors import UserError
from sim.scenario import Scenario, resolve


def scenario(gpu: Any) -> Scenario:
    return resolve({
        "name": "own", "cluster": {"topology": {"gpu": gpu, "gpus_per_node": 2, "intra": {"kind": "nvswitch"}}},
        "model": {"layers": 2, "hidden": 512, "heads": 8, "vocab": 8192},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}})


@pytest.mark.parametrize(("figures", "like"), [
    ({"tflops": {"bf16": 900}, "memory_bandwidth": "3.2 TB/s"}, "h100-80g-sxm"),
    ({"tflops": {"fp16": 120}, "memory_bandwidth": "900 GB/s"}, "v100-16g-sxm"),
    ({"tflops": {"bf16": 330}}, "a100-40g-sxm"), ({"memory_bandwidth": "310 GB/s"}, "t4"),
])
def test_figures_alone_resemble_the_nearest_of_the_catalogue(figures: dict[str, Any], like: str) -> None:
    result = sim.run(scenario({"name": "mine", "memory": "30 GB", **figures}))
    gpu = result.scenario.cluster.topology.gpu
    assert isinstance(gpu, dict) and gpu["like"] == like
    assert result.gpu == "mine"
    assert result.memory.capacity_bytes < 30e9
    assert any("not calibrated" in text for text in result.warnings)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "h100_80g_sxm", "H100-SXM5"])
def test_spellings(name: str) -> None:
    assert scenario(name).cluster.topology.gpu == "h100-80g-sxm"


@pytest.mark.parametrize("gpu", [{"memory": "80 GB"}, {"tflops": {"bf16": "many"}}, {"memory_bandwidth": "fast"},
                                 {"tflops": {"bf16": True}}, {}])
def test_without_a_figure_to_go_by_it_is_asked_for(gpu: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="needs 'like'"):
        scenario(gpu)


@pytest.mark.parametrize(("gpu", "field", "message"), [
    ({"like": "h100-80g-sxm", "memory": 96}, "cluster.topology.gpu.memory", "too little to be a size"),
    ({"like": "h100-80g-sxm", "tflops": {"bf17": 1}}, "cluster.topology.gpu.tflops.bf17", "not one of"),
    ({"like": "h100-80g-sxm", "memory": "96 GB", "memory_gib": 80}, "cluster.topology.gpu.memory_gib", "said twice")])
def test_faults_of_a_gpus_figures_are_told_where_they_are_written(gpu: dict[str, Any], field: str,
                                                                  message: str) -> None:
    """And not at `cluster.gpu`, where the figures are read."""
    with pytest.raises(UserError) as caught:
        resolve({"name": "t", "cluster": {"topology": {"gpu": gpu, "gpus_per_node": 1}}, "model": {"preset": "gpt2"},
                 "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}})
    (fault,) = caught.value.faults
    assert fault.field == field
    assert message in fault.message
