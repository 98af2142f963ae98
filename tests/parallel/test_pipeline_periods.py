"""Action lists written short give the same lists back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.parallel.pipeline.actions import SCHEDULES, TWO_CHUNKS, Action
from sim.parallel.pipeline.orders import order
from sim.parallel.pipeline.periods import Run, expand, periods

ACTIONS = st.builds(Action, st.sampled_from("FBW"), st.integers(0, 2), st.integers(0, 6))
PIECES = st.tuples(st.lists(ACTIONS, min_size=1, max_size=5), st.integers(-1, 3), st.integers(1, 6))


@given(st.lists(PIECES, max_size=4))
def test_expanding_gives_the_list_back(pieces: list[tuple[list[Action], int, int]]) -> None:
    actions = [a._replace(micro=a.micro + 6 + step * i) for pattern, step, repeats in pieces for i in range(repeats)
               for a in pattern]
    runs = periods(actions)
    assert list(expand(runs)) == actions
    assert sum(len(run.pattern) for run in runs) <= len(actions)
    assert all(run.repeats >= 1 for run in runs)


@given(st.lists(ACTIONS, max_size=40))
def test_any_list_comes_back(actions: list[Action]) -> None:
    assert list(expand(periods(actions))) == actions


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_become_short(schedule: str) -> None:
    """What is written does not grow with the number of micro-batches."""
    chunks = 2 if schedule in TWO_CHUNKS else 4 if schedule == "interleaved" else 1
    written = []
    for micro_batches in (64, 128):
        runs = [periods(actions) for actions in order(schedule, 8, chunks, micro_batches)]
        assert [list(expand(own)) for own in runs] == order(schedule, 8, chunks, micro_batches)
        written.append(max(sum(len(run.pattern) for run in own) for own in runs))
    assert written[0] == written[1] <= 100


def test_runs_of_1f1b() -> None:
    """Four forwards, a backward and a forward in turn, four backwards."""
    assert periods(order("1f1b", 4, 1, 16)[0]) == [
        Run((Action("F", 0, 0),), 1, 4), Run((Action("B", 0, 0), Action("F", 0, 4)), 1, 12),
        Run((Action("B", 0, 12),), 1, 4)]
    assert periods([]) == []
