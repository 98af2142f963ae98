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

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeVar

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


#: How the label of a compute task ends that goes on with a segment in which the host has read.
GOES_ON = ", on"


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
    """An `Inline` by contents, as `ProgramBuilder.segment` takes it.

    Attributes:
        reads_s: host time between a number that the host reads on the GPU and its launch; 0 = it does not wait.
        told: what it brings is read in front of the next call that waits; without one, that call waits for everything
            in front of it.
    """

    call: CollectiveCall
    beside: tuple[Kernel, ...] = ()
    reads_s: float = 0.0
    told: bool = False


class Read(NamedTuple):
    """A read of the host within a row of items.

    Attributes:
        behind: number of items that are over by then.
        before: the item that is launched behind it; those between are launched in front of it.
        host_s: from their end to the launch.
    """

    behind: int
    before: int
    host_s: float


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
        construction: how a resident entry comes about where more than its tensors is made on the way, by its name:
            (number, bytes) where a tensor is born, (number, 0) where it goes. Optimizer states named here are made
            before the first step, others in it.
        first: bytes of the tensors that stand for a resident entry until the first step is over, by its name.
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
    construction: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    first: dict[str, list[int]] = field(default_factory=dict)

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
