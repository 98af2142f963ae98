"""Context parallelism: ring attention. Keys and values travel round the ring while attention runs on those at hand.

Sources: Liu et al. 2023, "Ring Attention" (arXiv 2310.01889), section 3; Megatron-LM / TransformerEngine
`attn_forward_func_with_cp`, p2p variant: c steps of attention, c - 1 exchanges, causal halves paired so that every rank
does the same work.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.model.architecture import Joint
from sim.parallel.model.calls import Calls, Items, plain
from sim.work import Kernel


def around(calls: Calls, joint: Joint, kernels: Items, direction: str) -> Items:
    """Attention in as many steps as there are kernels, each but the last beside an exchange with the neighbours.

    Backward sends the gradients of keys and values along with them, and once more home at the end.
    """
    if not calls.has("context"):
        return kernels
    own = plain(kernels)
    steps = [i for i, k in enumerate(own) if k.op == "attention"]
    if not steps:
        return own
    first, last = steps[0], steps[-1] + 1
    elements = joint.elements * (1 if direction == "forward" else 2)
    inner = _steps(calls, joint, own[first:last], elements)
    home: Items = () if direction == "forward" else (calls.call("context", "send", joint.elements, joint.dtype),)
    return (*own[:first], *inner, *home, *own[last:])


def _steps(calls: Calls, joint: Joint, own: Sequence[Kernel], elements: int) -> Items:
    return (*(calls.call("context", "send", elements, joint.dtype, (kernel,)) for kernel in own[:-1]), own[-1])
