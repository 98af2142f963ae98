"""Attention of a slice of the sequence on the keys of one slice after another, and what puts the parts together.

A causal mask is balanced by giving every slice an early and a late part of the sequence: a rank attends to its own keys
under the mask, to those of slices before it with all of its queries on their early half, to those of slices behind it
with its late queries on all of them. Each step is half a square. Documents packed into the sequence are cut so one by
one, so that every rank has the same share of each. The last rank, which has only slices before it, puts
together most; all wait for it, so its are the kernels here.

Sources: Liu et al. 2023, "Ring Attention" (arXiv 2310.01889); TransformerEngine 2.8.0
pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVP2P (sbhd, 16 bits), the default of
Megatron's `cp_comm_type` ("p2p"): counted line by line. 1.13.0 pytorch/attention.py does the same and copies halves.
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Joint, Operator
from sim.model.kernels import elementwise, width
from sim.model.style import Style
from sim.work import Kernel

#: Name of what adds up gradients of keys and values, which first wait for those that come round.
KEY_GRADIENTS = "ring_key_gradients"


def below(style: Style) -> Style | None:
    """All queries of a slice on the early half of another's keys; None where all steps are alike."""
    if not style.causal or style.window or style.biased or style.sequence % 2:
        return None
    return replace(style, memory=style.sequence // 2, context=1, causal=False, document=style.document / style.context)


def around_the_ring(style: Style, own: Operator, other: Operator | None, elements: int, merges: bool) -> Operator:
    """Attention in as many steps as slices.

    Args:
        own: attention on a slice's own keys.
        other: on another slice's where it differs (`below`).
        elements: of the keys and values that travel.
        merges: outputs, log-sum-exps and gradients of steps are put together by kernels of their own.
    """
    again = style.context - 1
    forward, backward = own.forward, own.backward
    if other is not None:  # FLOPs count the square in full
        forward, backward = (tuple(replace(k, flops=2 * k.flops) for k in kernels)
                             for kernels in (other.forward, other.backward))
    joint = Joint("ring", elements, style.act)
    if not merges:
        received = round(elements * width(style.act))
        return replace(own, forward=own.forward + forward * again, backward=backward * again + own.backward,
                       core_again=own.core_again * style.context, joint=joint, buffers=(received, 2 * received))
    halves = 0.5 if other is not None else 1.0
    steps = [kernel for step in range(again)
             for kernel in (*backward, *_gradients(style, elements, step == 0, halves))]
    return replace(
        own, forward=(_copy(style, elements), *own.forward, *forward * again, _merge(style)),
        backward=(_copy(style, elements), *steps, *own.backward, *_gradients(style, elements, False, 1.0)),
        core_again=own.core_again * style.context, joint=joint, buffers=_buffers(style, elements))


def _buffers(style: Style, elements: int) -> tuple[int, int]:
    """Keys and values of every slice but the last, which is kept, and every step's outputs and log-sum-exps; in
    backward two buffers of keys, values and their gradients, less the gradients that leave, and a whole step's own."""
    e, queries, rows = width(style.act), style.tokens * style.query_width, style.tokens * style.heads
    forward = (style.context - 1) * elements * e + style.context * (queries * e + 4 * rows)
    return round(forward), round((4 * elements + queries) * e)


def _copy(style: Style, elements: int) -> Kernel:
    """Keys and values side by side in the first buffer (torch.cat; in backward copy_)."""
    return elementwise("ring_copy", elements, 2 * width(style.act), style.act, 1, "attention")


def _merge(style: Style) -> Kernel:
    """Each step's output by its share of the sum: the first is scaled into a new tensor, the others are added to it. Of
    log-sum-exps one kernel a step, all but the last beside attention: launches and no time."""
    elements = style.tokens * style.query_width
    moved = width(style.act) * (2 + 3 * (style.context - 1))
    return elementwise("ring_merge", elements, moved, style.act, style.context + 1, "attention")


def _gradients(style: Style, elements: int, first: bool, share: float) -> tuple[Kernel, Kernel]:
    """A step's gradients copied (`first`) or added to those before: of queries, and of a share of keys and values."""
    moved = width(style.act) * (2 if first else 3)
    return (elementwise("ring_query_gradients", style.tokens * style.query_width, moved, style.act, 1, "attention"),
            elementwise(KEY_GRADIENTS, round(share * elements), moved, style.act, 2, "attention"))
