"""Encoders as BERT has them: post-norm blocks, token types and a norm in the embedding, a masked-language-model head.

Sources: Devlin et al. 2019, section 3; transformers modeling_bert.py (`BertForMaskedLM`).
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Architecture, Layer, Operator, Parameter, Tensor
from sim.model.attention.layer import attention_operators
from sim.model.blocks import block_layer
from sim.model.kernels import elementwise, linear_operator, strided, width
from sim.model.layers.embedding import lookup, position_lookup
from sim.model.layers.head import loss_operator
from sim.model.layers.mlp import mlp_operators
from sim.model.layers.norms import norm_operator
from sim.model.layers.residual import dropout_operator, residual_operators
from sim.model.style import Program, Style
from sim.work import Kernel

#: Sentence A or B (BertConfig.type_vocab_size).
_TOKEN_TYPES = 2
_SEPARATE = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
_FUSED = ("attention.self.query_key_value", "attention.output.dense")
_EMBEDDINGS, _HEAD = "bert.embeddings", "cls.predictions"


def encoder(style: Style) -> Architecture:
    """Embedding, blocks, head."""
    parts = {"embedding": _embedding(style), "block": _block(style), "head": _head(style)}
    parts = {name: replace(layer, program=Program(name, style)) for name, layer in parts.items()}
    block = parts["block"]
    first = replace(block, program=Program("first block", style)) if style.constant_input else block
    layers = (parts["embedding"], first, *(block,) * (style.layers - 1), parts["head"])
    return Architecture(layers, style.tied, style.batch, style.sequence)


def pooled_encoder(style: Style) -> Architecture:
    """What serves: embedding, blocks, and the pooler of every sequence's first token, without the head of training.

    Source: transformers 4.56.2 modeling_bert.py (BertModel with its BertPooler, under BertForSequenceClassification,
    whose classifier of a few labels is not counted).
    """
    whole = encoder(style)
    return replace(whole, stack=(*whole.stack[:-1], _pooler(style)), tied=False)


def _pooler(style: Style) -> Layer:
    """Dense and tanh on one token of every sequence."""
    first = replace(style, sequence=1, gemm=style.wide)
    elements = first.tokens * style.hidden
    dense, parameters = linear_operator(first, "pooler", "bert.pooler.dense", style.hidden, style.hidden,
                                        source=style.residual)
    tanh = Operator("pooler_activation", (elementwise("activation", elements, 2 * width(style.act), style.act),), ())
    stream = Tensor("head_input_stream", style.tokens * style.hidden, style.residual)
    return Layer("head", (dense, tanh), stream, parameters)


def _block(style: Style) -> Layer:
    """Attention, sum, norm; feed-forward, sum, norm."""
    source = style.residual
    names = _SEPARATE if style.separate_qkv else _FUSED
    attention, attention_parameters = attention_operators(style, source, names)
    norm1, norm1_parameters = norm_operator(style, "norm1", "attention.output.LayerNorm")
    mlp, mlp_parameters = mlp_operators(style, source, ("intermediate.dense", "intermediate.gate", "output.dense"))
    norm2, norm2_parameters = norm_operator(style, "norm2", "output.LayerNorm")
    operators = [*attention, *residual_operators(style, "1"), norm1, *mlp, *residual_operators(style, "2"), norm2]
    return block_layer(style, operators, (*attention_parameters, *norm1_parameters, *mlp_parameters, *norm2_parameters))


def _embedding(style: Style) -> Layer:
    """Words, token types and positions summed, then norm and dropout."""
    words = Parameter(f"{_EMBEDDINGS}.word_embeddings.weight", (style.vocab, style.hidden))
    types = Parameter(f"{_EMBEDDINGS}.token_type_embeddings.weight", (_TOKEN_TYPES, style.hidden))
    operators, parameters = [lookup(style, words), _type_lookup(style, types)], [words]
    if style.positions == "learned":
        positions = Parameter(f"{_EMBEDDINGS}.position_embeddings.weight", (style.max_positions, style.hidden))
        operators.append(position_lookup(style, positions))
        parameters.append(positions)
    norm, norm_parameters = norm_operator(replace(style, residual=style.weight), "embedding_norm",
                                          f"{_EMBEDDINGS}.LayerNorm")
    operators.append(norm)
    if style.dropout:
        operators.append(dropout_operator(style, "embedding_dropout", style.weight))
    # token numbers are 8-byte integers; fp64 stands for their width
    tokens = Tensor("tokens", style.tokens, "fp64")
    return Layer("embedding", tuple(operators), tokens, (*parameters, types, *norm_parameters))


def _type_lookup(style: Style, types: Parameter) -> Operator:
    """Lookup of every token's type and its addition; backward scatters all rows into two."""
    rows, cols, e = style.tokens, style.hidden, width(style.weight)
    forward = (
        Kernel("embedding", style.weight, (rows, cols), "forward", 0.0, 2 * rows * cols * e, "memory_bound"),
        elementwise("type_add", rows * cols, 3 * e, style.weight),
    )
    backward = Kernel("embedding", style.weight, (rows, cols), "backward", 0.0, (3 * rows * cols + types.numel) * e,
                      "memory_bound", launches=6)
    return Operator("token_types", forward, (backward,), (types,))


