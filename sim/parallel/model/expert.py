"""Expert parallelism: tokens travel to the ranks that hold their experts and back, by all-to-all.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), section 3.2; Megatron-LM `moe/token_dispatcher.py`
(MoEAlltoAllTokenDispatcher): one all-to-all behind the permutation, one before it is undone, their conjugates backward.
"""

from __future__ import annotations

from sim.model.architecture import Joint
from sim.parallel.model.calls import Calls, Items


def around(calls: Calls, joint: Joint, kernels: Items, direction: str) -> Items:
    """Dispatch sends behind its kernels, combine receives before its own; backward the other way round."""
    if not calls.has("expert"):
        return kernels
    travel = calls.call("expert", "all_to_all", joint.elements, joint.dtype)
    behind = (joint.kind == "dispatch") == (direction == "forward")
    return (*kernels, travel) if behind else (travel, *kernels)
