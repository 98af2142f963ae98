"""The search never gives a different answer than evaluating everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.sizing.search.best_first import search


def exhaustive(values: np.ndarray, top: int) -> list[tuple[float, int]]:
    return sorted((float(v), row) for row, v in enumerate(values) if math.isfinite(v))[:top]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), top=st.integers(1, 12), size=st.sampled_from([1, 7, 300, 6000]),
       round_size=st.sampled_from([1, 3, 8]))
def test_same_answer_as_exhaustive_search_with_ties(seed: int, top: int, size: int, round_size: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 40, size) / 8.0  # many rows of one value
    values[rng.random(size) < 0.3] = math.inf  # do not fit
    known = np.where(np.isfinite(values), values, rng.integers(1, 40, size) / 8.0)
    bounds = known * rng.choice([1.0, 0.9, 0.5], size)  # some are exact
    found = search(bounds, lambda rows: [float(values[r]) for r in rows], top, round_size=round_size)
    assert found.complete and found.best == exhaustive(values, top)
    assert len(found.evaluated) == len(set(found.evaluated))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), top=st.integers(1, 12), size=st.sampled_from([1, 300, 50_000]))
def test_bounds_that_become_finer_on_the_way_change_no_answer(seed: int, top: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 40, size) / 8.0
    values[rng.random(size) < 0.3] = math.inf
    known = np.where(np.isfinite(values), values, rng.integers(1, 40, size) / 8.0)
    fine = np.where(rng.random(size) < 0.2, math.inf, known * rng.choice([1.0, 0.9], size))
    fine = np.where(np.isfinite(values), np.minimum(fine, known), fine)  # only what has no value may be ruled out
    bounds, left = known * 0.4, np.ones(size, dtype=bool)

    def tighten(rows: Sequence[int]) -> np.ndarray | None:
        if not left[list(rows)].any():
            return None
        chosen = left & (bounds <= bounds[list(rows)].max() * 1.3)
        bounds[chosen], left[chosen] = fine[chosen], False
        return bounds

    found = search(bounds.copy(), lambda rows: [float(values[r]) for r in rows], top, tighten=tighten)
    assert found.complete and found.best == exhaustive(values, top)
    assert len(found.evaluated) == len(set(found.evaluated)) and not left[found.evaluated].any()


def test_tight_bounds_leave_most_rows_alone() -> None:
    values = np.linspace(1.0, 2.0, 10_000)
    found = search(values * 0.999, lambda rows: [float(values[r]) for r in rows], 3)
    assert [row for _, row in found.best] == [0, 1, 2]
    assert len(found.evaluated) < 40
    assert found.next_bound > found.best[-1][0]


def test_an_early_stop_says_how_far_off_the_best_may_be() -> None:
    values = np.array([4.0, 3.0, 2.0, 8.0])
    bounds = np.array([1.0, 1.5, 1.6, 1.7])
    calls: list[int] = []
    found = search(bounds, lambda rows: [calls.append(1) or float(values[r]) for r in rows], 1, round_size=1,
                   stop=lambda: len(calls) >= 2)
    assert not found.complete and found.best == [(3.0, 1)]
    assert found.next_bound == 1.6 and found.gap == pytest.approx(1 - 1.6 / 3.0)
    assert found.proven == 0


def test_of_the_best_of_a_search_cut_short_the_first_may_be_proven_alone() -> None:
    values, bounds = np.array([1.5, 3.0, 2.0]), np.array([1.0, 1.1, 1.6])
    calls: list[int] = []
    found = search(bounds, lambda rows: [calls.append(1) or float(values[r]) for r in rows], 3, round_size=1,
                   stop=lambda: len(calls) >= 2)
    assert found.best == [(1.5, 0), (3.0, 1)] and found.gap == 0.0 and found.proven == 1
    whole = search(bounds, lambda rows: [float(values[r]) for r in rows], 3, round_size=1)
    assert whole.complete and whole.proven == 3


def test_rows_ruled_out_are_never_evaluated() -> None:
    found = search(np.array([math.inf, 1.0]), lambda rows: [5.0 for row in rows if row == 1], 2)
    assert found.best == [(5.0, 1)] and found.evaluated == [1]
