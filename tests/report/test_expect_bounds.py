"""Bounds of `expect`, judged on hand-made results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.errors import UserError
from sim.report.expect import Broken, Point, judge
from sim.scenario import Bound

RESULT: dict[str, Any] = {"step_time_s": 2.0, "mfu": 0.5, "bound": "compute", "memory": {"fits": True},
                          "breakdown_s": {"compute": {"gemm": 1.0}}}
PLAIN: list[Point] = [({}, RESULT)]
SWEEP: list[Point] = [({"cluster.nodes": n}, {**RESULT, "step_time_s": 2.0 + 0.1 * n}) for n in (1, 2, 64)]


def broken(bound: Bound, points: list[Point] = PLAIN) -> list[Broken]:
    return judge([bound], points, lambda path: {**RESULT, "step_time_s": 1.6})


@pytest.mark.parametrize(("bound", "allowed"), [
    (Bound("step_time_s", value=2.0), ""),
    (Bound("step_time_s", value=1.95, within=0.05), ""),
    (Bound("step_time_s", value=1.95, within=0.01), "1.95 within 1%"),
    (Bound("step_time_s", value=2.1), "2.1"),
    (Bound("mfu", low=0.5, high=0.5), ""),
    (Bound("mfu", low=0.51), "at least 0.51"),
    (Bound("mfu", high=0.4), "at most 0.4"),
    (Bound("memory.fits", value=True), ""),
    (Bound("memory.fits", value=False), "false"),
    (Bound("bound", value="compute"), ""),
    (Bound("bound", value="host"), "host"),
    (Bound("bound", low=1.0), "at least 1"),
    (Bound("breakdown_s.compute.gemm", value=1), ""),
    (Bound("step_time_s", ratio=1.25, relative_to=Path("other.yaml")), ""),
    (Bound("step_time_s", ratio=1.2, within=0.02, relative_to=Path("other.yaml")), "1.2 within 2%"),
])
def test_one_bound(bound: Bound, allowed: str) -> None:
    assert [b.allowed for b in broken(bound)] == ([allowed] if allowed else [])


def test_a_broken_bound_names_field_prediction_and_what_is_allowed() -> None:
    (one,) = broken(Bound("step_time_s", ratio=1.2, relative_to=Path("folder/other.yaml")))
    assert str(one) == "step_time_s relative to other.yaml: predicted 1.25, allowed 1.2"


def test_a_sweep_is_held_at_every_point_or_where_at_says() -> None:
    assert [b.at for b in broken(Bound("step_time_s", high=2.15), SWEEP)] == ["cluster.nodes=2", "cluster.nodes=64"]
    assert not broken(Bound("step_time_s", high=2.15, at={"cluster.nodes": 1}), SWEEP)


def test_a_point_relative_to_another() -> None:
    bound = Bound("step_time_s", ratio=8.4 / 2.1, relative_to={"cluster.nodes": 1}, at={"cluster.nodes": 64})
    assert not broken(bound, SWEEP)


def test_the_other_file_is_predicted_once() -> None:
    calls: list[Path] = []

    def predict(path: Path) -> dict[str, Any]:
        calls.append(path)
        return RESULT

    bounds = [Bound(f, ratio=1.0, relative_to=Path("other.yaml")) for f in ("step_time_s", "mfu")]
    assert judge(bounds, PLAIN, predict) == []
    assert calls == [Path("other.yaml")]


@pytest.mark.parametrize(("bound", "points", "words"), [
    (Bound("breakdown_s.compute.gem", low=0.0), PLAIN, "did you mean 'gemm'"),
    (Bound("breakdown_s.compute", low=0.0), PLAIN, "a mapping"),
    (Bound("step_time_s", low=0.0, at={"cluster.nodes": 3}), SWEEP, "cluster.nodes=3"),
    (Bound("bound", ratio=1.0, relative_to=Path("x.yaml")), PLAIN, "needs a number"),
])
def test_a_bound_that_cannot_be_judged_is_the_users_fault(bound: Bound, points: list[Point], words: str) -> None:
    with pytest.raises(UserError, match=words):
        broken(bound, points)
