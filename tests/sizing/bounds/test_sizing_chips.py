"""Chips of one kind differ, and a job waits for the slowest: bounds know how many there are at least."""

from __future__ import annotations

from sim.scenario import resolve
from sim.sizing import Choice
from sim.sizing.bounds.steps import Bounds, bounds
from sim.sizing.search.runner import simulated
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import Space, build_space

SCENARIO = {"name": "two nodes", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "gpt3-1.3b", "layers": 4},
            "training": {"micro_batch": 1, "global_batch": 64, "sequence": 2048, "precision": "megatron-bf16"},
            "software": {"framework": "megatron", "year": 2024}}


def space_of(*gpus: int) -> Space:
    choice = Choice(gpus, tensor=[1, 8], context=[1], pipeline=[1, 2], micro_batch=[1, 4], schedules=["1f1b"],
                    recompute=["none"], partial_recompute=False)
    return build_space([alone(resolve(SCENARIO, "small"), None)], choice)


def test_tables_are_for_the_fewest_nodes_asked_for() -> None:
    assert [one.cluster.nodes for one in Bounds(space_of(8, 32)).clusters] == [1]
    assert [one.cluster.nodes for one in Bounds(space_of(32)).clusters] == [4]


def test_more_chips_raise_the_bound_which_stays_below_the_step() -> None:
    many, few = space_of(32), space_of(8, 32)
    tight, loose = bounds(many).time_s, bounds(few).time_s[few.gpus == 32]
    assert len(tight) == len(loose) and (tight > loose).any() and (tight >= loose).all()
    plain = following(many.clusters[0])
    for row in range(0, len(many), 5):
        one = simulated(("", plain, many.sets(row), 32))
        assert one.outcome == "ok" and tight[row] <= one.step_time_s
