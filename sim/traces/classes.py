"""What a kernel is by its name and by the operator that launched it: the patterns of `kernels.yaml`."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

from sim.catalog import table
from sim.traces.kineto import Ran

COMMUNICATION, COPY, MEMORY_BOUND, OPTIMIZER = "communication", "copy", "memory_bound", "optimizer"
ATTENTION = "attention"
#: Operators between the two products of attention that is spelled out.
SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data")
#: NCCL kernels that serve several collectives.
_SHARED = ("sendrecv", "generic", "broadcast")


def class_of(ran: Ran) -> str:
    """gemm, attention, memory_bound, optimizer, communication or copy. What an optimizer's step launches is its own,
    whatever it is called; foreach kernels elsewhere are those of clipping, which a prediction counts there too."""
    found = _by_name(ran.name)
    return OPTIMIZER if ran.updating and found not in (COMMUNICATION, COPY) else found


def collective_of(ran: Ran) -> str:
    """Kind of a communication kernel: NCCL's name, or PyTorch's where that one serves several; `other` if unknown."""
    kernel = _plain(ran.name)
    several = any(one in kernel for one in _SHARED)
    for name in (ran.collective, kernel) if several else (kernel, ran.collective):
        for kind, patterns in _table()["collectives"].items():
            if name and any(pattern in name for pattern in patterns):
                return str(kind)
        if name and name == ran.collective and name not in ("coalesced", "") and several:
            return "other"  # gather, scatter: sent and received, but no stage's transfer
    return "other"


@lru_cache(maxsize=100_000)
def _by_name(name: str) -> str:
    plain = name.lower()
    for kind, patterns in _table().items():
        if kind != "collectives" and any(re.search(pattern, plain) for pattern in patterns):
            return kind
    return MEMORY_BOUND


@lru_cache(maxsize=10_000)
def _plain(name: str) -> str:
    """NCCL's kernel without its arguments: `ncclDevKernel_AllReduce_Sum_bf16_RING_LL` -> allreduce..."""
    return re.sub(r"^(void )?nccl(sym)?k?(dev)?kernel_?", "", name.lower()).partition("(")[0]


@cache
def _table() -> dict[str, Any]:
    return table("traces/kernels.yaml")
