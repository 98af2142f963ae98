"""Where along a sweep communication bounds, in words; titles that are wider than their picture."""

from __future__ import annotations

import pytest

import sim
from sim.report.pictures import style as look
from sim.report.scaling import Scaling

COMM, WORK = "communication", "compute"


@pytest.mark.parametrize(("bound", "said"), [
    ((WORK, WORK, WORK), "not bound by communication up to sequence = 3 (30.0% exposed)"),
    ((WORK, COMM, COMM), "bound by communication from sequence = 2 on (20.0% exposed there)"),
    ((COMM, COMM, WORK), "bound by communication up to sequence = 2 (20.0% exposed there), not from 3 on"),
    ((WORK, COMM, WORK), "bound by communication at sequence = 2, not at 3 (30.0% exposed)"),
    ((COMM, COMM, COMM), "bound by communication from sequence = 1 on (10.0% exposed there)")])
def test_every_pattern_is_told_as_it_is(bound: tuple[str, ...], said: str) -> None:
    """Longer sequences hide more: a sweep may begin bound by communication and end free of it."""
    from_ = next((i + 1 for i in range(3) if set(bound[i:]) == {COMM}), None)
    line = Scaling("training.sequence", (1, 2, 3), {}, (1.0, 1.0, 1.0), (0.1, 0.2, 0.3), bound, from_)
    assert str(line) == said


@pytest.mark.parametrize(("gpus", "lines"), [(1, 0), (2, 1)])
def test_one_gpu_has_nobody_to_communicate_with(gpus: int, lines: int) -> None:
    swept = sim.run_sweep({
        "name": "alone", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": gpus}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 256}, "parallel": {"strategy": "ddp"},
        "sweep": {"training.micro_batch": [1, 2]}})
    assert len(swept.scaling()) == lines


@pytest.mark.parametrize(("title", "whole"), [("Short", True), ("A name of words " * 15, False), ("W" * 300, False)])
def test_a_title_ends_inside_its_picture(title: str, whole: bool) -> None:
    with look.style():
        made = look.figure(2.0)
        look.heading(made, title, "subtitle")
        first, second = made.texts
        assert first.get_window_extent().x1 <= made.bbox.x1
        assert (first.get_text() == title) == whole and first.get_text().endswith("…") != whole
        assert second.get_text() == "subtitle"
        assert whole or first.get_window_extent().x1 > 0.9 * made.bbox.x1  # no more is left out than must be
