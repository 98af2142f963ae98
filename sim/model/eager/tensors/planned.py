"""What Inductor's plan of a graph's buffers does to its allocations: a buffer that nothing reads any more is given back
only if no later one has its size and dtype; else it stays, whoever needs memory in between, until that one takes it.

Source: torch 2.6.0 _inductor/codegen/wrapper.py: MemoryPlanningState, AllocateLine.plan, FreeIfNotReusedLine.plan (a
stack of freed buffers for each key); seen on torchtitan 0.1.0's blocks by tests/driver. Buffers that ATen or NCCL
allocates take none over, and only those that its code has a name for are left behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

Events = tuple[tuple[int, int], ...]


def planned(events: Sequence[tuple[int, int]], arriving: Collection[int], nameless: Collection[int]) -> Events:
    """Births (number, bytes) and deaths (number, 0) of one graph, with what is taken over under its last name.

    Args:
        arriving: what others allocate, which takes nothing over.
        nameless: what is given back inside an operator, or of a dtype that nothing else has.
    """
    births, sizes = dict[int, int](), dict[int, int]()
    freed: defaultdict[int, list[int]] = defaultdict(list)
    kept: list[tuple[int, int] | None] = []
    dead = dict[int, int]()  # number -> place of its death
    for number, size in events:
        if size and freed[size] and number not in arriving and number not in nameless:
            earlier = freed[size].pop()
            kept[dead.pop(earlier)] = None
            births[number], sizes[number] = births.pop(earlier), size
            kept[births[number]] = (number, size)
            continue
        if size:
            births[number], sizes[number] = len(kept), size
        elif number in births and number not in nameless:
            dead[number] = len(kept)
            freed[sizes[number]].append(number)
        kept.append((number, size))
    return tuple(event for event in kept if event is not None)


def highest(events: Sequence[tuple[int, int]]) -> int:
    """Most bytes at a time beyond those at the start."""
    alive, now, top = dict[int, int](), 0, 0
    for number, size in events:
        now += size or -alive.pop(number, 0)
        if size:
            alive[number] = size
        top = max(top, now)
    return top
