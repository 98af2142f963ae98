"""Bounds on sizes and times take units, as the fields of a scenario do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.errors import UserError
from sim.scenario import load_scenario
from sim.scenario.expect import Bound

HEAD = """name: x
cluster: {topology: dgx-a100-80g}
model: {preset: llama-2-7b}
training: {micro_batch: 1, global_batch: 8, sequence: 512}
"""


def bounds(folder: Path, text: str) -> list[Bound]:
    path = folder / "x.yaml"
    path.write_text(HEAD + f"expect: {text}\n", encoding="utf-8")
    return list(load_scenario(str(path)).expect)


@pytest.mark.parametrize(("text", "attribute", "value"), [
    ("{memory.peak_allocated_bytes: {max: 40 GB}}", "high", 40e9),
    ("{memory.device_used_bytes: {min: 1 GiB, max: 2000 MiB}}", "low", 2.0**30),
    ("{step_time_s: {max: 900 ms}}", "high", 0.9), ("{step_time_s: {value: 2 min, within: 5%}}", "value", 120.0),
    ("{memory.at_peak.gradients: 1 GB}", "value", 1e9), ("{bound: compute}", "value", "compute"),
])
def test_bounds_have_units(tmp_path: Path, text: str, attribute: str, value: Any) -> None:
    (found,) = bounds(tmp_path, text)
    assert getattr(found, attribute) == pytest.approx(value)


@pytest.mark.parametrize(("text", "said"), [
    ("{memory.peak_allocated_bytes: {max: 40 s}}", "expect.memory.peak_allocated_bytes.max: '40 s' has the unit 's'"),
    ("{step_time_s: {min: 2 s, max: 900 ms}}", "min 2 s is more than max 900 ms"),
    ("{mfu: {max: 40 GB}}", "expected a number"),
])
def test_units_of_another_kind_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        bounds(tmp_path, text)
    assert said in str(caught.value)
