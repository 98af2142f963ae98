"""What the best of a search would gain by its kind's usual precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import sim
from sim.scenario import resolve
from sim.sizing import Choice, size
from sim.sizing.search.usual import with_usual_half

JOB: dict[str, Any] = {
    "name": "autocast", "cluster": {"topology": "p4d", "nodes": 2}, "model": {"preset": "gpt2"},
    "training": {"micro_batch": 1, "global_batch": 32, "sequence": 1024, "precision": "amp-bf16"},
    "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2025}}
CHOICE = Choice([16], tensor=[1], context=[1], pipeline=[1], micro_batch=[1], recompute=["none"],
                partial_recompute=False)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])  # the file's own does not matter
def test_the_best_of_fsdp_is_simulated_with_its_own_mixed_precision(strategy: str) -> None:
    found = size(resolve({**JOB, "parallel": {"strategy": strategy}}), replace(CHOICE, strategies=["fsdp"]))
    (hint,) = found.hints
    other = sim.run(resolve({**JOB}, "", {**found.best[0]["set"], "training.precision": "fsdp-bf16"}))
    share = other.step_time_s / found.best[0]["step_time_s"] - 1
    assert share < -0.01 and f", {100 * share:+.0f}% (--precision fsdp-bf16 tries all layouts with it too)" in hint
    assert "gathers parameters in fp32" in hint


def test_what_has_its_kinds_precision_is_told_nothing() -> None:
    found = size(resolve({**JOB, "training": {**JOB["training"], "precision": "fsdp-bf16"}}),
                 replace(CHOICE, strategies=["fsdp"]))
    assert found.hints == []
    ddp = size(resolve(JOB), replace(CHOICE, strategies=["ddp"]))
    assert ddp.hints == []  # autocast is what DDP has


def test_a_layout_that_cannot_have_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    of = resolve(JOB)
    monkeypatch.setattr("sim.sizing.search.usual.usual_half", lambda _: "mxfp8")
    (hint,) = with_usual_half(of, {"step_time_s": 1.0})
    assert hint.endswith("not simulated for this layout")
