"""Attention: projections, rotary embedding, the core (`attention_core.py`), output projection.

What autograd keeps is assigned so that selective recomputation is simply "drop what `core` operators keep": queries,
keys and values belong to the operator that makes them, the core's output to the projection that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.model.architecture import Operator, Parameter, Tensor
from sim.model.attention.core import core_operators
from sim.model.attention.core_choice import core_dtype, expands, in_math, repeated, spread_groups, uses_flash
from sim.model.attention.head_exchange import within
from sim.model.attention.head_norms import head_norms
from sim.model.attention.math_core import repeat_slices
from sim.model.kernels import (
    ROTARY_VISITS,
    cast,
    elementwise,
    linear,
    linear_operator,
    linear_parameters,
    meeting,
    scalar,
    strided,
    strided_chain,
    width,
)
from sim.model.style import Style
from sim.work import Kernel

#: Names of the query, key, value and output projections by module style; a fused projection has one name.
_NAMES: dict[str, tuple[str, ...]] = {
    "plain": ("qkv", "proj"),
    "plain apart": ("q", "k", "v", "proj"),
    "gpt2": ("attn.c_attn", "attn.c_proj"),
    "transformers": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "megatron": ("self_attention.linear_qkv", "self_attention.linear_proj"),
}
#: Heads that TransformerEngine copies for flash-attn by one kernel (pytorch/attention.py, _PrepareQKVForFA).
_PREPARED = 128
#: Of Hugging Face's modules with one product, by how it lays out what it makes.
_JOINT_NAMES = {
    "parts": ("self_attn.qkv_proj", "self_attn.o_proj"), "heads": ("attention.query_key_value", "attention.dense"),
    "groups": ("self_attention.query_key_value", "self_attention.dense"),
}


def attention_operators(
    style: Style, source: str, names: Sequence[str] = (),
) -> tuple[list[Operator], list[Parameter]]:
    """Operators from the projection of queries to the output projection, and parameters in registration order.

    With `style.memory` keys and values come from another stack's output (cross attention).

    Args:
        source: dtype in which the norm's output arrives.
        names: modules of the projections, default those of the module style.
    """
    apart = style.modules == "plain" and style.projects_apart
    usual = "gpt2" if style.conv1d else "plain apart" if apart else style.modules
    names = names or _JOINT_NAMES.get(style.joint_qkv) or _NAMES[usual]
    project = _cross_projections if style.memory else _projections
    qkv, parameters = project(replace(style, bias=style.qkv_bias), names[:-1], source)
    operators = [qkv]
    style = spread_groups(style)
    if style.copies_heads:
        operators.append(_head_copies(style))
    normed: list[Parameter] = []
    if style.qk_norm:
        norms, normed = head_norms(style)
        operators += norms
    if style.positions == "rotary":
        operators.append(_rotary(style))
    inner = within(style)
    if expands(inner) and uses_flash(inner):
        operators.append(_expansion(inner))
    operators += core_operators(style)
    attended = Tensor("attention_output", style.tokens * style.query_width, style.act)
    projection, more = linear_operator(style, "projection", names[-1], style.query_width, style.hidden,
                                       source=style.act, saved=(attended,))
    elements = style.tokens * style.hidden
    operators[0] = meeting(style, operators[0], "column", elements)
    projection = meeting(style, projection, "row", elements)
    return [*operators, projection], [*parameters, *more, *normed]


def _projections(style: Style, names: Sequence[str], source: str) -> tuple[Operator, list[Parameter]]:
    """Query, key and value projections of one input, fused or not, and the tensors attention will need."""
    outputs = style.query_width + 2 * style.kv_width
    behind = spread_groups(style)
    kept = [] if style.positions == "rotary" else _kept_queries_and_keys(behind)
    kept.append(_kept_values(behind))
    inputs = Tensor("qkv_input", style.stream.tokens * style.hidden, style.act)
    if len(names) == 1:
        operator, fused = linear_operator(style, "qkv", names[0], style.hidden, outputs, source=source,
                                          saved=(inputs, *kept))
        if style.bias:
            operator = _with_bias(style, operator, outputs)
        if not style.stack.compile:
            apart, gather = _packed(style, outputs) if style.packs_heads else _taken_apart(style, outputs)
            if style.copies_queries:
                apart = [*apart, _copy(style, "query_heads", style.tokens * style.query_width)]
            if style.copies_values:
                parts = 1 if style.positions == "rotary" else 2
                apart = [*apart, _copy(style, "value_heads", parts * style.tokens * style.kv_width, parts)]
            operator = replace(operator, forward=(*operator.forward, *apart), backward=(*gather, *operator.backward))
        else:
            operator = replace(operator, backward=(_compiled_gather(style, outputs), *operator.backward))
        return operator, list(fused)
    features = (style.query_width, style.kv_width, style.kv_width)
    tokens = (style.tokens,) * 3
    sums = elementwise("input_gradient_sum", style.tokens * style.hidden, 3 * width(source), source, 2)
    # under autocast every projection casts its input for itself
    saved = (inputs,) * (3 if source != style.act else 1)
    operator, parameters = _separate(style, names, features, tokens, source, (*saved, *kept), [sums])
    own = style.modules == "transformers" and style.positions == "rotary" and not style.cut_heads
    if own and not (style.stack.fused_rope or style.stack.compile):
        # what comes of rotary positions has heads in front of tokens (as Hugging Face's Llama runs on tests/driver)
        laid = _copy(style, "rotary_gradients", style.tokens * (style.query_width + style.kv_width), 2)
        operator = replace(operator, backward=(laid, *operator.backward))
    return operator, parameters


def _with_bias(style: Style, operator: Operator, outputs: int) -> Operator:
    """The projection with its bias added where the stack adds it (`Stack.projection_bias`)."""
    if style.stack.projection_bias == "apart":
        added = strided(style, elementwise("projection_bias", style.tokens * outputs, 2 * width(style.act), style.act))
        return replace(operator, forward=(*operator.forward, added))
    if style.stack.projection_bias == "both":
        return replace(operator, backward=tuple(k for k in operator.backward if k.variant != "bias_gradient"))
    return operator


def _packed(style: Style, outputs: int) -> tuple[list[Kernel], list[Kernel]]:
    """What stands between a product of queries, keys and values and attention that takes them as they lie: nothing, or
    a copy each way, one kernel for heads of 128."""
    if style.packed == "in place":
        return [], []
    parts = 1 if style.head_dim == _PREPARED else 3
    return ([_copy(style, "heads_apart", style.tokens * outputs, parts)],
            [elementwise("heads_together", style.tokens * outputs, 2 * width(style.act), style.act)])


def _taken_apart(style: Style, outputs: int) -> tuple[list[Kernel], list[Kernel]]:
    """Copies behind a product of queries, keys and values, and what its gradient is put together by.

    Parts of a split are written side by side (unbind's, chunk's: stack or cat). A slice, and an index by a list, fill a
    zeroed whole each, two of which are added to the first (Phi-3, Falcon). Falcon's lists of one index copy keys and
    values, which several groups then have copied out to every query head.
    """
    elements, e = style.tokens * outputs, width(style.act)
    if style.joint_qkv not in ("parts", "groups"):
        return [], [elementwise("qkv_gradient_cat", elements, 2 * e, style.act)]
    gather = elementwise("qkv_gradient_slices", elements, (3 + 2 + 2 * 3) * e, style.act, 8)
    if style.joint_qkv == "parts":
        return [], [gather]
    pair = 2 * style.tokens * style.kv_width
    copies = [strided(style, elementwise("key_value_index", pair, 2 * e, style.act, 2))]
    if style.kv_heads > 1:
        copied = 3 * style.tokens * style.query_width
        copies.append(strided(style, elementwise("key_value_heads", copied, 2 * e, style.act, 3)))
    return copies, [gather]


def _compiled_gather(style: Style, outputs: int) -> Kernel:
    """Gradients of queries, keys and values written side by side by one kernel. Where positions are turned back,
    that of queries and keys is counted there (torch 2.13's Inductor on fake tensors)."""
    turned = style.query_width + style.kv_width if style.positions == "rotary" else 0
    return elementwise("qkv_gradient_cat", style.tokens * (outputs - turned), 2 * width(style.act), style.act)


def _copy(style: Style, name: str, elements: int, parts: int = 1) -> Kernel:
    """Parts of what one product made, copied out of it."""
    return strided(style, elementwise(name, elements, 2 * width(style.act), style.act, parts))


def _cross_projections(style: Style, names: Sequence[str], source: str) -> tuple[Operator, list[Parameter]]:
    """Queries from the stack's own stream, keys and values from the encoder's output.

    That output is kept once for all blocks, by the layer that makes it; where a projection casts it, the copy is kept.
    Its gradient is added up over the blocks.
    """
    rows = style.batch * style.memory
    copies = (Tensor("memory_copy", rows * style.hidden, style.act),) * (2 if source != style.act else 0)
    saved = (Tensor("query_input", style.tokens * style.hidden, style.act), *copies, *_kept_queries_and_keys(style),
             _kept_values(style))
    sums = elementwise("memory_gradient_sum", rows * style.hidden, 3 * width(source), source, 2)
    if len(names) == 2:
        features: tuple[int, ...] = (style.query_width, 2 * style.kv_width)
        saved = saved if source == style.act else (saved[0], *saved[2:])
        return _separate(style, names, features, (style.tokens, rows), source, saved, [sums])
    features = (style.query_width, style.kv_width, style.kv_width)
    return _separate(style, names, features, (style.tokens, rows, rows), source, saved, [sums])


def _separate(
    style: Style, names: Sequence[str], features: Sequence[int], rows: Sequence[int], source: str,
    saved: tuple[Tensor, ...], sums: list[Kernel],
) -> tuple[Operator, list[Parameter]]:
    """Projections that are modules of their own; the one that runs last in forward has its gradients first."""
    forward: list[Kernel] = []
    backward: list[Kernel] = []
    parameters: list[Parameter] = []
    ready: list[Parameter] = []
    for name, outputs, tokens in zip(names, features, rows, strict=True):
        one_forward, one_backward = linear(style, tokens, style.hidden, outputs, source=source, bias=style.bias,
                                           sibling=name != names[0] and not style.memory)
        forward += one_forward
        backward = one_backward + backward
        own = linear_parameters(style, name, style.hidden, outputs, style.bias)
        parameters += own
        ready = [*(own if style.autocast else own[::-1]), *ready]
    copies = (Tensor("qkv_weight_copy", style.hidden * sum(features), style.act),) if style.autocast else ()
    return Operator("qkv", tuple(forward), (*backward, *sums), tuple(ready), saved, weight_copies=copies), parameters


def _kept_queries_and_keys(style: Style) -> list[Tensor]:
    return [Tensor("queries", style.tokens * style.query_width, core_dtype(style)),
            Tensor("keys", style.batch * style.keys * _kept_width(style), core_dtype(style))]


def _kept_values(style: Style) -> Tensor:
    """Values; a view of what one product made keeps all of it."""
    whole = style.joint_qkv in ("parts", "heads") and not repeated(style) and core_dtype(style) == style.act
    if whole and (uses_flash(style) or style.batch == 1):
        return Tensor("values", style.tokens * (style.query_width + 2 * style.kv_width), style.act)
    return Tensor("values", style.batch * style.keys * _kept_width(style), core_dtype(style))


def _kept_width(style: Style) -> int:
    """Width of keys, and of values, as the core keeps them: one head that is broadcast is copied for several
    sequences only."""
    once = in_math(style) and style.broadcasts_keys and style.batch == 1
    return style.query_width if repeated(style) and not once else style.kv_width


def _expansion(style: Style) -> Operator:
    """Keys and values copied out to every query head; backward sums over the copies."""
    e, rows = width(style.act), style.batch * style.keys
    moved = 2 * rows * (style.kv_width + style.query_width) * e
    forward, backward = (replace(elementwise(name, 2 * rows * style.query_width, e, style.act, 2), bytes=moved)
                         for name in ("expand_kv", "expand_kv_backward"))
    forward = strided(style, forward)
    return Operator("rotary", (forward,), (backward, *repeat_slices(style, "memory_bound")))


def _head_copies(style: Style) -> Operator:
    """Copies of queries, keys and values between the projection and rotary positions, and those of their gradients;
    with them the row of tiny kernels that make cumulative lengths of the mask (zeros, sum and cumsum, twice).

    Source: nanotron 0.4 models/llama.py, CausalSelfAttention.forward (permute and contiguous, cat, permute and
    contiguous), CoreAttention.forward; backward: split's cat, the copy behind the first permutation (that of unbind is
    the projection's own).
    """
    e, pair = width(style.act), style.tokens * 2 * style.kv_width
    whole = style.tokens * style.query_width + pair
    lengths = elementwise("sequence_lengths", style.tokens, 2.0, style.act, 6)
    forward = (strided(style, elementwise("heads_first", whole, 2 * e, style.act)),
               elementwise("kv_cat", pair, 2 * e, style.act),
               strided(style, elementwise("kv_interleaved", pair, 2 * e, style.act)), lengths)
    backward = (strided(style, elementwise("kv_gradient_cat", pair, 2 * e, style.act)),
                strided(style, elementwise("heads_last", whole, 2 * e, style.act)))
    return Operator("rotary", forward, backward)


def _rotary(style: Style) -> Operator:
    """Rotation of queries and keys. cos and sin take the residual stream's dtype, and the products follow it.

    Hugging Face: q*cos, rotate_half (neg, cat), *sin, add, for q and k each; backward the products, rotate_half's
    slices (zero fill and copy of both halves), neg, and three sums. Source: transformers modeling_llama.py.
    """
    whole = style.tokens * (style.query_width + style.kv_width)
    elements = whole * style.turned // style.head_dim if style.cut_heads and style.turned else whole
    e, wide = width(style.act), width(style.residual)
    if style.turns_complex:
        forwards, backwards = _complex_rotary(style, elements, e)
        return Operator("rotary", forwards, backwards, saved=tuple(_kept_queries_and_keys(style)))
    forwards, backwards = _spelled_rotary(elements, e, wide, style.act)
    if style.stack.fused_rope or style.stack.compile:
        launches = 1 if style.stack.fused_in_place else 2
        forwards = (elementwise("rotary", elements, 2 * e, style.act, launches),)
        backwards = (elementwise("rotary_backward", elements, 2 * e, style.act, launches),)
    if style.modules == "transformers" and style.stack.rotary_tables and not style.stack.compile:
        tables = style.stack.rotary_tables
        made = elementwise("rotary_tables", style.sequence * style.head_dim, 4.0 * tables, "fp32", tables)
        forwards = (made, *forwards)
    if style.cut_heads and not style.stack.fused_rope:  # cat; two slices that fill a zeroed whole each, and their sum
        joined = strided(style, elementwise("rotary_cat", whole, e + wide, style.act, 2))
        filled = elementwise("rotary_cut_backward", whole, (2 + 3) * e, style.act, 6)
        copied = strided(style, elementwise("rotary_cut_backward", whole, 2 * e, style.act, 4))
        forwards, backwards = (*forwards, joined), (filled, copied, *backwards)
    return Operator("rotary", forwards, backwards, saved=tuple(_kept_queries_and_keys(style)))


def _complex_rotary(style: Style, elements: int, e: float) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Queries and keys as complex numbers: both widened to fp32, multiplied by what is broadcast over heads, and
    narrowed, forward and backward alike. Inductor has no code for complex numbers: ATen's kernel multiplies them, so
    widening and narrowing are passes of their own (what torch 2.13.0's Inductor makes of torchtitan's block).

    Args:
        elements: real ones, of queries and keys.
        e: bytes of one as it comes.
    """
    def way(name: str) -> tuple[Kernel, ...]:
        widened = cast(name, elements, style.act, "fp32", 2, compiled=style.stack.compile)
        turned = scalar(elementwise(name, elements, 4 + 4, "fp32", 2), 0.5)  # an element is a pair
        return (widened, turned, cast(name, elements, "fp32", style.act, 2)) if e < 4 else (turned,)

    return way("rotary"), way("rotary_backward")


def _spelled_rotary(elements: int, e: float, wide: float, dtype: str) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Hugging Face's operators on queries and keys. Heads stand behind tokens in memory and in front of them in
    operators, so no kernel is vectorised but fills, casts and the sum of both halves' gradients.

    Args:
        elements: of queries and keys.
        e, wide: bytes of an element, and of one multiplied by cos or sin.
    """
    narrowed = [] if wide == e else [e + wide]
    forward = strided_chain("rotary", elements, narrowed, [e + wide, e, 2 * e, e + wide, 3 * wide], dtype,
                            visits=ROTARY_VISITS)
    backward = strided_chain("rotary_backward", elements, [wide, wide, 3 * wide, *narrowed],
                             [2 * wide, 2 * wide, wide, wide, wide, 3 * wide], dtype, visits=ROTARY_VISITS)
    forward, backward = (tuple(replace(k, launches=2 * k.launches) for k in way)  # once over q and once over k
                         for way in (forward, backward))
    return forward, backward
