"""Communicators: NCCL runs the operations of one communicator one after another in issue order, whatever their streams.

An operation starts when it is first in its communicator's queue and every simulated rank has reached it: issued it and
got everything it waits for out of the way. While it is active it moves first its latency, then its bytes at the rate
the engine gives it; the engine changes rates only when the set of active operations changes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sim.engine.run import Run
from sim.engine.timer import Timer

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.host import Host
    from sim.engine.machine import Flow


class Operation:
    """One collective, shared by all simulated ranks that take part.

    Attributes:
        missing: ranks that have not reached it yet.
        ready_s: when the last of those that have is (or will be) there.
        members: (rank, section run, task) of each.
    """

    __slots__ = ("begun", "fifo", "flow", "members", "missing", "ready_s")

    def __init__(self, fifo: Fifo, flow: Flow, parties: int) -> None:
        self.fifo = fifo
        self.flow = flow
        self.missing = parties
        self.ready_s = -1.0  # unknown
        self.begun = False
        self.members: list[tuple[Host, Run, int]] = []

    def arrive(self, issued_s: float, now: float) -> None:
        """One more rank has reached it (`issued_s` may lie ahead: its host is late)."""
        if issued_s > self.ready_s:
            self.ready_s = issued_s
        self.missing -= 1
        if not self.missing and self.fifo.queue[0] is self:
            self.fifo.begin(self, now)


class Fifo(Timer):
    """One communicator; its timer is the end (or the delayed start) of the operation at the head of its queue.

    Attributes:
        queue: operations issued by at least one rank and not finished, in order.
        issued, done: operations issued so far by each class; finished so far.
        rate_bps: present rate of the active operation, as of `since_s` with `latency_s` and `bytes` to go.
    """

    def __init__(self, engine: Engine, parties: int) -> None:
        super().__init__(engine.env)
        self.engine = engine
        self.parties = parties
        self.queue: deque[Operation] = deque()
        self.issued = [0] * len(engine.machine.job.classes)
        self.done = 0
        self.active = False
        self.rate_bps = 0.0
        self.since_s = 0.0
        self.latency_s = 0.0
        self.bytes = 0.0

    def issue(self, host: Host, run: Run, task: int, flow: Flow) -> Operation:
        """The host has issued its next operation on this communicator.

        Raises:
            ValueError: the ranks of the communicator do not agree on the operation.
        """
        behind = self.issued[host.number] - self.done
        self.issued[host.number] += 1
        if behind < len(self.queue):
            operation = self.queue[behind]
            if operation.flow is not flow:
                raise ValueError(f"ranks disagree on operation {self.done + behind} of a communicator: task {task} of "
                                 f"section {run.plan.section!r} of class {host.number} is another collective")
        else:
            operation = Operation(self, flow, self.parties)
            self.queue.append(operation)
        operation.members.append((host, run, task))
        return operation

    def begin(self, operation: Operation, now: float) -> None:
        """The head of the queue has all its ranks; start it when the last host has issued it."""
        operation.begun = True
        if operation.ready_s > now:
            self.arm(operation.ready_s, now)
        else:
            self.engine.starting.append(self)
            self.engine.unsettled = True

    def activate(self, now: float, drain_s: float) -> None:
        """Start the head of the queue; `drain_s` passes before its thread blocks find room."""
        operation = self.queue[0]
        flow = operation.flow
        start = now + drain_s
        for _, run, task in operation.members:
            run.start[task] = start
        self.active = True
        self.since_s = now
        self.latency_s = flow.latency_s + drain_s
        self.bytes = flow.size_bytes
        self.rate_bps = 0.0

    def set_rate(self, rate_bps: float, now: float) -> None:
        """Go on at another rate."""
        passed = now - self.since_s
        if passed > 0.0:
            if passed < self.latency_s:
                self.latency_s -= passed
            else:
                passed -= self.latency_s
                self.latency_s = 0.0
                if passed > 0.0:
                    left = self.bytes - passed * self.rate_bps
                    self.bytes = left if left > 0.0 else 0.0
            self.since_s = now
        self.rate_bps = rate_bps
        self.arm(now + self.latency_s + (self.bytes / rate_bps if self.bytes else 0.0), now)

    def elapsed(self, now: float) -> None:
        """The active operation has ended, or the last host has issued the one that waits."""
        engine = self.engine
        if not self.active:  # the host was late; it has issued the operation now
            engine.starting.append(self)
            engine.unsettled = True
            return
        operation = self.queue.popleft()
        self.done += 1
        self.active = False
        flow = operation.flow
        del engine.active[flow.number]
        if engine.contends:
            for c in flow.classes:
                del engine.flowing[c][flow.number]
        engine.changed.append(flow)
        engine.unsettled = True
        for host, run, task in operation.members:
            host.complete(run, task, now)
        if self.queue:
            following = self.queue[0]
            if not following.missing and not following.begun:
                self.begin(following, now)
