"""Fitting free figures: the solver recovers what it should, groups are really left out, nothing stays changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.software import facts_of, free_figures, profile_names, stack_for, trial
from sim.validation.fit import solver
from sim.validation.fit.fit import Estimate, Fit, chosen, free
from sim.validation.fit.report import (
    beyond,
    error_table,
    judged,
    limit_of,
    markdown,
    short,
    verdict,
    worse_sources,
)
from sim.validation.fit.solver import Problem, at_end, cost, folds, gain, gain_alone, jackknife, solve, weights_of
from sim.validation.fit.trials import Row, sample

pytest.importorskip("scipy")
LOW, HIGH = np.array([0.0, 1.0]), np.array([1.0, 3.0])


def rows(*sources: str) -> tuple[Row, ...]:
    return tuple(Row(s, str(i), "c", 1e9, "f") for i, s in enumerate(sources))


def problem(errors: Any, slopes: Any, sources: str, at: Any = (0.5,), low: Any = (0.0,), high: Any = (1.0,)) -> Problem:
    """Sources by one letter each."""
    start = np.array(at)
    return Problem(np.array(errors), np.array(slopes), start, start, np.array(low), np.array(high), rows(*sources))


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 0.95), st.floats(1.1, 2.9), st.integers(0, 10**6))
def test_the_solver_finds_the_figures_that_made_the_errors(a: float, b: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    slopes = random.normal(size=(100, 2)) * 0.5
    truth = np.array([a, b])
    errors = slopes @ (np.array([0.5, 2.0]) - truth)
    errors[:8] -= 0.6  # rows of another origin
    many = [f"s{i}" for i in range(100)]
    found = solve(Problem(errors, slopes, np.array([0.5, 2.0]), np.array([0.5, 2.0]), LOW, HIGH, rows(*many)))
    assert found == pytest.approx(truth, abs=0.05)


def test_figures_stay_in_their_ranges_and_those_without_say_stay_put() -> None:
    asked = problem(np.full(9, -0.9), [[0.3, 0.0]] * 9, "abcdefghi", (0.5, 2.0), LOW, HIGH)
    assert solve(asked) == pytest.approx([1.0, 2.0], abs=1e-2)


def test_one_row_moves_a_figure_half_way_to_what_it_asks_for() -> None:
    """An error of one scale, and a slope by which a standard deviation of the figure (a quarter of its range) is one
    scale: row and what is known beforehand pull equally."""
    found = solve(problem([-0.003], [[0.12]], "a"))
    assert found == pytest.approx([0.5 + 0.003 / 0.12 / 2], abs=1e-3)


def test_a_large_table_counts_like_its_root() -> None:
    weights = weights_of(rows(*"a" * 16, "b"))
    assert weights[:16].sum() == pytest.approx(4)
    assert weights[16] == 1
    assert cost(np.zeros(17), rows(*"a" * 16, "b")) == 0


def test_every_free_figure_is_a_judgement_within_its_range() -> None:
    for (profile, fact), (value, low, high, unit) in free().items():
        assert low <= value <= high, (profile, fact)
        assert free_figures(profile)[profile, fact].confidence in ("estimated", "inferred")
        assert unit
    for name in profile_names():
        assert len(free_figures(name)) <= 8
    assert ("composer", "host_step_s") in free_figures("composer")
    assert ("pytorch", "host_step_s") not in free_figures("composer")
    assert ("pytorch", "host_forward_s") in free_figures("composer")
    assert ("megatron", "product_rate (year ==2022)") in free_figures("megatron")
    assert not free_figures("ideal")


def test_an_unknown_figure_is_bad_input() -> None:
    assert list(free(["composer.host_step_s"])) == [("composer", "host_step_s")]
    with pytest.raises(UserError, match=r"did you mean 'composer\.host_step_s'"):
        free(["composer.host_step"])


def test_a_trial_reaches_every_heir_and_leaves_nothing() -> None:
    before = {name: stack_for(name, 2023) for name in profile_names()}
    with trial({("pytorch", "host_forward_s"): 9e-6, ("megatron", "product_rate (year ==2022)"): 1.01}):
        assert stack_for("composer", 2023).host_forward_s == stack_for("pytorch", 2023).host_forward_s == 9e-6
        assert stack_for("ideal", 2023).host_forward_s == 0
        assert stack_for("megatron", 2022).product_rate == 1.01
        assert stack_for("megatron", 2021).product_rate == before_of("megatron", 2021)
        assert stack_for("megatron", 2024).product_rate == 1.0
    assert {name: stack_for(name, 2023) for name in profile_names()} == before
    assert facts_of("pytorch", 2023)["host_forward_s"].value == free()["pytorch", "host_forward_s"][0]


def before_of(profile: str, year: int) -> object:
    return facts_of(profile, year)["product_rate"].value


def test_what_is_left_out_is_not_seen() -> None:
    """Two sources that ask for opposite values: each one's figures are what the other asks for."""
    asked = problem([0.02] * 4 + [-0.02] * 4, np.full((8, 1), 0.8), "aaaabbbb")
    found = folds(asked, "source")
    assert found["a"][0].tolist() == [True] * 4 + [False] * 4
    assert found["a"][1][0] > 0.51 and found["b"][1][0] < 0.49
    assert folds(asked, "cluster")["c"][1] == pytest.approx(asked.start)  # nothing is left to learn from


