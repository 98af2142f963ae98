"""The core of attention, from queries, keys and values to its output: one fused kernel, or kernels spelled out; of a
slice of the sequence on the keys of all of them.
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Joint, Operator, Tensor
from sim.model.attention.core_choice import copies_output, in_math, kernel_name, masked, repeated, uses_flash
from sim.model.attention.head_exchange import exchanged, within
from sim.model.attention.math_core import in_math_operator, repeat_slices
from sim.model.attention.pairs import span
from sim.model.attention.relative import bias_backward, bias_forward, kept_bias
from sim.model.attention.ring import around_the_ring, below
from sim.model.attention.rotated_ring import rotated
from sim.model.kernels import cast, elementwise, product, softcap, softmax_gradient, strided, strided_chain, width
from sim.model.style import Style
from sim.software import Stack
from sim.work import FIXED_ORDER, Kernel

#: FlopCounterMode: a flash backward is five products where the forward is two. (torch/utils/flop_counter.py)
_FLASH_BACKWARD = 2.5

#: unpad_input of flash_attn/bert_padding.py: reads of the host, operators behind the first (the rest of nonzero,
#: max, item, cumsum, both of pad, gather), and views (flatten, rearrange twice, repeat, reshape).
_READS, _LAUNCHES, _VIEWS = 2, 7, 5


def core_operator(style: Style) -> Operator:
    """From queries, keys and values to the attention output: one fused kernel, or spelled out."""
    if style.gathers:
        return _gathered(style)
    fused = uses_flash(style)
    operator = _flash(style) if fused else in_math_operator(style) if in_math(style) else _eager(style)
    if style.context == 1:
        return operator
    other = below(style) if fused else None
    elements = 2 * style.batch * style.keys * (style.query_width if repeated(style) else style.kv_width)
    behind = None if other is None else _flash(other)
    if fused and style.stack.ring_gathers:
        return rotated(style, operator, behind, elements)
    return around_the_ring(style, operator, behind, elements, fused and style.stack.ring_merges)


def core_operators(style: Style, widths: tuple[int, int] | None = None) -> list[Operator]:
    """The core with what exchanges tokens for heads around it, where ranks do that (arguments of `exchanged`)."""
    core = core_operator(within(style))
    return [core] if style.exchanges == 1 else exchanged(style, core, widths)


def _gathered(style: Style) -> Operator:
    """Attention of a slice of the queries on the gathered keys and values of the whole sequence.

    Under a causal mask a slice is an early and a late part of the sequence, of as many keys together as any other's: a
    fused kernel each, here those of the first slice. Source: Llama 3 (arXiv 2407.21783), section 3.3.2;
    TransformerEngine `AttnFuncWithCPAndKVAllGather`, which gathers again in backward and keeps the slice's own.
    """
    whole = style.sequence * style.context
    every = replace(style, memory=whole, context=1, gathers=False)
    joint = Joint("gather", 2 * style.batch * whole * style.kv_width, style.act)
    if not uses_flash(style):
        return replace(_eager(every), joint=joint)
    saved = _flash(style).saved
    near = style.window or style.document  # a window's band has one size wherever it is, and documents in the mean
    if not style.causal or near or style.biased:
        one = _flash(style if near else every)
        return replace(one, saved=saved, joint=joint)
    half = style.sequence // 2
    early, late = (_flash(replace(every, sequence=half, memory=keys)) for keys in (half, whole))

    def attended(operator: Operator, direction: str) -> tuple[Kernel, ...]:
        # FLOPs count the square in full: half of the slice's queries on all keys
        scale = whole / (half if operator is early else whole)
        return tuple(replace(k, flops=k.flops * scale) for k in getattr(operator, direction))
    return Operator("attention", attended(early, "forward") + attended(late, "forward"),
                    attended(early, "backward") + attended(late, "backward"), saved=saved, core=True, joint=joint)


def _flash(style: Style) -> Operator:
    """One kernel forward, three backward (row sums of out*dout, the kernel itself, conversion of dq).

    Keeps the log-sum-exp (fp32, one per head and token) and the random state (two 8-byte scalars). FLOPs count the
    attended square in full (of documents each one's own, as FlopCounterMode does with cumulative lengths); `causal`
    lets the device skip half. With a window every query meets at most that many keys and the band's exact area is
    counted instead. A bias of the scores, or a mask, is read for every sequence and head,
    and nothing is skipped, since causality is part of it.
    """
    apart = masked(style)
    pieces, queries, keys, met, causal = span(style)
    groups, keys_width = (style.heads, style.query_width) if repeated(style) else (style.kv_heads, style.kv_width)
    shape = (pieces, style.heads, groups, queries, keys, style.head_dim)
    flops = 4.0 * style.batch * style.sequence * met * style.query_width
    e = width(style.act)
    row_sums = style.tokens * style.heads
    streams = (2 * style.tokens * style.query_width + 2 * style.batch * style.keys * keys_width) * e
    scores = style.batch * style.heads * style.sequence * style.keys * e if style.biased or apart else 0.0
    kernel = kernel_name(style)
    forward = [Kernel("attention", style.act, shape, "forward", flops, streams + 4 * row_sums + scores, "attention",
                      causal, 1, kernel)]
    learned = style.biased and not style.memory
    trained = learned and style.tuned is None  # fine-tuning freezes the table
    backward = [Kernel("attention", style.act, shape, "backward", _FLASH_BACKWARD * flops,
                       2 * streams + 8 * row_sums + scores * (1 + trained), "attention", causal, 3,
                       kernel + FIXED_ORDER if style.stack.fixed_order else kernel)]
    if style.stack.unpadding != "none":
        forward, backward = _unpadded(style, forward, backward)
    saved = [Tensor("log_sum_exp", row_sums, "fp32"), Tensor("rng_seed", 1, "fp64"), Tensor("rng_offset", 1, "fp64")]
    if learned:
        forward = [*bias_forward(style), *forward]
        backward = [*backward, *(bias_backward(style) if trained else ())]
        saved += kept_bias(style)
    if apart and style.stack.sdpa_mask_each:
        pairs = style.batch * style.sequence * style.keys
        forward = [elementwise("mask", pairs, 1.0 + e, style.act, 1, "attention"), *forward]
        saved.append(Tensor("score_mask", pairs, style.act))
    if copies_output(style):
        made = style.tokens * style.query_width
        forward.append(strided(style, elementwise("output_transpose", made, 2 * e, style.act, 1, "attention")))
        saved.append(Tensor("attention_made", made, style.act))
    return Operator("attention", tuple(forward), tuple(backward), saved=tuple(saved), core=True,
                    reading_s=_reading_s(style.stack))


def _unpadded(style: Style, forward: list[Kernel], backward: list[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """flash-attn's wrapper: qkv gathered to packed rows, the output scattered back into a zeroed tensor.

    Source: flash_attn/bert_padding.py (unpad_input, pad_input) and their index backward, the same from 0.2.2 to 2.4.2.
    """
    e, times = width(style.act), 1 if style.stack.unpadding == "packed" else 3
    qkv = style.tokens * (style.query_width + 2 * style.kv_width)
    out = style.tokens * style.query_width
    return (
        [elementwise("unpad", qkv, 2 * e, style.act, 2 * times), *forward,
         elementwise("pad", out, 3 * e, style.act, 3)],
        [elementwise("pad_backward", out, 2 * e, style.act, 2), *backward,
         elementwise("unpad_backward", qkv, 3 * e, style.act, 3 * times)],
    )


def _reading_s(stack: Stack) -> float:
    """Host time in front of the kernel while rows that are not padding are looked for: the GPU has nothing to do then.

    Source: flash_attn/bert_padding.py, unpad_input: the host reads nonzero's count and the longest sequence, and what
    it launches behind the first read is over at once.
    """
    times = {"packed": 1, "apart": 3}.get(stack.unpadding, 0)
    return times * (_READS * stack.host_read_s + _LAUNCHES * stack.host_forward_s + _VIEWS * stack.host_view_s)


def _eager(style: Style) -> Operator:
    """Scores, scale, mask, softmax, dropout and values as kernels of their own (a window only changes the mask)."""
    b, a, s, t, d = style.batch, style.heads, style.sequence, style.keys, style.head_dim
    e = width(style.act)
    operand = style.act
    scores = product(b * a, s, t, d, "tn", style.wide, operand, category="attention")
    values = product(b * a, s, d, t, "tn", style.wide, operand, category="attention")
    shape_kernels = _score_kernels(style)
    output = strided(style, elementwise("output_transpose", style.tokens * style.query_width, 2 * e, style.act, 1,
                                        "attention"))
    forward = [scores, *shape_kernels[0], values, output]
    backward = [
        product(b * a, s, t, d, "nn", style.wide, operand, category="attention"),
        product(b * a, t, d, s, "nt", style.wide, operand, category="attention"),
        *shape_kernels[1],
        product(b * a, s, d, t, "nn", style.wide, operand, category="attention"),
        product(b * a, t, d, s, "nt", style.wide, operand, category="attention"),
        *_scaled_gradients(style),
    ]
    if style.batch > 1 and style.modules != "megatron":
        # matmul flattens (batch, head) of transposed views, which takes a copy; Megatron's (s, b, ...) layout does not
        elements = style.tokens * style.query_width + 2 * style.batch * t * style.kv_width
        forward.insert(0, strided(style, elementwise("head_copies", elements, 2 * e, style.act, 3, "attention")))
    if repeated(style):
        copies = style.batch * t * 2 * style.query_width
        forward.insert(0, strided(style, elementwise("repeat_kv", copies, 2 * e, style.act, 2, "attention")))
        backward += [elementwise("repeat_kv_backward", copies, 2 * e, style.act, 2, "attention"), *repeat_slices(style)]
    backward += _laid_out(style)
    if style.biased and not style.memory and style.tuned is None:
        backward += bias_backward(style)
    # softmax's output, which the product with the values reads, is the last thing kept: early stop skips that product
    again = tuple(k for k in forward if k not in (values, output)) if style.stack.early_stop else ()
    return Operator("attention", tuple(forward), tuple(backward), saved=tuple(_kept_scores(style)), core=True,
                    core_again=again)


def _laid_out(style: Style) -> list[Kernel]:
    """Gradients of Hugging Face's heads copied for the product that reads them: the output's into heads (of several
    sequences), the others' into tokens. Rotary positions' and repeat_kv's own are counted there, and keys that one
    product made with the rest (GPT-2) are turned by the cat of all three.

    Source: transformers 4.40.2 to 4.50.3 (Llama, GPT-2, BERT, T5) run on torch 2.3.1 and 2.6.0 (tests/driver).
    """
    if style.modules != "transformers" or style.stack.compile or style.joint_qkv or style.latent is not None:
        return []
    own, other, e = style.tokens * style.query_width, style.batch * style.keys * style.query_width, width(style.act)
    parts = [own] * (style.batch > 1) + [other] * (not repeated(style))
    if style.positions != "rotary":
        parts += [own] + [other] * style.separate_qkv
    copies = elementwise("head_gradients", sum(parts), 2 * e, style.act, len(parts), "attention")
    return [strided(style, copies)] if parts else []


def _scaled_gradients(style: Style) -> list[Kernel]:
    """Gradients of queries and keys times the scale of the scores, where that rides in their product: forward it costs
    nothing, and backward a kernel each.

    Source: megatron-core 0.3.0 to 0.15.0 transformer/dot_product_attention.py (baddbmm, alpha=1/norm_factor; traced on
    fake tensors: 0.12.0), Megatron-LM since 2020 likewise (recalled); derivatives.yaml, baddbmm: maybe_multiply.
    """
    if style.modules != "megatron" or not style.stack.fused_softmax:
        return []
    elements = style.tokens * style.query_width + style.batch * style.keys * style.query_width
    return [elementwise("scaled_gradients", elements, 2 * width(style.act), style.act, 2, "attention")]


def softmax_dtype(style: Style) -> str:
    """Autocast runs softmax in fp32, and so do Hugging Face's Llama and its older T5; otherwise it follows the
    activations."""
    llama = style.separate_qkv and style.kind == "decoder"
    return "fp32" if style.autocast or llama or widens_biased(style) else style.act


def widens_biased(style: Style) -> bool:
    """Whether scores with relative positions are cast to fp32 in front of softmax, and its result back."""
    return style.biased and style.stack.biased_softmax_wide


def _kept_scores(style: Style) -> list[Tensor]:
    """What the spelled-out core keeps: softmax's output, its half copy for the product, dropout's mask and output.

    Plain modules build a boolean mask per block, which masked_fill keeps. Megatron's fused softmax needs none.
    """
    elements = style.batch * style.heads * style.sequence * style.keys * style.context
    soft = softmax_dtype(style)
    kept = [Tensor("softmax", elements, soft)]
    if soft != style.act:
        kept.append(Tensor("softmax_half", elements, style.act))
    if style.score_softcap:
        kept.append(Tensor("bounded_scores", elements, style.act))
    if style.dropout:
        kept.append(Tensor("attention_dropout_mask", elements, "int8"))
        if soft == style.act:
            kept.append(Tensor("attention_dropped", elements, style.act))
    if style.modules == "plain" and style.causal and not style.memory and not style.stack.fused_softmax:
        kept.append(Tensor("causal_mask", style.sequence**2 * style.context, "int8"))
    return kept


def _seen(style: Style) -> float:
    """Share of the scores that softmax reads: Megatron's causal kernel reads of each row what its query sees, and of
    the row's gradients likewise, and writes it whole, zeros behind.

    Source: Megatron-LM's scaled_upper_triang_masked_softmax.h as colossalai 0.2.8 has it (kernel/cuda_native/csrc):
    local_seq bounds what both kernels load, element_count what they store.
    """
    own = style.modules == "megatron" and style.stack.fused_softmax
    square = style.causal and not style.memory and not style.window and style.sequence == style.keys
    return (1 + 1 / style.keys) / 2 if own and square else 1.0


def _score_kernels(style: Style) -> tuple[list[Kernel], list[Kernel]]:
    """What happens between the two products, forward and backward."""
    rows, cols = style.batch * style.heads * style.sequence, style.keys
    elements = rows * cols
    e, soft = width(style.act), softmax_dtype(style)
    w = width(soft)
    fused = style.stack.fused_softmax or style.stack.compile
    forward: list[Kernel] = []
    backward: list[Kernel] = []
    bound = softcap("score_softcap", elements, style.act, fused, "attention") if style.score_softcap else None
    if bound is not None:
        forward.append(bound[0])
    if style.biased and not fused:  # T5 does not scale, and its mask is in the bias, whole, which the first block makes
        forward.append(elementwise("scale_mask", elements, 3 * e, style.act, 1, "attention"))
    elif not fused:
        added = 2 if style.positions == "alibi" else 1  # mask (causal or padding), bias: broadcast
        forward += strided_chain("scale_mask", elements, [2 * e], [2 * e] * added, style.act, "attention")
    if w != e and not fused:
        forward.append(replace(cast("softmax_cast", elements, style.act, soft), category="attention"))
    own, seen, passed = "fused" if fused else "", _seen(style), e if fused else w
    forward.append(Kernel("softmax", soft, (rows, cols), "forward", 0.0, elements * (seen + 1) * passed,
                          "attention", kernel=own))
    if w != e and not fused:
        forward.append(replace(cast("softmax_cast", elements, soft, style.act), category="attention"))
    if style.dropout:
        # compiled, the softmax's kernel writes what is left and the mask, and backward reads the mask
        after, before, launches = (e + 1, 1, 0) if style.stack.compile else (2 * e + 1, 2 * e + 1, 1)
        forward.append(elementwise("attention_dropout", elements, after, style.act, launches, "attention"))
        backward.append(elementwise("attention_dropout_backward", elements, before, style.act, launches, "attention"))
    if w != e and not fused:
        backward.append(replace(cast("softmax_gradient_cast", elements, style.act, soft), category="attention"))
    if not fused:
        backward.append(softmax_gradient(soft, elements, "attention"))
    backward.append(Kernel("softmax", soft, (rows, cols), "backward", 0.0, elements * (2 * seen + 1) * passed,
                           "attention", kernel=own))
    if not fused:
        if w != e:
            backward.append(replace(cast("softmax_gradient_cast", elements, soft, style.act), category="attention"))
        if not style.biased:  # a mask that is added has no gradient and passes the scores' on
            steps = 1 if style.modules == "transformers" and not style.conv1d else 2
            backward.append(elementwise("scale_mask_backward", elements, 2 * steps * e, style.act, steps, "attention"))
    if bound is not None:
        backward.append(bound[1])
    return forward, backward
