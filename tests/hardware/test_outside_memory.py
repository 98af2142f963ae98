"""What a GPU holds beside tensors: the figures of the table, by generation, loading and communicators."""

from __future__ import annotations

import pytest

from sim.hardware.outside import CONFIDENCE, outside

GIB = 2**30


@pytest.mark.parametrize(("capability", "loading", "context"), [
    ("8.0", "all", 1.78), ("8.0", "fewer", 0.9), ("8.0", "lazy", 0.6), ("7.0", "all", 1.3), ("7.0", "fewer", 1.3),
    ("9.0", "lazy", 0.6), ("10.0", "lazy", 0.65), ("gfx90a", "lazy", 0.4),
])
def test_context_by_generation_and_loading(capability: str, loading: str, context: float) -> None:
    assert outside(capability, loading, 0).context_bytes == round(context * GIB)


def test_parts_add_up() -> None:
    found = outside("8.0", "lazy", 5 * GIB)
    assert found.nccl_bytes == 5 * GIB
    assert found.total_bytes == found.context_bytes + 5 * GIB + found.workspace_bytes


def test_the_least_sure_part_decides() -> None:
    assert CONFIDENCE.index("inferred") > CONFIDENCE.index("measured")
    assert outside("8.0", "fewer", 0).confidence == "measured"
    assert outside("8.0", "fewer", GIB).confidence == "inferred"
