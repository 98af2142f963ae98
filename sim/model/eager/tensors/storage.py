"""Storages of tensors: bytes that are there while somebody holds a reference, counted by kind, with a log.

Rounding: c10/core/AllocatorConfig.h.
"""

from __future__ import annotations

import math

from sim.work import DTYPE_BYTES

#: What a live storage can be, by result.md's categories; a `Memory` counts them apart.
KINDS = ("activations", "logits", "workspace", "gradients", "gathered_parameters")
ACTIVATIONS, LOGITS, WORKSPACE, GRADIENTS, COPIES = range(len(KINDS))
#: Every allocation is rounded up to this many bytes (kMinBlockSize).
BLOCK_BYTES = 512


def rounded(elements: float, dtype: str) -> int:
    """Bytes the allocator hands out for a tensor."""
    return math.ceil(elements * DTYPE_BYTES[dtype] / BLOCK_BYTES) * BLOCK_BYTES


class Memory:
    """Live bytes by kind, the highest total since the last `mark` with the operator at which it was reached, and a log.

    Attributes:
        log: births (number of the storage, its bytes) and deaths (number, 0), in order.
        born: storages so far.
        made: by number, the operator that was at work at a storage's birth, and its kind then.
    """

    __slots__ = ("born", "live", "log", "made", "operator", "top", "top_live", "top_operator", "total")

    def __init__(self) -> None:
        self.live = [0] * len(KINDS)
        self.log: list[tuple[int, int]] = []
        self.made: list[tuple[str, str]] = []
        self.born = 0
        self.total = 0
        self.operator = ""
        self.mark()

    def mark(self) -> None:
        """Forget the highest point so far."""
        self.top, self.top_live, self.top_operator = self.total, tuple(self.live), self.operator

    def change(self, kind: int, size: int) -> None:
        """`size` bytes of a kind come (positive) or go."""
        self.live[kind] += size
        self.total += size
        if self.total > self.top:
            self.mark()


class Storage:
    """Bytes of one tensor, for as long as somebody holds a reference, or until they are given up."""

    __slots__ = ("kind", "memory", "number", "size", "there")

    def __init__(self, memory: Memory, size: int, kind: int) -> None:
        self.memory, self.size, self.kind, self.there = memory, size, kind, False
        self.fill()

    def fill(self) -> None:
        """Allocate the bytes: at birth, and again where they were given up."""
        memory = self.memory
        self.number, self.there = memory.born, True
        memory.born += 1
        memory.log.append((self.number, self.size))
        memory.made.append((memory.operator, KINDS[self.kind]))
        memory.change(self.kind, self.size)

    def give_up(self) -> None:
        """`untyped_storage().resize_(0)`: the bytes go, whoever holds a reference."""
        if self.there:
            self.there = False
            self.memory.log.append((self.number, 0))
            self.memory.change(self.kind, -self.size)

    def __del__(self) -> None:
        self.give_up()

    def become(self, kind: int) -> None:
        """Count as another kind from now on."""
        self.memory.live[self.kind] -= self.size
        self.memory.live[kind] += self.size
        self.kind = kind

    def hand_over(self) -> None:
        """From now on somebody else accounts for it."""
        self.memory.live[self.kind] -= self.size
        self.memory.total -= self.size
        self.size = 0
