"""Offload as an axis of the search: only what techniques have code for, and the answer of simulating everything."""

from __future__ import annotations

from typing import Any

import pytest

from sim.cli_sizing import _size_lines
from sim.errors import UserError
from sim.scenario import resolve
from sim.scenario.dump import dump
from sim.sizing import Choice, size
from sim.sizing.bounds import bounds
from sim.sizing.offloads import OFFLOADS, narrowed, variants
from sim.sizing.runner import simulated
from sim.sizing.size import _alone
from sim.sizing.space import STRATEGIES, Space, build_space

CHOICE = Choice([8], context=[1], tensor=[1, 2], micro_batch=[1, 2], recompute=["none", "full"],
                partial_recompute=False, schedules=["1f1b"], pipeline=[1, 2])


def scenario(framework: str, **model: Any) -> Any:
    return resolve({"name": "small", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"} | model,
                    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 512, "precision":
                                 "mixed-bf16" if framework == "deepspeed" else "fsdp-bf16"},
                    "software": {"framework": framework, "year": 2023}}, "small")


def spread(framework: str, **model: Any) -> Space:
    return build_space(variants([_alone(scenario(framework, **model), None)], list(OFFLOADS)), CHOICE, narrowed)


@pytest.mark.parametrize("framework", ["pytorch", "deepspeed"])
def test_the_answer_is_that_of_simulating_everything(framework: str) -> None:
    space = spread(framework, layers=4)
    plain = [dump(one) for one in space.clusters]
    outcomes = [simulated(("", plain[space.columns["cluster"][row]], space.sets(row), 8)) for row in range(len(space))]
    assert {one.outcome for one in outcomes} == {"ok"}  # nothing that a technique refuses
    every = sorted((one.step_time_s, row) for row, one in enumerate(outcomes) if one.fits)
    found = size(scenario(framework, layers=4), CHOICE, offload=list(OFFLOADS), top=5)
    assert found.proven and found.covered == len(space)
    assert [row["set"] for row in found.best] == [space.sets(row) for _, row in every[:5]]
    below = bounds(space)
    assert all(below.time_s[row] <= one.step_time_s and below.memory_bytes[row] <= one.device_used_bytes
               for row, one in enumerate(outcomes))


def test_each_technique_keeps_outside_what_it_has_code_for() -> None:
    for framework, states, optimizer in (("pytorch", {"zero2", "fsdp"}, set()), ("deepspeed", {"zero3", "fsdp"},
                                                                        {"zero1", "zero2", "zero3"})):
        space = spread(framework, layers=4)
        places = {name: {STRATEGIES[s] for s, c in zip(space.columns["strategy"], space.columns["cluster"],
                                                      strict=True) if c == number}
                  for number, name in enumerate(OFFLOADS)}
        assert places["states"] == places["everything"] == states
        assert places["optimizer"] == optimizer
        assert "ddp" in places["activations"]
        outside = space.columns["cluster"] > 0
        assert (space.columns["pipeline"][outside] == 1).all() and (space.columns["pipeline"] == 2).any()


def test_one_place_says_nothing_of_it_and_a_wrong_one_is_named() -> None:
    base = _alone(scenario("pytorch"), None)
    assert not any("offload" in name for name in build_space([base], CHOICE, narrowed).sets(0))
    with pytest.raises(UserError) as caught:
        variants([base], ["state"])
    assert caught.value.faults[0].field == "--offload" and "states" in str(caught.value)


def test_what_a_framework_keeps_nowhere_else_is_refused_by_name() -> None:
    with pytest.raises(UserError) as caught:
        size(scenario("pytorch"), CHOICE, offload=["optimizer"])
    assert caught.value.faults[0].field == "--offload" and "optimizer" in str(caught.value)


def test_a_place_without_code_in_a_list_is_named() -> None:
    """FSDP has no optimizer on the CPU of its own: `states` is tried, `optimizer` is not, and both are said."""
    one = Choice([8], context=[1], tensor=[1], micro_batch=[1], recompute=["none"], partial_recompute=False,
                 schedules=["1f1b"], pipeline=[1], strategies=["fsdp"])
    found = size(scenario("pytorch", layers=2), one, offload=["none", "optimizer", "states"], top=1)
    assert found.not_offloaded == found.to_json()["not_offloaded"] == ["optimizer"]
    first = next(_size_lines(found))
    assert first.startswith("not tried: --offload optimizer, which nothing of this framework keeps on the host")
    assert {row["set"]["parallel.offload.optimizer"] for row in found.rows} <= {"none", "cpu"}
    whole = size(scenario("pytorch", layers=2), one, offload=["none", "states"], top=1)
    assert whole.not_offloaded == [] and [row["set"] for row in whole.rows] == [row["set"] for row in found.rows]
    assert not next(_size_lines(whole)).startswith("not tried")
