"""What stands inside a task of kernels: its kernels, and the collectives that a chain of kernels waits for.

Slices of a cut model depend on one another's sums in the middle of every layer. The engine runs such a chain as one
task (`sim.program.Inline`), so a picture that shows tasks alone would show no tensor parallelism at all. Parts are put
where they are without contention, launches included (`sim.engine.machine.Profile`); what a task lost to collectives
beside it is spread over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from sim.engine import Machine, SectionRun
from sim.program import Kind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the tasks of a section, in order, each of shape (n,), seconds where nothing else is said.

    Attributes:
        task: number of the task in its section; row: of `Program.kernels`, -1 - i for `Program.inlines[i]`.
        before, own: kernel time of the task before a part, and of the part.
        hidden: of a collective, time in which kernels run beside it, which are parts too.
        moving: of a collective, what it takes by itself; kernels beside it may take longer, and `own` is both together.
        launched: the latest that it, or a part before it, is launched after the task's issue, less `before`.
        whole, whole_launched: `before` and `launched` of the task's end.
    """

    task: Ints
    row: Ints
    before: Floats
    own: Floats
    hidden: Floats
    moving: Floats
    launched: Floats
    whole: Floats
    whole_launched: Floats

    @property
    def collectives(self) -> Parts:
        """Those that are collectives."""
        rows = self.row < 0
        return Parts(*(getattr(self, one.name)[rows] for one in fields(self)))

    def placed(self, run: SectionRun) -> tuple[Floats, Floats, Floats, Floats]:
        """Begin and end, and of collectives where they are exposed, from and to, in one run of their section."""
        start, issued = run.start_s[self.task], run.issue_s[self.task]
        end = self.before + self.own + np.maximum(start, issued + self.launched)
        begin = end - self.own
        last = self.whole + np.maximum(start, issued + self.whole_launched)
        stretch = (run.end_s[self.task] - start) / np.maximum(last - start, 1e-30)
        shown, over = np.minimum(end, begin + self.hidden), np.minimum(end, begin + self.moving)
        begin, over, shown, end = (start + (at - start) * stretch for at in (begin, over, shown, end))
        return begin, over, shown, end


class Inside:
    """The parts of one class's tasks, worked out once per segment and section."""

    def __init__(self, machine: Machine, number: int) -> None:
        self._machine, self._number = machine, number
        self._program = machine.job.programs[machine.job.classes[number].program]
        self._kernel_s, self._alone_s = machine.kernel_s(number), machine.lockstep_s(number)
        self._sections: dict[int, Parts] = {}
        self._segments: dict[int, Floats] = {}

    def of(self, number: int) -> Parts:
        """Parts of every task of kernels of a section."""
        if number not in self._sections:
            section = self._program.sections[number]
            tables = [np.vstack((np.full(table.shape[1], task), table))
                      for task, (kind, payload) in enumerate(zip(section.kind, section.payload, strict=True))
                      if kind == Kind.KERNELS and (table := self._segment(payload)).size]
            task, row, *seconds = np.hstack(tables) if tables else np.zeros((9, 0))
            self._sections[number] = Parts(task.astype(np.int64), row.astype(np.int64), *seconds)
        return self._sections[number]

    def _segment(self, number: int) -> Floats:
        """What `Parts` has beside the task, shape (8, parts); no part of what takes no time."""
        if number not in self._segments:
            profile = self._machine.profile(self._number, 0, number)
            rows = self._program.segments[number].kernels if profile.total_s > 0 else ()
            launched = np.maximum.accumulate(profile.delay_column) if rows else np.zeros(0)
            found = [part for i, row in enumerate(rows) for part in self._parts(
                row, profile.elapsed[i], profile.elapsed[i + 1] - profile.elapsed[i], float(launched[i]))]
            table = np.array(found, dtype=np.float64).reshape(-1, 6).T
            ends = [[profile.total_s], [launched[-1] if rows else 0.0]]
            self._segments[number] = np.vstack((table, np.full((2, table.shape[1]), ends)))
        return self._segments[number]

    def _parts(self, row: int, before: float, own: float, launched: float) -> Iterator[tuple[float, ...]]:
        """A row of a segment, and the kernels beside it: row, before, own, hidden, moving, launched."""
        if row >= 0:
            yield row, before, own, 0.0, own, launched
            return
        inline, at = self._program.inlines[-1 - row], before
        for kernel in inline.beside:
            length = min(float(self._kernel_s[kernel]), before + own - at)
            yield kernel, at, length, 0.0, length, launched
            at += length
        yield row, before, own, at - before, self._alone_s[inline.collective], launched
