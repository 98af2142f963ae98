"""Which pictures a sweep gets and what their lines hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sim.report import folder
from sim.report.folder import write_sweep
from sim.report.pictures import style as look
from sim.report.pictures.sweep import Sweep, scales, sweep_digest, sweep_figure, sweeps
from sim.report.readme_picture import differences, terminal
from sim.report.result import Result

Make = Callable[..., Result]


def points_of(result: Result, axes: dict[str, list[Any]], skip: int = -1) -> list[Result]:
    """One point per combination; throughput per GPU falls with the number of GPUs."""
    points = []
    for number, values in enumerate(product(*axes.values())):
        sets = dict(zip(axes, values, strict=True))
        gpus = 8 * sets.get("cluster.nodes", 1)
        speed = gpus * (100.0 - number)
        point = replace(result, set=sets, gpus=gpus, step_time_s=1.0 + number, tokens_per_second=speed)
        if number != skip:
            points.append(point)
    return points


def test_one_axis_is_one_line_in_its_order(result_of: Make) -> None:
    axes = {"cluster.nodes": [4, 1, 2]}
    (sweep,) = sweeps(points_of(result_of(1), axes), axes)
    assert (sweep.axis, sweep.other) == ("cluster.nodes", "")
    assert sweep.lines[0].x == [4.0, 1.0, 2.0]
    assert scales(sweep)


def test_two_axes_are_a_line_per_value_of_the_second(result_of: Make) -> None:
    axes: dict[str, list[Any]] = {"training.recompute": ["none", "full"], "training.micro_batch": [1, 2, 4]}
    (sweep,) = sweeps(points_of(result_of(1), axes, skip=2), axes)
    assert (sweep.axis, sweep.other) == ("training.micro_batch", "training.recompute")
    assert [(line.name, line.x) for line in sweep.lines] == [("recompute none", [1.0, 2.0]),
                                                            ("recompute full", [1.0, 2.0, 4.0])]
    assert not scales(sweep)


def test_further_axes_are_held_one_picture_each(result_of: Make) -> None:
    axes: dict[str, list[Any]] = {"cluster.nodes": [1, 2], "training.recompute": ["none", "full", "selective"],
                                  "parallel.overlap": [True, False], "training.sequence": [1024]}
    found = sweeps(points_of(result_of(1), axes), axes)
    assert [sweep.fixed for sweep in found] == [{"parallel.overlap": True}, {"parallel.overlap": False}]
    assert all(len(sweep.lines) == 3 for sweep in found)


def test_words_on_the_axis_get_places(result_of: Make) -> None:
    axes: dict[str, list[Any]] = {"parallel.strategy": ["ddp", "fsdp", "zero3"]}
    (sweep,) = sweeps(points_of(result_of(1), axes), axes)
    assert not sweep.numeric
    assert sweep.lines[0].x == [0.0, 1.0, 2.0]


def test_values_that_are_mappings_are_told_apart(result_of: Make) -> None:
    axes: dict[str, list[Any]] = {"training.recompute": ["none", {"layers": 4}], "training.micro_batch": [1, 2, 3]}
    (sweep,) = sweeps(points_of(result_of(1), axes), axes)
    assert len(sweep.lines) == 2
    assert all(len(line.points) == 3 for line in sweep.lines)


def test_nothing_to_compare_is_no_picture(result_of: Make) -> None:
    assert sweeps([], {"cluster.nodes": [1, 2]}) == []
    assert sweeps(points_of(result_of(1), {"cluster.nodes": [1]}), {"cluster.nodes": [1]}) == []


@pytest.mark.parametrize(("values", "geometric"), [([1, 2, 4, 8], True), ([1, 2, 3, 4], False), ([0, 2, 4], False),
                                                   (["a", "b", "c"], False)])
def test_powers_are_drawn_as_powers(values: list[Any], geometric: bool) -> None:
    assert Sweep("", "x", values, "", {}, []).geometric is geometric


def test_a_folder_of_a_sweep_holds_its_pictures_and_numbers(result_of: Make, tmp_path: Path) -> None:
    axes: dict[str, list[Any]] = {"cluster.nodes": [1, 2, 4], "training.recompute": ["none", "full"]}
    points = points_of(result_of(1), axes)
    written = write_sweep(tmp_path, points, axes, "text", {"points": []})
    assert [p.name for p in written] == ["report.txt", "result.json", "sweep.png", "scaling.png", "pictures.json",
                                         "index.html"]
    digest = json.loads((tmp_path / "pictures.json").read_text())
    assert digest["scaling.png"]["lines"][0]["gpus"] == [8, 16, 32]
    assert digest["sweep.png"] == json.loads(json.dumps(sweep_digest(sweeps(points, axes)[0])))


def test_a_sweep_of_very_many_pictures_says_what_it_left_out(result_of: Make, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MOST_PICTURES", 1)
    axes: dict[str, list[Any]] = {"training.micro_batch": [1, 2, 3, 4], "training.recompute": ["none", "full"],
                                  "parallel.prefetch.limit": [1, 2, 3]}
    written = write_sweep(tmp_path, points_of(result_of(1), axes), axes, "text", {})
    assert sum(p.suffix == ".png" for p in written) == 1
    assert "left out: 1." in (tmp_path / "index.html").read_text()


def test_a_sweep_without_points_is_reported_without_pictures(tmp_path: Path) -> None:
    written = write_sweep(tmp_path, [], {"cluster.nodes": [1, 2]}, "text", {"points": []})
    assert not any(p.suffix == ".png" for p in written)


def test_stored_data_are_compared_by_value() -> None:
    stored = {"a": [1.0, 2.0], "b": "x", "c": True}
    assert differences(stored, {"a": [1.0 + 1e-9, 2.0], "b": "x", "c": True}) == []
    found = differences(stored, {"a": [1.0, 2.1], "b": "y", "d": 1})
    assert [line.split(":")[0] for line in found] == ["/a/1", "/b", "/c", "/d"]


def test_the_terminals_picture_loads_nothing_and_keeps_its_colours() -> None:
    drawn = terminal("\x1b[1mbold\x1b[0m and \x1b[31mred\x1b[0m")
    assert drawn.startswith("<svg")
    assert "url(http" not in drawn
    assert "@font-face" not in drawn
    assert "#f07167" in drawn


def test_few_whole_numbers_are_the_ticks_and_memory_is_held_against_the_gpu(result_of: Make) -> None:
    axes: dict[str, list[Any]] = {"cluster.nodes": [4, 8, 12, 16]}
    (sweep,) = sweeps(points_of(result_of(1), axes), axes)
    with look.style():
        made = sweep_figure(sweep)
        panels = made.axes
        assert [label.get_text() for label in panels[0].get_xticklabels()] == ["4", "8", "12", "16"]
        titles = [ax.get_title(loc="left") for ax in panels]
    assert titles == ["step time", "tokens per second per GPU", "memory per GPU"]
