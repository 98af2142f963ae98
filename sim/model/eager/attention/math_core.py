"""Attention's core as PyTorch's `scaled_dot_product_attention` computes it without a fused kernel, tensor by tensor.

Source: ATen native/transformers/attention.cpp, _scaled_dot_product_attention_math, as it runs on fake tensors (torch
2.13.0), but for the mask, which is added in place there.
"""

from __future__ import annotations

from sim.model.attention.core_choice import core_dtype, masked
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Run, Tensor
from sim.model.eager.tensors.storage import Storage
from sim.model.style import Style


def in_math_run(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None,
                _weights: list[Storage] | None = None) -> Tensor:
    """From queries, keys and values to the output, which autocast casts in front of it and not inside."""
    query, key, value = (op.to(run, t, run.autocast or t.dtype) for t in (query, key, value))
    autocast, run.autocast = run.autocast, ""
    try:
        return _in_math(run, style, query, key, value, bias)
    finally:
        run.autocast = autocast


def _in_math(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """`matmul` copies what it cannot view as one batch of matrices: of several sequences everything, of one what is
    repeated."""
    act, wide, several = query.dtype, core_dtype(style), style.batch > 1
    q_acc, k_acc, v_acc = (op.to(run, t, wide) for t in (query, key, value))
    scaled = op.scale(run, q_acc)
    pairs = style.sequence * style.keys
    apart = masked(style)  # made in front of this function, in the call's dtype
    mask = run.new(pairs * (style.batch if apart else 1), act if apart else wide) if style.causal or apart else None
    grouped = style.heads != style.kv_heads and not style.broadcasts_keys
    keys, values = (repeat(run, style, t) if grouped else t for t in (k_acc, v_acc))
    weights = op.matmul(run, op.clone(run, scaled, several), _broadcast(run, style, op.scale(run, keys)),
                        style.heads * style.batch * pairs)
    if bias is not None:
        weights = op.add(run, weights, bias)
    weights = op.softmax_of_scores(run, weights, wide, style.stack.cuda_kernels)
    del mask
    if style.dropout:
        weights = op.dropout(run, weights)
    out = op.to(run, op.matmul(run, weights, _broadcast(run, style, values), style.tokens * style.query_width), act)
    if wide != act:
        run.new(weights.elements, act)  # the weights that the function returns too
    return op.clone(run, out)


def _broadcast(run: Run, style: Style, x: Tensor) -> Tensor:
    """Keys or values for `matmul`."""
    if style.batch == 1:
        return op.expanded(run, x, style.heads) if style.broadcasts_keys else x
    return repeat(run, style, x) if style.broadcasts_keys else op.clone(run, x)


def repeat(run: Run, style: Style, x: Tensor) -> Tensor:
    """repeat_kv: copied out to every query head; the gradient is summed over the copies."""
    elements, source, dtype = style.batch * style.keys * style.query_width, x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(source, dtype)], (x.sink,))
    return Tensor(run.new(elements, dtype), elements, dtype, node.output())
