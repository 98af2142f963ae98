"""Encoder-decoders as T5 has them: two stacks on one embedding, relative positions, cross attention.

Sources: Raffel et al. 2020, section 2.1; transformers modeling_t5.py (`T5ForConditionalGeneration`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sim.model.architecture import Architecture, Layer, Operator, Parameter, Tensor
from sim.model.attention.layer import attention_operators
from sim.model.attention.relative import table_operator, zero_bias_operator
from sim.model.blocks import block_layer
from sim.model.kernels import elementwise, width
from sim.model.layers.embedding import lookup, position_lookup
from sim.model.layers.head import chunked_loss, logits_operator, loss_operator
from sim.model.layers.mlp import mlp_operators
from sim.model.layers.norms import norm_operator
from sim.model.layers.residual import dropout_operator, residual_operators
from sim.model.style import Program, Style

#: Module of cross attention in a block, and the vocabulary's table.
CROSS, TABLE = "EncDecAttention", "shared.weight"
_SEPARATE, _FUSED, _CROSS_FUSED = ("q", "k", "v", "o"), ("qkv", "o"), ("q", "kv", "o")


def encoder_decoder(style: Style) -> Architecture:
    """Embedding, encoder blocks, bridge (the encoder's norm, the decoder's embedding), decoder blocks, head.

    `style` is the encoder's; the decoder's has its own length and reads the encoder's output.
    """
    encode = replace(style, causal=False)
    decode = replace(style, sequence=style.decoder_sequence, layers=style.decoder_layers, causal=True)
    reads = replace(decode, memory=style.sequence)
    stack = (
        replace(_embedding(encode), program=Program("embedding", encode)),
        *_blocks(encode, encode, style.layers, lambda first: _encoder_block(encode, first)),
        replace(_bridge(encode, decode), program=Program("bridge", encode)),
        *_blocks(decode, reads, style.decoder_layers, lambda first: _decoder_block(decode, style.sequence, first)),
        replace(_head(decode), program=Program("head", reads)),
    )
    return Architecture(stack, style.tied, style.batch, style.sequence)


def _blocks(style: Style, run: Style, count: int, make: Callable[[bool], Layer]) -> tuple[Layer, ...]:
    """`count` blocks; the first is an object of its own where it holds the table of relative positions or where no
    gradient leaves it, the last of several because gradients of what all of them read begin with it.

    Args:
        run: the style with which their module code runs (a decoder's knows the encoder's length).
    """
    block = replace(make(False), program=Program("block", run))
    last = (replace(block, program=Program("last block", run)),) if count > 1 else ()
    if not style.biased and not style.constant_input:
        return (block,) * (count - len(last)) + last
    return (replace(make(True), program=Program("first block", run)), *(block,) * (count - 1 - len(last)), *last)


def _encoder_block(style: Style, first: bool) -> Layer:
    operators, parameters = _attend(style, 0, first)
    mlp, mlp_parameters = _feed_forward(style, 1)
    return block_layer(style, [*operators, *mlp], [*parameters, *mlp_parameters])


def _decoder_block(style: Style, memory: int, first: bool) -> Layer:
    """Self-attention, cross attention over `memory` tokens per sequence, feed-forward."""
    operators, parameters = _attend(style, 0, first)
    cross, cross_parameters = _attend(replace(style, memory=memory), 1, first)
    mlp, mlp_parameters = _feed_forward(style, 2)
    return block_layer(style, [*operators, *cross, *mlp], [*parameters, *cross_parameters, *mlp_parameters])


def _attend(style: Style, place: int, first: bool) -> tuple[list[Operator], list[Parameter]]:
    """Norm, attention and sum: part `place` of a block. Registered before the norm, as everything but the norm is."""
    module = f"layer.{place}.{CROSS if style.memory else 'SelfAttention'}"
    parts = _SEPARATE if style.separate_qkv else _CROSS_FUSED if style.memory else _FUSED
    norm, norm_parameters = norm_operator(style, f"norm{place + 1}", f"layer.{place}.layer_norm")
    attention, parameters = attention_operators(style, style.residual, [f"{module}.{name}" for name in parts])
    if first and style.biased:
        bias = zero_bias_operator(style) if style.memory else table_operator(style, f"{module}.relative_attention_bias")
        attention.insert(1, bias)
        parameters += bias.parameters
    return [norm, *attention, *residual_operators(style, str(place + 1))], [*parameters, *norm_parameters]


def _feed_forward(style: Style, place: int) -> tuple[list[Operator], list[Parameter]]:
    module = f"layer.{place}.DenseReluDense"
    up, gate = ("wi_1", "wi_0") if style.gated else ("wi", "")
    names = (f"{module}.{up}", f"{module}.{gate}", f"{module}.wo")
    norm, norm_parameters = norm_operator(style, f"norm{place + 1}", f"layer.{place}.layer_norm")
    mlp, parameters = mlp_operators(style, style.residual, names)
    return [norm, *mlp, *residual_operators(style, str(place + 1))], [*parameters, *norm_parameters]


def _table(style: Style) -> Parameter:
    return Parameter(TABLE, (style.vocab, style.hidden))


def _embed(style: Style, name: str) -> list[Operator]:
    """Lookup of a stack's tokens, positions where they are learned, dropout."""
    operators = [lookup(style, _table(style))]
    if style.positions == "learned":
        operators.append(position_lookup(style, Parameter(f"{name}.embed_positions.weight",
                                                          (style.max_positions, style.hidden))))
    if style.dropout:
        operators.append(dropout_operator(style, "embedding_dropout", style.weight))
    return operators


