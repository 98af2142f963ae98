"""Statistics by hand: small numbers whose mean, percentiles and bias are worked out on paper."""

from __future__ import annotations

from typing import Any

import pytest

from sim.validation.statistics import overall, spread, summarize, worst
from sim.validation.words.table import wrong_verdicts


def record(name: str, step_error: float | None, quality: str | None = None, **more: Any) -> dict[str, Any]:
    """A training record with a step-time error, or an unsupported one."""
    made = {"file": "f.yaml", "id": name, "kind": "training", "quality": quality, "measured": {"step_time_s": 1.0},
            "predicted": {}, "error": {}, "status": "ok", "reason": ""}
    if step_error is None:
        made.update(status="unsupported", reason="why")
    else:
        made.update(predicted={"step_time_s": 1.0 + step_error}, error={"step_time_s": step_error})
    return {**made, **more}


def test_spread_of_signed_errors() -> None:
    figures = spread([0.1, -0.3, 0.2, -0.4], 8)
    assert figures == pytest.approx({"count": 4, "measured": 8, "coverage": 0.5, "mean": 0.25, "median": 0.25,
                                     "p90": 0.37, "worst": 0.4, "bias": -0.1})


def test_spread_of_nothing_has_no_figures() -> None:
    assert spread([], 3)["coverage"] == 0.0
    assert spread([], 0)["coverage"] is None
    assert spread([], 3)["mean"] is None


def test_unsupported_cases_count_against_coverage() -> None:
    summary = summarize([record("a", 0.1), record("b", None), record("c", None, status="failed")])
    assert (summary["cases"], summary["ok"], summary["unsupported"], summary["failed"]) == (3, 1, 1, 1)
    assert summary["coverage"] == summary["step_time"]["coverage"] == pytest.approx(1 / 3)


def test_marked_rows_are_apart() -> None:
    summary = summarize([record("a", 0.1), record("b", 5.0, "outlier")])
    assert summary["step_time"]["worst"] == pytest.approx(0.1)
    assert summary["quality"]["outlier"]["step_time"]["worst"] == pytest.approx(5.0)
    assert summary["cases"] == 1


def test_the_worst_come_first_and_unmarked() -> None:
    records = [record("a", 0.1), record("b", -0.9), record("c", 9.0, "plot"), record("d", 0.5), record("e", None)]
    assert [r["id"] for r in worst(records, 2)] == ["b", "d"]
    assert [w["id"] for w in overall(records)["worst"]] == ["b", "d", "a"]


def test_memory_and_verdicts() -> None:
    right = record("a", 0.0, measured={"peak_allocated_bytes": 10, "oom": False},
                   predicted={"peak_allocated_bytes": 11, "oom": False}, error={"peak_allocated_bytes": 0.1})
    wrong = record("b", 0.0, measured={"oom": True}, predicted={"oom": False}, error={})
    silent = record("c", 0.0, measured={"oom": True}, predicted={"oom": None}, error={})
    summary = summarize([right, wrong, silent])
    assert summary["oom"] == {"right": 1, "wrong": 1, "not_compared": 1}
    assert summary["memory"]["mean"] == pytest.approx(0.1)
    assert summary["step_time"]["measured"] == 0


def test_files_are_summarized_apart_and_together() -> None:
    summary = overall([record("a", 0.1), record("b", 0.3, file="g.yaml")])
    assert summary["files"]["g.yaml"]["step_time"]["mean"] == pytest.approx(0.3)
    assert summary["overall"]["step_time"]["mean"] == pytest.approx(0.2)


def test_rows_and_exact_values() -> None:
    rows = record("a", None, status="ok", rows=[{"error": -0.5}, {"error": 0.1}])
    equal = record("b", None, status="ok", equal={"parameters": True, "traffic": False})
    summary = summarize([rows, equal])
    assert summary["rows"]["mean"] == pytest.approx(0.3)
    assert summary["exact"] == {"compared": 2, "equal": 1, "unequal": 1}


def test_wrong_verdicts_are_listed_with_what_was_needed() -> None:
    def ran(name: str, really: bool, said: bool | None, size: float) -> dict[str, Any]:
        memory = {"peak_allocated_bytes": size * 2**30, "capacity_bytes": 80 * 2**30}
        return record(name, 0.0, measured={"oom": really}, predicted={"oom": said, "memory": memory})

    records = [ran("right", False, False, 40), ran("never fits", False, True, 81.25), ran("fits", True, False, 70),
               ran("not said", True, None, 70), record("no verdict", 0.1)]
    assert wrong_verdicts(records) == [("f", "fits", "ran out", "70.0 GiB", "80.0 GiB"),
                                       ("f", "never fits", "ran", "81.2 GiB", "80.0 GiB")]
