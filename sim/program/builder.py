"""Writes Programs: distinct kernels, segments and calls are collected while tasks are appended in host order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from sim.program.columns import (
    GOES_ON,
    CollectiveCall,
    Copy,
    Inline,
    InlineCall,
    Kind,
    Label,
    MemoryOp,
    Program,
    Read,
    Section,
    Segment,
)
from sim.work import Kernel


class Piece(NamedTuple):
    """A part of a segment in which the host reads.

    Attributes:
        segment: its own number.
        end: items of the whole segment up to its end.
        reads: what the host reads before it launches it.
    """

    segment: int
    end: int
    reads: tuple[Read, ...]


class SectionBuilder:
    """Appends tasks to a section; every method returns the new task's number."""

    def __init__(self, program: ProgramBuilder, name: str) -> None:
        self.program = program
        self.section = Section(name)

    def _add(self, kind: Kind, stream: int, payload: int, host_s: float, waits: Sequence[int], joins: Sequence[int],
             label: Label) -> int:
        s = self.section
        s.kind.append(int(kind))
        s.stream.append(stream)
        s.payload.append(payload)
        s.host_s.append(host_s)
        s.waits.append(tuple(waits))
        s.joins.append(tuple(joins))
        s.label.append(self.program.label(label))
        return len(s.kind) - 1

    def kernels(self, stream: int, segment: int, label: Label, waits: Sequence[int] = (),
                joins: Sequence[int] = ()) -> int:
        """A compute segment; its host time is the sum of its kernels' launch times. One in which the host reads is
        several tasks, the last of which is returned."""
        pieces = self.program.tables.pieces.get(segment)
        if pieces is not None:
            return self._pieces(stream, pieces, label, waits, joins)
        host_s = self.program.segment_host_s[segment]
        return self._add(Kind.KERNELS, stream, segment, host_s, waits, joins, label)

    def _pieces(self, stream: int, pieces: Sequence[Piece], label: Label, waits: Sequence[int],
                joins: Sequence[int]) -> int:
        made: dict[int, int] = {}  # task of the piece that ends behind so many items
        task, going_on = -1, label._replace(name=label.name + GOES_ON)
        for piece in pieces:
            for read in piece.reads:  # what nothing of the segment stands in front of waits for what the stream has
                behind = made.get(read.behind)
                self.host(read.host_s, label._replace(name="read"), () if behind is None else (behind,),
                          (stream,) if behind is None else ())
            task = self._add(Kind.KERNELS, stream, piece.segment, self.program.segment_host_s[piece.segment], waits,
                             joins, label)
            made[piece.end] = task
            waits, joins, label = (), (), going_on
        return task

    def collective(self, stream: int, call: CollectiveCall | int, host_s: float, label: Label,
                   waits: Sequence[int] = (), joins: Sequence[int] = ()) -> int:
        """A collective on one of this rank's communicators; `call` may be what `ProgramBuilder.collective` gave."""
        row = call if isinstance(call, int) else self.program.collective(call)
        return self._add(Kind.COLLECTIVE, stream, row, host_s, waits, joins, label)

    def copy(self, stream: int, copy: Copy, host_s: float, label: Label, waits: Sequence[int] = (),
             joins: Sequence[int] = ()) -> int:
        """A host-device copy."""
        return self._add(Kind.COPY, stream, self.program.copy(copy), host_s, waits, joins, label)

    def host(self, host_s: float, label: Label, waits: Sequence[int] = (), joins: Sequence[int] = ()) -> int:
        """Host work or a blocking call: the host waits for `waits` and `joins`, then spends `host_s`."""
        return self._add(Kind.HOST, -1, -1, host_s, waits, joins, label)

    def allocate(self, tensor: str, size_bytes: int, category: str, stream: int = 0) -> None:
        """The host allocates `tensor` at this point of its order."""
        self.section.memory.append(MemoryOp(len(self.section), tensor, size_bytes, category, stream))

    def free(self, tensor: str, size_bytes: int, category: str, stream: int = 0, used_on: tuple[int, ...] = ()) -> None:
        """The host drops `tensor` at this point of its order; `size_bytes` is positive here."""
        self.section.memory.append(MemoryOp(len(self.section), tensor, -size_bytes, category, stream, used_on))


class Tables:
    """Distinct kernels, segments, collectives and labels; programs of one job that share them are written once."""

    def __init__(self) -> None:
        self.kernels: dict[Kernel, int] = {}
        self.rows: dict[int, tuple[Kernel, int]] = {}  # by identity: hashing a kernel costs more than a look-up
        self.collectives: dict[CollectiveCall, int] = {}
        self.copies: dict[Copy, int] = {}
        self.inlines: dict[Inline, int] = {}
        self.labels: dict[Label, int] = {}
        self.segments: dict[tuple[tuple[int, ...], tuple[float, ...]], int] = {}
        self.segment_host_s: list[float] = []
        self.pieces: dict[int, tuple[Piece, ...]] = {}  # of segments in which the host reads
        self._lists: tuple[int, tuple[list[Kernel], list[Segment], list[CollectiveCall], list[Copy], list[Label],
                                      list[Inline]]] | None = None

    def row(self, kernel: Kernel) -> int:
        """Row of a kernel."""
        known = self.rows.get(id(kernel))
        if known is None:
            known = self.rows[id(kernel)] = (kernel, self.kernels.setdefault(kernel, len(self.kernels)))
        return known[1]

    def lists(self) -> tuple[list[Kernel], list[Segment], list[CollectiveCall], list[Copy], list[Label],
                             list[Inline]]:
        """The columns as lists; the same objects until something is added."""
        size = (len(self.kernels) + len(self.segments) + len(self.collectives) + len(self.copies) + len(self.labels)
                + len(self.inlines))
        if self._lists is None or self._lists[0] != size:
            self._lists = (size, (list(self.kernels), [Segment(*key) for key in self.segments], list(self.collectives),
                                  list(self.copies), list(self.labels), list(self.inlines)))
        return self._lists[1]


