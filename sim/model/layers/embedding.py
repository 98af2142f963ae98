"""The embedding layer: token lookup, learned positions, dropout."""

from __future__ import annotations

from sim.model.architecture import Layer, Operator, Parameter, Tensor
from sim.model.kernels import column_sum, elementwise, joint, strided, width
from sim.model.layers.residual import dropout_operator
from sim.model.style import Style
from sim.work import Kernel

_NAMES = {"plain": ("wte", "wpe"), "gpt2": ("transformer.wte", "transformer.wpe"),
          "transformers": ("model.embed_tokens", "model.embed_positions"),
          "megatron": ("embedding.word_embeddings", "embedding.position_embeddings")}


def embedding_layer(style: Style) -> Layer:
    """Token embedding, learned positions and dropout. A tied head's gradient is added to the table's here."""
    token_name, position_name = _NAMES["gpt2" if style.conv1d else style.modules]
    table = Parameter(f"{token_name}.weight", (style.vocab, style.hidden))
    operators = [lookup(style, table)]
    parameters = [table]
    if style.positions == "learned":
        positions = Parameter(f"{position_name}.weight", (style.max_positions, style.hidden))
        operators.append(position_lookup(style, positions))
        parameters.append(positions)
    if style.dropout:
        operators.append(dropout_operator(style.stream, "embedding_dropout", style.weight))
    # token numbers are 8-byte integers; fp64 stands for their width
    tokens = Tensor("tokens", style.tokens, "fp64")
    return Layer("embedding", tuple(operators), tokens, tuple(parameters))


def lookup(style: Style, table: Parameter) -> Operator:
    """Gather of one row per token; backward zeroes a dense gradient, sorts the tokens and scatter-adds. A stack that
    keeps a buffer of all gradients adds this one to it, whole.

    Source: aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda); megatron-core 0.5.0
    distributed/distributed_data_parallel.py, param_hook (main_grad.add_(grad)); nanotron 0.4
    optim/gradient_accumulator.py, _accumulate_grad.
    """
    rows, cols, e = style.tokens, style.hidden, width(style.weight)
    forward = Kernel("embedding", style.weight, (rows, cols), "forward", 0.0, 2 * rows * cols * e, "memory_bound")
    if style.stack.compile:
        forward = elementwise("lookup", rows * cols, 2 * e, style.weight)
    backward = [Kernel("embedding", style.weight, (rows, cols), "backward", 0.0,
                       (3 * rows * cols + table.numel) * e, "memory_bound", launches=6)]
    if style.tied:
        backward.append(elementwise("tied_gradient_sum", table.numel, 3 * e, style.weight))
    if style.main_grad and (not style.tied or style.stack.gradient_accumulation_fusion):
        # no product adds into the buffer here; a tied head that adds for itself has added for both
        backward.append(elementwise("main_grad_add", table.numel, e + 2 * width(style.gradient), style.gradient))
    cut = joint(style, _sum_of(style), rows * cols, narrow=False)
    return Operator("embedding", (forward,), tuple(backward), (table,), joint=cut)


def _sum_of(style: Style) -> str:
    """Which joint the ranks' shares of the lookup have: Megatron adds learned positions to whole sums, and cuts these
    along the sequence afterwards (megatron-core 0.8.0 to 0.15.0 models/common/embeddings/language_model_embedding.py,
    reduce_scatter_embeddings, which before was not there; run on the driver that does nothing)."""
    return "summed" if style.modules == "megatron" and style.positions == "learned" else "row"


def position_lookup(style: Style, positions: Parameter) -> Operator:
    """Lookup of one row per position and its addition to every sequence; backward sums over the batch."""
    rows, cols, e = style.sequence, style.hidden, width(style.weight)
    forward = (
        Kernel("embedding", style.weight, (rows, cols), "forward", 0.0, 2 * rows * cols * e, "memory_bound"),
        strided(style, elementwise("position_add", style.tokens * cols, 2 * e + e / style.batch, style.weight)),
    )
    backward = (
        column_sum("position_gradient_sum", style.batch, rows * cols, style.weight),
        Kernel("embedding", style.weight, (rows, cols), "backward", 0.0, (3 * rows * cols + positions.numel) * e,
               "memory_bound", launches=6),
    )
    return Operator("positions", forward, backward, (positions,))
