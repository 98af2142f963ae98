"""Dropout of compiled and eager blocks, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.parallel import lower
from sim.scenario import resolve

TOKENS, HIDDEN, HEADS = 2 * 512, 1024, 16


def dropouts(compiled: bool, attention: str = "flash") -> dict[str, list[tuple[float, int]]]:
    """Bytes an element and launches of each dropout of a block, by kernel."""
    scenario: dict[str, Any] = {
        "name": "t", "cluster": {"topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": HEADS, "vocab": 1024, "dropout": True},
        "training": {"micro_batch": 2, "global_batch": 2, "sequence": 512, "precision": "amp-bf16",
                     "attention": attention},
        "parallel": {"strategy": "none"}, "software": {"framework": "pytorch", "year": 2025, "compile": compiled}}
    found: dict[str, list[tuple[float, int]]] = {}
    for op in lower(resolve(scenario, "t")).architecture.stack[1].operators:
        for k in (*op.forward, *op.backward):
            if "dropout" in k.variant:
                found.setdefault(k.variant, []).append((k.bytes / k.shape[0], k.launches))
    return found


def test_eager_dropout_reads_writes_and_keeps_a_mask() -> None:
    assert dropouts(False) == {"dropout": [(5, 1)] * 2, "dropout_backward": [(5, 1)] * 2}


def test_compiled_it_moves_its_mask_alone() -> None:
    assert dropouts(True) == {"dropout": [(1, 0)] * 2, "dropout_backward": [(1, 0)] * 2}


@pytest.mark.parametrize(("compiled", "forward", "backward"), [(False, (5, 1), (5, 1)), (True, (3, 0), (1, 0))])
def test_scores_that_are_dropped_are_written_beside_those_that_are_kept(
        compiled: bool, forward: tuple[float, int], backward: tuple[float, int]) -> None:
    found = dropouts(compiled, "eager")
    assert found["attention_dropout"] == [forward]
    assert found["attention_dropout_backward"] == [backward]
