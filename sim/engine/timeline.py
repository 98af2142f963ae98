"""When each task of the steady step ran: plain columns, one set per simulated class.

All times are seconds after the step's start. A step starts when the one before has ended on all classes, so what its
host issued ahead of that, and communication that began early, has negative times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sim.engine.run import Run
from sim.program import Kind

if TYPE_CHECKING:
    from sim.engine.machine import Machine

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SectionRun:
    """One run of a section by one class, or several that differ only by a shift in time.

    Attributes:
        section: number of the section in the class's program.
        issue_s: when the host began to issue each task, shape (tasks,); of a HOST task, when the host got there.
        start_s: when the device began (HOST: the host's own work, its waits being over). end_s: when it ended.
        starved_s: seconds between start and end in which a segment waited for the host to launch its kernels.
        repeats: how many runs this stands for, each `delta_s` later than the one before.
    """

    section: int
    issue_s: Floats
    start_s: Floats
    end_s: Floats
    starved_s: Floats
    repeats: int = 1
    delta_s: float = 0.0

    def __iter__(self) -> Iterator[SectionRun]:
        """The runs it stands for, one by one."""
        for number in range(self.repeats):
            shift = number * self.delta_s
            yield SectionRun(self.section, self.issue_s + shift, self.start_s + shift, self.end_s + shift,
                             self.starved_s)


@dataclass(frozen=True, slots=True)
class Columns:
    """All tasks of one class in the step, in host order, repeats written out; every array has shape (tasks,).

    Attributes:
        section, task: which task of the program it is.
        kind, stream, payload, label: as in `sim.program.Section`.
        issue_s, start_s, end_s, starved_s: see `SectionRun`.
        alone_s: its duration without contention and without waiting for the host; what `end_s - start_s - starved_s`
            exceeds it by is the slow-down by contention (of a collective: and by draining thread blocks).
    """

    section: Ints
    task: Ints
    kind: Ints
    stream: Ints
    payload: Ints
    label: Ints
    issue_s: Floats
    start_s: Floats
    end_s: Floats
    starved_s: Floats
    alone_s: Floats


@dataclass(frozen=True)
class Timeline:
    """The steady step of a simulated job.

    Attributes:
        step_time_s: from the end of the step before to this step's end, over all classes.
        classes: for each simulated class its section runs in order (`runs` writes repeats out).
        alone_s: for each class and section, the contention-free seconds of each task (`Columns.alone_s`).
        events: SimPy events of the simulation. tasks: tasks simulated, all steps together.
        steps: steps simulated (fewer than asked for if a step began on an idle machine).
        machine: what it ran on.
    """

    step_time_s: float
    classes: Sequence[Sequence[SectionRun]]
    events: int
    tasks: int
    steps: int
    machine: Machine

    @staticmethod
    def collect(machine: Machine, ended: Sequence[Sequence[Run]], idle_after_s: float | None, events: int,
                tasks: int) -> Timeline:
        """Cut the last step out of what the engine recorded.

        Args:
            ended: section runs of each class, in order.
            tasks: how many were simulated.
            idle_after_s: when the first step left the machine idle, so that later steps equal it; else None.
        """
        last = max((run.entry[0] for runs in ended for run in runs), default=0)
        begin = 0.0
        finish = 0.0
        for runs in ended:
            for run in runs:
                if run.plan.size:
                    end = max(run.end) + run.shift_s
                    if run.entry[0] < last:
                        begin = max(begin, end)
                    finish = max(finish, end)
        if idle_after_s is not None:
            finish = idle_after_s
        classes = [_section_runs([run for run in runs if run.entry[0] == last], begin) for runs in ended]
        return Timeline(finish - begin, classes, events, tasks, last + 1, machine)

    @cached_property
    def alone_s(self) -> list[list[Floats]]:
        return [self.machine.alone_s(number) for number in range(len(self.classes))]

    def runs(self, class_number: int) -> Iterator[SectionRun]:
        """Section runs of one class in order, every repeat by itself."""
        for run in self.classes[class_number]:
            if run.repeats == 1:
                yield run
            else:
                yield from run

    def columns(self, class_number: int) -> Columns:
        """All tasks of one class, flat."""
        job = self.machine.job
        program = job.programs[job.classes[class_number].program]
        fixed = [(np.array(s.kind, dtype=np.int64), np.array(s.stream, dtype=np.int64),
                  np.array(s.payload, dtype=np.int64), np.array(s.label, dtype=np.int64)) for s in program.sections]
        runs = list(self.runs(class_number))
        sections = [run.section for run in runs]
        alone = self.alone_s[class_number]

        def flat(parts: list[npt.NDArray[np.generic]], dtype: type) -> npt.NDArray[np.generic]:
            return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)

        def ints(parts: list[Ints]) -> Ints:
            return flat(list(parts), np.int64).astype(np.int64, copy=False)

        def floats(parts: list[Floats]) -> Floats:
            return flat(list(parts), np.float64).astype(np.float64, copy=False)

        return Columns(
            section=ints([np.full(len(fixed[s][0]), s, dtype=np.int64) for s in sections]),
            task=ints([np.arange(len(fixed[s][0]), dtype=np.int64) for s in sections]),
            kind=ints([fixed[s][0] for s in sections]), stream=ints([fixed[s][1] for s in sections]),
            payload=ints([fixed[s][2] for s in sections]), label=ints([fixed[s][3] for s in sections]),
            issue_s=floats([run.issue_s for run in runs]), start_s=floats([run.start_s for run in runs]),
            end_s=floats([run.end_s for run in runs]), starved_s=floats([run.starved_s for run in runs]),
            alone_s=floats([alone[s] for s in sections]))

    def host_intervals(self, class_number: int) -> tuple[Floats, Floats]:
        """When the host of a class was at work: begins and ends, shape (tasks,) each, in order.

        A device task keeps it for its `host_s` from its issue on, a HOST task from its start to its end. In the gaps
        the host was blocked: by a HOST task's waits, or by a full launch queue.
        """
        job = self.machine.job
        program = job.programs[job.classes[class_number].program]
        begins, ends = [], []
        for run in self.runs(class_number):
            section = program.sections[run.section]
            host = np.array(section.kind, dtype=np.int64) == Kind.HOST
            begins.append(np.where(host, run.start_s, run.issue_s))
            ends.append(np.where(host, run.end_s, run.issue_s + np.array(section.host_s, dtype=np.float64)))
        if not begins:
            return np.zeros(0), np.zeros(0)
        return np.concatenate(begins), np.concatenate(ends)


def _section_runs(runs: Sequence[Run], begin: float) -> list[SectionRun]:
    """Runs of one class as arrays; one conversion for all, of which each run has its part."""
    sizes = [run.plan.size for run in runs]
    ends = np.cumsum(sizes).tolist()
    shifts = np.repeat([run.shift_s - begin for run in runs], sizes)

    def column(of: Callable[[Run], list[float]]) -> Floats:
        return np.fromiter(chain.from_iterable(map(of, runs)), np.float64, sum(sizes))

    issue, start, end = (column(of) + shifts for of in (_ISSUE, _START, _END))
    starved = column(_STARVED)
    return [SectionRun(run.section, issue[low:high], start[low:high], end[low:high], starved[low:high],
                       1 + run.copies, run.delta_s)
            for run, low, high in zip(runs, [0, *ends], ends, strict=False)]


_ISSUE, _START, _END, _STARVED = map(attrgetter, ("issue", "start", "end", "starved"))
