"""Encoder-decoder layers as Hugging Face's T5 runs them.

Tensors that live across layers are the encoder's output and, per stack, the bias of the attention scores that the first
block makes. A layer that only reads one sees a tensor of no size of its own; their gradients, which the blocks add up,
are counted from the layer before (in backward's order) the first of them.
Source: transformers modeling_t5.py and integrations/sdpa_attention.py (create_position_bias_mask).
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.attention.core_choice import uses_flash
from sim.model.eager import chunked, decoder, norms, tuned
from sim.model.eager.attention.modules import attention
from sim.model.eager.head import loss
from sim.model.eager.mlp import activated, mlp
from sim.model.eager.products import linear, summed_apart
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Run, Tensor, Weight
from sim.model.eager.tensors.storage import ACTIVATIONS, LOGITS, WORKSPACE, Storage
from sim.model.style import Style

#: Distances fall into this many buckets (T5Config.relative_attention_num_buckets).
_BUCKETS = 32


class _Sum:
    """Where a gradient is added to one that exists elsewhere, or begins to exist."""

    def __init__(self, begins: bool) -> None:
        self.begins = begins

    def receive(self, run: Run, gradient: Storage) -> None:
        """In place: the new one goes, if it is not the first of all."""
        if self.begins:
            self.begins = False
            gradient.become(WORKSPACE)
            run.sums.append(gradient)


def block(run: Run, style: Style, x: Tensor, policy: str, *, first: bool, last: bool, keep: bool) -> Tensor:
    """T5Block; with `style.memory` a decoder's.

    Args:
        first: makes the biases that the other blocks of its stack read.
        last: of several, with which the gradients of biases and of the encoder's output begin.
        keep: those stay until backward (they are arguments of checkpointed blocks).
    """
    own = replace(style, memory=0)
    weights: list[Storage] = []  # until the next attention's are there
    bias = _bias(run, own, first, last, keep)  # until the block is done
    x = _attend(run, own, x, None, bias, policy, "1", weights)
    if style.memory:
        memory = Tensor(Storage(run.memory, 0, 0), style.batch * style.memory * style.hidden,
                        style.weight if _own_norm(style) else style.residual, _Sum(last))
        crossed = _bias(run, style, first, last, keep)
        x = _attend(run, style, x, memory, crossed, policy, "2", weights)
        del weights[:-1]
    run.at("norm3")
    branch = norm(run, style, x)
    branch = _feed_forward(run, style, branch)
    x = decoder.residual(run, style, x, branch, "3", "mlp")
    del bias
    return x


def _attend(run: Run, style: Style, x: Tensor, memory: Tensor | None, bias: Tensor | None, policy: str,
            suffix: str, weights: list[Storage]) -> Tensor:
    """T5LayerSelfAttention, T5LayerCrossAttention."""
    run.at(f"norm{suffix}")
    normed = norm(run, style, x)
    branch = attention(run, style, normed, policy, memory, bias, variables=weights)
    return decoder.residual(run, style, x, branch, suffix, "cross" if style.memory else "attention")


def norm(run: Run, style: Style, x: Tensor) -> Tensor:
    """T5LayerNorm: unlike Llama's it multiplies the input as it came."""
    if not _own_norm(style):
        return norms.norm(run, style, x, "norm")
    variance = op.mean_rows(run, norms.square(run, op.to(run, x, "fp32")), style.tokens)
    x = op.mul_rows(run, x, op.unary(run, op.shift(run, variance), saves_output=True))
    x = op.to(run, x, style.weight)
    trained = style.tuned is None or style.tuned.trains_norms
    return op.mul_weight(run, x, Weight(style.hidden, style.weight)) if trained else op.scale(run, x)


def _own_norm(style: Style) -> bool:
    """Whether norms are T5LayerNorm, whose output has the dtype of its weight."""
    return style.norm != "layernorm" and style.modules == "transformers" and not style.stack.compile


def _bias(run: Run, style: Style, first: bool, last: bool, keep: bool) -> Tensor | None:
    """compute_bias in a stack's first block, zeros for cross attention; elsewhere the first block's."""
    if not style.biased:
        return None
    pairs = style.sequence * style.keys
    dtype = style.act if style.memory else style.weight
    if not first:
        constant = style.memory or style.tuned is not None
        return Tensor(Storage(run.memory, 0, 0), pairs * style.heads, dtype, None if constant else _Sum(last))
    run.at("position_bias")
    if style.memory:
        bias = run.tensor(pairs * style.heads, dtype)
    elif style.tuned is not None:
        bias = _frozen_bias(run, style, pairs, dtype)
    else:
        buckets = run.new(pairs, "fp64")  # numbers of 64 bits
        bias = op.embedding(run, pairs, style.heads, Weight(_BUCKETS * style.heads, dtype), buckets)
        assert bias.sink is not None
        run.expect(bias.sink, bias.elements, dtype)
    run.hold(bias.storage, keep)
    return bias


