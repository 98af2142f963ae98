"""The process's own thresholds come back, whatever happens in between."""

from __future__ import annotations

import gc

import pytest

from sim.garbage import seldom_searched


def test_thresholds_are_restored_after_nesting_and_failure() -> None:
    before = (700, 10, 10)  # a worker of this suite may have raised its own for good
    found = gc.get_threshold()
    gc.set_threshold(*before)

    @seldom_searched()
    def work() -> tuple[int, ...]:
        with seldom_searched():
            pass
        return gc.get_threshold()

    inside = work()
    assert inside[0] > before[0]
    assert inside == work()
    assert gc.get_threshold() == before
    with pytest.raises(ValueError, match="ours"), seldom_searched():
        raise ValueError("ours")
    assert gc.get_threshold() == before
    gc.set_threshold(*found)
