"""Megatron's tensor and sequence parallelism: conjugate collectives around products cut by columns and by rows.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053), section 3, f and g; Korthikanti et al. 2022 (arXiv 2205.05198), section
4.2, g and its conjugate with sequence parallelism; Megatron-LM `tensor_parallel/layers.py`
(LinearWithGradAccumulationAndAsyncCommunication: the input is gathered beside the data gradient, the input's gradient
reduced beside the weight gradient), `mappings.py`, `cross_entropy.py`; Megatron-Bridge `peft/utils.py`
(ParallelLinearAdapter). Scales of torchtitan's tensors: torchao 0.5.0 and 0.13.0 float8/float8_utils.py,
tensor_to_scale of a DTensor, run on fake tensors under PyTorch 2.13: ranks that share a tensor out find its maximum by
an all-reduce of 8 bytes (fp64) in front of each cast, of weights and of what products of rows read too. Copies along
the sequence: torch 2.6.0 and 2.14.1 distributed/_functional_collectives.py, all_gather_tensor (chunk and cat behind the
wait) and reduce_scatter_tensor (in front of it); what Inductor makes of them was read off torch 2.13's scheduler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sim.model.architecture import Joint
from sim.model.kernels import elementwise
from sim.parallel.model.calls import Calls, Items, plain
from sim.program import InlineCall
from sim.work import DTYPE_BYTES, Kernel

#: Joints of `sim.model.adapters.branches` and `bottlenecks`.
_BETWEEN = ("read", "sum", "columns", "whole", "restored")


class Style(NamedTuple):
    """See `sim.parallel.model.joints.Joints`."""

    sequence: bool
    hides: bool
    pipelined: bool
    keeps: bool
    pieces: str = "ring"
    parts: int = 1
    shared_scale: str = "none"
    margin: float = 1.0
    copies: str = "none"
    compiled: bool = False


def around(calls: Calls, joint: Joint, kernels: Items, direction: str, style: Style) -> Items:
    """An operator's kernels with the collectives of its joint."""
    if not calls.has("tensor"):
        return kernels
    if joint.apart:
        style = style._replace(pipelined=False, keeps=True)
    met = _around(calls, joint, kernels, direction, style)
    every = style.shared_scale == "every" and joint.kind in ("column", "row") and joint.gathered not in ("", "mxfp8")
    return _agreed(calls, met) if every else met


def _agreed(calls: Calls, items: Items) -> Items:
    """All ranks' maximum in front of every cast of a tensor that they share out."""
    largest = calls.call("tensor", "all_reduce", 1, "fp64")
    parts = ((largest, item) if isinstance(item, Kernel) and item.variant == "quantise" else (item,) for item in items)
    return tuple(part for pair in parts for part in pair)


def _around(calls: Calls, joint: Joint, kernels: Items, direction: str, style: Style) -> Items:
    own = plain(kernels)
    if joint.kind == "vocabulary_loss":
        # the largest logit, the predicted logit and the sum of exponentials of every token
        scalars = tuple(calls.call("tensor", "all_reduce", joint.elements / joint.times, joint.dtype)
                        for _ in range(3 * joint.times))
        return (*own, *scalars) if direction == "forward" else own
    if joint.kind in _BETWEEN:
        return _between(calls, joint, own, direction, style)
    if joint.kind == "column":
        return _column_forward(calls, joint, own, style) if direction == "forward" else (
            _column_backward(calls, joint, own, style))
    if direction == "forward":
        return _row_forward(calls, joint, own, style)
    return _row_backward(calls, joint, own, style) if style.sequence else own


def _between(calls: Calls, joint: Joint, own: tuple[Kernel, ...], direction: str, style: Style) -> Items:
    """What stands between the matrices of a branch or a bottleneck, cut along no sequence."""
    forward, whole = direction == "forward", style._replace(sequence=False, pipelined=False)
    if joint.kind == "sum":
        return _row_forward(calls, joint, own, whole) if forward else own
    if joint.kind == "restored" and not forward:  # scattered tokens' gradients come together again
        return (*own, _gather(calls, joint)) if style.sequence else own
    if joint.kind == "whole" or (joint.kind in ("columns", "restored") and forward):
        return (*(_gather(calls, joint) for _ in range(joint.times)), *own)
    return own if forward else _column_backward(calls, joint, own, whole)


def _gather(calls: Calls, joint: Joint, *beside: Kernel) -> InlineCall:
    """The whole of a tensor cut along the sequence, in the dtype its product reads where that is made before; a part of
    one that travels in several."""
    return calls.call("tensor", "all_gather", joint.elements / joint.times, joint.gathered or joint.dtype, beside)


def _column_forward(calls: Calls, joint: Joint, own: tuple[Kernel, ...], style: Style) -> Items:
    """f: nothing to do forward, unless the input is cut along the sequence."""
    if not style.sequence:
        return own
    first = next((i for i, k in enumerate(own) if k.op == "gemm"), 0)
    before = (*own[:first], *_scale(calls, joint, style))
    if style.pipelined and own[first].op == "gemm":
        return (*before, _gather(calls, joint, own[first]), *own[first + 1:])
    return (*before, _gather(calls, joint), *_joined(joint, style), *own[first:])