def _head(style: Style) -> Layer:
    """Dense, GELU and norm on the predicted tokens, then the vocabulary with a bias of its own, and the loss."""
    rows = style.batch * style.predicted
    few = replace(style, batch=1, sequence=rows, gemm=style.wide)  # narrow formats leave the head alone
    inputs = Tensor("transform_input", rows * style.hidden, style.act)
    dense, dense_parameters = linear_operator(few, "transform", f"{_HEAD}.transform.dense", style.hidden, style.hidden,
                                              source=style.residual, saved=(inputs,))
    kept = Tensor("transform_output", rows * style.hidden, style.act)
    e = width(style.act)
    gelu = Operator("transform_activation", (elementwise("activation", rows * style.hidden, 2 * e, style.act),),
                    (elementwise("activation_backward", rows * style.hidden, 3 * e, style.act),), saved=(kept,))
    norm, norm_parameters = norm_operator(few, "transform_norm", f"{_HEAD}.transform.LayerNorm")
    logits, logits_parameters = _logits(few, rows)
    weight = () if style.tied else (logits_parameters[0],)
    bias = logits_parameters[1]
    operators = [dense, gelu, norm, logits, loss_operator(style, rows)]
    if style.predicted < style.sequence:
        operators.insert(0, _gather(style, rows))
    stream = Tensor("head_input_stream", style.tokens * style.hidden, style.residual)
    table = (Parameter(f"{_EMBEDDINGS}.word_embeddings.weight", (style.vocab, style.hidden)),) if style.tied else ()
    return Layer("head", tuple(operators), stream, (bias, *dense_parameters, *norm_parameters, *weight), table)


def _logits(few: Style, rows: int) -> tuple[Operator, tuple[Parameter, ...]]:
    """The product with the vocabulary; its gradient-ready parameters are its own only."""
    inputs = Tensor("head_input", rows * few.hidden, few.act)
    operator, parameters = linear_operator(few, "logits", f"{_HEAD}.decoder", few.hidden, few.vocab,
                                           source=few.residual, saved=(inputs,), bias=True)
    own = tuple(p for p in operator.parameters if not (few.tied and len(p.shape) > 1))
    return replace(operator, parameters=own), parameters


def _gather(style: Style, rows: int) -> Operator:
    """The masked positions picked out of the sequence; backward scatters into zeros."""
    elements, e = rows * style.hidden, width(style.residual)
    picked = strided(style, elementwise("gather_predicted", elements, 2 * e, style.residual))
    backward = (elementwise("scatter_predicted", style.tokens * style.hidden, e, style.residual), picked)
    return Operator("gather_predicted", (picked,), backward)