class ProgramBuilder:
    """Collects distinct kernels, segments, collectives and labels while sections are written.

    Args:
        tables: shared with other programs of the job, which must be built after all are written; None = its own.
    """

    def __init__(self, streams: Sequence[str], communicators: Sequence[str], launch_queue: int = 1024,
                 tables: Tables | None = None) -> None:
        self.tables = tables or Tables()
        self.segment_host_s = self.tables.segment_host_s
        self.streams = tuple(streams)
        self.communicators = tuple(communicators)
        self.launch_queue = launch_queue
        self.resident: list[tuple[str, int, str]] = []
        self.host_resident: list[tuple[str, int, str]] = []
        self.tensors: dict[str, list[int]] = {}
        self.managed_bytes = 0
        self.construction: dict[str, tuple[tuple[int, int], ...]] = {}
        self.first: dict[str, list[int]] = {}
        self._sections: list[Section] = []
        self._numbers: dict[int, int] = {}
        self._schedule: list[tuple[int, int]] = []

    def hold_as(self, other: ProgramBuilder) -> None:
        """Hold for the whole step what another program of the job has declared."""
        self.resident, self.host_resident = list(other.resident), list(other.host_resident)
        self.tensors, self.construction, self.first = dict(other.tensors), dict(other.construction), dict(other.first)
        self.managed_bytes = other.managed_bytes

    def label(self, label: Label) -> int:
        labels = self.tables.labels
        return labels.setdefault(label, len(labels))

    def collective(self, call: CollectiveCall) -> int:
        calls = self.tables.collectives
        return calls.setdefault(call, len(calls))

    def copy(self, copy: Copy) -> int:
        copies = self.tables.copies
        return copies.setdefault(copy, len(copies))

    def inline(self, item: InlineCall) -> int:
        """Number of an inline collective."""
        inlines = self.tables.inlines
        row = Inline(self.collective(item.call), tuple(map(self.tables.row, item.beside)))
        return inlines.setdefault(row, len(inlines))

    def rows(self, items: Sequence[Kernel | InlineCall]) -> tuple[int, ...]:
        """What a segment's `kernels` say of items."""
        row = self.tables.row
        return tuple([row(k) if isinstance(k, Kernel) else -1 - self.inline(k) for k in items])

    def segment(self, items: Sequence[Kernel | InlineCall], host_s: Sequence[float]) -> int:
        """Number of the segment that runs `items` in order, each launched at a cost of `host_s[i]` seconds."""
        return self.segment_of(self.rows(items), tuple(host_s))

    def segment_of(self, rows: tuple[int, ...], host_s: tuple[float, ...], reads: tuple[Read, ...] = ()) -> int:
        """`segment`, of what `rows` says of its items, which also says where the host reads among them."""
        segments, key = self.tables.segments, (rows, host_s)
        found = segments.setdefault(key, len(segments))
        if found == len(self.segment_host_s):
            self.segment_host_s.append(sum(host_s))
        if reads and found not in self.tables.pieces:
            marks = sorted({0, len(rows), *(place for read in reads for place in (read.behind, read.before))})
            self.tables.pieces[found] = tuple([
                Piece(self.segment_of(rows[low:high], host_s[low:high]), high,
                      tuple([read for read in reads if read.before == low])) for low, high in pairwise(marks)])
        return found

    def section(self, name: str) -> SectionBuilder:
        return SectionBuilder(self, name)

    def run(self, section: SectionBuilder, repeats: int = 1) -> None:
        """Append `repeats` runs of a finished section to the schedule; it may be named again later."""
        if repeats > 0:
            number = self._numbers.setdefault(id(section.section), len(self._sections))
            if number == len(self._sections):
                self._sections.append(section.section)
            self._schedule.append((number, repeats))

    def build(self) -> Program:
        """The finished Program."""
        kernels, segments, collectives, copies, labels, inlines = self.tables.lists()
        return Program(
            kernels=kernels, segments=segments, collectives=collectives, copies=copies, labels=labels,
            streams=self.streams, communicators=self.communicators, sections=self._sections, schedule=self._schedule,
            launch_queue=self.launch_queue, resident=self.resident, host_resident=self.host_resident, inlines=inlines,
            tensors=self.tensors, managed_bytes=self.managed_bytes, construction=self.construction,
            first=self.first)