def _embedding(style: Style) -> Layer:
    operators = _embed(style, "encoder")
    # token numbers are 8-byte integers; fp64 stands for their width
    tokens = Tensor("tokens", style.tokens, "fp64")
    return Layer("embedding", tuple(operators), tokens, tuple(p for op in operators for p in op.parameters))


def _bridge(encode: Style, decode: Style) -> Layer:
    """The encoder's last norm and dropout, whose output all decoder blocks read, and the decoder's embedding.

    The decoder looks up the encoder's table, so that its gradient is added there and ready with the encoder's.
    """
    norm, parameters = norm_operator(encode, "encoder_norm", "encoder.final_layer_norm")
    operators = [norm]
    if encode.dropout:
        operators.append(dropout_operator(encode, "encoder_dropout", encode.residual))
    kept = () if encode.residual != encode.act else (Tensor("memory", encode.tokens * encode.hidden, encode.act),)
    operators[-1] = replace(operators[-1], saved=(*operators[-1].saved, *kept))
    table, *rest = _embed(decode, "decoder")
    operators += [replace(table, parameters=()), *rest]
    own = tuple(p for op in rest for p in op.parameters)
    stream = Tensor("encoder_stream", encode.tokens * encode.hidden, encode.residual)
    return Layer("bridge", tuple(operators), stream, (*parameters, *own), (_table(encode),))


def _head(style: Style) -> Layer:
    """The decoder's last norm and dropout, the scaling of a tied head, logits, loss."""
    norm, norm_parameters = norm_operator(style, "final_norm", "decoder.final_layer_norm")
    operators = [norm]
    if style.dropout:
        operators.append(dropout_operator(style, "head_dropout", style.residual))
    if style.tied:  # T5 scales by hidden ** -0.5 before the shared matrix
        moved = 2 * width(style.residual)
        elements = style.tokens * style.hidden
        operators.append(Operator("head_scale", (elementwise("head_scale", elements, moved, style.residual),),
                                  (elementwise("head_scale_backward", elements, moved, style.residual),)))
    rows = style.batch * style.predicted
    logits, weight = logits_operator(style, rows, "shared" if style.tied else "lm_head")
    own = () if style.tied else weight
    stream = Tensor("head_input_stream", style.tokens * style.hidden, style.residual)
    last = chunked_loss(style, rows, logits) if style.chunked_loss else (logits, loss_operator(style, rows))
    return Layer("head", (*operators, *last), stream, (*norm_parameters, *own), weight if style.tied else ())
