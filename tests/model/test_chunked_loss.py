"""The loss in chunks (Liger Kernel): the same products, a fraction of the logits."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model.head import chunk_rows
from sim.parallel import Lowered, lower
from sim.scenario import resolve


def lowered(chunked: bool, precision: str = "pure-bf16", tied: bool = False, **model: Any) -> Lowered:
    return lower(resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": 512, "heads": 8, "vocab": 32000, "positions": "rotary",
                  "tied_embeddings": tied} | model,
        "training": {"micro_batch": 4, "global_batch": 4, "sequence": 1024, "precision": precision, "recompute": "full",
                     "chunked_loss": chunked}, "software": {"framework": "pytorch", "year": 2025}}))


@pytest.mark.parametrize(("rows", "hidden", "vocab", "chunk"), [
    (4096, 512, 32000, 128),  # 32000 / 512 = 62.5 -> 63 parts of 66 rows -> 128
    (8192, 4096, 128256, 256),  # 31.3 -> 32 parts of 256
    (100, 4096, 1000, 100),  # never more than there are
])
def test_rows_of_a_chunk(rows: int, hidden: int, vocab: int, chunk: int) -> None:
    assert chunk_rows(rows, hidden, vocab) == chunk


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["pure-bf16", "amp-bf16"])
def test_the_same_flops_and_far_fewer_logits(precision: str, tied: bool) -> None:
    whole, chunked = lowered(False, precision, tied), lowered(True, precision, tied)
    assert chunked.architecture.parameters == whole.architecture.parameters
    flops = [low.architecture.forward_flops + low.architecture.backward_flops for low in (whole, chunked)]
    assert flops[0] == pytest.approx(flops[1])
    high, low = peak(whole.job.programs[0]), peak(chunked.job.programs[0])
    assert low.steady and high.category_peaks["logits"] > 2 * 4096 * 32000 * 2
    assert low.category_peaks["logits"] <= 128 * 32000 * 4
    assert low.peak_allocated_bytes < high.peak_allocated_bytes


def test_gradients_of_input_and_weight_wait_from_forward_to_backward() -> None:
    whole, chunked = (peak(lowered(c).job.programs[0]).phases["end_of_forward"] for c in (False, True))
    assert chunked["workspace"] - whole["workspace"] == 2 * (4096 * 512 + 32000 * 512)


def test_an_encoder_has_no_chunked_loss() -> None:
    with pytest.raises(UserError) as caught:
        lowered(True, kind="encoder", positions="learned")
    assert caught.value.faults[0].field == "training.chunked_loss"
