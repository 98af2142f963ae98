"""Context parallelism. Keys and values travel round a ring while attention runs on those at hand, or all are gathered
before it, or tokens are exchanged for heads around it.

Sources: Liu et al. 2023, "Ring Attention" (arXiv 2310.01889), section 3; TransformerEngine 2.8.0
pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVP2P: c steps of attention, c - 1
exchanges forward and c backward, causal halves paired so that every rank does the same work; all-gather variant:
Llama 3 (arXiv 2407.21783), section 3.3.2, which does not hide it.
"""

from __future__ import annotations

from itertools import chain, pairwise

from sim.model.architecture import Joint
from sim.model.attention.head_exchange import PACKED, REORDERED, UNPACKED
from sim.model.attention.ring import KEY_GRADIENTS
from sim.model.attention.rotated_ring import AFTER, ARRIVED, HOME
from sim.parallel.model.calls import Calls, Items, plain
from sim.program import InlineCall
from sim.work import Kernel


def around(calls: Calls, joint: Joint, kernels: Items, direction: str) -> Items:
    """Attention in as many steps as slices, passed round a ring or, of kind rotate, as PyTorch does it."""
    if _group(calls, "ring") is None:
        return kernels
    own = plain(kernels)
    lead, steps = _steps(own)
    if not steps:
        return own
    turned = _rotated if joint.kind == "rotate" else _passed
    return (*lead, *turned(calls, joint, steps, direction))


def _passed(calls: Calls, joint: Joint, steps: list[tuple[Kernel, ...]], direction: str) -> Items:
    """Each step beside an exchange with the neighbours.

    Forward's last step has nothing to pass on. Backward passes keys and values on beside its first step, gradients of
    the step before with them beside the others, gradients alone beside the last: a rank's own have come round then.
    What adds a step's gradients to them waits for the exchange.
    """
    last, ring = len(steps) - 1, _group(calls, "ring") or ""

    def beside(number: int) -> Items:
        step = steps[number]
        travels = direction == "backward" or number < last
        if not travels:
            return step
        twice = direction == "backward" and 0 < number < last
        waits = tuple(k for k in step if k.variant == KEY_GRADIENTS)
        return (calls.call(ring, "send", joint.elements * (2 if twice else 1), joint.dtype,
                           tuple(k for k in step if k.variant != KEY_GRADIENTS)), *waits)
    return tuple(chain.from_iterable(beside(number) for number in range(len(steps))))


def _rotated(calls: Calls, joint: Joint, steps: list[tuple[Kernel, ...]], direction: str) -> Items:
    """PyTorch's ring: keys and values of all slices with one all-gather beside the first step. In backward every step's
    fp32 gradients of them go to the next rank beside the following step's attention, the last ones beside nothing; what
    adds to gradients that have come waits for them.

    Source: torch 2.6.0 distributed/tensor/experimental/_attention.py, _AllGatherRotater and _AllToAllRotater.
    """
    gather = calls.call("context", "all_gather", joint.elements * len(steps), joint.dtype, steps[0])
    if direction == "forward":
        return (gather, *chain.from_iterable(steps[1:]))
    passed: list[Kernel | InlineCall] = []
    for step in steps[1:]:
        beside: tuple[Kernel, ...] = ()
        for kernel in step:
            if kernel.variant in (ARRIVED, HOME):
                passed.append(calls.call("context", "send", joint.elements, "fp32", beside))
            elif kernel.variant not in AFTER:
                beside = (*beside, kernel)
                continue
            beside = ()
            passed.append(kernel)
    return (gather, *passed)


def exchanged(calls: Calls, joint: Joint, kernels: Items) -> Items:
    """An all-to-all of each tensor, told by the copies in front of or behind it; of all together where there are none.

    Copies to and from early and late halves run beside the collectives of other tensors (TransformerEngine's
    flash_attn_a2a_communicate): in front, what packs the next tensor, and what orders the one before.
    """
    group = _group(calls, "heads")
    own = plain(kernels)
    if group is None:
        return own
    packs, ordered = ([k for k in own if k.variant == name] for name in (PACKED, REORDERED))
    if not ordered:
        found = list(chain.from_iterable(_sent(calls, joint, group, kernel) for kernel in own))
        travels = any(isinstance(item, InlineCall) for item in found)
        return tuple(found) if travels else (calls.call(group, "all_to_all", joint.elements, joint.dtype), *own)
    rest = tuple(k for k in own if k.variant not in (PACKED, REORDERED))
    travelling = [calls.call(group, "all_to_all", pack.shape[0], joint.dtype, (*packs[i + 1:i + 2],
                                                                              *ordered[max(0, i - 1):i]))
                  for i, pack in enumerate(packs)]
    return (*rest, packs[0], *travelling, ordered[-1])


def _sent(calls: Calls, joint: Joint, group: str, kernel: Kernel) -> Items:
    """A copy with the collective behind or in front of it, if it is one of a tensor that travels."""
    if kernel.variant not in (PACKED, UNPACKED):
        return (kernel,)
    travels = calls.call(group, "all_to_all", kernel.shape[0], joint.dtype)
    return (kernel, travels) if kernel.variant == PACKED else (travels, kernel)


def _group(calls: Calls, part: str) -> str | None:
    """The communicator of the whole context, or of a part of it where there are two levels."""
    return next((name for name in ("context", f"context_{part}") if calls.has(name)), None)


def _steps(own: tuple[Kernel, ...]) -> tuple[tuple[Kernel, ...], list[tuple[Kernel, ...]]]:
    """What is in front of the first step, and the kernels of each: from one fused kernel to the next, or of spelled-out
    attention as many for each as for any other."""
    starts = [i for i, k in enumerate(own) if k.op == "attention"]
    if starts:
        return own[:starts[0]], [own[start:end] for start, end in pairwise((*starts, len(own)))]
    count = sum(k.op == "softmax" for k in own)
    each = len(own) // count if count and len(own) % count == 0 else 0
    return (), [own[i * each:(i + 1) * each] for i in range(count)] if each else []


def gathered(calls: Calls, joint: Joint, kernels: Items, direction: str) -> Items:
    """Keys and values of all slices, then attention; backward gathers them again and adds up their gradients."""
    if not calls.has("context"):
        return kernels
    gather = calls.call("context", "all_gather", joint.elements, joint.dtype)
    home = () if direction == "forward" else (calls.call("context", "reduce_scatter", joint.elements, joint.dtype),)
    return (gather, *kernels, *home)
