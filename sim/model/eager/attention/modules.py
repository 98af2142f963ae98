"""Attention as PyTorch modules run it: projections, rotary positions, and the core as one kernel or spelled out.

Sources: transformers modeling_gpt2.py and modeling_llama.py (5.x), Megatron-LM core/transformer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from sim.model.attention.core import softmax_dtype, widens_biased
from sim.model.attention.core_choice import (
    copies_output,
    expands,
    fused_kernel,
    in_math,
    masked,
    spread_groups,
    unequal,
    uses_flash,
)
from sim.model.attention.head_exchange import within
from sim.model.attention.head_norms import copies_parts
from sim.model.eager.attention.head_exchange import exchanged, in_one, one_function
from sim.model.eager.attention.joint import joint_parts
from sim.model.eager.attention.math_core import in_math_run, repeat
from sim.model.eager.attention.ring import ring
from sim.model.eager.norms import norm
from sim.model.eager.products import column, entered, row
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Gradients, Run, Tensor
from sim.model.eager.tensors.storage import Storage
from sim.model.recompute import modules_of
from sim.model.style import Style

#: Rows of a block of flash attention's backward.
_BLOCK_ROWS = 128


def attention(run: Run, style: Style, x: Tensor, policy: str, memory: Tensor | None = None,
              bias: Tensor | None = None, *, variables: list[Storage]) -> Tensor:
    """From the norm's output to the output projection.

    Args:
        memory: what keys and values are made from, default `x`.
        bias: added to the scores.
        variables: takes what the block has in variables to its end. Hugging Face's modules return the weights of scores
            that are spelled out (`hidden_states, _ = self.self_attn(...)`); others: `Style.one_forward`.
    """
    run.at("qkv")
    joint: list[Storage] = []  # until attention is done: variables of modules with one product
    query, key, value = _projections(run, style, x, memory, joint)
    del x
    style = spread_groups(style)
    if style.copies_heads and memory is None:
        run.at("rotary")
        query, key, value = _copied(run, style, query, key, value)
    elif style.positions == "rotary":
        run.at("rotary")
        query, key = _rotary(run, style, query, key)
    if style.copies_values and "core_attn" not in modules_of(policy):  # a checkpoint keeps them as they lie
        key, value = op.clone(run, key, style.positions != "rotary"), op.clone(run, value)
    out = attended(run, style, query, key, value, policy, bias, variables=variables)
    if style.one_forward:
        variables += [query.storage, out.storage]
    run.at("projection")
    return row(run, style, out, style.query_width, (("projection", style.hidden),))


def attended(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, policy: str,
             bias: Tensor | None = None, *, variables: list[Storage]) -> Tensor:
    """The core, fused or spelled out, of queries, keys and values of every head; arguments as of `attention`."""
    run.at("attention")
    core: Callable[..., Tensor] = _core(within(style))
    if style.exchanges > 1:
        core = _exchanged
    if "core_attn" in modules_of(policy):
        inputs = (query, key, value) if bias is None else (query, key, value, bias)
        return run.checkpoint(lambda run, *tensors: core(run, style, *tensors), *inputs)
    return core(run, style, query, key, value, bias, variables)


def spelled_out(style: Style) -> bool:
    """Whether scores are a tensor that softmax reads."""
    return _core(within(style)) is _eager


def _core(style: Style) -> Callable[..., Tensor]:
    return _flash if uses_flash(style) else in_math_run if in_math(style) else _eager


def _exchanged(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None,
               weights: list[Storage] | None = None) -> Tensor:
    """The core with the exchange of tokens for heads around it."""
    inner = within(style)
    if uses_flash(inner) and in_one(style) and bias is None:
        q, k, v = (op.to(run, t, run.autocast or t.dtype) for t in (query, key, value))
        return one_function(run, style, (q, k, v), style.tokens * style.heads, flash_sums(style))
    core = _core(inner)
    return exchanged(run, style, (query, key, value), lambda style, q, k, v: core(run, style, q, k, v, bias, weights))


def _projections(run: Run, style: Style, x: Tensor, memory: Tensor | None, joint: list[Storage],
                 ) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values. Plain modules view them as (3, b, a, s, d), so their gradients are copied twice."""
    widths = (style.query_width, style.kv_width, style.kv_width)
    parts = tuple(zip(("query", "key", "value"), widths, strict=True))
    x = entered(run, style, x)
    style = replace(style, bias=style.qkv_bias)
    if (style.projects_apart and not style.joint_qkv) or memory is not None:
        q = _normed(run, style, column(run, style, x, parts[:1]), "query_norm")
        k = _normed(run, style, column(run, style, memory or x, parts[1:2]), "key_norm")
        v = column(run, style, memory or x, parts[2:])
        return q, k, v
    fused = column(run, style, x, parts)
    if style.joint_qkv:
        joint.append(fused.storage)
        return joint_parts(run, style, fused)
    if style.modules == "plain" and not style.stack.compile:
        fused = op.relayout(run, op.clone(run, fused, style.copies_heads))
    q, k, v = op.split(run, fused, [style.tokens * width for width in widths])
    q = op.clone(run, q, style.copies_queries)
    return _normed(run, style, q, "query_norm"), _normed(run, style, k, "key_norm"), v