def test_the_gain_is_left_out_and_over_sources() -> None:
    slopes = np.full((6, 1), 0.8)
    agreeing = gain_alone(problem([0.04] * 6, slopes, "abcdef"), 0)
    assert agreeing[0] > 0.02 and agreeing[1] < 0.005
    opposed = gain_alone(problem([0.04, -0.04] * 3, slopes, "abcdef"), 0)
    assert opposed[0] <= 0
    assert gain_alone(problem([0.04] * 6, slopes, "aaaaaa"), 0)[1] == np.inf
    assert gain_alone(problem([0.04] * 6, np.zeros((6, 1)), "abcdef"), 0) == (0.0, np.inf)


def test_the_standard_error_of_a_gain_by_hand() -> None:
    """Falls of 1% and 3% in two sources of one row each: mean 2%, standard error |3 - 1| / 2 = 1%."""
    mean, error = gain(np.array([0.05, -0.05]), np.array([0.04, -0.02]), rows("a", "b"))
    assert (mean, error) == (pytest.approx(0.02), pytest.approx(0.01))


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.array([1.0, 2.0, 4.0, 7.0])
    estimates = [np.array([np.delete(values, i).mean()]) for i in range(4)]
    assert jackknife(estimates) == pytest.approx([values.std(ddof=1) / 2])


def test_one_figure_alone_stands_on_the_others_own_values() -> None:
    asked = replace(problem([0.05, 0.01], [[1.0, 0.0], [0.0, 1.0]], "ab", (0.5, 2.0), LOW, HIGH),
                    at=np.array([0.55, 2.01]))
    alone = asked.only(0)
    assert alone.errors_at(alone.start) == pytest.approx([0.0])
    assert len(alone.rows) == 1
    assert asked.free([1]).errors_at(np.array([2.0])) == pytest.approx([0.0, 0.0])


def test_two_sources_must_agree_far_better_than_eight() -> None:
    assert not solver.sure(0.02, 0.002, 2) and solver.sure(0.02, 0.002, 8)
    assert solver.sure(0.02, 0.007, 8) and not solver.sure(0.02, 0.007, 8, tests=10)
    assert not solver.sure(0.02, 0.0, 1) and not solver.sure(-0.01, 0.0, 8)


def test_an_end_is_judged_in_orders_of_magnitude() -> None:
    assert at_end(1.0e-6, 1e-6, 30e-6) and at_end(29.9e-6, 1e-6, 30e-6)
    assert not at_end(2.0e-6, 1e-6, 30e-6)
    assert at_end(0.01, 0.0, 1.0) and not at_end(0.5, 0.0, 1.0)


