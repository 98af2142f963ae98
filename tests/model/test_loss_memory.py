"""What the loss holds of the logits at most, counted by hand."""

from __future__ import annotations

import pytest

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.scenario import resolve

TOKENS, VOCAB = 4 * 1024, 32768  # a multiple of what every stack pads to


@pytest.mark.parametrize(("framework", "per_logit"), [
    ("pytorch", 6),  # bf16: logits, log-softmax and the gradient of either
    ("megatron", 6),  # bf16 logits, and fp32 ones that turn into softmax and gradient
    ("nanotron", 8),  # fp32 logits and the copy that turns into softmax; the bf16 ones are gone
])
def test_bytes_of_a_logit(framework: str, per_logit: int) -> None:
    program = lower(resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "gpus_per_node": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": 512, "heads": 8, "vocab": VOCAB, "positions": "rotary",
                  "tied_embeddings": False},
        "training": {"micro_batch": 4, "global_batch": 4, "sequence": 1024, "precision": "pure-bf16",
                     "recompute": "full"},
        "software": {"framework": framework, "year": 2025}})).job.programs[0]
    assert peak(program).category_peaks["logits"] == pytest.approx(per_logit * TOKENS * VOCAB, rel=1e-3)