def _frozen_bias(run: Run, style: Style, pairs: int, dtype: str) -> Tensor:
    """The lookup alone: bucket numbers go with compute_bias."""
    buckets = run.new(pairs, "fp64")
    bias = run.tensor(pairs * style.heads, dtype)
    del buckets
    return bias


def _feed_forward(run: Run, style: Style, x: Tensor) -> Tensor:
    """T5DenseActDense, T5DenseGatedActDense; their result is cast to the weights' dtype before the last product."""
    fused = style.gated and (style.stack.compile or style.stack.fused_swiglu)
    if style.modules != "transformers" or fused:
        return mlp(run, style, x)
    x = _between(run, style, x)
    if style.dropout:
        x = op.dropout(run, x)
    x = op.to(run, x, style.weight)
    run.at("down")
    return linear(run, style, x, style.ffn, (("mlp", style.hidden),))


def _between(run: Run, style: Style, x: Tensor) -> Tensor:
    """From the norm's output to what dropout gets."""
    parts = (("mlp", style.ffn),)
    run.at("up")
    inner = linear(run, style, x, style.hidden, parts)
    run.at("activation")
    if not style.gated:
        relu = style.activation == "relu"
        return op.unary(run, inner, saves_input=not relu, saves_output=relu)
    inner = activated(run, style, inner)
    run.at("up")
    other = linear(run, style, x, style.hidden, parts)
    run.at("activation")
    return op.mul(run, inner, other)


def embedding(run: Run, style: Style, name: str, *, complete: bool) -> Tensor:
    """A stack's lookup in the shared table, and dropout; the gradient is complete with the encoder's lookup."""
    run.at(name)
    table = Weight(style.vocab * style.hidden, style.weight, True, not complete,
                   apart=not complete and summed_apart(style))
    x = (op.embedding(run, style.tokens, style.hidden, table) if style.tuned is None else
         run.tensor(style.tokens * style.hidden, style.weight))
    if style.dropout:
        run.held.append(x.storage)  # the stack's forward has it to its end
        x = op.dropout(run, x)
    return tuned.dropped(op.to(run, x, style.residual))


def bridge(run: Run, style: Style, x: Tensor, keep: bool) -> Tensor:
    """The encoder's last norm, whose output the decoder's blocks read, and the decoder's lookup.

    Args:
        style: the encoder's.
        keep: the blocks are checkpointed and keep the encoder's output.
    """
    run.at("encoder_norm")
    memory = norm(run, style, x)
    if style.dropout:
        memory = op.dropout(run, memory)
    read = any(tuned.keeps_inputs(style, target) for target in ("key", "value"))
    if keep or (memory.dtype == style.act and read):
        run.retained.append(memory.storage)
    else:
        run.cache.append(memory.storage)  # a local of the model's forward
    assert memory.sink is not None
    run.expect(memory.sink, memory.elements, memory.dtype)
    if style.biased and style.layers == 1 and style.tuned is None:
        run.outgoing.append((style.heads * style.sequence**2, style.weight))
    decode = replace(style, sequence=style.decoder_sequence, causal=True)
    kept = run.retained if style.tuned is None else run.cache  # a local of the model's forward
    kept.append(run.new(decode.tokens, "fp64"))  # _shift_right(labels), which a trained lookup keeps
    if decode.biased and not uses_flash(decode):  # the additive mask of a causal stack
        (run.retained if keep else run.held).append(run.new(style.batch * decode.sequence**2, style.weight))
    return embedding(run, decode, "decoder_embedding", complete=False)


def head(run: Run, style: Style, x: Tensor) -> Tensor:
    """The decoder's last norm, scaling of a tied head, logits, loss. The model's output holds what it is given.

    Args:
        style: the decoder's.
    """
    if style.layers == 1:  # or the last block makes them
        run.outgoing.append((style.batch * style.memory * style.hidden, style.residual))
    if style.layers == 1 and style.biased and style.tuned is None:
        run.outgoing.append((style.heads * style.sequence**2, style.weight))
    rows = style.batch * style.predicted
    run.at("final_norm")
    x = norm(run, style, x)
    if style.dropout:
        x = op.dropout(run, x)
    run.at("logits")
    run.kind = ACTIVATIONS if style.chunked_loss else LOGITS
    scaled = op.scale(run, x) if style.tied else x
    if style.chunked_loss:
        inputs = [scaled]
        del x, scaled
        return chunked.loss(run, style, inputs, rows)
    if style.tuned is not None:
        logits = tuned.linear(run, style, scaled, style.hidden, (("head", style.vocab),))
    else:
        logits = op.linear(run, scaled, style.hidden, style.vocab, False, dtype=style.weight, shared=style.tied)
    run.at("loss")
    return loss(run, style, logits, rows)