def _joined(joint: Joint, style: Style) -> Items:
    """A copy of what was gathered into one piece, where the sequence is not the outermost dimension."""
    if not style.sequence or style.pipelined or style.copies != "both":
        return ()
    dtype = joint.gathered or joint.dtype
    return (elementwise("sequence_cat", joint.elements, 2 * DTYPE_BYTES[dtype], dtype),)


def _parted(joint: Joint, style: Style, sums: bool = False) -> Items:
    """A copy of what is reduced and scattered, piece behind piece.

    Args:
        sums: it is a sum of several products; compiled, the kernel that adds them up writes it so.
    """
    if not style.sequence or style.pipelined or style.copies == "none" or (sums and style.compiled):
        return ()
    return (elementwise("sequence_cat", joint.elements, 2 * DTYPE_BYTES[joint.dtype], joint.dtype),)


def _row_forward(calls: Calls, joint: Joint, own: tuple[Kernel, ...], style: Style) -> Items:
    """g: the partial sums of all slices are added up right behind the product."""
    kind = "reduce_scatter" if style.sequence and joint.kind != "summed" else "all_reduce"
    last = max((i for i, k in enumerate(own) if k.op in ("gemm", "embedding")), default=len(own) - 1)
    if style.pipelined and own[last].op == "gemm":
        return (*own[:last], *_pieces(calls, joint, kind, own[last], style), *own[last + 1:])
    return (*own[:last + 1], *_parted(joint, style), calls.call("tensor", kind, joint.elements, joint.dtype),
            *own[last + 1:])


def _pieces(calls: Calls, joint: Joint, kind: str, product: Kernel, style: Style) -> Items:
    """A product whose partial sums are reduced while it runs.

    In a ring every rank's part is sent as soon as it is made and added up behind all of them. In quarters each is
    reduced beside the next, the last alone, in the product's dtype, and the product leaves SMs to the reductions all
    the time: it takes as long as one of `margin` times its rows on all of them. Source: TransformerEngine 1.9.0
    csrc/comm_gemm_overlap.h, UbufP2PCommOverlap and UbufCommOverlap, split_overlap_rs (_math_sms).
    """
    if style.pieces == "quarters":
        batch, rows, *others = product.shape
        product = replace(product, shape=(batch, round(rows * style.margin), *others))
        dtype = product.dtype if DTYPE_BYTES[product.dtype] < DTYPE_BYTES[joint.dtype] else joint.dtype
        return (calls.call("tensor", kind, joint.elements * 3 / 4, dtype, (product,)),
                calls.call("tensor", kind, joint.elements / 4, dtype))
    moved = (1 + 1 / style.parts) * DTYPE_BYTES[joint.dtype]
    added = elementwise("partial_sums", joint.elements, moved, joint.dtype)
    return (calls.call("tensor", kind, joint.elements, joint.dtype, (product,)), added)


def _row_backward(calls: Calls, joint: Joint, own: tuple[Kernel, ...], style: Style) -> Items:
    """Conjugate of g: the output's gradient is gathered, in pieces beside the product that makes the input's."""
    first = next((i for i, k in enumerate(own) if k.op == "gemm"), -1)
    scale = _scale(calls, joint, style)
    if not style.pipelined or first < 0:
        return (*scale, _gather(calls, joint), *_joined(joint, style), *own)
    return (*own[:first], *scale, _gather(calls, joint, own[first]), *own[first + 1:])


def _scale(calls: Calls, joint: Joint, style: Style) -> Items:
    """The largest element of a tensor cut along the sequence, by which it is scaled before it is gathered."""
    if style.shared_scale != "gathered" or joint.gathered in ("", "mxfp8"):
        return ()
    return (calls.call("tensor", "all_reduce", 1, "fp32"),)


def _column_backward(calls: Calls, joint: Joint, own: tuple[Kernel, ...], style: Style) -> Items:
    """Conjugate of f: the gradient of the input is a sum over slices; the weight gradient can hide it. An input
    kept as gathered needs no second gathering; its sum is then a node of autograd behind the whole product's."""
    data = max((i for i, k in enumerate(own) if k.op == "gemm" and k.variant == "nn"), default=-1)
    weight = tuple(k for k in own[data + 1:] if k.op == "gemm" and k.variant == "nt")
    rest = tuple(k for k in own[data + 1:] if k not in weight)
    kind = "reduce_scatter" if style.sequence else "all_reduce"
    hides = (style.hides or style.sequence) and data >= 0 and not (style.sequence and style.keeps)
    if not hides:
        part, sums = joint.elements / joint.times, any(k.variant == "input_gradient_sum" for k in own)
        reduced = (calls.call("tensor", kind, part, joint.dtype) for _ in range(joint.times))
        return (*own, *_parted(joint, style, sums), *reduced)
    before: Items = own[:data + 1]
    if style.sequence and joint.again:
        before = (*own[:data], _gather(calls, joint, own[data]))
    return (*before, calls.call("tensor", kind, joint.elements, joint.dtype, weight), *rest)
