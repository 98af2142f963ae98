"""Lines of the whole run: numbers that a person reads, also where a run is tiny or never ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import sim
from sim.report.terminal.render import sweep_as_text
from sim.report.terminal.run import budget_lines
from sim.scenario import resolve


def lines_of(**budget: Any) -> str:
    result = sim.run(resolve({
        "name": "run", "cluster": {"topology": "dgx-a100-80g", "nodes": 2}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 1024, "precision": "fsdp-bf16"},
        "parallel": {"strategy": "fsdp"}, "budget": {"tokens": 1e12, "price_per_gpu_hour": 2, **budget}}))
    return "\n".join(line.plain for line in budget_lines(result))


def test_a_step_is_one_step_and_its_gpu_hours_are_not_nothing() -> None:
    text = lines_of(tokens=100)
    assert "100 tokens in 1 step\n" in text
    hours = float(text.split(" GPU-hours")[0].split("· ")[-1])
    assert 0 < hours < 0.01
    assert float(text.split(" USD")[0].split("· ")[-1]) == pytest.approx(2 * hours, rel=0.01)


def test_a_run_that_failures_never_let_end_has_no_figures_of_seventy_digits() -> None:
    text = lines_of(mtbf_per_gpu="8000 h", restart="10 min", checkpoint_every="500 days")
    assert "hardly any time for work: it would take more than a thousand years" in text
    assert "GPU-hours" not in text
    assert "goodput under 0.1%" in text
    assert "lost work 100%" in text
    assert "e+" not in text


def test_a_sweep_with_a_budget_tells_the_length_and_price_of_every_point() -> None:
    points = []
    for nodes in (1, 2):
        point = sim.run(resolve({
            "name": "run", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes}, "model": {"preset": "gpt2"},
            "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 1024, "precision": "fsdp-bf16"},
            "parallel": {"strategy": "fsdp"}, "budget": {"tokens": 1e12, "price_per_gpu_hour": 2}}))
        points.append(replace(point, set={"cluster.nodes": nodes}))
    lines = sweep_as_text(points, [], {"cluster.nodes": [1, 2]}).splitlines()
    assert lines[1].split()[-3:] == ["whole", "run", "USD"]
    for line, point in zip(lines[2:4], points, strict=True):
        assert point.budget is not None and point.budget.days is not None and point.budget.cost is not None
        assert line.split()[-3:] == [f"{point.budget.days:.4g}", "days", f"{point.budget.cost:,.0f}"]
    assert "whole run" not in sweep_as_text([replace(p, budget=None) for p in points], [], {"cluster.nodes": [1, 2]})
