"""What the loss holds of the logits at most, counted by hand."""

from __future__ import annotations

import pytest

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.program import Program
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


def torchtitan(year: int, compiled: bool, tensor: int) -> Program:
    return lower(resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "gpus_per_node": 2},
        "model": {"kind": "decoder", "layers": 2, "hidden": 512, "heads": 8, "vocab": VOCAB, "positions": "rotary",
                  "tied_embeddings": False},
        "training": {"micro_batch": 4, "global_batch": 4 * 2 // tensor, "sequence": 1024, "precision": "fsdp-bf16",
                     "recompute": "full"},
        "parallel": {"strategy": "fsdp", "tensor": tensor, "sequence_parallel": tensor > 1},
        "software": {"framework": "torchtitan", "year": year, "compile": compiled}})).job.programs[0]


@pytest.mark.parametrize(("year", "compiled", "tensor", "per_logit"), [
    (2024, False, 1, 12),  # fp32 log-softmax and the gradient of either; the logits themselves are gone
    (2024, True, 1, 12),  # torchtitan compiled its blocks only
    (2025, True, 1, 4),  # in one kernel: bf16 logits and their gradient
    (2024, True, 2, 16),  # log-softmax, zeros, its exponential and their sum
    (2025, True, 2, 4),
])
def test_torchtitan_compiles_its_loss_since_2025_and_cuts_it_over_tensor_ranks(
        year: int, compiled: bool, tensor: int, per_logit: int) -> None:
    wanted = per_logit * TOKENS * VOCAB // tensor
    gathered = 2 * TOKENS * 512 if tensor > 1 else 0  # the head's input, beside the logits
    logits = peak(torchtitan(year, compiled, tensor)).category_peaks["logits"]
    assert logits == pytest.approx(wanted, rel=1e-3, abs=1.01 * gathered)


def test_steps_of_a_loss_over_tensor_ranks() -> None:
    moved = {(kernel.variant, kernel.kernel): (kernel.bytes, kernel.launches)
             for kernel in torchtitan(2024, False, 2).kernels if "split_loss" in kernel.variant}
    one = 4 * TOKENS * VOCAB // 2
    assert moved == {("split_loss", ""): (4 * one, 3), ("split_loss", "scalar"): (4 * one, 2),
                     ("split_loss_backward", ""): (8 * one, 4)}


@pytest.mark.parametrize("scattered", [False, True])
def test_few_predicted_tokens_shrink_logits_of_a_scattered_stream_too(scattered: bool) -> None:
    """Half of the tokens and half of the vocabulary on each of two ranks: 6 bytes of a quarter of the logits."""
    program = lower(resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "gpus_per_node": 2},
        "model": {"kind": "decoder", "layers": 2, "hidden": 512, "heads": 8, "vocab": VOCAB, "positions": "rotary",
                  "tied_embeddings": False},
        "training": {"micro_batch": 4, "global_batch": 4, "sequence": 1024, "predicted_tokens": 512,
                     "precision": "pure-bf16", "recompute": "full"},
        "parallel": {"tensor": 2, "sequence_parallel": scattered},
        "software": {"framework": "megatron", "year": 2025}})).job.programs[0]
    gathered = 2 * TOKENS * 512  # the head's input, beside the logits
    assert peak(program).category_peaks["logits"] == pytest.approx(6 * TOKENS * VOCAB // 4, rel=1e-3, abs=gathered)
