"""Widths that are no multiple of 16 bytes are told with what padding them would gain."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.report.result import Result
from sim.scenario import resolve


def run(**model: Any) -> Result:
    return sim.run(resolve({
        "name": "w", "cluster": {"topology": "dgx-h100"},
        "model": {"kind": "decoder", "layers": 4, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 32000, **model},
        "training": {"micro_batch": 4, "micro_steps": 1, "sequence": 2048, "precision": "fsdp-bf16"},
        "parallel": {"strategy": "fsdp"}}))


def told(result: Result) -> list[str]:
    return [warning for warning in result.warnings if warning.startswith("kernels: products with")]


@pytest.mark.parametrize(("model", "said"), [
    ({"ffn": 8191}, "model.ffn 8,191, no multiple of 8 elements"), ({"vocab": 50257}, "model.vocab 50,257")])
def test_an_odd_width_is_told_with_what_a_padded_one_gains(model: dict[str, int], said: str) -> None:
    odd = run(**model)
    (warning,) = told(odd)
    assert said in warning
    ((field, size),) = model.items()
    even = run(**{field: -(-size // 64) * 64})
    assert f"padded (to {-(-size // 64) * 64:,})" in warning
    percent = float(warning.split("about ")[1].split("%")[0])
    assert percent == pytest.approx(100 * (1 - even.step_time_s / odd.step_time_s), abs=2)


def test_even_widths_and_small_losses_are_not_told() -> None:
    assert not told(run())
    assert not told(run(vocab=1001))
