"""Bytes per parameter of the named precisions, and steps that end at the level they began with."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.api import memory_of
from sim.scenario import resolve

#: Parameters, gradients, AdamW's states and master copy, bytes per parameter.
PER_PARAMETER = {
    "fp32": 16, "tf32": 16, "amp-fp16": 16, "amp-bf16": 16, "fsdp-bf16": 16, "fsdp-fp16": 16, "mixed-fp16": 16,
    "mixed-bf16": 16, "megatron-bf16": 18, "megatron-fp16": 16, "pure-bf16": 8, "pure-fp16": 8, "fp8": 18,
}
STATES = ("parameters", "gradients", "optimizer_states", "master_parameters")
SMALL = {"layers": 2, "hidden": 512, "heads": 8, "vocab": 8192}
FRAMEWORKS = ("pytorch", "megatron", "deepspeed", "composer", "torchtitan", "nanotron")


def scenario(model: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    training = {"micro_batch": 1, "micro_steps": 1, "sequence": 512} | parts.pop("training", {})
    cluster = {"topology": "single-h100-80g-sxm"} | parts.pop("cluster", {})
    return {"name": "small", "cluster": cluster, "model": model or SMALL, "training": training, **parts}


@pytest.mark.parametrize("framework", ["pytorch", "megatron", "ideal"])
@pytest.mark.parametrize("precision", PER_PARAMETER)
def test_model_states_take_the_bytes_of_the_precision(precision: str, framework: str) -> None:
    plan = sim.plan_memory(resolve(scenario(training={"precision": precision}, software={"framework": framework})))
    held = plan.stages[0].memory.to_json()["phases"]["optimizer_step"]
    numel = plan.lowered.architecture.parameters
    assert sum(held[name] for name in STATES) / numel == pytest.approx(PER_PARAMETER[precision], rel=0.01)


@pytest.mark.parametrize("precision", ["amp-bf16", "mixed-bf16", "fp32"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_encoders_step_ends_where_it_began(framework: str, precision: str) -> None:
    use = memory_of(resolve(scenario(SMALL | {"kind": "encoder"}, training={"precision": precision},
                                     software={"framework": framework}))).use
    assert use.steady, use.net_bytes


@pytest.mark.parametrize("layout", [{}, {"schedule": "gpipe"}, {"schedule": "zb-v"}, {"virtual_stages": 2},
                                    {"strategy": "fsdp"}])
def test_a_stage_lets_go_of_what_hugging_faces_forward_held(layout: dict[str, Any]) -> None:
    decoder = SMALL | {"layers": 8, "positions": "rotary", "norm": "rmsnorm", "gated_mlp": True, "bias": False,
                       "tied_embeddings": False}
    result = sim.run(resolve(scenario(
        decoder, cluster={"topology": "dgx-a100-80g"}, training={"micro_steps": 8, "precision": "mixed-bf16"},
        parallel={"pipeline": 4} | layout, software={"modules": "transformers"})))
    assert result.memory.use.steady, result.memory.use.net_bytes
