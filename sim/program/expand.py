"""A coarsened Job written out: every collective inside a segment becomes a task of its own.

Programs put chains of kernels and collectives of one class of ranks into one segment (`sim.program.Inline`), which
takes as long as its parts alone. This file undoes it where they are not alone: their ranks differ, or their links carry
other traffic. Else both timelines are the same, and so are memory and traffic always; a test holds both.
"""

from __future__ import annotations

from dataclasses import replace

from sim.program.columns import Kind, Program, Section, Segment
from sim.program.job import Job

#: Stream of the collectives that were inside segments, behind the program's own.
_NAME = "between_kernels"


def expand(job: Job) -> Job:
    """The job with every inline collective written out. Jobs without any are returned as they are."""
    if not any(program.inlines for program in job.programs):
        return job
    return replace(job, programs=[_Writer(program).program() for program in job.programs])


class _Writer:
    """Writes one program out."""

    def __init__(self, program: Program) -> None:
        self.old = program
        self.stream = len(program.streams)
        self.segments: dict[tuple[tuple[int, ...], tuple[float, ...]], int] = {}

    def program(self) -> Program:
        """The program without inline collectives."""
        sections = [self._section(section) for section in self.old.sections]
        segments = [Segment(*key) for key in self.segments]
        return replace(self.old, sections=sections, segments=segments, inlines=[],
                       streams=(*self.old.streams, _NAME))

    def _segment(self, rows: tuple[int, ...], host_s: tuple[float, ...]) -> int:
        return self.segments.setdefault((rows, host_s), len(self.segments))

    def _section(self, old: Section) -> Section:
        new = Section(old.name, layers=list(old.layers))
        first: list[int] = []
        last: list[int] = []
        for task in range(len(old)):
            first.append(len(new))
            waits = tuple(last[other] for other in old.waits[task])
            if old.kind[task] == Kind.KERNELS:
                self._kernels(new, old, task, waits)
            else:
                _add(new, old.kind[task], old.stream[task], old.payload[task], old.host_s[task], waits,
                     old.joins[task], old.label[task])
            last.append(len(new) - 1)
        first.append(len(new))
        new.memory = [op._replace(before=first[op.before]) for op in old.memory]
        return new

    def _kernels(self, new: Section, old: Section, task: int, waits: tuple[int, ...]) -> None:
        """The pieces of one segment; the last stands for the whole, so that its stream goes on behind it."""
        segment, stream, label = self.old.segments[old.payload[task]], old.stream[task], old.label[task]
        joins = old.joins[task]
        rows: list[int] = []
        host: list[float] = []

        def flush(always: bool = False) -> None:
            nonlocal waits, joins, rows, host
            if rows or always:
                number = self._segment(tuple(rows), tuple(host))
                _add(new, Kind.KERNELS, stream, number, sum(host), waits, joins, label)
                waits, joins, rows, host = (len(new) - 1,), (), [], []

        for row, seconds in zip(segment.kernels, segment.host_s, strict=True):
            if row >= 0:
                rows.append(row)
                host.append(seconds)
                continue
            flush()
            inline = self.old.inlines[-1 - row]
            _add(new, Kind.COLLECTIVE, self.stream, inline.collective, seconds, waits, (*joins, stream), label)
            done = [len(new) - 1]
            if inline.beside:
                number = self._segment(inline.beside, (0.0,) * len(inline.beside))
                _add(new, Kind.KERNELS, stream, number, 0.0, waits, joins, label)
                done.append(len(new) - 1)
            waits, joins = tuple(done), ()
        flush(always=True)


def _add(section: Section, kind: int, stream: int, payload: int, host_s: float, waits: tuple[int, ...],
         joins: tuple[int, ...], label: int) -> None:
    section.kind.append(int(kind))
    section.stream.append(stream)
    section.payload.append(payload)
    section.host_s.append(host_s)
    section.waits.append(waits)
    section.joins.append(joins)
    section.label.append(label)
