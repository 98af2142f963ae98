"""What megatron-core 0.6 to 0.8 keep of a mixture's rows, counted by hand."""

from __future__ import annotations

import pytest

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.program import Program
from sim.scenario import resolve

MIB, LAYERS, HIDDEN, TOKENS, TOP_K = 2**20, 4, 1024, 2048, 2


def program(year: int, experts: int = 0, spread: int = 1) -> Program:
    return lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "ffn": 2048, "gated_mlp": True,
                  "norm": "rmsnorm", "positions": "rotary", "bias": False, "dropout": False, "vocab": 8192,
                  **({"moe": {"experts": experts, "top_k": TOP_K}} if experts else {})},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": TOKENS, "precision": "megatron-bf16",
                     "optimizer": "adam", "attention": "flash"},
        "parallel": {"strategy": "zero1", **({"expert": spread} if experts else {})},
        "software": {"framework": "megatron", "year": year}})).job.programs[0]


@pytest.mark.parametrize(("experts", "spread", "tensors"), [(8, 1, 2), (8, 4, 2), (8, 8, 1)])
def test_rows_are_kept_as_they_come_back(experts: int, spread: int, tensors: int) -> None:
    """From the experts' products where a rank has several, and from other ranks; 2023 keeps neither. What attention
    keeps otherwise is that of a dense model."""
    held = {year: [peak(program(year, *which)).at_peak["activations"] for which in ((experts, spread), ())]
            for year in (2023, 2024)}
    more, dense = (now - before for before, now in zip(held[2023], held[2024], strict=True))
    rows = 2 * TOKENS * TOP_K * HIDDEN
    assert more - dense == pytest.approx(LAYERS * tensors * rows, abs=LAYERS * MIB)
