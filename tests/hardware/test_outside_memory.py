"""What a GPU holds beside tensors: the figures of the table, by generation, loading and communicators."""

from __future__ import annotations

import pytest

from sim.hardware.outside import CONFIDENCE, outside

GIB = 2**30


@pytest.mark.parametrize(("capability", "loading", "context"), [
    ("8.0", "all", 1.78), ("8.0", "fewer", 0.9), ("8.0", "lazy", 0.6), ("7.0", "all", 1.0), ("7.0", "fewer", 1.0),
    ("9.0", "lazy", 0.6), ("10.0", "lazy", 0.65), ("gfx90a", "lazy", 0.4),
])
def test_context_by_generation_and_loading(capability: str, loading: str, context: float) -> None:
    assert outside(capability, loading, ()).context_bytes == round(context * GIB)


def test_communicators_add_up_and_lonely_ones_are_free() -> None:
    none, one, two = (outside("8.0", "lazy", sizes).nccl_bytes for sizes in ((1, 1), (8,), (8, 16, 1)))
    assert none == 0
    assert 0 < one < two < 2 * one


def test_a_pair_needs_less_than_many() -> None:
    assert outside("8.0", "lazy", (2,)).nccl_bytes < outside("8.0", "lazy", (3,)).nccl_bytes


def test_the_least_sure_part_decides() -> None:
    found = outside("8.0", "fewer", (8, 8))
    assert found.confidence in CONFIDENCE
    assert outside("8.0", "fewer", (8,)).confidence == "measured"
    assert found.confidence == "inferred"
