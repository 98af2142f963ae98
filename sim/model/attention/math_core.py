"""What `scaled_dot_product_attention` does where no fused kernel of its takes a call: products and softmax of its own.

Halves are computed in fp32 from PyTorch 2.5 on, unless `allow_fp16_bf16_reduction_math_sdp` is set; queries and keys
are scaled by the root of the scale each. Source: ATen native/transformers/attention.cpp,
_scaled_dot_product_attention_math (as it runs on fake tensors, torch 2.13.0).
"""

from __future__ import annotations

from sim.model.architecture import Operator, Tensor
from sim.model.attention.core_choice import core_dtype, masked, repeated
from sim.model.kernels import cast, elementwise, product, softmax_gradient, strided, width
from sim.model.style import Style
from sim.work import Kernel

_CATEGORY = "attention"


def in_math_operator(style: Style) -> Operator:
    """From queries, keys and values to the output."""
    b, a, s, t, d = style.batch, style.heads, style.sequence, style.keys, style.head_dim
    wide = core_dtype(style)
    gemm = wide if wide != style.act else style.wide
    shape = [_scores(style, wide), _made(style, wide)]
    forward = [*_given(style, wide), product(b * a, s, t, d, "tn", gemm, wide, category=_CATEGORY), *shape[0][0],
               product(b * a, s, d, t, "tn", gemm, wide, category=_CATEGORY), *shape[1][0]]
    backward = [*shape[1][1], product(b * a, s, t, d, "nn", gemm, wide, category=_CATEGORY),
                product(b * a, t, d, s, "nt", gemm, wide, category=_CATEGORY), *shape[0][1],
                product(b * a, s, d, t, "nn", gemm, wide, category=_CATEGORY),
                product(b * a, t, d, s, "nt", gemm, wide, category=_CATEGORY), *_returned(style, wide)]
    return Operator("attention", tuple(forward), tuple(backward), saved=tuple(_kept(style, wide)), core=True)


def repeat_slices(style: Style, category: str = _CATEGORY) -> list[Kernel]:
    """Gradients of keys and values through the slices of repeat_kv (`x[:, :, None, :, :]`), four of whole dimensions:
    each fills a whole with zeros and copies the gradient into it. `:` is a slice to autograd, since its end is no
    dimension's. What comes has heads in front of tokens, so the values' projection copies it.

    Source: transformers 4.40.2 to 4.50.3 modeling_llama.py, repeat_kv, run on torch 2.3.1 and 2.6.0 (tests/driver).
    """
    if style.modules != "transformers" or style.stack.compile or style.joint_qkv == "groups":
        return []
    pair = 2 * style.batch * style.keys * style.kv_width
    e = width(style.act)
    return [elementwise("repeat_kv_slices", pair, 4 * (1 + 2) * e, style.act, 2 * 4 * 2, category),
            strided(style, elementwise("value_gradient_copy", pair // 2, 2 * e, style.act, 1, category))]


def _elements(style: Style) -> tuple[int, int]:
    """Of queries, and of keys and values as they come."""
    return style.tokens * style.query_width, 2 * style.batch * style.keys * style.kv_width


def _given(style: Style, wide: str) -> list[Kernel]:
    """Queries, keys and values cast, queries and keys scaled, keys and values repeated, all copied for `matmul`."""
    (queries, pair), w = _elements(style), width(wide)
    copied = 2 * style.batch * style.keys * style.query_width
    found = [elementwise("scale", queries + pair // 2, 2 * w, wide, 2, _CATEGORY)]
    if wide != style.act:
        casts = elementwise("math_casts", queries + pair, w + width(style.act), wide, 3, _CATEGORY)
        found.insert(0, strided(style, casts))
    if repeated(style) and not style.broadcasts_keys:
        found.append(strided(style, elementwise("repeat_kv", copied, 2 * w, wide, 2, _CATEGORY)))
    if style.batch > 1:
        found.append(strided(style, elementwise("head_copies", queries + copied, 2 * w, wide, 3, _CATEGORY)))
    return found


def _returned(style: Style, wide: str) -> list[Kernel]:
    """Gradients on their way back: sums over repeated heads, scaling, casts."""
    (queries, pair), w = _elements(style), width(wide)
    found = [elementwise("scale_backward", queries + pair // 2, 2 * w, wide, 2, _CATEGORY)]
    if repeated(style):
        copied = 2 * style.batch * style.keys * style.query_width
        found.insert(0, elementwise("repeat_kv_backward", copied, 2 * w, wide, 2, _CATEGORY))
        found += repeat_slices(style)
    if wide != style.act:
        found.append(elementwise("math_casts_backward", queries + pair, w + width(style.act), wide, 3, _CATEGORY))
    return found


def _scores(style: Style, wide: str) -> tuple[list[Kernel], list[Kernel]]:
    """Between the products: the mask is added in place; the softmax that takes rows of nothing but minus infinity for
    zeros (`_safe_softmax`: softmax, eq, all, where); dropout; the weights in the call's dtype, which nobody reads."""
    rows, w = style.batch * style.heads * style.sequence, width(wide)
    elements = rows * style.keys
    mask = strided(style, elementwise("mask", elements, 2 * w, wide, 1, _CATEGORY))
    forward = [mask] if style.causal or masked(style) else []
    forward += [Kernel("softmax", wide, (rows, style.keys), "forward", 0.0, elements * 2.0 * w, _CATEGORY),
                elementwise("safe_softmax", elements, 3 * w + 2, wide, 3, _CATEGORY)]
    backward = [softmax_gradient(wide, elements, _CATEGORY),
                Kernel("softmax", wide, (rows, style.keys), "backward", 0.0, elements * 3.0 * w, _CATEGORY)]
    if style.dropout:
        forward.append(elementwise("attention_dropout", elements, 2 * w + 1, wide, 1, _CATEGORY))
        backward.insert(0, elementwise("attention_dropout_backward", elements, 2 * w + 1, wide, 1, _CATEGORY))
    if wide != style.act:
        forward.append(elementwise("weights_cast", elements, w + width(style.act), wide, 1, _CATEGORY))
    return forward, backward


def _made(style: Style, wide: str) -> tuple[list[Kernel], list[Kernel]]:
    """The output cast back, and copied from heads to tokens."""
    elements, e = style.tokens * style.query_width, width(style.act)
    copy = strided(style, elementwise("output_transpose", elements, 2 * e, style.act, 1, _CATEGORY))
    if wide == style.act:
        return [copy], []
    return [cast("output_cast", elements, wide, style.act), copy], [cast("output_cast", elements, style.act, wide)]


def _kept(style: Style, wide: str) -> list[Tensor]:
    elements = style.batch * style.heads * style.sequence * style.keys
    kept = [Tensor("softmax", elements, wide)]
    if style.dropout:
        kept += [Tensor("attention_dropout_mask", elements, "int8"), Tensor("attention_dropped", elements, wide)]
    return kept
