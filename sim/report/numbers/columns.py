"""A rank's step as columns: what the Program says of each task beside when the Timeline says it ran.

The engine keeps a run that repeats exactly once (`SectionRun.repeats`). A hundred thousand equal tasks need not be
written out to know where the time goes: of such runs the first two and the last two are placed on the time axis, one
period is counted for all the periods in between, and the stretch in between is hidden. Two at each end, because a run's
communication reaches into its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sim.engine import SectionRun, Timeline
from sim.program import Job, Kind, Program, Section

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)

#: Repeats of a run that are all written out.
_WRITTEN_OUT = 4


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch [start_s, end_s) happens `copies` more times right after it; there the axis is hidden."""

    start_s: float
    end_s: float
    copies: int


@dataclass(slots=True)
class Columns:
    """One simulated rank's steady step, a row per task, in the order in which the host issues.

    Attributes:
        program: what the rank runs.
        kind, stream, payload, label: the Program's columns.
        host_s: host time of issuing the task.
        issue_s, start_s, end_s, starved_s: see `sim.engine.SectionRun`.
        times: how many tasks of the step the row stands for.
        windows: stretches that stand for hidden ones.
        step_time_s: length of the step.
    """

    program: Program
    kind: Ints
    stream: Ints
    payload: Ints
    label: Ints
    host_s: Floats
    issue_s: Floats
    start_s: Floats
    end_s: Floats
    starved_s: Floats
    times: Ints
    windows: list[Window]
    step_time_s: float

    def where(self, kind: Kind) -> Ints:
        """Rows of one kind of task."""
        return np.flatnonzero(self.kind == kind)


def of_class(job: Job, timeline: Timeline, number: int) -> Columns:
    """The step of simulated class `number`."""
    program = job.programs[job.classes[number].program]
    known: dict[int, tuple[Ints, Ints, Ints, Ints, Floats]] = {}
    placed: list[tuple[SectionRun, float, int]] = []
    windows: list[Window] = []
    for run in timeline.classes[number]:
        if run.section not in known:
            known[run.section] = _fixed(program.sections[run.section])
        placed += _placed(run, windows)
    fixed = [known[run.section] for run, _, _ in placed]
    return Columns(
        program=program,
        kind=_flat([f[0] for f in fixed], np.int64), stream=_flat([f[1] for f in fixed], np.int64),
        payload=_flat([f[2] for f in fixed], np.int64), label=_flat([f[3] for f in fixed], np.int64),
        host_s=_flat([f[4] for f in fixed], np.float64),
        issue_s=_flat([run.issue_s + shift for run, shift, _ in placed], np.float64),
        start_s=_flat([run.start_s + shift for run, shift, _ in placed], np.float64),
        end_s=_flat([run.end_s + shift for run, shift, _ in placed], np.float64),
        starved_s=_flat([run.starved_s for run, _, _ in placed], np.float64),
        times=_flat([np.full(len(run.start_s), times, dtype=np.int64) for run, _, times in placed], np.int64),
        windows=windows, step_time_s=timeline.step_time_s)


def _placed(run: SectionRun, windows: list[Window]) -> list[tuple[SectionRun, float, int]]:
    """(run, shift, how many it stands for) of those repeats of a run that are written out; adds its window."""
    count, delta = run.repeats, run.delta_s
    if count <= _WRITTEN_OUT or not len(run.start_s):
        return [(run, i * delta, 1) for i in range(count)]
    begin = float(run.start_s[0])
    windows.append(Window(begin, begin + delta, count - 2))
    return [(run, 0.0, count - 3), (run, delta, 1), (run, (count - 2) * delta, 1), (run, (count - 1) * delta, 1)]


def _fixed(section: Section) -> tuple[Ints, Ints, Ints, Ints, Floats]:
    return (np.array(section.kind, dtype=np.int64), np.array(section.stream, dtype=np.int64),
            np.array(section.payload, dtype=np.int64), np.array(section.label, dtype=np.int64),
            np.array(section.host_s, dtype=np.float64))


def _flat(parts: Sequence[npt.NDArray[_Scalar]], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
