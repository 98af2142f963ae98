"""Multi-token prediction (MTP): blocks behind the model that each predict one token further on.

Each takes the hidden state of the block before it and the embedding of the token after, normalises both, multiplies
them side by side by one matrix, runs a block like the model's last and a norm, and predicts through the model's own
head. All of it stands in the head's layer: it is on the stage of the head, which its products share.

Sources: DeepSeek-V3, arXiv 2412.19437, section 2.2; megatron-core 0.16.1 transformer/multi_token_prediction.py
(MultiTokenPredictionLayer), models/gpt/gpt_model.py (_postprocess), models/gpt/gpt_layer_specs.py (the block is like
the last one).
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Layer, Operator, Parameter, Tensor
from sim.model.kernels import elementwise, joint, linear_operator, width
from sim.model.layers.embedding import lookup
from sim.model.layers.norms import norm_operator
from sim.model.layers.residual import dropout_operator
from sim.model.style import Style


def with_further_tokens(style: Style, head: Layer, block: Layer) -> Layer:
    """The head's layer with `style.further` more predictions.

    The vocabulary's gradient is complete with the first product of forward, the last of backward.

    Args:
        head: final norm, and what makes a loss of it.
        block: the model's last.
    """
    if not style.further:
        return head
    table = Parameter("embedding.word_embeddings.weight", (style.vocab, style.hidden))
    depths = [_depth(style, depth, block, table) for depth in range(style.further)]
    norm, *ends = (replace(op, recomputed=False) for op in head.operators)
    first = [replace(op, name=f"mtp_{op.name}") for op in ends]
    later = [replace(op, parameters=()) for op in first] * (style.further - 1)
    operators = (norm, *(op for own, _ in depths for op in own), *first, *later,
                 *(replace(op, parameters=()) for op in ends))
    norm_parameters, vocabulary = head.parameters[:len(norm.parameters)], head.parameters[len(norm.parameters):]
    copied = (table,) if style.copies_table else ()
    return replace(head, operators=operators, parameters=(
        *norm_parameters, *(p for _, own in depths for p in own), *vocabulary, *copied),
        shared=head.shared if copied else (*head.shared, table))


def _depth(style: Style, depth: int, block: Layer, table: Parameter) -> tuple[list[Operator], list[Parameter]]:
    """Operators of one further token up to its last norm, and their parameters but the table, as registered."""
    module, stream, e = f"mtp.layers.{depth}", style.stream, width(style.act)
    token_norm, token_parameters = norm_operator(stream, "mtp_token_norm", f"{module}.enorm")
    hidden_norm, hidden_parameters = norm_operator(stream, "mtp_hidden_norm", f"{module}.hnorm")
    both = 2 * stream.tokens * style.hidden
    join = Operator("mtp_join", (elementwise("concatenate", both, 2 * e, style.act),),
                    (elementwise("concatenate_backward", both, 2 * e, style.act, 2),))
    projection, projection_parameters = linear_operator(
        style, "mtp_projection", f"{module}.eh_proj", 2 * style.hidden, style.hidden // style.tensor,
        source=style.residual, saved=(Tensor("mtp_projection_input", both, style.act),), bias=False)
    projection = replace(projection, joint=joint(style, "column", 2 * style.tokens * style.hidden))
    last_norm, last_parameters = norm_operator(stream, "mtp_norm", f"{module}.final_layernorm")
    named = {p.name: replace(p, name=f"{module}.transformer_layer.{p.name}") for p in block.parameters}
    inside = [replace(op, parameters=tuple(named[p.name] for p in op.parameters)) for op in block.operators]
    operators = [*_looked_up(style, table, depth), token_norm, hidden_norm, join, projection, *_gathered(style),
                 *inside, last_norm]
    return operators, [*token_parameters, *hidden_parameters, *projection_parameters, *named.values(),
                       *last_parameters]


def _looked_up(style: Style, table: Parameter, depth: int) -> list[Operator]:
    """The tokens' embeddings, out of checkpoints. The table's gradient is complete with the first depth's where this
    stage has a copy of it; else it waits for the embedding's own, to which it is added."""
    found = replace(lookup(style, table), name="mtp_embedding", recomputed=False)
    if depth or not style.copies_table:
        added = elementwise("table_gradient_sum", table.numel, 3 * width(style.weight), style.weight)
        found = replace(found, parameters=(), backward=(found.backward[0], added))
    if not style.dropout:
        return [found]
    return [found, replace(dropout_operator(style.stream, "mtp_dropout", style.weight), recomputed=False)]


def _gathered(style: Style) -> list[Operator]:
    """The projection's columns of all tensor ranks, copied side by side; where activations are scattered each goes on
    with its own tokens, whose gradients come together again (gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region)."""
    if style.tensor == 1:
        return []
    elements, e = style.tokens * style.hidden, width(style.act)
    copied = elementwise("gathered_columns", elements, 2 * e, style.act)
    back = (elementwise("own_columns", elements // style.tensor, 2 * e, style.act),) if style.scattered else ()
    return [Operator("mtp_gather", (copied,), back, joint=joint(style, "whole", elements, narrow=False))]
