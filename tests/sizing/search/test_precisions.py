"""What is looked for of each precision where a search ends early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sizing_once import Once

from sim.scenario import resolve
from sim.sizing import Choice, size
from sim.sizing.bounds.steps import Bounds
from sim.sizing.search.best_first import Found
from sim.sizing.search.nearby import within
from sim.sizing.search.precisions import climb_in, of_each
from sim.sizing.search.ranking import Ranking
from sim.sizing.search.runner import Runner
from sim.sizing.search.store import Store
from sim.sizing.search.workers import Workers
from sim.sizing.space.base import following
from sim.sizing.space.layouts import build_space
from sim.sizing.space.precisions import clusters_of, with_precisions
from sim.sizing.wish import Wish

#: 7B on eight GPUs of 40 GB over data and pipeline ranks: much fits in one precision alone.
TIGHT: dict[str, Any] = {
    "name": "tight", "cluster": {"topology": "dgx-a100-40g"}, "model": {"preset": "llama-2-7b"},
    "training": {"micro_batch": 1, "global_batch": 32, "sequence": 2048, "precision": "amp-bf16"},
    "software": {"framework": "pytorch", "year": 2024, "fsdp": 2}}
CHOICE = Choice([8], context=[1], tensor=[1], pipeline=[1], micro_batch=[1, 2, 4], strategies=["fsdp"],
                precision=["fsdp-bf16"])


@pytest.fixture
def search(once: Once) -> tuple[Any, Ranking, Runner]:
    space = build_space(with_precisions(resolve(TIGHT, ""), [None], CHOICE)[0], CHOICE)
    runner = Runner(space, [following(one) for one in space.clusters], Wish(), Store(None, {}), Workers())
    return space, Ranking(space, Bounds(space), Wish()), runner


def _where(space: Any, **columns: int) -> int:
    found = np.ones(len(space), dtype=bool)
    for name, value in columns.items():
        found &= space.columns[name] == value
    (row,) = np.flatnonzero(found)
    return int(row)


def test_a_layout_that_does_not_fit_in_a_precision_is_tried_with_more_recomputed(
        search: tuple[Any, Ranking, Runner]) -> None:
    space, ranking, runner = search
    row = _where(space, cluster=1, sharding_factor=8, micro_batch=4, recompute=27)  # the first 21 blocks
    (value,) = runner.values([row])
    assert np.isfinite(value)
    result = Found([(value, row)], [row], {row: value}, complete=False)
    own, other = of_each(space, ranking, runner, result, 5, lambda: True, blocks=False)
    assert (own.name, other.name) == ("amp-bf16", "fsdp-bf16") and not own.proven and not other.proven
    assert own.alike is not None and not own.alike.fits and other.best == row
    assert own.best is not None and own.back is not None and own.back.fits and own.best in result.values
    slice_of = {"cluster": 0, "sharding_factor": 8, "micro_batch": 4}
    assert {name: int(space.columns[name][own.best]) for name in slice_of} == slice_of
    assert space.columns["recompute"][own.best] in (33, 3)  # 30 fits and is slow for want of room
    values = [runner.value(one) for one in runner.rows]
    assert runner.value(own.best) < 0.8 * max(value for value in values if np.isfinite(value))
    assert len(runner.rows) <= 10  # the best's layout, its own, and back


def test_the_slower_precision_is_looked_at_as_closely_as_alone(once: Once) -> None:
    """Numbers of recomputed blocks between those of the space, next to the best of each."""
    job = {**TIGHT, "training": {**TIGHT["training"], "sequence": 2048}}
    choice = replace(CHOICE, micro_batch=[2], recompute=["none", "full"])
    found = size(resolve(job, ""), choice, top=3)
    for one in found.precisions:
        training = {**job["training"], "precision": one["precision"]}
        alone = size(resolve({**job, "training": training}, ""), replace(choice, precision=[]), top=1)
        said = {name: value for name, value in one["best"]["set"].items() if name != "training.precision"}
        assert one["proven"] and alone.proven and said == alone.best[0]["set"]
    own, fsdp = (one["best"] for one in found.precisions)
    assert own["step_time_s"] > fsdp["step_time_s"]
    assert own["set"]["training.recompute"] == {"layers": 28}  # of the space are 27 and 30


def test_no_layout_that_is_told_of_beats_the_best(search: tuple[Any, Ranking, Runner]) -> None:
    """A search that ended early had the best of one precision from a layout that it did not try in the other."""
    space, ranking, runner = search
    found = _where(space, cluster=1, sharding_factor=8, micro_batch=2, recompute=3)
    other = _where(space, cluster=0, sharding_factor=8, micro_batch=4, recompute=3)
    better = _where(space, cluster=1, sharding_factor=8, micro_batch=4, recompute=3)
    values = dict(zip((found, other), runner.values([found, other]), strict=True))
    assert values[found] < values[other]
    result = Found(sorted((value, row) for row, value in values.items()), list(values), values, complete=False)
    each = of_each(space, ranking, runner, result, 5, lambda: True, blocks=False)
    assert result.best[0] == (runner.value(better), better) and each[1].best == better
    assert each[0].best is not None and runner.value(each[0].best) <= values[other]
    assert all(one.alike is not None and one.alike.step_time_s >= result.best[0][0] for one in each)
    assert all(one.back is not None and one.back.step_time_s >= result.best[0][0] for one in each)
    rows = [row for _, row in result.best]
    assert len(rows) == len(set(rows))


def test_the_climb_of_a_precision_begins_with_the_best_layouts_of_those_before(
        search: tuple[Any, Ranking, Runner]) -> None:
    space, ranking, runner = search
    kinds = clusters_of(space)
    first = _where(space, cluster=0, sharding_factor=8, micro_batch=1, recompute=3)
    runner.values([first])
    twin = _where(space, cluster=1, sharding_factor=8, micro_batch=1, recompute=3)
    own = _where(space, cluster=0, sharding_factor=4, micro_batch=1, recompute=3)
    climb_in(space, ranking, runner, "fsdp-bf16", kinds["fsdp-bf16"], [own], lambda: True, lambda: True)
    assert set(runner.rows) == {first}  # no time left, and the scenario's own is of the other
    climb_in(space, ranking, runner, "fsdp-bf16", kinds["fsdp-bf16"], [own], lambda: False, lambda: True)
    assert set(runner.rows) == {first, twin}
    climb_in(space, ranking, runner, "amp-bf16", kinds["amp-bf16"], [own], lambda: False, lambda: True)
    assert own in runner.rows
    turns = iter([False, False, True])
    before = set(runner.rows)
    climb_in(space, ranking, runner, "fsdp-bf16", kinds["fsdp-bf16"], [], lambda: False, lambda: next(turns))
    new = set(runner.rows) - before
    assert new and all(space.columns["cluster"][row] == 1 for row in new)  # nothing of another precision


def test_out_of_turn_only_rows_of_the_precision_are_tried() -> None:
    """`Nearby` looks over all axes, and would try another precision's rows, whose steps say nothing of this one."""
    aside = within(lambda found: ([2, 0, 1], np.array([1.0, 2.0, 3.0])), np.array([True, False, True]))
    rows, values = aside(Found())
    assert rows == [2, 0] and values is not None and values.tolist() == [1.0, np.inf, 3.0]
    assert within(lambda found: ([1], None), np.array([True, False]))(Found()) == ([], None)
