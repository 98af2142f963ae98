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

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.work import Kernel


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


class Label(NamedTuple):
    """Names for the report: model layer (block0, embedding, head, optimizer), phase (forward, backward, optimizer)."""

    layer: str
    phase: str
    name: str


@dataclass(slots=True)
class Segment:
    """A run of kernels between two communications.

    Attributes:
        kernels: rows of `Program.kernels`, in launch order (a kernel that repeats is repeated).
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
        communicators: for each name of the program's communicators, the index into `Job.communicators`.
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


class ProgramBuilder:
    """Collects distinct kernels, segments, collectives and labels while sections are written."""

    def __init__(self, streams: Sequence[str], communicators: Sequence[str], launch_queue: int = 1024) -> None:
        self._kernels: dict[Kernel, int] = {}
        self._collectives: dict[CollectiveCall, int] = {}
        self._copies: dict[Copy, int] = {}
        self._labels: dict[Label, int] = {}
        self._segments: dict[tuple[tuple[int, ...], tuple[float, ...]], int] = {}
        self.segment_host_s: list[float] = []
        self.streams = tuple(streams)
        self.communicators = tuple(communicators)
        self.launch_queue = launch_queue
        self.resident: list[tuple[str, int, str]] = []
        self.host_resident: list[tuple[str, int, str]] = []
        self._sections: list[Section] = []
        self._schedule: list[tuple[int, int]] = []

    def label(self, label: Label) -> int:
        return self._labels.setdefault(label, len(self._labels))

    def collective(self, call: CollectiveCall) -> int:
        return self._collectives.setdefault(call, len(self._collectives))

    def copy(self, copy: Copy) -> int:
        return self._copies.setdefault(copy, len(self._copies))

    def segment(self, kernels: Sequence[Kernel], host_s: Sequence[float]) -> int:
        """Number of the segment that runs `kernels` in order, each launched at a cost of `host_s[i]` seconds."""
        rows = self._kernels
        key = (tuple(rows.setdefault(k, len(rows)) for k in kernels), tuple(host_s))
        found = self._segments.setdefault(key, len(self._segments))
        if found == len(self.segment_host_s):
            self.segment_host_s.append(sum(host_s))
        return found

    def section(self, name: str) -> SectionBuilder:
        return SectionBuilder(self, name)

    def run(self, section: SectionBuilder, repeats: int = 1) -> None:
        """Append `repeats` runs of a finished section to the schedule."""
        if repeats > 0:
            self._sections.append(section.section)
            self._schedule.append((len(self._sections) - 1, repeats))

    def build(self) -> Program:
        """The finished Program."""
        return Program(
            kernels=list(self._kernels), segments=[Segment(*key) for key in self._segments],
            collectives=list(self._collectives), copies=list(self._copies), labels=list(self._labels),
            streams=self.streams, communicators=self.communicators, sections=self._sections, schedule=self._schedule,
            launch_queue=self.launch_queue, resident=self.resident, host_resident=self.host_resident)
