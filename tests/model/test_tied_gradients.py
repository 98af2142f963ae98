"""The two gradients of a tied table: PyTorch adds them up in a third tensor where the first is a view."""

from __future__ import annotations

import pytest

from sim.model import build
from sim.model.eager import layer_profile
from sim.scenario import resolve
from sim.software import stack_of


def _tables(precision: str, chunked: bool) -> int:
    """Tensors of the table's size (2 or 4 bytes an element) that backward of the embedding makes."""
    scenario = resolve({
        "name": "t", "cluster": {"topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "layers": 2, "hidden": 512, "heads": 8, "vocab": 32000, "positions": "rotary",
                  "tied_embeddings": True},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 256, "precision": precision,
                     "chunked_loss": chunked},
        "parallel": {"strategy": "none"},
        "software": {"framework": "pytorch", "year": 2025}})
    embedding = build(scenario, stack_of(scenario.software), 1).stack[0]
    events = layer_profile(embedding, "none", True).trace.backward
    return sum(size in (2 * 32000 * 512, 4 * 32000 * 512) for _, size in events)


@pytest.mark.parametrize(("precision", "chunked", "tables"), [
    ("pure-bf16", False, 2), ("fp32", False, 2),  # the lookup's, and the sum of it and the head's
    ("amp-bf16", False, 1),  # the head's was cast, so it is nobody's view
    ("pure-bf16", True, 1),  # chunks were added up before
])
def test_a_view_is_not_written_over(precision: str, chunked: bool, tables: int) -> None:
    """By torch's dispatcher from 2.1 to 2.13 (`aten.add.Tensor`, not `add_`), FSDP 1 too."""
    assert _tables(precision, chunked) == tables
