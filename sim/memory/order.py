"""The order in which the host comes to a section's memory: operations of techniques, whole layers, waits.

A layer of which every tensor is known is one mark instead of the operations that sum it up; the host's waits stand
where what other streams still read comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sim.program import Kind, MemoryOp, Program, Section
from sim.tensor_trace import LayerMemory

#: What layers save between forward and backward, in a program's memory operations.
ACTIVATIONS = "layers: activations"


class Sync(NamedTuple):
    """The host waits for tasks up to `until` of its section."""

    until: int


class Passed(NamedTuple):
    """A tensor comes from another stage or is on its way to one."""

    op: MemoryOp


class Buffers(NamedTuple):
    """A technique's own tensors come or go.

    Attributes:
        name: of the pool they belong to.
        sizes: bytes of each.
        asks: what tells it from other operations, but for when it happens.
    """

    op: MemoryOp
    name: str
    sizes: tuple[int, ...]
    asks: object


#: What a replay walks through.
Item = Buffers | LayerMemory | Sync | Passed


def in_order(section: Section, whole: bool, over: Sequence[int]) -> list[MemoryOp | LayerMemory | Sync | Passed]:
    """Operations, layers (if they are to be taken as a `whole`) and waits of the host in its order.

    Args:
        over: for every task the last one that is over when the host comes to it (`TensorReplay._over`); empty for none.
    """
    host, waits = int(Kind.HOST), section.waits
    syncs = deque((task, max(waits[task])) for task, kind in enumerate(section.kind) if kind == host and waits[task])
    layers = deque(section.layers if whole else ())
    found: list[MemoryOp | LayerMemory | Sync | Passed] = []
    at, past = 0, -1
    while at < len(section.memory) or layers:
        op = section.memory[at] if at < len(section.memory) else None
        while syncs and op is not None and syncs[0][0] < op.before:
            found.append(Sync(syncs.popleft()[1]))
        if over and op is not None and over[op.before] > past:
            past = over[op.before]
            found.append(Sync(past))
        if layers and layers[0].start <= at:
            mark = layers.popleft()
            found.append(mark if mark.verb != "passed" else Passed(section.memory[mark.start]))
            at = max(at, mark.stop)
        elif op is not None:
            found.append(op)
            at += 1
    return found


def asked(items: list[Item]) -> object:
    """What makes two sections alike. When the host waits matters only to what other streams still read."""
    late = any(isinstance(item, Buffers) and item.op.used_on for item in items)
    found: list[object] = []
    for item in items:
        if isinstance(item, Buffers):
            found.append((item.asks, item.op.before) if late else item.asks)
        elif isinstance(item, LayerMemory):
            found.append((item.verb, item.position, id(item.trace)))
        elif isinstance(item, Passed):
            found.append((item.op.tensor, item.op.size_bytes, item.op.stream))
        elif late:
            found.append(item.until)
    return tuple(found)


def knows_layers(program: Program) -> bool:
    """Whether layers alone decide about what they save: not where saved tensors leave for the host in between, of which
    only sums are known."""
    for section in program.sections:
        inside = {place for mark in section.layers for place in range(mark.start, mark.stop)}
        if any(op.tensor == ACTIVATIONS and place not in inside for place, op in enumerate(section.memory)):
            return False
    return True
