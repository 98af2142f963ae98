"""The picture of a pipeline: what it shows, what it leaves out where there is no room, that it is the same twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.parallel.pipeline.actions import Costs, places, split
from sim.parallel.pipeline.evaluate import durations, evaluate
from sim.parallel.pipeline.orders import order
from sim.report.pictures import style as look
from sim.report.pictures.pipeline import Boxes, bubble_share, colour, pipeline_figure

MS = 1e-3


def boxes_of(schedule: str, pipeline: int, virtual: int, micro_batches: int) -> Boxes:
    """The schedule with 1 ms for every action."""
    costs = Costs(MS, MS, MS)
    orders = order(schedule, pipeline, virtual, micro_batches, costs)
    ends = evaluate(orders, places(schedule, pipeline, virtual), costs)
    takes = durations(costs, split(schedule))
    rows = [(rank, action.kind, action.chunk, action.micro, end - takes[action.kind], end)
            for rank, (actions, own) in enumerate(zip(orders, ends, strict=True))
            for action, end in zip(actions, own, strict=True)]
    stage, kind, chunk, micro, start, end = zip(*rows, strict=True)
    return Boxes(np.array(stage), np.array(kind), np.array(chunk), np.array(micro), np.array(start), np.array(end))


def test_bubbles_are_the_white_of_the_picture() -> None:
    """(p - 1) / (m + p - 1) of 1F1B; without waiting for each other at the end ZB-H2 has none."""
    assert bubble_share(boxes_of("1f1b", 4, 1, 8)) == pytest.approx(3 / 11)
    assert bubble_share(boxes_of("interleaved", 4, 2, 8)) == pytest.approx(1.5 / 9.5)
    assert bubble_share(boxes_of("zb-h2", 4, 1, 8), 24 * MS) == pytest.approx(0.0, abs=1e-12)
    assert bubble_share(boxes_of("1f1b", 1, 1, 3)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("case", "titles", "legend"), [
    (("1f1b", 4, 1, 8), [""], ["forward", "backward"]),
    (("zb-h1", 4, 1, 8), [""], ["forward", "input gradients", "weight gradients"]),
    (("interleaved", 2, 4, 2), [""],
     ["forward, chunk 0", "forward, chunk 3", "backward, chunk 0", "backward, chunk 3"]),
    (("zb-2p", 8, 1, 24), ["first half", "second half"], ["forward", "input gradients", "weight gradients"]),
    (("1f1b", 8, 1, 64), ["the whole step", "the pipeline fills", "the pipeline empties"], ["forward", "backward"]),
    (("1f1b", 32, 1, 64), [""], ["forward", "backward"])])
def test_panels_and_legend(case: tuple[str, int, int, int], titles: list[str], legend: list[str]) -> None:
    """Numbers that do not fit get panels of their own, but for more stages than a panel can name."""
    with look.style():
        made = pipeline_figure("a pipeline", boxes_of(*case), f"{case[3]} micro-batches")
    assert [ax.get_title(loc="left") for ax in made.axes] == titles
    assert [text.get_text() for text in made.legends[0].get_texts()] == legend
    assert len({ax.get_ylim() for ax in made.axes}) == 1


def test_all_panels_are_in_the_unit_of_the_whole_step() -> None:
    boxes = boxes_of("1f1b", 8, 1, 64)
    slow = replace(boxes, start_s=20 * boxes.start_s, end_s=20 * boxes.end_s)  # 2.8 s, and parts of less than one
    with look.style():
        made = pipeline_figure("a pipeline", slow)
    assert [ax.get_title(loc="right") for ax in made.axes] == ["s", "s", "s"]
    assert made.axes[1].get_xlim()[1] < 2 < made.axes[0].get_xlim()[1]


def test_every_micro_batch_is_numbered_from_one() -> None:
    with look.style():
        (ax,) = pipeline_figure("a pipeline", boxes_of("1f1b", 2, 1, 4)).axes
    assert sorted(text.get_text() for text in ax.texts) == sorted(4 * ["1", "2", "3", "4"])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["stage 0", "stage 1"]


def test_directions_have_names_and_chunks_shades() -> None:
    with look.style():
        made = pipeline_figure("a pipeline", boxes_of("dualpipe", 4, 2, 8), chunk_names=("up", "down"))
    assert made.legends[0].get_texts()[0].get_text() == "forward, up"
    shades = [colour("F", chunk, 3) for chunk in range(3)]
    assert shades[-1] == look.SKY
    assert len({*shades, colour("B", 0, 3), colour("W", 0, 3)}) == 5


def test_the_picture_is_the_same_twice(tmp_path: Path) -> None:
    with look.style():
        for name in ("a.png", "b.png"):
            look.save(pipeline_figure("a pipeline", boxes_of("zb-v", 2, 2, 4)), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
