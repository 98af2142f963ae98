"""Batches written before: a pipeline's stages repeat each other, and a stage repeats itself, but for the communicators
they exchange on. What a batch added to a section is kept and added again, shifted to where it stands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sim.program import MemoryOp, ProgramBuilder, Section, SectionBuilder
from sim.tensor_trace import LayerMemory


class Exchange(NamedTuple):
    """A send or receive among a piece's tasks.

    Attributes:
        task: its number within the piece.
        slot: which of the stage's own edges it goes over.
    """

    task: int
    slot: int


class Mark(NamedTuple):
    """How long a section's columns were before a batch was written."""

    tasks: int
    memory: int
    layers: int

    @staticmethod
    def of(section: Section) -> Mark:
        """Where a section ends now."""
        return Mark(len(section), len(section.memory), len(section.layers))


@dataclass
class Piece:
    """What one batch added to a section; its columns are shifted copies of `source`'s from `begin` to `end`.

    Attributes:
        exchanges: its transfers, whose calls are the only thing that differs from stage to stage.
        left: bytes of gradients that layers left behind, by position.
    """

    source: Section
    begin: Mark
    end: Mark
    exchanges: Sequence[Exchange]
    left: Sequence[tuple[int, int]]
    _memory: dict[int, list[MemoryOp]] = field(default_factory=dict)

    def add(self, to: Section, call: Callable[[int], int]) -> None:
        """Write the batch again at the end of `to`.

        Args:
            call: row of the collective that a slot of the stage runs.
        """
        old, (begin, memory, layers), (end, until, last) = self.source, self.begin, self.end
        at = len(to)
        by = at - begin
        ops = self._memory.get(by)
        if ops is None:
            ops = self._memory[by] = [
                MemoryOp(op[0] + by, *op[1:]) for op in old.memory[memory:until]] if by else old.memory[memory:until]
        moved = len(to.memory) - memory
        to.layers += [LayerMemory(start + moved, stop + moved, verb, position, trace)
                      for start, stop, verb, position, trace in old.layers[layers:last]]
        to.memory += ops
        to.kind += old.kind[begin:end]
        to.stream += old.stream[begin:end]
        to.payload += old.payload[begin:end]
        to.host_s += old.host_s[begin:end]
        to.waits += [tuple([task + by for task in waits]) for waits in old.waits[begin:end]] if by else (
            old.waits[begin:end])
        to.joins += old.joins[begin:end]
        to.label += old.label[begin:end]
        for task, slot in self.exchanges:
            to.payload[at + task] = call(slot)


class Written:
    """All pieces of a job.

    Attributes:
        pieces: by the likeness of the stage and what tells its batches apart.
        ends: sections behind the last batch, by likeness and what the batches left behind.
    """

    def __init__(self) -> None:
        self.pieces: dict[Hashable, Piece] = {}
        self.ends: dict[Hashable, tuple[SectionBuilder, SectionBuilder]] = {}
        self._held: dict[Hashable, ProgramBuilder] = {}
        self._kinds: dict[Hashable, int] = {}

    def likeness(self, key: Hashable) -> int:
        """A number for stages that write the same."""
        return self._kinds.setdefault(key, len(self._kinds))

    def hold(self, key: Hashable, builder: ProgramBuilder, make: Callable[[], None]) -> None:
        """What a stage holds for the whole step: `make` declares it, unless one of the same layers has (`key`)."""
        other = self._held.setdefault(key, builder)
        if other is builder:
            make()
        else:
            builder.hold_as(other)
