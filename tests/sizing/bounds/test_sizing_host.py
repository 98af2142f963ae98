"""Bounds where the host launches slower than the GPUs work."""

from __future__ import annotations

from typing import Any

import pytest

from sim.scenario import resolve
from sim.sizing.bounds.steps import bounds
from sim.sizing.bounds.tables import Tables
from sim.sizing.search.runner import simulated
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import Choice, build_space


def job(**software: Any) -> Any:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "global_batch": 64, "sequence": 512},
        "parallel": {"strategy": "ddp"}, "software": {"framework": "pytorch", "year": 2023} | software})


@pytest.mark.parametrize(("strategy", "share"), [("ddp", 0.75), ("fsdp", 0.65)])
def test_a_step_takes_at_least_as_long_as_its_launches(strategy: str, share: float) -> None:
    """What FSDP's hooks and DDP's copies into buckets take of the host is not counted."""
    base = alone(job(), None)
    space = build_space([base], Choice([8], tensor=[1], context=[1], pipeline=[1], micro_batch=[1],
                                       strategies=[strategy], recompute=["none"], partial_recompute=False))
    for row, least_s in enumerate(bounds(space).time_s):
        one = simulated(("", following(base), space.sets(row), 8))
        assert one.outcome == "ok" and share * one.step_time_s < least_s <= one.step_time_s


def test_graphs_that_were_recorded_are_launched_at_once() -> None:
    launched, recorded = (Tables([job(**written)]).table((0, 1, 1, 0, 1, 1, 1, 1, 1)).layers.host.forward[-1]
                          for written in ({}, {"cuda_graphs": True}))
    assert recorded < 0.2 * launched
