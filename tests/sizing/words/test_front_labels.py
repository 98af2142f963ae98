"""Labels of the picture of the Pareto front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.report.pictures import style as look
from sim.scenario import resolve
from sim.sizing import Choice, Wish, size
from sim.sizing.words.front_picture import _legible, _unit, write_front
from sim.sizing.words.size import layout_of

SMALL: dict[str, Any] = {"name": "small", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 4},
                         "model": {"preset": "gpt2", "layers": 4},
                         "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128}}


@pytest.mark.parametrize(("values", "kept"), [
    ([1.87, 1.88, 3.6, 7.19, 14.3], [1.87, 3.6, 7.19, 14.3]),  # 0.3% of the axis apart
    ([16.0, 32.0, 64.0], [16.0, 32.0, 64.0]), ([5.0], [5.0]), ([], [])])
def test_labels_that_would_lie_on_one_another_are_left_out(values: list[float], kept: list[float]) -> None:
    assert _legible(values) == kept


def test_a_front_of_one_layout_is_drawn_as_the_best_side_by_side(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(look, "save", lambda made, path: texts.extend(t.get_text() for t in made.axes[0].texts))
    found = size(resolve(SMALL), Choice([4], micro_batch=[1, 2], context=[1], partial_recompute=False), top=4)
    found.front = found.best[:1]
    write_front(tmp_path, found)
    assert len(texts) == len(found.best) and layout_of(found.best[0]["set"]) in texts[0] and "GiB" in texts[0]


def test_a_front_on_one_number_of_gpus_is_drawn_as_the_best_side_by_side(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(look, "save", lambda figure, path: made.append(figure))
    found = size(resolve(SMALL), Choice([4], micro_batch=[1, 2], context=[1], partial_recompute=False), top=4)
    found.front = found.best[:2]
    write_front(tmp_path, found)
    (axes,) = made[0].axes
    assert len(axes.texts) == len(found.best) and axes.get_ylim() == (len(found.best) - 0.5, -0.5)


def test_a_search_that_found_nothing_draws_no_empty_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(look, "save", lambda figure, path: made.append(figure))
    found = size(resolve(SMALL), Choice([4], micro_batch=[1], context=[1], partial_recompute=False),
                 Wish(margin_bytes=2**50))
    write_front(tmp_path, found)
    assert not made[0].axes and "No layout does what is asked" in made[0].texts[0].get_text()


def test_costs_that_are_nearly_one_are_drawn_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(look, "save", lambda figure, path: made.append(figure))
    found = size(resolve(SMALL), Choice([4], micro_batch=[1], context=[1], partial_recompute=False), top=4)
    one = found.best[0]
    found.front = [one, {**one, "gpus": 8, "run_s": one["run_s"] / 2, "step_time_s": one["step_time_s"] / 2,
                         "gpu_hours": one["gpu_hours"] * 1.001}]
    write_front(tmp_path, found)
    times, costs = made[0].axes
    assert len(times.get_yticks()) == 2 and len(costs.get_yticks()) == 1
    low, high = costs.get_ylim()
    assert high / low > 1.2  # a thousandth does not fill the axis


@pytest.mark.parametrize(("longest_s", "unit", "one_s"), [
    (86.0, "s", 1.0), (600.0, "minutes", 60.0), (7199.0, "minutes", 60.0), (8 * 3600.0, "hours", 3600.0),
    (3 * 86_400.0, "days", 86_400.0)])
def test_runs_are_told_in_the_unit_that_they_last(longest_s: float, unit: str, one_s: float) -> None:
    assert _unit(longest_s) == (unit, one_s)


def test_a_run_of_hours_is_drawn_in_hours_and_costs_that_lie_apart_have_ticks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(look, "save", lambda figure, path: made.append(figure))
    found = size(resolve(SMALL), Choice([4], micro_batch=[1], context=[1], partial_recompute=False),
                 Wish(steps=1e4, priced=True), top=4)
    found.front = [{**found.best[0], "gpus": gpus, "run_s": hours * 3600.0, "step_time_s": hours, "cost": usd}
                   for gpus, hours, usd in ((8, 8.25, 1650.4), (16, 4.04, 1617.7), (32, 1.99, 1592.3))]
    found.best = found.front[-1:]
    write_front(tmp_path, found)
    costs = made[0].axes[1]
    made[0].canvas.draw()
    assert costs.get_xlabel() == "run, hours" and [text.get_text() for text in costs.get_xticklabels()] == [
        "1.99", "4.04", "8.25"]
    assert [text.get_text() for text in costs.get_yticklabels()] == ["1,592", "1,618", "1,650"]
