"""Where a step waits, as stretches of its picture: for communication, for another stage, for the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sim.program import Kind
from sim.report.numbers.behind import Tasks, common, gaps, paced
from sim.report.numbers.breakdown import COMPUTE_STREAM
from sim.report.numbers.exposure import Spans, axis, owner, waits_between

Floats = npt.NDArray[np.float64]


def waits_of(columns: dict[str, npt.NDArray[np.generic]], chained: Spans,
           step_time_s: float) -> tuple[Floats, Floats, Floats]:
    """Stretches of exposed communication, of waiting for another stage and of waiting for the host, by the precedence
    of `sim.report.numbers.exposure`; collectives inside of tasks of kernels come before those."""
    kind, stream, between = columns["kind"], columns["stream"], np.asarray(columns["between"], dtype=bool)
    start, end = (np.asarray(columns[name], dtype=np.float64) for name in ("start_s", "end_s"))
    issue, took = (np.asarray(columns[name], dtype=np.float64) for name in ("issue_s", "took_s"))
    issued = issue + took
    kernels = (kind == Kind.KERNELS) & (stream == COMPUTE_STREAM)
    aside = (kind == Kind.KERNELS) & (stream != COMPUTE_STREAM)
    calls = kind == Kind.COLLECTIVE
    tasks = Tasks(kind == Kind.HOST, kernels, np.asarray(columns["outside"], dtype=bool), issue, start, end,
                  np.asarray(columns["starved_s"], dtype=np.float64), took,
                  np.asarray(columns["launch_s"], dtype=np.float64))
    behind = common(gaps(tasks), paced(tasks, step_time_s))
    layers = [chained, _layer(start, end, kernels), behind, _layer(start, end, calls),
              _layer(start, end, kind == Kind.COPY),
              _layer(start, end, aside), _waits_between(issued, start, calls & between, step_time_s),
              _layer(issued, start, calls & ~between)]
    on = axis(layers, step_time_s)
    given = owner(on, layers)
    exposed, bubble = (given == 0) | (given == 3) | (given == 7), given == 6
    late = (given == 2) | (given == len(layers))
    return _stretches(on.cuts, exposed), _stretches(on.cuts, bubble), _stretches(on.cuts, late)


def _waits_between(issued_s: Floats, start_s: Floats, rows: npt.NDArray[np.bool_], step_time_s: float) -> Spans:
    return waits_between(issued_s[rows], start_s[rows], np.zeros(int(rows.sum()), dtype=np.int64), 1, step_time_s)


def _layer(start_s: Floats, end_s: Floats, rows: npt.NDArray[np.bool_]) -> Spans:
    count = int(rows.sum())
    return Spans(start_s[rows], end_s[rows], np.zeros(count, dtype=np.int64), 1)


def _stretches(cuts: Floats, chosen: npt.NDArray[np.bool_]) -> Floats:
    """Neighbouring chosen pieces as one stretch each, shape (n, 2)."""
    edges = np.diff(np.concatenate(([0], chosen.astype(np.int64), [0])))
    return np.stack((cuts[np.flatnonzero(edges == 1)], cuts[np.flatnonzero(edges == -1)]), axis=1)
