"""Axes of which not every value is tried: what stands for what, and what a user asks for by name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.scenario import resolve
from sim.sizing import Choice
from sim.sizing.space.base import alone
from sim.sizing.space.layouts import SCHEDULES, build_space, with_own
from sim.sizing.space.thinned import NUMBERS, Own, chunks, contexts, micro_batches, numbers, stride

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


def test_of_micro_batches_there_is_one_for_each_doubling_and_they_stand_for_all() -> None:
    for share in (960, 48, 30, 105, 7, 1):
        able = [size for size in range(1, share + 1) if share % size == 0]
        found = micro_batches(able, Own(), ())
        tried = [size for size, _ in found]
        assert tried[0] == 1 and tried[-1] == share and sum(alike for _, alike in found) == len(able)
        assert all(after <= 2 * before or able.index(after) == able.index(before) + 1 for before, after in
                   pairwise(tried))
        assert all(after > 2 * before for before, after in zip(tried, tried[2:], strict=False))
    assert [size for size, _ in micro_batches([1, 2, 3, 4, 6, 12], Own(micro_batch=3), ())] == [1, 2, 3, 4, 6, 12]
    assert micro_batches([1, 2, 3, 4, 6, 12], Own(), (3, 5)) == [(3, 1)]


def test_thinned_micro_batches_are_written_as_often_and_of_what_a_schedule_can_order() -> None:
    of = resolve({**DEEP, "training": {**DEEP["training"], "global_batch": 96}}, "")
    axes: dict[str, Any] = {"tensor": [1], "context": [1], "pipeline": [4], "strategies": ["zero1"],
                            "recompute": ["none"], "partial_recompute": False, "schedules": ["1f1b", "interleaved"]}
    some, every = (build_space([alone(of, None)], Choice([8], **axes, micro_batch=sizes))
                   for sizes in ((), range(1, 97)))
    assert some.raw == every.raw and some.stepped and not every.stepped and len(some) < len(every)
    found = {SCHEDULES[number]: set(some.columns["micro_batch"][some.columns["schedule"] == number].tolist())
             for number in np.unique(some.columns["schedule"])}
    # of 48 sequences, and of the 12 that leave each of four stages one
    assert found == {"1f1b": {1, 2, 4, 8, 16, 24, 48}, "interleaved": {1, 2, 4, 6, 12}}


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
