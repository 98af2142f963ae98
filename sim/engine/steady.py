"""Steps that have become what the step before was: their rest need not be simulated.

The engine is deterministic. When a step comes to a point at which everything the future depends on is as it was at the
same point of the step before, apart from a shift in time, the rest of this step is the rest of that one, and so is
every further step. Stages of a pipeline begin their second step one after another and not, as the first, all at once,
so the two differ at first; a few forwards later they do not. This is exact; `simulate(skip_repeats=False)` gives the
same times, and a test holds both against each other.

What has passed without trace is not compared: how long ago a task was issued that still waits for another rank changes
nothing. It is reported as it was. The end of a step is taken from the step before only where the next step had not yet
begun to disturb it: the last step simulated has none behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sim.engine.repeats import TOLERANCE_S
from sim.engine.run import UNKNOWN, Run
from sim.program import Kind

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.host import Host

#: Section runs of the first class after which the machine is looked at.
POINTS = frozenset((1, 3, 10, 30, 100, 300))
#: Stands for a time that no longer matters.
_PAST = -1e9


@dataclass
class Mark:
    """The machine at a point of a step.

    Attributes:
        facts: what must be equal; times: seconds from then on that must be close.
        at_s: when it was, skipped repeats counted.
        ended: section runs of each class that were over, all steps counted.
        live: section runs of each class that were under way.
    """

    facts: object
    times: npt.NDArray[np.float64]
    at_s: float
    ended: list[int]
    live: list[list[Run]]


class Steady:
    """Looks at the machine at some points of every step, until one is like the step before."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.due = False
        self.step = 0
        self._runs = 0
        self._marks: dict[int, Mark] = {}  # of the step before
        self._own: dict[int, Mark] = {}
        self._found: tuple[Mark, Mark] | None = None
        self._disturbed = False

    @property
    def found(self) -> bool:
        """Whether a step goes on as the one before did."""
        return self._found is not None

    def run_ended(self, run: Run) -> None:
        """A section run of the first class has ended."""
        step = run.entry[0]
        if step != self.step:
            self.step, self._runs = step, 0
            self._marks, self._own = self._own, {}
        self._runs += 1
        if self._runs in POINTS and (step > 0 or step + 1 < self.engine.steps):
            self.due = self.engine.unsettled = True

    def skipped(self) -> None:
        """Repeats have been left out: what was under way at a mark and still is stands for later runs now."""
        for point, mark in list(self._own.items()):
            if point == self._runs or any(run.left for runs in mark.live for run in runs):
                del self._own[point]

    def observe(self, now: float) -> bool:
        """Whether the step goes on as the one before did."""
        self.due = False
        if any(run.entry[0] != self.step for host in self.engine.hosts for run in host.live):
            return False
        mark = self._own[self._runs] = self._mark(now)
        before = self._marks.get(self._runs)
        if before is None or self._disturbed or before.facts != mark.facts or len(before.times) != len(mark.times):
            return False
        if np.any(np.abs(mark.times - before.times) > TOLERANCE_S * (1.0 + np.abs(mark.times))):
            return False
        if self._disturbs():
            self._disturbed = True
            return False
        for host in self.engine.hosts:
            if host.queue_full and host.run is not None:  # what it waits to issue is not issued
                host.run.issue[host.next_task] = UNKNOWN
        self._found = before, mark
        return True

    def ended(self, ended: list[list[Run]]) -> list[list[Run]]:
        """Section runs of every class, with what was not simulated."""
        if self._found is None:
            return ended
        before, mark = self._found
        by = mark.at_s - before.at_s
        whole = []
        for number, runs in enumerate(ended):
            first = before.ended[number]
            until = first + len(before.live[number])
            following = [i for i, run in enumerate(runs) if run.entry[0] == self.step]
            stop = following[0] if following else len(runs)
            offset_s = self.engine.offset_s
            whole.append([*runs,
                          *[_completed(own, run, self.step, by, offset_s)
                            for own, run in zip(mark.live[number], runs[first:until], strict=True)],
                          *[run.moved(self.step, by) for run in runs[until:stop]]])
        return whole

    def _disturbs(self) -> bool:
        """Whether a task of this step began beside one of the step before that it can slow: a task of its own rank, or
        a collective it shares links with."""
        hosts, machine = self.engine.hosts, self.engine.machine
        ends_s = [max((max(run.end) + run.shift_s for run in host.ended if run.entry[0] < self.step and run.plan.size),
                      default=0.0) for host in hosts]
        latest_s = max(ends_s)
        for host in hosts:
            for run in (*host.ended, *host.live):
                if run.entry[0] < self.step:
                    continue
                shift_s = run.shift_s if run.left == 0 else self.engine.offset_s
                for task, start in enumerate(run.start):
                    kind = run.plan.kind[task]
                    if start == UNKNOWN or kind == Kind.HOST or start + shift_s >= latest_s:
                        continue
                    if start + shift_s < ends_s[host.number]:
                        return True
                    if kind == Kind.COLLECTIVE:
                        met = machine.near(host.flows[run.plan.payload[task]].number)
                        if any(start + shift_s < ends_s[c] for number in met for c in machine.flows[number].classes):
                            return True
        return False

    def _mark(self, now: float) -> Mark:
        hosts = self.engine.hosts
        facts: list[object] = []
        times: list[npt.NDArray[np.float64]] = []
        own: list[float] = []
        for host in hosts:
            self._host(host, now, facts, times, own)
        for number, fifo in enumerate(self.engine.fifos):
            if not fifo.queue:
                continue
            facts += [number, fifo.active, len(fifo.queue), [issued and issued - fifo.done for issued in fifo.issued]]
            for operation in fifo.queue:
                facts += [operation.flow.number, operation.missing, operation.begun]
                own.append(max(operation.ready_s - now, 0.0))
            if fifo.queue[0].begun:
                own.append(fifo.due - now)
            if fifo.active:
                own += [fifo.since_s - now, fifo.latency_s, fifo.bytes / fifo.rate_bps]
        return Mark(facts, np.concatenate((*times, np.array(own))), now + self.engine.offset_s,
                    [len(host.ended) for host in hosts], [list(host.live) for host in hosts])

    def _host(self, host: Host, now: float, facts: list[object], times: list[npt.NDArray[np.float64]],
              own: list[float]) -> None:
        runs = list(host.live)
        numbers = {id(run): number for number, run in enumerate(runs)}
        step, entry, repeat = host.position
        facts += [step - self.step, entry, repeat, host.next_task, host.queue_full, host.outstanding, host.state,
                  numbers[id(host.run)] if host.run is not None else -1, host.number in self.engine.idle, len(runs)]
        own.append(max(host.clock - now, 0.0))
        for run in runs:
            facts += [run.entry[1], run.entry[2], run.section, run.pending.copy(), run.left]
            issue, issued = np.array(run.issue), np.array(run.plan.host_s)
            waits = (issue != UNKNOWN) & (issue + issued > now) & (np.array(run.end) == UNKNOWN)
            times.append(np.where(waits, issue - now, _PAST))
        for stream in host.streams:
            if stream.run is None:
                facts.append(None)
                continue
            facts += [numbers[id(stream.run)], stream.task, stream.first]
            own.append(stream.due - now)
            if stream.profile is not None:
                gaps = stream.issue_s + stream.profile.late[stream.first] > stream.base_s
                own += [stream.base_s - now, stream.issue_s - now if gaps else _PAST, stream.run.starved[stream.task]]


def _completed(own: Run, run: Run, step: int, by: float, offset_s: float) -> Run:
    """A run that was under way: what it has done so far, then what `run` did a step before."""
    other = run.moved(step, by)
    moved = offset_s - other.shift_s

    def column(mine: list[float], theirs: list[float]) -> list[float]:
        return [theirs[task] if time == UNKNOWN else time + moved for task, time in enumerate(mine)]

    other.issue, other.start, other.end = (
        column(own.issue, run.issue), column(own.start, run.start), column(own.end, run.end))
    other.starved = [theirs if end == UNKNOWN else mine
                     for mine, theirs, end in zip(own.starved, run.starved, own.end, strict=True)]
    return other
