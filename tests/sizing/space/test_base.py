"""What every row of a search starts from, and what follows from the row."""

from __future__ import annotations

from typing import Any

import pytest
from sizing_once import Once

from sim.errors import UserError
from sim.scenario import Scenario, resolve
from sim.sizing import Choice, size
from sim.sizing.bounds.steps import bounds
from sim.sizing.search.runner import simulated
from sim.sizing.space.base import alone, following, never_simulated, refused_strategies
from sim.sizing.space.layouts import STRATEGIES, build_space

PLAIN: dict[str, Any] = {
    "name": "small", "cluster": {"topology": "dgx-h100", "nodes": 2}, "model": {"preset": "llama-3-8b"},
    "training": {"micro_batch": 2, "global_batch": 64, "sequence": 1024}}


def row(base: Scenario, **sets: Any) -> Any:
    return resolve(following(base), "", {f"parallel.{name}": value for name, value in sets.items()}).parallel


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_reduced_as_a_rows_strategy_does(strategy: str) -> None:
    base = alone(resolve({**PLAIN, "parallel": {"strategy": strategy}}), None)
    assert base.parallel.reduce_every_micro_step  # what bounds count of strategies that shard gradients
    reduced = {name: row(base, strategy=name).reduce_every_micro_step for name in ("ddp", "zero1", "zero2", "fsdp")}
    assert reduced == {"ddp": False, "zero1": False, "zero2": True, "fsdp": True}


@pytest.mark.parametrize("said", [True, False])
def test_what_was_written_holds_in_every_row(said: bool) -> None:
    base = alone(resolve({**PLAIN, "parallel": {"strategy": "fsdp", "reduce_every_micro_step": said}}), None)
    assert base.parallel.reduce_every_micro_step is said
    assert {row(base, strategy=name).reduce_every_micro_step for name in ("ddp", "fsdp")} == {said}


def test_tensor_ranks_overlap_where_their_stack_does() -> None:
    """Megatron's user buffers of 2024 in 8 bits: whoever cuts the sequence overlaps, unless told not to."""
    job = {**PLAIN, "training": {**PLAIN["training"], "precision": "fp8"},
           "software": {"framework": "megatron", "year": 2024}}
    base = alone(resolve(job), None)
    assert base.parallel.async_tensor
    assert row(base, tensor=2, sequence_parallel=True).async_tensor and not row(base, tensor=2).async_tensor
    told = alone(resolve({**job, "parallel": {"async_tensor": False}}), None)
    assert not row(told, tensor=2, sequence_parallel=True).async_tensor


def test_defaults_follow_the_cluster() -> None:
    """GPUs without bf16 train in fp16; what was written is not changed for them."""
    job = resolve(PLAIN)
    assert job.training.precision.compute == "bf16"
    assert alone(job, "dgx-1v-32g").training.precision.compute == "fp16"
    assert alone(job, None).cluster.nodes == 1


def test_a_batch_said_by_micro_steps_is_kept() -> None:
    job = resolve({**PLAIN, "training": {"micro_batch": 2, "micro_steps": 3, "sequence": 1024}})
    assert alone(job, None).training.global_batch == job.training.global_batch == 96


@pytest.mark.parametrize(("batch", "gpus"), [(4096, 8), (15360, 8), (1_048_576, 1), (35_000, 7), (1000, 5)])
def test_any_batch_has_a_base(batch: int, gpus: int) -> None:
    """Also thousands of sequences, which one node alone would take a million micro-steps for."""
    job = {**PLAIN, "cluster": {"topology": "dgx-h100", "nodes": 2, "gpus_per_node": gpus},
           "training": {**PLAIN["training"], "micro_batch": 1, "global_batch": batch}}
    job["cluster"]["nodes"] = 1 if batch % (2 * gpus) else 2
    assert alone(resolve(job), None).training.global_batch == batch


def test_rows_reshard_to_fewer_ranks_where_those_divide_them() -> None:
    """reshard_after_forward: 4 of the base: taken by FSDP over a multiple of four ranks, off elsewhere."""
    base = alone(resolve({**PLAIN, "parallel": {"strategy": "fsdp", "reshard_after_forward": 4}}), None)
    space, plain = build_space([base], Choice([8], strategies=["ddp", "zero2", "fsdp"], tensor=[1], context=[1],
                                              micro_batch=[1], pipeline=[1, 2], schedules=["1f1b"],
                                              recompute=["none"], partial_recompute=False)), following(base)
    below, taken = bounds(space), []
    for number in range(len(space)):
        sets = space.sets(number)
        asked = sets.get("parallel.reshard_after_forward")
        assert sets["parallel.pipeline"] == 1 or sets["parallel.strategy"] != "fsdp" or asked is False
        if asked == 4:
            taken.append((sets["parallel.strategy"], sets["parallel.sharding_factor"] % 4))
        if number % 2 == 0:
            one = simulated(("", plain, sets, 8))
            assert one.outcome == "ok", (sets, one.reason)
            assert below.time_s[number] <= one.step_time_s and below.memory_bytes[number] <= one.device_used_bytes
    assert set(taken) == {("fsdp", 0)}


def test_what_one_strategy_alone_makes_possible_is_searched_with_it(once: Once) -> None:
    """LoRA's fp32 matrices beside bf16 weights: FSDP's mixed precision brings them together, nothing beside it does."""
    of = resolve({**PLAIN, "model": {"preset": "llama-3-8b", "layers": 4}, "parallel": {"strategy": "fsdp"},
                  "training": {"micro_batch": 1, "global_batch": 32, "sequence": 512, "precision": "fsdp-bf16",
                               "finetune": {"method": "lora", "base": "bf16"}},
                  "software": {"framework": "torchtitan", "year": 2025}})
    base, choice = alone(of, None), Choice([8], context=[1], tensor=[1, 2], pipeline=[1, 2], micro_batch=[1, 2],
                                           recompute=["none", "full"], partial_recompute=False, schedules=["1f1b"])
    assert not never_simulated(base) and refused_strategies(base, STRATEGIES) == {"none", "ddp", "zero1"}
    space, plain = build_space([base], choice), following(base)
    below = bounds(space)
    assert {STRATEGIES[number] for number in space.columns["strategy"]} == {"zero2", "fsdp"}
    for number in range(0, len(space), 3):
        one = once(("", plain, space.sets(number), 8))
        assert one.outcome == "ok", (space.sets(number), one.reason)
        assert below.time_s[number] <= one.step_time_s and below.memory_bytes[number] <= one.device_used_bytes
    found = size(of, choice)
    assert found.proven and found.best and not found.refused
    wide = resolve({**PLAIN, "training": {**PLAIN["training"], "precision": "amp-bf16"}})
    assert not refused_strategies(alone(wide, None), STRATEGIES)


def test_what_no_strategy_makes_possible_is_refused() -> None:
    of = resolve({**PLAIN, "training": {**PLAIN["training"], "precision": "pure-bf16",
                                        "finetune": {"method": "lora", "base": "fp32"}}})
    assert never_simulated(alone(of, None)) and not refused_strategies(alone(of, None), STRATEGIES)
    with pytest.raises(UserError, match="no code is known"):
        size(of, Choice([8]))
