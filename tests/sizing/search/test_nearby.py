"""Layouts near the best found, and the scenario's own layout among the rows of a search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.scenario import Scenario, resolve
from sim.sizing import Choice, Wish, size
from sim.sizing.bounds.steps import Bounds
from sim.sizing.search.best_first import Found, search
from sim.sizing.search.nearby import Nearby, own_row
from sim.sizing.search.ranking import Ranking
from sim.sizing.space.base import alone
from sim.sizing.space.layouts import STRATEGIES, Space, build_space
from sim.sizing.wish import priced

SMALL: dict[str, Any] = {
    "name": "small", "cluster": {"topology": "dgx-a100-80g", "nodes": 2}, "model": {"preset": "llama-7b"},
    "training": {"micro_batch": 1, "global_batch": 32, "sequence": 1024}, "software": {"framework": "megatron"}}


def scenario(training: dict[str, Any] | None = None, **parallel: Any) -> Scenario:
    return resolve({**SMALL, "training": {**SMALL["training"], **(training or {})}, "parallel": parallel}, "")


def space_of(of: Scenario) -> Space:
    return build_space([alone(of, None)], Choice([8, 16], context=[1]))


@pytest.mark.parametrize(("training", "parallel"), [
    ({}, {"strategy": "ddp"}),
    ({"micro_batch": 2, "recompute": {"layers": 3}}, {"strategy": "zero1", "tensor": 2, "sequence_parallel": True}),
    ({"recompute": {"layers": 8}},
     {"strategy": "zero1", "pipeline": 4, "schedule": "interleaved", "virtual_stages": 2}),
    ({"recompute": "full"}, {"strategy": "fsdp", "sharding_factor": 4}),
    ({}, {"strategy": "none", "tensor": 8, "pipeline": 2, "schedule": "1f1b"}),
])
def test_the_scenarios_own_layout_is_found_among_the_rows(training: dict[str, Any], parallel: dict[str, Any]) -> None:
    of = scenario(training, **parallel)
    space = space_of(of)
    row = own_row(space, of)
    assert row is not None
    sets = space.sets(row)
    assert sets["cluster.nodes"] == 2 and sets["training.micro_batch"] == of.training.micro_batch
    for name in ("tensor", "pipeline", "strategy", "virtual_stages"):
        assert sets[f"parallel.{name}"] == getattr(of.parallel, name), name
    if parallel.get("pipeline") == 4:  # eight blocks of eight are all of a stage's
        assert sets["training.recompute"] == "full"


def test_zero3_is_found_as_what_it_equals_and_what_is_not_covered_is_not_found() -> None:
    of = resolve({**SMALL, "software": {"framework": "pytorch"}, "parallel": {"strategy": "zero3"}}, "")
    space = space_of(of)
    row = own_row(space, of)
    assert row is not None and STRATEGIES[space.columns["strategy"][row]] == "fsdp"
    assert space.columns["sharding_factor"][row] == 16
    assert own_row(build_space([alone(of, None)], Choice([8])), of) is None
    other = resolve({**SMALL, "cluster": {"topology": "dgx-h100", "nodes": 2}}, "")
    assert own_row(space, other) is None
    named = scenario({"recompute": {"modules": ["mlp"]}}, strategy="zero1")
    assert own_row(space_of(named), named) is None


def around_own() -> tuple[Space, Ranking, Nearby, int, Found]:
    """A space, and the search around the scenario's own row, which has taken three times its bound."""
    of = scenario(strategy="zero1")
    space = space_of(of)
    wish, _ = priced(Wish(), [alone(of, None)], None)
    ranking = Ranking(space, Bounds(space), wish)
    best = own_row(space, of)
    assert best is not None
    found = Found(best=[(float(ranking.values[best]) * 3, best)], values={best: 1.0})
    return space, ranking, Nearby(space, ranking), best, found


def test_rows_near_the_best_differ_in_one_thing_until_none_is_left_that_could_be_better() -> None:
    """And in what they recompute, which changes with any other where that takes too much room."""
    space, ranking, near, best, found = around_own()
    own = space.sets(best)
    together = [("parallel.tensor", "parallel.sequence_parallel"),
                ("parallel.pipeline", "parallel.virtual_stages", "parallel.schedule",
                 "parallel.reshard_after_forward")]
    kinds, seen = set(), 0
    while True:
        rows, _ = near(found)
        apart = [frozenset(next((names for names in together if name in names), (name,))
                           for name, value in space.sets(row).items() if own.get(name, value) != value
                           and name != "parallel.sharding_factor")  # it follows the ranks that are left
                 for row in rows]
        apart = [one - {("training.recompute",)} or one for one in apart]
        if not rows or any(len(one) > 1 for one in apart):
            break
        assert len(set(apart)) == len(rows) <= 8 and not set(rows) & set(found.values)
        assert all(ranking.values[row] < found.best[0][0] and not ranking.of.coarse[row] for row in rows)
        kinds |= set(apart)
        seen += len(rows)
        found.values |= dict.fromkeys(rows, 2.0)
    assert seen > 20 and len(kinds) >= 5
    assert all(len(one) == 2 for one in apart)  # then two things at once


def test_once_one_did_not_fit_only_what_holds_less_is_tried_of_its_axis() -> None:
    space, ranking, near, best, found = around_own()
    last: dict[int, float] = {}
    sizes, names = space.columns["micro_batch"], [name for name in space.columns if name not in (
        "micro_batch", "recompute")]
    for _ in range(6):
        rows, _ = near(found)
        mine = [row for row in rows if sizes[row] != sizes[best] and all(
            space.columns[name][row] == space.columns[name][best] for name in names)]
        for row in mine:
            held = float(ranking.of.memory_bytes[row])
            assert held < min(last.values(), default=np.inf)
            last[row] = held
        found.values |= dict.fromkeys(rows, float("inf"))
    assert len(last) > 2 and len({int(space.columns["recompute"][row]) for row in last}) > 1


def test_rows_out_of_turn_are_found_early_and_change_no_answer() -> None:
    rng = np.random.default_rng(5)
    bounds, values = np.linspace(1.0, 1.5, 3000), rng.uniform(3.0, 9.0, 3000)
    values[2500] = 2.0

    def turn(rows: list[int]) -> list[float]:
        return [float(values[row]) for row in rows]

    def aside(found: Found) -> tuple[list[int], np.ndarray | None]:
        return [row for row in range(2495, 2505) if row not in found.values][:3], bounds

    plain = search(bounds, turn, 3)
    found = search(bounds, turn, 3, first=[77], aside=aside)
    assert found.complete and plain.best == found.best
    assert found.evaluated[0] == 77 and found.evaluated.index(2500) < 70 < plain.evaluated.index(2500)
    assert sorted(found.evaluated) == sorted(plain.evaluated) == list(range(3000))


@pytest.mark.whole
def test_a_search_reports_the_scenarios_own_layout() -> None:
    of = resolve({**SMALL, "model": {"preset": "gpt2"}, "parallel": {"strategy": "ddp"}}, "")
    found = size(of, Choice([16], context=[1], tensor=[1], pipeline=[1]), Wish())
    assert found.own is not None and found.own["outcome"] == "ok" and found.own["gpus"] == 16
    assert found.own["step_time_s"] >= found.best[0]["step_time_s"]
    assert found.to_json()["own"] == found.own and found.own in found.rows
    assert size(of, Choice([8], context=[1], tensor=[1], pipeline=[1]), Wish()).own is None
