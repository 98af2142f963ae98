"""Memory that a layout holds at least: below what is simulated, and not by much where states decide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.scenario import resolve
from sim.sizing import Choice
from sim.sizing.bounds.steps import bounds
from sim.sizing.search.runner import simulated
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import build_space


def held(choice: Choice, rows: int, seed: int, **fields: Any) -> list[tuple[dict[str, Any], float]]:
    """Of some layouts their fields, and the bound over what is simulated."""
    base = alone(resolve({"name": "x", "parallel": {"strategy": "ddp"}} | fields), None)
    space, plain = build_space([base], choice), following(base)
    bound, found = bounds(space), []
    for row in np.random.default_rng(seed).choice(len(space), min(rows, len(space)), replace=False).tolist():
        got = simulated(("", plain, space.sets(row), choice.gpus[0]))
        assert got.outcome == "ok"
        found.append((space.sets(row), float(bound.memory_bytes[row] / got.device_used_bytes)))
    return found


@pytest.mark.parametrize(("version", "finetune"), [(1, {"method": "full"}), (2, {"method": "full"}),
                                                   (2, {"method": "lora", "rank": 8, "base": "bf16"})])
def test_what_fsdp_s_stages_gather_is_counted(version: int, finetune: dict[str, Any]) -> None:
    """Without the gathers, and the gradients that pile up where passes take turns, a third or less was counted."""
    found = held(
        Choice([16], micro_batch=[1], context=[1], tensor=[1], pipeline=[4], strategies=["fsdp"],
               schedules=["1f1b", "interleaved", "gpipe", "zb-h1"], recompute=["full"], partial_recompute=False), 8, 2,
        model={"preset": "llama-3.2-1b", "tied_embeddings": False}, cluster={"topology": "dgx-h100"},
        software={"framework": "torchtitan", "fsdp": version},
        training={"micro_batch": 1, "global_batch": 64, "sequence": 256, "precision": "pure-bf16",
                  "finetune": finetune})
    for sets, share in found:
        assert share <= 1
        if sets["parallel.schedule"] != "zb-h1":
            assert share > (0.2 if sets["parallel.schedule"] == "gpipe" else 0.42)


@pytest.mark.parametrize("framework", ["pytorch", "deepspeed"])
@pytest.mark.parametrize("precision", ["fsdp-bf16", "amp-bf16", "pure-bf16"])
def test_parameters_of_zero2_are_sharded_and_gathered(framework: str, precision: str) -> None:
    """In DeepSpeed they are whole; elsewhere ZeRO-2 is FSDP that keeps what it gathers, in the gathers' dtype."""
    for _, share in held(
            Choice([8], micro_batch=[1, 2], context=[1], tensor=[1, 2], pipeline=[1], strategies=["zero2"],
                   partial_recompute=False), 6, 3,
            model={"preset": "llama-3.2-3b"}, cluster={"topology": "dgx-h100"}, software={"framework": framework},
            training={"micro_batch": 1, "global_batch": 16, "sequence": 512, "precision": precision}):
        assert 0.41 < share <= 1


@pytest.mark.parametrize(("framework", "strategy", "expert", "least"), [
    ("megatron", "zero1", 8, 0.8), ("megatron", "zero1", 2, 0.75), ("pytorch", "fsdp", 8, 0.5)])
def test_states_of_experts_are_shared_by_fewer_ranks(framework: str, strategy: str, expert: int, least: float) -> None:
    """Eight ranks with an expert each hold its states whole: 18 bytes for each of its 1.4B parameters and more."""
    for sets, share in held(
            Choice([8], micro_batch=[1], context=[1], tensor=[1], pipeline=[1], expert=[expert],
                   strategies=[strategy], recompute=["full"], partial_recompute=False), 4, 4,
            model={"preset": "mixtral-8x7b", "layers": 8}, cluster={"topology": "dgx-h100"},
            software={"framework": framework}, training={
                "micro_batch": 1, "global_batch": 16, "sequence": 512, "precision": "megatron-bf16"}):
        assert least < share <= 1, sets


@pytest.mark.parametrize(("model", "precision"), [({"preset": "llama-3.2-1b", "tied_embeddings": False}, "mixed-bf16"),
                                                  ({"preset": "mixtral-8x7b", "layers": 4}, "megatron-bf16")])
def test_both_holders_of_a_stage_share_its_states(model: dict[str, Any], precision: str) -> None:
    """DualPipe: twice as many ranks hold each stage, and split the states of two stages; as one they were counted a
    fifth above what is simulated, and experts' more."""
    for _, share in held(
            Choice([16], micro_batch=[1], context=[1, 2], tensor=[1, 2], pipeline=[2, 4], strategies=["ddp", "zero1"],
                   schedules=["dualpipe"], recompute=["full"], partial_recompute=False), 10, 4,
            model=model, cluster={"topology": "dgx-a100-80g"}, software={"framework": "megatron"},
            training={"micro_batch": 1, "global_batch": 64, "sequence": 256, "precision": precision}):
        assert 0.5 < share <= 1
