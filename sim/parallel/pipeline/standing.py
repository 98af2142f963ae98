"""Tensors that torch.distributed.pipelining keeps for a whole step, beside what a stage's layers hold.

Every micro-batch has a receive buffer of its own for its input and for its output's gradient. An input's gradient stays
with the buffer until the next step clears it, a stage's output until the backward that starts from it, and the last
stage hands the outputs of all micro-batches back at the end.

Source: torch 2.6.0 distributed/pipelining/stage.py: _prepare_forward_infra, _prepare_backward_infra, forward_one_chunk
(fwd_cache, output_chunks), clear_runtime_states. The copy that merge_chunks makes of the last stage's outputs is left
out: by then the activations are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sim.parallel.pipeline.patterns import Pattern


class Standing(NamedTuple):
    """How many tensors of a rank stand beside those its layers count.

    Attributes:
        transfers: inputs, their gradients, outputs and gradients of those, all of one size.
        outputs: micro-batches whose logits are kept.
    """

    transfers: int
    outputs: int


def standing(patterns: Sequence[Pattern], micro_batches: int, receives: Iterable[int], sends: Iterable[int], *,
             last: bool) -> Standing:
    """Tensors at the fullest moment.

    Args:
        receives, sends: chunks whose input comes from another rank, and whose output goes to one.
        last: the rank has the model's last layer.

    While a micro-batch is in flight its layers count its input, and the gradient that has come for a backward.
    """
    receives, sends = set(receives), set(sends)
    inputs = micro_batches * len(receives) - most_in_flight(patterns, receives)
    gradients = micro_batches * len(sends) - 1 if sends else 0
    return Standing(2 * inputs + gradients + most_in_flight(patterns, sends), micro_batches if last else 0)


def most_in_flight(patterns: Sequence[Pattern], chunks: set[int]) -> int:
    """Most micro-batches of the given chunks between their forward and the end of their backward."""
    held = most = 0
    for batches, repeats, _ in patterns:
        actions = [kind for batch in batches for kind, chunk, *_ in batch.actions if chunk in chunks]
        for kind in actions * repeats:
            held += (kind == "F") - (kind == "B")
            most = max(most, held)
    return most
