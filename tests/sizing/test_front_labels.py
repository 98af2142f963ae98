"""Labels of the picture of the Pareto front."""

from __future__ import annotations

import pytest

from sim.sizing.front_picture import _legible


@pytest.mark.parametrize(("values", "kept"), [
    ([1.87, 1.88, 3.6, 7.19, 14.3], [1.87, 3.6, 7.19, 14.3]),  # 0.3% of the axis apart
    ([16.0, 32.0, 64.0], [16.0, 32.0, 64.0]), ([5.0], [5.0]), ([], [])])
def test_labels_that_would_lie_on_one_another_are_left_out(values: list[float], kept: list[float]) -> None:
    assert _legible(values) == kept
