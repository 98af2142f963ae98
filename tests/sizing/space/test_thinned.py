"""Axes of which not every value is tried: what stands for what, and what a user asks for by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.scenario import resolve
from sim.sizing import Choice
from sim.sizing.space.base import alone
from sim.sizing.space.layouts import build_space, with_own
from sim.sizing.space.thinned import NUMBERS, Own, chunks, contexts, numbers, stride

#: 96 blocks: 48 on each of two stages.
DEEP: dict[str, Any] = {
    "name": "deep", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt3-175b"},
    "training": {"micro_batch": 1, "global_batch": 64, "sequence": 2048},
    "software": {"framework": "megatron", "year": 2023}}


def test_recomputed_blocks_are_every_eighth_of_ninety_four() -> None:
    assert numbers(94, Own()) == [8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88]
    assert numbers(94, Own(blocks=4)) == [4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88]
    assert numbers(12, Own()) == list(range(1, 12)) and numbers(1, Own()) == numbers(1, Own(blocks=9)) == []


@given(st.integers(1, 400))
def test_there_are_never_more_numbers_than_said_and_none_is_far_from_one(blocks: int) -> None:
    tried = [0, *numbers(blocks, Own()), blocks]
    assert len(tried) - 1 <= NUMBERS and max(np.diff(tried)) <= stride(blocks)


def test_of_chunks_that_are_as_large_the_fewest_stand_for_all() -> None:
    """47 blocks a rank: chunks of 24, 16, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1 blocks at most."""
    found = list(chunks(94, 2, Own(), ()))
    assert [count for count, _ in found] == [2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 47]
    assert sum(alike for _, alike in found) == 47  # of 2 to 48
    assert (9, 1) in list(chunks(94, 2, Own(chunks=9), ()))
    assert list(chunks(94, 2, Own(), (9, 11, 90))) == [(9, 1), (11, 1)] and list(chunks(4, 4, Own(), ())) == []


def test_ranks_of_context_keep_a_flash_kernels_queries_unless_asked_for() -> None:
    degrees = [1, 2, 4, 8, 16, 32, 64]
    assert contexts(degrees, 2048, Own(), ()) == [1, 2, 4, 8, 16]
    assert contexts(degrees, 2048, Own(context=64), ()) == [1, 2, 4, 8, 16, 64]
    assert contexts(degrees, 64, Own(), ()) == [1] and contexts(degrees, 64, Own(), (2, 4, 3)) == [2, 4]


@pytest.mark.parametrize(("changed", "column", "value"), [
    ({"parallel": {"strategy": "zero1", "pipeline": 2, "schedule": "interleaved", "virtual_stages": 9}},
     "virtual_stages", 9), ({"training": {"recompute": {"layers": 5}}}, "recompute", 11)])
def test_what_the_scenario_has_is_tried(changed: dict[str, Any], column: str, value: int) -> None:
    of = resolve({**DEEP, **changed, "training": {**DEEP["training"], **changed.get("training", {})}}, "")
    axes = Choice([8], tensor=[4], context=[1], micro_batch=[1])
    own, other = (build_space([alone(of, None)], with_own(axes, one)) for one in (of, resolve(DEEP, "")))
    assert (own.columns[column] == value).any() and not (other.columns[column] == value).any()
    assert own.raw == other.raw  # as many can be written
