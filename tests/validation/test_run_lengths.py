"""Published run lengths: every one is predicted, and the report is honest about them."""

from __future__ import annotations

import pytest

from sim.errors import UserError
from sim.validation.runs import markdown, predict, published

RUNS = {run["id"]: run for run in published()}


def test_llama_65b_takes_about_as_long_as_published() -> None:
    found = {one.figure: one for one in predict(RUNS["llama-65b"])}
    # 1.4T tokens at 380 tokens/s on each of 2,048 GPUs are 20.8 days and 1.02M GPU-hours: its figures agree
    assert pytest.approx(found["days"].measured, rel=0.02) == 1.4e12 / 380 / 2048 / 86400
    assert pytest.approx(found["gpu_hours"].measured, rel=0.01) == 1.4e12 / 380 / 3600
    assert found["days"].predicted * 24 * 2048 == pytest.approx(found["gpu_hours"].predicted)
    assert abs(found["gpu_hours"].error) < 0.25  # the layout is assumed: gathers go round 256 nodes


def test_a_rate_and_a_length_err_to_the_same_side() -> None:
    found = {one.figure: one for one in predict(RUNS["llama-65b"])}
    assert found["tokens_per_second_per_gpu"].error == pytest.approx(found["gpu_hours"].error, abs=0.01)


def test_the_worst_stand_first() -> None:
    found = predict(RUNS["llama-65b"]) + predict(RUNS["llama-7b"])
    rows = [line for line in markdown(found).splitlines() if line.startswith("| llama")]
    errors = [abs(float(row.split("|")[5].strip().rstrip("%"))) for row in rows]
    assert len(rows) == 4 and errors == sorted(errors, reverse=True)


def test_unknown_figures_are_refused() -> None:
    with pytest.raises(UserError, match="no such figure"):
        predict({**RUNS["llama-7b"], "measured": {"weeks": 3}})