def _normed(run: Run, style: Style, x: Tensor, name: str) -> Tensor:
    """Queries or keys behind their norm, of a part of one projection a copy."""
    if not style.qk_norm:
        return x
    run.at(name)
    cols = style.head_dim if style.qk_norm == "head" else x.elements // style.tokens
    x = op.clone(run, x, copies_parts(style))
    normed = norm(run, replace(style, hidden=cols, residual=style.act), x, name)
    run.at("qkv")
    return normed


def _copied(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in one tensor, side by side and then interleaved, where the keys are rotated in place.

    Source: nanotron 0.4 models/llama.py, CausalSelfAttention.forward; flash_attn layers/rotary.py (q not in place,
    apply_rotary_emb_kv_ in place).
    """
    pair = op.clone(run, op.cat(run, [key, value]))
    key, value = op.split(run, pair, [key.elements, value.elements])
    if style.positions == "rotary" and style.stack.fused_rope:
        return op.unary(run, query), key, value
    return (*_rotary(run, style, query, key), value) if style.positions == "rotary" else (query, key, value)


def _rotary(run: Run, style: Style, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb; cos and sin are the embedding layer's and in the residual stream's dtype."""
    if style.turns_complex:
        return _as_complex(run, query, key)
    if style.stack.fused_rope and style.stack.fused_in_place:
        return op.overwritten(run, query), op.overwritten(run, key)
    if style.stack.fused_rope or style.stack.compile:
        return op.unary(run, query), op.unary(run, key)
    return _turned(run, style, query), _turned(run, style, key)


def _as_complex(run: Run, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """torchtitan's apply_rotary_emb: fp32 copies and their products are variables to its end; by what they are
    multiplied needs no gradient, so neither is kept."""
    wide = [op.to(run, x, "fp32") for x in (query, key)]
    turned = [_multiplied(run, x) for x in wide]
    first, second = (op.to(run, x, query.dtype) for x in turned)
    return first, second


def _multiplied(run: Run, x: Tensor) -> Tensor:
    elements = x.elements
    node = run.node(lambda run, _: [run.arrived(elements, "fp32", named=False)], (x.sink,))
    return Tensor(run.arrived(elements, "fp32", named=False), elements, "fp32", node.output())


def _turned(run: Run, style: Style, x: Tensor) -> Tensor:
    """Rotary positions of whole heads, or of a part that is cut out and joined to the rest again."""
    if not style.cut_heads:
        return rotated(run, style, x)
    part = x.elements // style.head_dim * (style.turned or style.head_dim)
    turned, rest = op.slices(run, x, [part, x.elements - part])
    return op.cat(run, [rotated(run, style, turned), rest])


def rotated(run: Run, style: Style, x: Tensor) -> Tensor:
    """Rotary positions spelled out: two products and a sum."""
    return op.add(run, times_table(run, style, x), times_table(run, style, _rotate_half(run, x)))


def times_table(run: Run, style: Style, x: Tensor) -> Tensor:
    """A product with cos or sin, which need no gradient: the input is not kept."""
    elements, source, wide = x.elements, x.dtype, op.promote(x.dtype, style.residual)

    def rule(run: Run, _: object) -> Gradients:
        full = run.new(elements, wide)
        return [full if wide == source else run.new(elements, source)]

    node = run.node(rule, (x.sink,))
    return Tensor(run.new(elements, wide), elements, wide, node.output())


def _rotate_half(run: Run, x: Tensor) -> Tensor:
    first, second = op.slices(run, x, [x.elements // 2] * 2)
    return op.cat(run, [op.unary(run, second), first])


def _flash(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None,
           _weights: list[Storage] | None = None) -> Tensor:
    # flash has neither a bias nor fp32
    kernel, half, shared = fused_kernel(style), run.autocast or query.dtype, 1
    efficient = kernel == "efficient" or half == "fp32"
    rows = style.tokens * style.heads
    if efficient:  # sums are kept of a multiple of 32 queries (ATen _efficient_attention_forward, kAlignLSE)
        rows = style.batch * style.heads * (math.ceil(style.sequence / 32) * 32)
    if expands(style):
        key, value = repeat(run, style, key), repeat(run, style, value)
    if masked(style):
        bias = _window_mask(run, style, half)
    elif bias is None:
        q, k, v = (op.to(run, t, run.autocast or t.dtype) for t in (query, key, value))
        sums = style.gradient_parts if flash_sums(style) else 0
        if style.context > 1 and not style.gathers and style.stack.unpadding == "none":
            return ring(run, style, q, k, v, rows, sums)
        if style.stack.unpadding == "none":
            out = op.attention(run, q, k, v, rows, gathered=style.context if style.gathers else 1, sums=sums,
                               spare=_spare(style))
            return op.clone(run, out, copies_output(style))
        # bert_padding.unpad_input and pad_input make new tensors both ways and keep row numbers only
        q, k, v = (op.relayout(run, op.clone(run, t)) for t in (q, k, v))
        return op.relayout(run, op.clone(run, op.attention(run, q, k, v, rows, sums=sums, spare=_spare(style))))
    else:
        bias, shared = bias if style.memory else _bias_mask(run, style, bias), style.batch
    # autocast casts every argument of the call: products with weights of 4 and 8 bits came back as wide as their input
    query, key, value, bias = (op.to(run, t, run.autocast or t.dtype) for t in (query, key, value, bias))
    return op.attention(run, query, key, value, rows, op.expanded(run, bias, shared), shared)


def flash_sums(style: Style) -> bool:
    """Whether the kernel adds the queries' gradient up in fp32, beside row sums (`operations.attention`)."""
    if style.attention == "sdpa":
        return fused_kernel(style) == "flash"
    return style.stack.attention_kernel in ("flash1", "flash2", "triton") and not unequal(style)


def _spare(style: Style) -> int:
    """Queries' gradients that backward keeps room for beside those of tokens: a block of rows for every document
    (flash-attn 2 csrc/flash_attn/flash_api.cpp, mha_varlen_bwd: total_q + 128 * batch_size; recalled)."""
    return _BLOCK_ROWS * style.pieces * style.query_width if style.document else 0


def _window_mask(run: Run, style: Style, dtype: str) -> Tensor:
    """The mask as the kernel reads it: made of booleans, or there already."""
    pairs = style.batch * style.sequence * style.keys * style.stack.sdpa_mask_each
    return run.tensor(pairs, dtype)


def _bias_mask(run: Run, style: Style, bias: Tensor) -> Tensor:
    """create_position_bias_mask: the bias under the causal mask, contiguous."""
    if not style.causal:
        return op.clone(run, bias)
    mask = run.new(style.sequence * style.keys * style.context, "int8")
    return op.clone(run, op.where(run, bias, mask))


def _eager(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None,
           returned: list[Storage] | None = None) -> Tensor:
    """Scores, scale, mask, softmax, dropout, values. `matmul` copies what it cannot view as one batch of matrices, and
    only autograd keeps the copies."""
    b, scores = style.batch, style.batch * style.heads * style.sequence * style.keys * style.context
    whole, repeated = style.positions == "rotary" or style.latent is not None, style.heads != style.kv_heads
    copies, slices = b > 1 and style.modules != "megatron", style.context if style.gathers else 1
    if repeated:
        key, value = repeat(run, style, key), repeat(run, style, value)
    weights = _softmax(run, style, op.matmul(
        run, op.clone(run, query, copies and not whole), op.clone(run, key, copies and not whole and not repeated),
        scores, slices), value.dtype, bias)
    if style.modules == "transformers" and returned is not None:
        returned.append(weights.storage)
    out = op.matmul(run, weights, op.clone(run, value, copies and not repeated),
                    style.tokens * value.elements // (style.batch * style.keys), slices)
    return op.relayout(run, op.clone(run, out)) if copies else op.clone(run, out)


def _softmax(run: Run, style: Style, weights: Tensor, dtype: str, bias: Tensor | None) -> Tensor:
    soft = softmax_dtype(style)
    if style.score_softcap:
        weights = op.scale(run, weights)
        weights = op.unary(run, weights, saves_output=True)  # tanh
    if style.stack.fused_softmax or style.stack.compile:
        if bias is not None:
            weights = _biased(run, weights, bias)
        # Megatron's kernel: "backward pass is completely in-place" (scaled_upper_triang_masked_softmax_cuda.cu and
        # scaled_masked_softmax_cuda.cu, read as colossalai 0.2.8 has them)
        own = style.modules == "megatron" and style.stack.fused_softmax and style.act != "fp32"
        weights = op.to(run, op.softmax(run, weights, soft, own), weights.dtype)
    elif style.modules == "plain" and style.causal and bias is None:
        weights = op.scale(run, weights)
        mask = run.new(style.sequence**2, "int8")  # tril
        weights = op.masked_fill(run, weights, run.new(style.sequence**2, "int8"))  # ~mask
        # one variable, which masked scores do not leave before what comes of them is there
        out = op.softmax_of_scores(run, weights, soft, style.stack.cuda_kernels)
        out = op.dropout(run, out) if style.dropout else out
        del mask, weights
        return out
    else:
        weights = op.scale(run, weights)
        if bias is not None:
            weights = op.add(run, weights, bias)
        if style.causal and not style.memory:
            weights = op.add(run, weights, _mask(style, weights))
        weights = op.softmax_of_scores(run, weights, soft, style.stack.cuda_kernels)
        if style.modules != "transformers" or style.kind == "decoder" or widens_biased(style):
            weights = op.to(run, weights, dtype)  # BERT's and today's T5's go through dropout as softmax left them
    return op.dropout(run, weights) if style.dropout else weights


def _biased(run: Run, weights: Tensor, bias: Tensor) -> Tensor:
    """The sum within the kernel that reads it, without a tensor of its own; the bias has its gradient all the same."""
    elements, dtype, needed = bias.elements, bias.dtype, bias.sink is not None
    node = run.node(lambda run, gradients: [gradients[0], run.new(elements, dtype) if needed else None],
                    (weights.sink, bias.sink))
    return Tensor(weights.storage, weights.elements, weights.dtype, node.output())


def _mask(style: Style, like: Tensor) -> Tensor:
    """The additive mask, which the embedding layer made: only its dtype matters here."""
    return Tensor(like.storage, 0, style.residual, None)
