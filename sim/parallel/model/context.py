"""Context parallelism. Keys and values travel round a ring while attention runs on those at hand, or all are gathered
before it.

Sources: Liu et al. 2023, "Ring Attention" (arXiv 2310.01889), section 3; Megatron-LM / TransformerEngine
`attn_forward_func_with_cp`, p2p variant: c steps of attention, c - 1 exchanges, causal halves paired so that every rank
does the same work; all-gather variant: Llama 3 (arXiv 2407.21783), section 3.3.2, which does not hide it.
"""

from __future__ import annotations

from sim.model.architecture import Joint
from sim.parallel.model.calls import Calls, Items, plain


def around(calls: Calls, joint: Joint, kernels: Items, direction: str) -> Items:
    """Attention in as many equal steps as slices, each but the last beside an exchange with the neighbours.

    Backward sends the gradients of keys and values along with them, and once more home at the end.
    """
    if not calls.has("context"):
        return kernels
    own = plain(kernels)
    steps = sum(k.op in ("attention", "softmax") for k in own)
    if not steps or len(own) % steps:
        return own
    each = len(own) // steps
    elements = joint.elements * (1 if direction == "forward" else 2)
    exchanged: Items = tuple(calls.call("context", "send", elements, joint.dtype, own[i * each:(i + 1) * each])
                             for i in range(steps - 1))
    home: Items = () if direction == "forward" else (calls.call("context", "send", joint.elements, joint.dtype),)
    return (*exchanged, *own[-each:], *home)


def gathered(calls: Calls, joint: Joint, kernels: Items, direction: str) -> Items:
    """Keys and values of all slices, then attention; backward gathers them again and adds up their gradients."""
    if not calls.has("context"):
        return kernels
    gather = calls.call("context", "all_gather", joint.elements, joint.dtype)
    home = () if direction == "forward" else (calls.call("context", "reduce_scatter", joint.elements, joint.dtype),)
    return (gather, *kernels, *home)