def test_a_sample_takes_every_kind_before_it_takes_more_of_one() -> None:
    table = [Row("s", str(i), "c", 1e9, "f", gpus) for i, gpus in enumerate([8, 8, 8, 8, 16, 16, 32])]
    events = [10] * 7
    assert sample(table, events, 3) == [2, 5, 6]
    assert len(sample(table, events, 5)) == 5
    assert sample(table, events, 99) == list(range(7))
    assert 6 not in sample(table, [10] * 6 + [10**9], 99)
    assert len(sample([*table, Row("t", "7", "c", 1e9, "f")], [10] * 8, 1)) == 2


def made(**changes: Any) -> Fit:
    figure = Estimate(("composer", "host_step_s"), "s per optimizer step", 5e-3, 1e-3, 2e-2, 1e-2, 1e-3, 4, 2,
                      0.02, 0.001)
    base = Fit((figure,), rows(*"ssst"), np.full(4, -0.05), np.full(4, 0.02), (0, 2, 3),
               {"source": np.full(3, 0.03), "cluster": np.full(3, 0.04)}, 0.001, {figure.figure: 9e-3},
               np.full(4, 0.02), np.full(3, 0.03), 1, 99)
    return replace(base, **changes)


def test_the_report_shows_all_side_by_side() -> None:
    header, table = error_table(made())
    assert dict(zip(header, table[0], strict=True)) == {
        "source": "s", "runs": "3", "unfitted": "5.0 / 5.0%", "fitted": "2.0 / 2.0%", "recommended": "2.0 / 2.0%",
        "sample": "2", "sample unfitted": "5.0 / 5.0%", "sample fitted": "2.0 / 2.0%",
        "left out: source": "3.0 / 3.0%", "left out: cluster": "4.0 / 4.0%",
        "recommended, source left out": "3.0 / 3.0%", "limit": "–"}
    text = markdown(made())
    assert "| composer.host_step_s | 5 ms | 1 to 20 ms | 10 ms ± 1 ms | 4 / 2 | +2.00% ± 0.10% |" in text
    assert "recommended, source" not in markdown(made(taken={}))


def test_limits_are_one_and_a_half_times_what_is_asked() -> None:
    assert limit_of("llm_foundry_v5_h100") == (pytest.approx(0.03), pytest.approx(0.075))
    assert limit_of("llm_foundry_v1_a100_40g") == (pytest.approx(0.0525), pytest.approx(0.12))
    assert limit_of("nanotron") == (pytest.approx(0.09), None)
    assert limit_of("somebody") is None
    assert beyond(made()) == []
    late = made(rows=rows("nemo", "nemo", "nemo", "t"), left_out={"source": np.full(3, 0.07)})
    assert "nemo (7.0%, limit 6.0%)" in beyond(late)[1]


def test_the_verdict_says_what_to_take_and_what_it_harms() -> None:
    assert "composer.host_step_s = 9 ms" in verdict(made()) and "no source gets worse" in verdict(made())
    harmed = made(taken_left_out=np.array([0.03, 0.03, 0.06]))
    assert worse_sources(harmed) == ["t"]
    assert "but t get worse" in verdict(harmed)
    assert "the profiles keep their values" in verdict(made(taken={}))


def test_what_becomes_of_a_figure() -> None:
    (figure,) = made().estimates
    assert judged(figure) == "recommended" and figure.recommended
    assert judged(replace(figure, found=2e-2)) == "at its range's end"
    assert judged(replace(figure, gain_error=0.009)) == "within noise"
    assert judged(replace(figure, gain=0.0009, gain_error=1e-5)) == "too little to matter"
    assert judged(replace(figure, gain=-0.01)) == "no better"
    assert judged(replace(figure, gain_error=np.inf)) == "one source only"
    assert judged(replace(figure, runs=0)) == "no run"
    assert [short(v, u) for v, u in ((5e-6, "s per call"), (5e-3, "s"), (1.07, "1"), (1e-18, "s"))] == [
        "5 µs", "5 ms", "1.07", "0"]


def test_cases_are_unmarked_step_times() -> None:
    found = chosen(["resnet50", "llm_foundry_v1_a100_40g"])
    assert {case.file for case in found} == {"resnet50.yaml", "llm_foundry_v1_a100_40g.yaml"}
    assert all(c.quality is None and "step_time_s" in c.measured for c in found)
    assert 0.9 < solver.SURE < 1
