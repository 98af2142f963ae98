"""Fitting free figures: the solver recovers what it should, groups are really left out, nothing stays changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.software import facts_of, free_figures, profile_names, stack_for, trial
from sim.validation import fit as fitting
from sim.validation.fit import Fit, Row, balanced, chosen, free, solve
from sim.validation.fit_report import at_end, markdown, verdict

pytest.importorskip("scipy")
LOW, HIGH = np.array([0.0, 1.0]), np.array([1.0, 3.0])


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 0.95), st.floats(1.1, 2.9), st.integers(0, 10**6))
def test_the_solver_finds_the_figures_that_made_the_errors(a: float, b: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    slopes = random.normal(size=(40, 2)) * 0.1
    at, truth = np.array([0.5, 2.0]), np.array([a, b])
    errors = slopes @ (at - truth)
    errors[:3] -= 0.6  # rows of another origin
    found = solve(errors, slopes, np.ones(40), at, LOW, HIGH)
    assert found == pytest.approx(truth, abs=0.1)


def test_figures_stay_in_their_ranges() -> None:
    found = solve(np.full(5, -0.2), np.full((5, 2), 0.01), np.ones(5), np.array([0.5, 2.0]), LOW, HIGH)
    assert found == pytest.approx(HIGH, abs=1e-3)


def test_a_large_table_counts_like_its_root() -> None:
    rows = [Row("large", str(i), "c", 1e9, "f") for i in range(16)] + [Row("small", "0", "c", 1e9, "f")]
    weights = balanced(rows)
    assert weights.mean() == pytest.approx(1)
    assert weights[-1] / weights[0] == pytest.approx(4)


def test_every_free_figure_is_estimated_and_within_its_range() -> None:
    for (profile, fact), (value, low, high) in free().items():
        assert low <= value <= high, (profile, fact)
        assert free_figures(profile)[profile, fact].confidence == "estimated"
    for name in profile_names():
        assert len(free_figures(name)) <= 8
        assert all(fact.unit for fact in free_figures(name).values())
    assert ("composer", "host_step_s") in free_figures("composer")
    assert ("pytorch", "host_step_s") not in free_figures("composer")
    assert ("pytorch", "host_forward_s") in free_figures("composer")
    assert free_figures("ideal").keys().isdisjoint({("pytorch", "host_forward_s"), ("pytorch", "host_step_s")})


def test_a_trial_reaches_every_heir_and_leaves_nothing() -> None:
    before = {name: stack_for(name, 2023) for name in profile_names()}
    with trial({("pytorch", "host_forward_s"): 9e-6}):
        assert stack_for("composer", 2023).host_forward_s == stack_for("pytorch", 2023).host_forward_s == 9e-6
        assert stack_for("ideal", 2023).host_forward_s == 0
    assert {name: stack_for(name, 2023) for name in profile_names()} == before
    assert facts_of("pytorch", 2023)["host_forward_s"].value == 7e-6


def test_what_is_left_out_is_not_seen() -> None:
    """Two groups that ask for opposite values: each one's error is what the other's estimate gives it."""
    errors, slopes = np.array([0.02] * 4 + [-0.02] * 4), np.full((8, 1), 0.1)
    at, low, high = np.array([0.5]), np.array([0.0]), np.array([1.0])
    found = fitting._left_out(errors, slopes, np.ones(8), at, low, high, ["a"] * 4 + ["b"] * 4)
    assert found == pytest.approx([0.04] * 4 + [-0.04] * 4, abs=2e-3)


def made(**changes: Any) -> Fit:
    rows = tuple(Row("s", str(i), "c", 1e9, "f") for i in range(4))
    base = Fit((("pytorch", "host_step_s"),), np.array([1e-3]), np.array([0.0]), np.array([1e-2]), np.array([1e-2]),
               rows, np.full(4, -0.05), np.full(4, 0.02), {"source": np.full(4, 0.03), "cluster": np.full(4, 0.04)})
    return replace(base, **changes)


def test_the_report_shows_all_three_and_says_whether_to_take_it() -> None:
    text = markdown(made(), 16)
    assert "| s | 4 | 5.0% / 5.0% | 2.0% / 2.0% | 3.0% / 3.0% | 4.0% / 4.0% |" in text
    assert "| pytorch | host_step_s | 1 ms | 0 µs to 10 ms | 10 ms, the range's end |" in text
    assert at_end(made(), 0) and not at_end(made(found=np.array([5e-3])), 0)
    assert "holds beyond" in verdict(made(found=np.array([5e-3])))
    assert "Not taken all the same: 1 of 1 figures" in verdict(made())
    assert "sources get worse (s)" in verdict(made(found=np.array([5e-3]), after=np.full(4, 0.07)))
    assert "Not taken: with what is left out unseen, the mean error is 6.00% (source)" in verdict(
        made(left_out={"source": np.full(4, 0.06)}))


def test_cases_are_spread_evenly_over_a_source() -> None:
    found = chosen(3)
    count = {case.file: sum(c.file == case.file for c in found) for case in found}
    assert max(count.values()) == 3
    assert all(c.quality is None and "step_time_s" in c.measured for c in found)


def test_slopes_by_difference() -> None:
    slopes = fitting._slopes(lambda x: np.array([2 * x[0], x[0] - 3 * x[1]]), np.array([1.0, 0.5 - 6.0]),
                             np.array([0.5, 2.0]), LOW, HIGH)
    assert slopes == pytest.approx(np.array([[2, 0], [1, -3]]))
