"""Where the host sets the pace of a step: stretches in which nothing on the device could end it sooner.

When compute is idle as the host launches its next kernels, all that was launched before is done, and what follows
could not begin earlier: not on a network of infinite speed, nor with faster kernels. So back to the moment from which
the host worked unhindered (it had waited for the device: a limit on gathers, a synchronising call, a full launch queue)
its work is the critical path, and whatever compute waited for meanwhile, gathers issued too late say, cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.program import Kind, Program
from sim.report.numbers.exposure import Spans

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

#: Shorter gaps are rounding.
_GAP_S = 1e-9


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of a rank's step in the order in which the host issues them; every array has shape (tasks,).

    Attributes:
        host: whether it is the host's own. compute: whether it is kernels of the compute stream.
        outside: whether it is an optimizer on the CPU, which the host waits for.
        issue_s, start_s, end_s, starved_s: see `sim.engine.SectionRun`.
        host_s: host time of issuing it. launch_s: that of its first kernel.
    """

    host: Flags
    compute: Flags
    outside: Flags
    issue_s: Floats
    start_s: Floats
    end_s: Floats
    starved_s: Floats
    host_s: Floats
    launch_s: Floats


def paced(tasks: Tasks, step_time_s: float) -> Spans:
    """Stretches in which the host sets the pace, within one step that is as those before and behind it."""
    reached_s, freed_s = np.sort(_reached(tasks)), np.sort(_freed(tasks))
    if not len(reached_s):
        return Spans.none()
    ends = np.concatenate((reached_s, reached_s + step_time_s))
    free = np.concatenate(([-np.inf], freed_s - step_time_s, freed_s, freed_s + step_time_s))
    since = np.searchsorted(free, ends, side="right") - 1
    last = np.flatnonzero(np.append(np.diff(since) > 0, True))  # of those behind one wait the last says it all
    starts, ends = np.clip(free[since[last]], 0.0, step_time_s), np.clip(ends[last], 0.0, step_time_s)
    lasts = ends > starts
    return Spans(starts[lasts], ends[lasts], np.zeros(int(lasts.sum()), dtype=np.int64), 1)


def common(of: Spans, other: Spans) -> Spans:
    """What intervals of `of`, as one row, have in common with those of `other`."""
    cuts = np.sort(np.concatenate((of.start_s, of.end_s, other.start_s, other.end_s)))
    chosen = (_covered(cuts, of) > 0) & (_covered(cuts, other) > 0) & (np.diff(cuts) > 0)
    return Spans(cuts[:-1][chosen], cuts[1:][chosen], np.zeros(int(chosen.sum()), dtype=np.int64), 1)


def gaps(tasks: Tasks) -> Spans:
    """Where the compute stream is idle before one of its tasks."""
    rows, idle_s = _idle(tasks)
    late = tasks.start_s[rows] > idle_s
    return Spans(idle_s[late], tasks.start_s[rows][late], np.zeros(int(late.sum()), dtype=np.int64), 1)


def launch_s(program: Program, kind: Ints, payload: Ints) -> Floats:
    """Seconds from the issue of each task until its first kernel is launched, 0 of what is no kernel."""
    found = np.zeros(len(kind))
    kernels = kind == Kind.KERNELS
    first = np.array([segment.host_s[0] if segment.host_s else 0.0 for segment in program.segments], dtype=np.float64)
    found[kernels] = first[payload[kernels]]
    return found


def _idle(tasks: Tasks) -> tuple[Ints, Floats]:
    """Compute tasks in the order in which they run, and since when the stream was idle before each."""
    rows = np.flatnonzero(tasks.compute)
    rows = rows[np.argsort(tasks.start_s[rows], kind="stable")]
    return rows, np.concatenate(([0.0], np.maximum.accumulate(tasks.end_s[rows])))[:-1]


def _reached(tasks: Tasks) -> Floats:
    """When the host launched kernels for an idle device; of a task whose kernels starved the last of its launches."""
    rows, idle_s = _idle(tasks)
    launched = tasks.issue_s[rows] + tasks.launch_s[rows]
    late, starved = launched > idle_s + _GAP_S, rows[tasks.starved_s[rows] > _GAP_S]
    through = np.minimum(tasks.issue_s[starved] + tasks.host_s[starved], tasks.end_s[starved])
    moments: Floats = np.concatenate((launched[late], through))
    return moments


def _freed(tasks: Tasks) -> Floats:
    """When the host had waited for something and went on."""
    begin = np.where(tasks.host, tasks.start_s, tasks.issue_s)
    done = np.where(tasks.host, tasks.end_s, tasks.issue_s + tasks.host_s)
    waited = begin[1:] > done[:-1] + _GAP_S
    freed: Floats = np.concatenate((begin[1:][waited], tasks.end_s[tasks.outside]))
    return freed


def _covered(cuts: Floats, spans: Spans) -> Ints:
    """How many intervals cover each piece between neighbouring cuts."""
    change = np.zeros(len(cuts), dtype=np.int64)
    np.add.at(change, np.searchsorted(cuts, spans.start_s), 1)
    np.add.at(change, np.searchsorted(cuts, spans.end_s), -1)
    covered: Ints = np.cumsum(change)[:-1]
    return covered
