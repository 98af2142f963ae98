"""A Program's step replayed tensor by tensor, twice: what the allocator was asked for."""

from __future__ import annotations

from sim.memory.allocator import Allocator
from sim.memory.tensors import TensorReplay
from sim.program import Program


def asked_twice(program: Program) -> Allocator:
    """The allocator behind construction and two steps, of which the second leaves no more than the first."""
    allocator = Allocator()
    replay = TensorReplay(program, allocator)
    replay.construct()
    replay.step()
    after_first = allocator.asked
    replay.step()
    assert allocator.asked == after_first
    return allocator
