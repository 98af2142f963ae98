"""PyTorch's own ring attention: keys and values gathered once, sums in fp32, gradients of keys and values passed on.

Steps are those of `ring.py`, a rank's own slice first in both directions. Keys and values of all slices come with one
all-gather beside the first step. Every step's output is cast to fp32 and merged into the sum of those before by a chain
of operators over the whole output (out - sigmoid(block_lse - lse) * (out - block_out)), which torch.compile fuses into
one kernel. In backward gradients of queries add up in fp32 at home; those of keys and values travel in fp32, each
step's added to what came from the neighbour (its early half, then copied whole) and laid side by side again to be sent
on. The last rank, which has only slices before it, merges whole outputs; all wait for it, so its kernels are counted.

Source: torch 2.6.0 and 2.7.0 torch/distributed/tensor/experimental/_attention.py (_templated_ring_attention,
_SDPAMerger, _templated_ring_attention_backward, _AllGatherRotater, _AllToAllRotater, _ContextParallelOptions:
convert_to_f32, enable_load_balance, rotate_method ALL_GATHER); torchtitan 0.1.0 and 0.2.0:
context_parallel_rotate_method "allgather".
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Joint, Operator
from sim.model.kernels import elementwise, width
from sim.model.style import Style
from sim.work import Kernel

#: What waits for gradients of keys and values from the neighbour: a step's added to them, and a rank's own at the end.
ARRIVED, HOME = "ring_gradients_arrived", "ring_gradients_home"
#: What stands behind that in a step.
AFTER = ("ring_packed", "ring_narrowed")
#: Bytes per element of fp32: a tensor read or written.
_WIDE = 4.0


def rotated(style: Style, own: Operator, other: Operator | None, elements: int) -> Operator:
    """Attention in as many steps as slices, as PyTorch runs it.

    Args:
        own: attention on a slice's own keys; other: on another slice's where it differs.
        elements: of a slice's keys and values.
    """
    again = style.context - 1
    forward, backward = own.forward, own.backward
    if other is not None:  # FLOPs count the square in full
        forward, backward = (tuple(replace(k, flops=2 * k.flops) for k in kernels)
                             for kernels in (other.forward, other.backward))
    e, whole = width(style.act), style.tokens * style.query_width
    widened = elementwise("ring_widened", whole, e + _WIDE, "fp32", 1, "attention")
    narrowed = elementwise("ring_narrowed", whole, _WIDE + e, style.act, 1, "attention")
    packed = elementwise("ring_copy", elements, 2 * e, style.act, 1, "attention")
    partly = other is not None
    steps = [kernel for _ in range(again) for kernel in (*backward, _queries(style, whole, False),
                                                         *_arrived(style, elements, partly), _packed(elements))]
    home = elementwise(HOME, elements, _WIDE + e, style.act, 1, "attention")
    first = (_queries(style, whole, True), elementwise("ring_key_gradients", elements, 2 * _WIDE + _WIDE + e, "fp32", 2,
                                                       "attention"), _packed(elements))
    return replace(
        own, forward=(packed, *own.forward, widened, *(*forward, *_merged(style, whole)) * again, narrowed),
        backward=(packed, *own.backward, *first, *steps, home, narrowed),
        core_again=own.core_again * style.context, joint=Joint("rotate", elements, style.act),
        buffers=_buffers(style, elements, whole, partly))


def _buffers(style: Style, elements: int, whole: int, partly: bool) -> tuple[int, int]:
    """All slices; beside them what is copied and packed in the first step and its sum, or what merges a later one: the
    sum before and behind and, where not compiled, two products of operators. In backward all slices and what was
    packed, fp32 gradients of queries, and of keys and values those so far, those sent and those that come, while the
    second step makes its own beside the first's, or the sum of what came and of its own."""
    e, fused = width(style.act), style.stack.compile
    slices = style.context * elements * e
    own = elements * e * (0.5 if partly else 1.0)
    summed = elements * (_WIDE if partly and not fused else 0.0) - elements * e
    back = elements * e + (whole + 3 * elements) * _WIDE + own + max(whole * e, summed)
    return (round(slices + max(2 * elements * e + whole * _WIDE, whole * (2 if fused else 4) * _WIDE)),
            round(slices + back))


def _merged(style: Style, whole: int) -> tuple[Kernel, ...]:
    """A step's output into the sum: cast; two differences (two read, one written) and a product (one and one, and the
    log-sum-exps' small factor); compiled, one kernel that reads the narrow output and the sum and writes the sum."""
    e = width(style.act)
    if style.stack.compile:
        return (elementwise("ring_merge", whole, e + 2 * _WIDE, "fp32", 1, "attention"),)
    return (elementwise("ring_merge", whole, (e + _WIDE) + (3 + 2 + 3) * _WIDE, "fp32", 8, "attention"),)


def _queries(style: Style, whole: int, first: bool) -> Kernel:
    """Gradients of queries added to their fp32 sum, which is filled with zeros before the first."""
    moved = width(style.act) + 2 * _WIDE + (_WIDE if first else 0.0)
    return elementwise("ring_query_gradients", whole, moved, "fp32", 2 if first else 1, "attention")


def _arrived(style: Style, elements: int, partly: bool) -> tuple[Kernel, ...]:
    """A step's gradients of keys and values added to those that have come: to the early half, which is then copied
    together with the late one; compiled, in one pass."""
    added = width(style.act) + 2 * _WIDE
    if not partly:
        moved = added
    elif style.stack.compile:
        moved = 2 * _WIDE + width(style.act) / 2
    else:
        moved = added / 2 + 2 * _WIDE
    return (elementwise(ARRIVED, elements, moved, "fp32", 4 if partly else 2, "attention"),)


def _packed(elements: int) -> Kernel:
    """Gradients of keys and of values side by side, to be sent (torch.cat)."""
    return elementwise("ring_packed", elements, 2 * _WIDE, "fp32", 1, "attention")
