"""Bounds on the errors: worse fails, better tightens, nothing loosens."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import UserError
from sim.validation import Validation
from sim.validation.regression import broken, load, save, tightened
from sim.validation.report import main, markdown, readme_with

BOUNDS = {"a.yaml": {"coverage": 0.9, "mean": 0.2, "p90": 0.4}}


@pytest.mark.parametrize(("now", "worse"), [
    ({"coverage": 0.9, "mean": 0.2, "p90": 0.4}, 0),
    ({"coverage": 1.0, "mean": 0.1, "p90": 0.3}, 0),
    ({"coverage": 0.9, "mean": 0.2001, "p90": 0.4}, 0),
    ({"coverage": 0.9, "mean": 0.21, "p90": 0.4}, 1),
    ({"coverage": 0.8, "mean": 0.2, "p90": 0.41}, 2),
    ({"coverage": 0.9, "mean": 0.2}, 1),
])
def test_what_counts_as_worse(now: dict[str, float], worse: int) -> None:
    assert len(broken(BOUNDS, {"a.yaml": now})) == worse


def test_a_source_that_vanished_is_worse() -> None:
    assert len(broken(BOUNDS, {})) == 3


def test_tightening_takes_the_better_of_each_figure() -> None:
    now = {"a.yaml": {"coverage": 0.8, "mean": 0.1, "p90": 0.5}, "b.yaml": {"mean": 0.3}}
    assert tightened(BOUNDS, now) == {"a.yaml": {"coverage": 0.9, "mean": 0.1, "p90": 0.4}, "b.yaml": {"mean": 0.3}}


def test_bounds_are_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "bounds.yaml"
    save(path, BOUNDS)
    assert load(path) == BOUNDS
    assert load(tmp_path / "none.yaml") == {}


def test_a_malformed_bounds_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bounds.yaml"
    path.write_text("a.yaml: {mean: low}\n", encoding="utf-8")
    with pytest.raises(UserError, match="is not a mapping"):
        load(path)


def test_the_readme_table_is_renewed_in_place() -> None:
    record = {"file": "a.yaml", "id": "x", "kind": "training", "quality": None, "measured": {"step_time_s": 1.0},
              "predicted": {"step_time_s": 1.1}, "error": {"step_time_s": 0.1}, "status": "ok", "reason": ""}
    readme = "before\n<!-- accuracy:begin (note) -->\nold\n<!-- accuracy:end -->\nafter\n"
    once = readme_with(readme, Validation((), (record,)))
    assert "| a | 1 | 100.0% | 1 | 10.0% |" in once
    assert "old" not in once
    assert once.startswith("before\n<!-- accuracy:begin (note) -->\n")
    assert readme_with(once, Validation((), (record,))) == once
    assert "| a | x | 1 | 1.1 | +10.0% |" in markdown(Validation((), (record,)))


@pytest.mark.parametrize(("mean", "code"), [(0.5, 0), (0.001, 3)])
def test_the_report_holds_the_same_predictions_against_bounds(tmp_path: Path, mean: float, code: int,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    bounds = tmp_path / "bounds.yaml"
    save(bounds, {"megatron_readme_gpt3.yaml": {"mean": mean}, "another.yaml": {"mean": 0.1}})
    source = Path(__file__).parents[2] / "scenarios/published/megatron_readme_gpt3.yaml"
    assert main([str(source), "--out", str(tmp_path), "--readme", str(tmp_path / "none.md"), "--workers", "1",
                 "--bounds", str(bounds)]) == code
    assert ("1 sources within their bounds" in capsys.readouterr().out) == (code == 0)
