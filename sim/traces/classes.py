"""What a kernel is by its name: the patterns of `kernels.yaml`."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

from sim.catalog import table
from sim.traces.kineto import Ran

COMMUNICATION, COPY, MEMORY_BOUND, OPTIMIZER = "communication", "copy", "memory_bound", "optimizer"
ATTENTION = "attention"
#: Operators of attention that is spelled out: its scores and values, and the softmax between them.
_SPELLED_OUT = ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_softmax_backward_data")


def class_of(ran: Ran) -> str:
    """gemm, attention, memory_bound, optimizer, communication or copy."""
    if ran.copy:
        return COPY
    found = ATTENTION if ran.op in _SPELLED_OUT else _by_name(ran.name)
    return OPTIMIZER if ran.updating and found != COMMUNICATION else found


def collective_of(ran: Ran) -> str:
    """Kind of a communication kernel: PyTorch's name where the trace has it, else NCCL's."""
    for name in (ran.collective, _plain(ran.name)):
        for kind, patterns in _table()["collectives"].items():
            if name and any(pattern in name for pattern in patterns):
                return str(kind)
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
    """NCCL's kernel without what it sums or copies by: `ncclDevKernel_AllReduce_Sum_bf16_RING_LL` -> allreduce..."""
    return re.sub(r"^(void )?nccl(dev)?kernel_?", "", name.lower()).partition("(")[0]


@cache
def _table() -> dict[str, Any]:
    return table("traces/kernels.yaml")
