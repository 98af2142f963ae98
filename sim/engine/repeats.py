"""Leaving out section runs that repeat the one before (gradient accumulation: sixteen equal micro-steps).

The engine is deterministic, so if the whole machine is in the same state at the ends of two successive runs, apart from
a shift in time, the next run will be that run again. The state is compared in full: what is in flight and how far it
is, where each host is and what its clock says, what waits for what. Then the remaining repeats (all but one) are left
out by adding their time to the clock's offset: the runs in flight are taken for those k repeats later. This is exact,
not an approximation; `simulate(skip_repeats=False)` gives the same times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sim.engine.run import UNKNOWN, Run

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.host import Host

#: Two times are the same if they differ by less than this, seconds (rounding of a clock that shows a few seconds).
TOLERANCE_S = 1e-12
#: Runs of fewer tasks are compared only when they take as long as the one before (relative): looking costs as much as
#: running them.
_SHORT, _LIKE = 40, 1e-6


class Repeats:
    """Compares the machine's state whenever the first class ends a repeated section run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.due = False
        self._before: tuple[list[int], object, npt.NDArray[np.float64], float] | None = None
        self._short = False
        self._ends_s: list[float] = []

    def run_ended(self, host: Host, run: Run) -> None:
        """A section run of the first class has ended; look at the state when this instant has settled."""
        _, entry, repeat = run.entry
        if repeat and host.schedule[entry][1] - repeat > 2:
            self.due = self.engine.unsettled = True
            self._short = run.plan.size < _SHORT
        else:
            self._before = None
            self._ends_s.clear()

    def _drifts(self, now: float) -> bool:
        """Whether the last two runs took different times, so that this state is another than the one before."""
        ends_s = self._ends_s
        ends_s.append(now)
        if len(ends_s) < 3:
            return False
        return abs((now - ends_s[-2]) - (ends_s[-2] - ends_s[-3])) > _LIKE * (now - ends_s[-2])

    def observe(self, now: float) -> bool:
        """Compare with the state at the end of the run before; skip if it is the same, and say so."""
        self.due = False
        before, self._before = self._before, None
        if self._short and self._drifts(now):
            return False
        remaining = min(self._remaining(host) for host in self.engine.hosts)
        if remaining < 2:
            return False
        numbers = [host.ended[-1].entry[2] for host in self.engine.hosts]
        facts, times = self._state(now)
        self._before = (numbers, facts, times, now)
        if before is None or any(number != last + 1 for number, last in zip(numbers, before[0], strict=True)):
            return False  # several runs of a class ended at one instant: what recurs is longer than one run
        if before[1] != facts or len(before[2]) != len(times):
            return False
        if np.all(np.abs(times - before[2]) <= TOLERANCE_S * (1.0 + np.abs(times))):
            self._skip(remaining - 1, now - before[3])
            self._before = None
            return True
        return False

    def _remaining(self, host: Host) -> int:
        """Repeats the host has not entered yet, 0 if what is in flight does not all belong to one schedule entry."""
        step, entry, repeat = host.position
        if not repeat or not host.ended:
            return 0
        if any(run.entry[:2] != (step, entry) for run in (host.ended[-1], *host.live)):
            return 0
        return host.schedule[entry][1] - repeat

    def _skip(self, count: int, delta_s: float) -> None:
        self.engine.offset_s += count * delta_s
        for host in self.engine.hosts:
            reference = host.ended[-1]
            reference.copies = count
            reference.delta_s = delta_s
            step, entry, repeat = host.position
            host.position = (step, entry, repeat + count)
            for run in host.live:
                run.entry = (step, entry, run.entry[2] + count)

    def _state(self, now: float) -> tuple[object, npt.NDArray[np.float64]]:
        """Everything the future depends on: facts that must be equal, and times relative to now that must be close."""
        facts: list[object] = []
        times: list[float] = []
        durations: list[float] = []
        for host in self.engine.hosts:
            runs = [host.ended[-1], *host.live]
            numbers = {id(run): number for number, run in enumerate(runs)}
            first = runs[0].entry[2]
            facts += [host.position[2] - first, host.next_task, host.queue_full, host.outstanding, host.state,
                      numbers[id(host.run)] if host.run is not None else -1, len(runs)]
            times += [host.clock, host.due]
            for run in runs:
                facts += [run.entry[2] - first, run.section, tuple(run.pending), run.left]
                times += run.issue
                times += run.start
                times += run.end
            for stream in host.streams:
                if stream.run is not None:
                    facts += [numbers[id(stream.run)], stream.task, stream.first]
                    times += [stream.base_s, stream.due]
                else:
                    facts.append(None)
        for number, fifo in enumerate(self.engine.fifos):
            if not fifo.queue:
                continue
            facts += [number, fifo.active, len(fifo.queue), tuple(n - fifo.done for n in fifo.issued if n)]
            for operation in fifo.queue:
                facts += [operation.flow.number, operation.missing, operation.begun]
                times.append(operation.ready_s)
            times.append(fifo.due)
            if fifo.active:
                times.append(fifo.since_s)
                durations += [fifo.latency_s, fifo.bytes / fifo.rate_bps]
        clock = np.array(times)
        known = (clock != UNKNOWN) & np.isfinite(clock)
        return facts, np.concatenate((np.where(known, clock - now, 1e9), np.array(durations, dtype=np.float64)))
