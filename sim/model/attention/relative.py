"""Relative positions: a learned table of score biases, looked up by distance, shared by all blocks of a stack.

Source: Raffel et al. 2020, section 2.1; transformers modeling_t5.py (`compute_bias`, in the first block) and
integrations/sdpa_attention.py (`create_position_bias_mask`, in every block).
"""

from __future__ import annotations

from sim.model.architecture import Operator, Parameter, Tensor
from sim.model.kernels import elementwise, width
from sim.model.style import Style
from sim.work import Kernel

#: Name of the table, in its module.
TABLE = "relative_attention_bias"
#: Distances fall into this many buckets (T5Config.relative_attention_num_buckets).
_BUCKETS = 32
#: 8-byte integer kernels over all pairs that number the buckets: subtract, compare, abs, compare, float, divide, log,
#: scale, add, to long, full, min, where, add (`_relative_position_bucket`).
_BUCKET_LAUNCHES, _INTEGER_BYTES = 14, 8


def table_operator(style: Style, module: str) -> Operator:
    """The table's lookup for all pairs of positions, in a stack's first block; its gradient is that of all blocks.

    Args:
        module: the table's module name.
    """
    pairs = style.sequence * style.keys
    table = Parameter(f"{module}.weight", (_BUCKETS, style.heads))
    e = width(style.weight)
    forward = (
        elementwise("position_buckets", pairs, _BUCKET_LAUNCHES * 2 * _INTEGER_BYTES, "fp64", _BUCKET_LAUNCHES),
        Kernel("embedding", style.weight, (pairs, style.heads), "forward", 0.0, 2 * pairs * style.heads * e,
               "memory_bound"),
    )
    backward = Kernel("embedding", style.weight, (pairs, style.heads), "backward", 0.0,
                      (3 * pairs * style.heads + table.numel) * e, "memory_bound", launches=6)
    # bucket numbers are 8-byte integers; fp64 stands for their width
    saved = (Tensor("position_buckets", pairs, "fp64"), Tensor("position_bias", pairs * style.heads, style.weight))
    return Operator("position_bias", forward, (backward,), (table,), saved)


def zero_bias_operator(style: Style) -> Operator:
    """The bias of cross attention: zeros, made in the first block and read by all."""
    elements = style.heads * style.sequence * style.keys
    return Operator("zero_bias", (elementwise("zero_bias", elements, width(style.act), style.act),), (),
                    saved=(Tensor("zero_bias", elements, style.act),))


def bias_forward(style: Style) -> list[Kernel]:
    """The contiguous (heads, s, s) copy that the fused kernel reads: where (a causal stack), copy, cast."""
    elements, e, wide = style.heads * style.sequence * style.keys, width(style.act), width(style.weight)
    kernels = [elementwise("bias_copy", elements, wide + e, style.act, 1, "attention")]
    if style.causal:
        kernels.insert(0, elementwise("bias_mask", elements, 2 * wide, style.weight, 2, "attention"))
    return kernels


def bias_backward(style: Style) -> list[Kernel]:
    """The kernel's bias gradient summed over the batch, (masked,) cast and added to that of the blocks behind."""
    elements, e, wide = style.heads * style.sequence * style.keys, width(style.act), width(style.weight)
    kernels = [Kernel("reduction", style.act, (style.batch, elements), "bias_gradient_sum", 0.0,
                      (style.batch + 1) * elements * e, "attention")]
    if style.causal:
        kernels.append(elementwise("bias_mask_backward", elements, 2 * wide, style.weight, 1, "attention"))
    kernels.append(elementwise("bias_gradient_add", elements, 3 * wide + (e if e != wide else 0.0), style.weight,
                               1 + (e != wide), "attention"))
    return kernels


def kept_bias(style: Style) -> list[Tensor]:
    """What a block keeps: the kernel's copy of the bias, and the boolean mask of a causal stack for its gradient."""
    kept = [Tensor("score_bias", style.heads * style.sequence * style.keys, style.act)]
    if style.causal and style.tuned is None:
        kept.append(Tensor("causal_mask", style.sequence * style.keys, "int8"))
    return kept
