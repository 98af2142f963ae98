"""Numbers of recomputed blocks between those that a space tries, next to the best found."""

from __future__ import annotations

from typing import Any

import pytest

from sim import api
from sim.scenario import resolve
from sim.sizing import Choice, size
from sim.sizing.space.thinned import stride
from sim.sizing.words.size import lines

#: 40 blocks on eight GPUs of 80 GB, whose activations do not fit whole.
#: Searches of one space, over and over: what they simulate is shared.
pytestmark = pytest.mark.usefixtures("once")

FULL: dict[str, Any] = {
    "name": "full", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "llama-2-13b"},
    "training": {"micro_batch": 1, "global_batch": 64, "sequence": 4096, "precision": "fsdp-bf16"},
    "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2024}}
NARROW: dict[str, Any] = {"tensor": [1], "context": [1], "pipeline": [1], "micro_batch": [4], "strategies": ["fsdp"]}


def recomputed(row: dict[str, Any]) -> int:
    found = row["set"]["training.recompute"]
    return int(found["layers"]) if isinstance(found, dict) else {"none": 0, "full": 40}[found]


def test_the_best_is_that_of_trying_every_number() -> None:
    found = size(resolve(FULL, ""), Choice([8], recompute=["none", "full"], **NARROW), top=3)
    best = found.best[0]
    assert recomputed(best) % stride(40), "else the space has it anyway"
    every = {blocks: api.measure(resolve(FULL, "", {**best["set"], "training.recompute": {"layers": blocks}}))
             for blocks in range(recomputed(best) - 4, recomputed(best) + 4)}
    assert best["step_time_s"] == min(one.step_s for one in every.values() if one.step_s is not None)
    assert not all(one.memory.fits for one in every.values()) and found.proven
    assert found.covered == found.impossible + sum(found.pruned.values()) + found.simulated
    assert found.winner is not None and len(found.rows) == found.simulated


@pytest.mark.whole
def test_blocks_alone_are_tried_down_to_the_first() -> None:
    """None of them has a row with fewer blocks below it; one sequence a GPU fits without recomputation."""
    found = size(resolve(FULL, ""), Choice([8], recompute=[], **{**NARROW, "micro_batch": [1]}), top=1)
    assert recomputed(found.best[0]) == 1 < stride(40)


def test_named_policies_alone_stay_alone() -> None:
    found = size(resolve(FULL, ""), Choice([8], recompute=["none", "full"], partial_recompute=False, **NARROW), top=3)
    assert {recomputed(row) for row in found.best} == {40} and found.covered == 2 * 3  # sharded over 2, 4 and 8


def test_every_number_of_gpus_on_the_front_has_the_best_number_of_blocks() -> None:
    found = size(resolve(FULL, ""), Choice([8, 16], recompute=["none", "full"], **NARROW), top=1)
    for gpus in (8, 16):
        row = next(row for row in found.front if row["gpus"] == gpus)
        some = range(max(0, recomputed(row) - stride(40)), recomputed(row) + 1)
        every = [api.measure(resolve(FULL, "", {**row["set"], "training.recompute": {"layers": blocks}}))
                 for blocks in some]
        assert row["step_time_s"] == min(one.step_s for one in every if one.step_s is not None)
    assert any(recomputed(row) % stride(40) for row in found.front if row["gpus"] == 8), "else the space has it anyway"
    assert found.front_proven and "no layout searched beats them" in "\n".join(lines(found))


def test_what_is_listed_first_does_not_depend_on_how_much_is_listed() -> None:
    choice = Choice([8, 16], recompute=["none", "full"], tensor=[1, 2], context=[1], pipeline=[1],
                    micro_batch=[2, 4, 8], strategies=["fsdp", "zero2"])
    found = [size(resolve(FULL, ""), choice, top=top) for top in (1, 2, 3, 5, 12)]
    listed = [[(row["step_time_s"], row["set"]) for row in one.best] for one in found]
    assert all(one.proven for one in found) and any(recomputed(row) % stride(40) for row in found[-1].best)
    assert listed[:-1] == [listed[-1][:len(one)] for one in listed[:-1]]
