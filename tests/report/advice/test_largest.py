"""The search finds the largest that fits, and what it finds is true of the scenario."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_scenarios import small

from sim.api import memory_of
from sim.report.advice.combined import next_above
from sim.report.advice.largest import largest, search

scenario = partial(small, 2048, 2, "fsdp-bf16", "fsdp")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 400), st.integers(1, 300), st.integers(1, 400))
def test_the_search_finds_the_last_that_fits(last: int, start: int, most: int) -> None:
    asked: list[int] = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= last

    assert search(fits, start, most) == min(last, most)
    assert all(1 <= value <= most for value in asked)
    assert len(asked) < 25


def test_the_first_that_suffices() -> None:
    assert next_above(0, 10, lambda n: n >= 4) == 4
    assert next_above(0, 10, lambda n: False) == 10


@pytest.mark.parametrize("changes", [
    {}, {"training.micro_batch": 64, "training.global_batch": 512},
    {"parallel.strategy": "zero1", "software.framework": "megatron", "parallel.pipeline": 4, "parallel.tensor": 2,
     "training.precision": "megatron-bf16", "training.global_batch": 32},
], ids=["fits", "does not", "pipeline"])
def test_what_is_found_fits_and_the_next_does_not(changes: dict[str, Any]) -> None:
    base = scenario(**changes)
    micro, sequence = largest(base, memory_of)
    steps, replicas = base.micro_steps, base.data_parallel
    assert (micro.field, micro.now, micro.ends) == ("training.micro_batch", base.training.micro_batch, "memory")

    def of(size: int) -> bool:
        return memory_of(scenario(**changes | {
            "training.micro_batch": size, "training.global_batch": size * steps * replicas})).fits

    assert of(micro.value)
    assert not of(micro.value + 1)
    assert (micro.value >= base.training.micro_batch) == memory_of(base).fits
    assert memory_of(scenario(**changes | {"training.sequence": sequence.value})).fits
    assert not memory_of(scenario(**changes | {"training.sequence": sequence.value + sequence.step})).fits


def test_learned_positions_end_a_sequence() -> None:
    found = largest(scenario(**{"model.positions": "learned", "model.max_positions": 1024}), memory_of)[1]
    assert found.value == 1024
    assert "learned positions" in found.ends


def test_a_request_has_sequences_and_a_prompt() -> None:
    mode = {"inference": {"prompt": 128, "generate": 16, "batch": 4}}
    batch, prompt = largest(scenario(**{"training.mode": mode, "parallel.strategy": "none", "cluster.gpus_per_node": 1,
                                        "training.global_batch": 2, "training.precision": "pure-bf16"}), memory_of)
    assert (batch.field, prompt.field) == ("training.mode.inference.batch", "training.mode.inference.prompt")
    assert batch.value > 4
    assert prompt.value > 128
