"""The Program: what one class of identical ranks does in a training step, as plain columns.

A Program is a list of *sections* (one micro-step, the last micro-step, the optimizer step ...) and a *schedule* that
repeats them. A section is a list of tasks **in the order in which the host issues them**. There is no Python object per
kernel: a compute task names a *segment*, a run of kernels between two communications, and a segment is a list of rows
of the kernel table.

Meaning of a task (the rules of the machine, said here because the Program is where they are written down):

* The host takes tasks in list order. Issuing one costs `host_s` of host time. A HOST task is work of the host itself or
  a blocking call: the host waits until everything in `waits` and `joins` has *finished*, then spends `host_s`.
* A device task (KERNELS, COLLECTIVE, COPY) starts when it has been issued, its stream's previous task has finished, all
  of `waits` have finished and, for each stream in `joins`, the last task issued on that stream before this one has
  finished (CUDA's wait_stream). `waits` are task numbers of the same section; what reaches across sections is said with
  `joins`, so a section can be repeated.
* A COLLECTIVE moreover waits for its communicator: operations of one communicator run one after another in issue order,
  whatever their streams, and start when all simulated ranks of the communicator have reached theirs.
* Memory operations happen when the host passes them, between the task before and the task after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sim.tensor_trace import LayerMemory
from sim.work import Kernel

_T = TypeVar("_T")


class Kind(IntEnum):
    """What a task is; decides what its `payload` indexes."""

    KERNELS = 0  # payload: index into Program.segments
    COLLECTIVE = 1  # payload: index into Program.collectives
    COPY = 2  # payload: index into Program.copies
    HOST = 3  # payload: -1


class CollectiveCall(NamedTuple):
    """One distinct collective: kind, full buffer size and the communicator (index into `Program.communicators`)."""

    kind: str
    size_bytes: int
    dtype: str
    communicator: int


#: How the label of a HOST task ends that is an offloaded optimizer: reports count the wait for it as offload.
ON_CPU = "on the CPU"


class Copy(NamedTuple):
    """A copy: `direction` is h2d or d2h (host memory and device), nvme_read or nvme_write (disks and host memory)."""

    direction: str
    size_bytes: int


class Inline(NamedTuple):
    """A collective within a segment: the compute stream waits for it, as a chain of kernels and all-reduces does.

    Putting a chain into one segment changes no time as long as nothing else of the job is on the same links
    (`sim.engine.expand` writes it out, and a test compares the two).

    Attributes:
        collective: row of `Program.collectives`; all its ranks must be of one class.
        beside: rows of `Program.kernels` that run meanwhile; what follows waits for both.
    """

    collective: int
    beside: tuple[int, ...] = ()


class InlineCall(NamedTuple):
    """An `Inline` by contents, as `ProgramBuilder.segment` takes it."""

    call: CollectiveCall
    beside: tuple[Kernel, ...] = ()


class Label(NamedTuple):
    """Names for the report: model layer (block0, embedding, head, optimizer), phase (forward, backward, optimizer)."""

    layer: str
    phase: str
    name: str


@dataclass(slots=True)
class Segment:
    """A run of kernels between two communications.

    Attributes:
        kernels: rows of `Program.kernels`, in launch order (a kernel that repeats is repeated); -1 - i stands for
            `Program.inlines[i]`, so that a list of kernels' values followed by the inlines' in reverse is indexed by
            either (see `Program.by_row`).
        host_s: host time to launch each of them, seconds, same length. The task's own `host_s` is their sum.
    """

    kernels: tuple[int, ...]
    host_s: tuple[float, ...]


class MemoryOp(NamedTuple):
    """An allocation (`size_bytes` > 0) or the release (< 0) of a tensor, at a point of the host's order.

    Attributes:
        before: number of the task of the section before which the host does it; len(tasks) = at the section's end.
        tensor: name; an allocation and its release carry the same one. A pool of tensors (the layers' own) rises and
            falls in parts; over a step they cancel.
        size_bytes: signed.
        category: one of result.md's memory categories.
        stream: stream whose pool it comes from.
        used_on: other streams it was record_stream'ed on (a release is reusable only after their events).
        operator: operator of the layer that makes it, where one can be named.
    """

    before: int
    tensor: str
    size_bytes: int
    category: str
    stream: int = 0
    used_on: tuple[int, ...] = ()
    operator: str = ""


@dataclass(slots=True)
class Section:
    """Tasks in host order, one list per column, all of equal length (see the module's docstring for their meaning)."""

    name: str
    kind: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    payload: list[int] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    waits: list[tuple[int, ...]] = field(default_factory=list)
    joins: list[tuple[int, ...]] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    memory: list[MemoryOp] = field(default_factory=list)
    layers: list[LayerMemory] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(slots=True)
class Program:
    """What one class of ranks runs in one optimizer step.

    Attributes:
        kernels: distinct kernels; segments, collectives, copies: distinct payloads of tasks.
        streams: names of the device streams, e.g. ("compute", "all_gather", "reduce_scatter").
        communicators: names of this rank's communicators, e.g. ("shard", "replicate"); the engine is told separately
            which communicator instance each of them is (see `Job`).
        sections, schedule: the step is `for s, n in schedule: n times sections[s]`.
        launch_queue: kernels issued but not finished at which the host blocks (CUDA: about 1024).
        resident: memory held for the whole step: (tensor name, bytes, category).
        host_resident: host memory a rank holds for the whole step: (tensor name, bytes, category).
        tensors: bytes of each tensor of a resident entry or pool, by its name; what is not here is one tensor.
        managed_bytes: optimizer states in unified memory, which no caching allocator has.
    """

    kernels: list[Kernel]
    segments: list[Segment]
    collectives: list[CollectiveCall]
    copies: list[Copy]
    labels: list[Label]
    streams: tuple[str, ...]
    communicators: tuple[str, ...]
    sections: list[Section]
    schedule: list[tuple[int, int]]
    launch_queue: int = 1024
    resident: list[tuple[str, int, str]] = field(default_factory=list)
    host_resident: list[tuple[str, int, str]] = field(default_factory=list)
    inlines: list[Inline] = field(default_factory=list)
    tensors: dict[str, list[int]] = field(default_factory=dict)
    managed_bytes: int = 0

    def by_row(self, of_kernel: Callable[[Kernel], _T], of_inline: Callable[[Inline], _T]) -> list[_T]:
        """A value for every row a segment may name: index it with the entries of `Segment.kernels`."""
        return [*map(of_kernel, self.kernels), *map(of_inline, reversed(self.inlines))]

    def calls(self) -> set[int]:
        """Rows of `collectives` that this program's own tasks name, inside segments or by themselves."""
        found: set[int] = set()
        segments: set[int] = set()
        for section in self.sections:
            for kind, payload in zip(section.kind, section.payload, strict=True):
                if kind == Kind.COLLECTIVE:
                    found.add(payload)
                elif kind == Kind.KERNELS:
                    segments.add(payload)
        if self.inlines:
            rows = {row for segment in segments for row in self.segments[segment].kernels if row < 0}
            found |= {self.inlines[-1 - row].collective for row in rows}
        return found

    def launches(self) -> list[int]:
        """CUDA kernels launched by each segment."""
        own = [k.launches for k in self.kernels]
        of_row = self.by_row(lambda k: k.launches, lambda i: 1 + sum(own[row] for row in i.beside))
        return [sum(of_row[row] for row in segment.kernels) for segment in self.segments]

    def tasks(self) -> int:
        """Tasks of one step, repeats counted."""
        return sum(n * len(self.sections[s]) for s, n in self.schedule)

    def section_runs(self) -> list[int]:
        """Section numbers in executed order, repeats written out."""
        return [s for s, n in self.schedule for _ in range(n)]


@dataclass(slots=True)
class RankClass:
    """Ranks that behave alike; one of them is simulated.

    Attributes:
        representative: global rank that is simulated.
        members: global ranks of the class, shape (n,).
        program: what they run (index into `Job.programs`).
        device: index of their hardware kind (0 unless GPUs are mixed or one is slow).
        communicators: for each name of the program's communicators, the index into `Job.communicators`; -1 where the
            class takes no part (names are those of the whole job).
    """

    representative: int
    members: npt.NDArray[np.int64]
    program: int
    device: int
    communicators: tuple[int, ...]


@dataclass(slots=True)
class Communicator:
    """One simulated communicator.

    Attributes:
        name: e.g. "shard".
        ranks: global ranks of *all* instances it stands for, shape (instances, size): in a folded job every shard group
            of the job, of which one is simulated and all run in lockstep; unfolded, one row.
        parties: number of simulated classes that take part in one operation (the rendezvous count).
    """

    name: str
    ranks: npt.NDArray[np.int64]
    parties: int

    @property
    def size(self) -> int:
        """Ranks of one instance."""
        return int(self.ranks.shape[1])


@dataclass(slots=True)
class Job:
    """A whole run: programs, the classes of ranks that run them, and their communicators."""

    programs: list[Program]
    classes: list[RankClass]
    communicators: list[Communicator]
    ranks: int


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
        """A compute segment; its host time is the sum of its kernels' launch times."""
        host_s = self.program.segment_host_s[segment]
        return self._add(Kind.KERNELS, stream, segment, host_s, waits, joins, label)

    def collective(self, stream: int, call: CollectiveCall, host_s: float, label: Label, waits: Sequence[int] = (),
                   joins: Sequence[int] = ()) -> int:
        """A collective on one of this rank's communicators."""
        return self._add(Kind.COLLECTIVE, stream, self.program.collective(call), host_s, waits, joins, label)

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
        self._sections: list[Section] = []
        self._numbers: dict[int, int] = {}
        self._schedule: list[tuple[int, int]] = []

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

    def segment(self, items: Sequence[Kernel | InlineCall], host_s: Sequence[float]) -> int:
        """Number of the segment that runs `items` in order, each launched at a cost of `host_s[i]` seconds."""
        row, segments = self.tables.row, self.tables.segments
        key = (tuple([row(k) if isinstance(k, Kernel) else -1 - self.inline(k) for k in items]), tuple(host_s))
        found = segments.setdefault(key, len(segments))
        if found == len(self.segment_host_s):
            self.segment_host_s.append(sum(host_s))
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
            tensors=self.tensors, managed_bytes=self.managed_bytes)
