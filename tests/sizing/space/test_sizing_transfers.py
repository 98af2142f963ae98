"""Transfers between stages beside compute as an axis of the search: only where they make a difference, and the answer
of simulating everything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sizing_once import Once

from sim.scenario import resolve
from sim.sizing import Choice, size
from sim.sizing.bounds.steps import bounds
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import SCHEDULES, build_space
from sim.sizing.space.offloads import both_ways, narrowed, waiting

CHOICE = Choice([8], context=[1], tensor=[1], micro_batch=[1, 2], recompute=["none"],
                partial_recompute=False, schedules=["1f1b", "interleaved", "zb-h1"], pipeline=[1, 2, 4],
                virtual_stages=[1, 2], strategies=["ddp"])


def scenario(framework: str, **changes: Any) -> Any:
    return resolve({"name": "small", "cluster": {"topology": "dgx-a100-80g"},
                    "model": {"preset": "gpt2", "layers": 6, "tied_embeddings": False},
                    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 512, "precision":
                                 "megatron-bf16" if framework == "megatron" else "amp-bf16"},
                    "software": {"framework": framework, "year": 2023}} | changes, "small")


@pytest.mark.parametrize("framework", ["megatron", "pytorch"])
def test_the_answer_is_that_of_simulating_everything(framework: str, once: Once) -> None:
    of = scenario(framework)
    space = build_space(both_ways([alone(of, None)]), CHOICE, partial(narrowed, both=True))
    overlaps = [space.sets(row)["parallel.overlap_p2p"] for row in range(len(space))]
    assert 0 < sum(overlaps) < len(overlaps) / 2
    plain = [following(one) for one in space.clusters]
    outcomes = [once(("", plain[space.columns["cluster"][row]], space.sets(row), 8)) for row in range(len(space))]
    assert {one.outcome for one in outcomes} == {"ok"}
    every = sorted((one.step_time_s, row) for row, one in enumerate(outcomes) if one.fits)
    found = size(of, CHOICE, overlap_p2p=True, top=5)
    assert found.proven and found.covered == len(space)
    assert [row["set"] for row in found.best] == [space.sets(row) for _, row in every[:5]]
    below = bounds(space)
    assert all(below.time_s[row] <= one.step_time_s for row, one in enumerate(outcomes))


def test_only_stages_that_would_wait_are_tried_with_overlap() -> None:
    base = alone(scenario("megatron"), None)
    space = build_space(both_ways([base]), CHOICE, partial(narrowed, both=True))
    overlapped = space.columns["cluster"] == 1
    assert (space.columns["pipeline"][overlapped] > 1).all()
    assert {SCHEDULES[s] for s in space.columns["schedule"][overlapped]} == {"1f1b", "interleaved"}
    assert waiting(base, replace(CHOICE, schedules=["zb-h1"])) is None
    assert waiting(base, replace(CHOICE, pipeline=[1])) is None
    free = waiting(base, replace(CHOICE, pipeline=[]))
    assert free is not None and list(free.pipeline) == list(range(2, 9))


def test_who_does_not_ask_gets_what_the_scenario_says() -> None:
    of = scenario("megatron", parallel={"overlap_p2p": True, "strategy": "ddp", "pipeline": 2})
    few = replace(CHOICE, tensor=[1], micro_batch=[1], recompute=["none"])
    said = build_space([alone(of, None)], few, narrowed)
    assert not any("parallel.overlap_p2p" in said.sets(row) for row in range(len(said)))
    assert said.clusters[0].parallel.overlap_p2p and (said.columns["pipeline"] == 1).any()
