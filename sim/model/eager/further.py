"""Multi-token prediction as Megatron runs it: blocks for further tokens, which share embedding and head.

Source: megatron-core 0.16.1 transformer/multi_token_prediction.py (MultiTokenPredictionLayer.forward; full
recomputation covers all of it but the lookup), models/gpt/gpt_model.py (_postprocess).
"""

from __future__ import annotations

from functools import partial

from sim.model.eager.decoder import block
from sim.model.eager.norms import norm
from sim.model.eager.products import entered, row_cut
from sim.model.eager.tensors import between
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Run, Tensor, Weight
from sim.model.eager.tensors.narrow import narrow
from sim.model.style import Style


def hidden_states(run: Run, style: Style, x: Tensor, policy: str) -> list[Tensor]:
    """What is multiplied by the vocabulary for every further token, the nearest first.

    Args:
        x: of the model, behind its last norm.
        policy: recomputation of the blocks.
    """
    found: list[Tensor] = []
    for depth in range(style.further):
        embedded = _embedding(run, style, depth)
        if policy == "full":
            x = run.checkpoint(partial(_depth, style, "none"), x, embedded)
        else:
            x = _depth(style, policy, run, x, embedded)
        del embedded
        found.append(x)
    return found


def joined(run: Run, x: Tensor, loss: Tensor) -> Tensor:
    """A hidden state through which a further token's loss begins its backward (MTPLossAutoScaler)."""
    node = run.node(lambda run, gradients: [gradients[0], run.new(1, "fp32")], (x.sink, loss.sink))
    return Tensor(x.storage, x.elements, x.dtype, node.output())


def _embedding(run: Run, style: Style, depth: int) -> Tensor:
    """The tokens moved on by one. The table's gradients add up: from depth to depth, and with the embedding's own
    where that is on the same rank."""
    run.at("mtp_embedding")
    waits = not style.copies_table
    table = Weight(style.vocab * style.hidden, style.weight, waits or style.further > 1, waits or depth > 0)
    x = row_cut(run, style, op.embedding(run, style.tokens, style.hidden, table))
    if style.dropout:
        run.at("mtp_dropout")
        x = op.dropout(run, x)
    return op.to(run, x, style.residual)


def _depth(style: Style, policy: str, run: Run, x: Tensor, embedded: Tensor) -> Tensor:
    token = norm(run, style, embedded, "mtp_token_norm")
    hidden = norm(run, style, x, "mtp_hidden_norm")
    run.at("mtp_join")
    both = op.cat(run, [token, hidden])
    del token, hidden
    run.at("mtp_projection")
    again = style.scattered and not style.stack.gathered_inputs_kept
    x = op.linear(run, entered(run, style, both), 2 * style.hidden, style.hidden // style.tensor, False,
                  dtype=style.weight, gathered=style.tensor if again else 1, narrow=narrow(style),
                  placeholder=style.weight_placeholder)
    del both
    run.at("mtp_gather")
    x = between.widened(run, x, style.tensor)
    x = block(run, style, row_cut(run, style, x), policy)
    return norm(run, style, x, "mtp_norm")
