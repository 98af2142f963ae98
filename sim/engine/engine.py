"""The event loop: runs any Job on any Machine. It knows neither transformers nor parallelism.

Three kinds of actor, each a SimPy event that arms itself (`Timer`): a `Host` per simulated rank issues tasks, its
`Stream`s run kernels and copies, and a `Fifo` per communicator runs collectives. Each callback finishes one task and
follows the consequences at that instant (what is now ready starts). When nothing more happens in the instant the engine
*settles*: collectives that became ready start, and if the set of active ones has changed, rates and contention states
are looked up anew. Settling last has two merits: a collective that ends just as the next begins costs one change of
state, not two; and a kernel and a collective that begin at one instant always meet in the same order. Which of an
instant's events comes first by rounding must not matter, for whether a collective finds a kernel on the device decides
if it waits for thread blocks: so an instant is `INSTANT_S` long.
"""

from __future__ import annotations

from simpy import Environment
from simpy.core import EmptySchedule

from sim.engine.communicators import Fifo
from sim.engine.host import Host
from sim.engine.machine import Flow, Machine
from sim.engine.repeats import Repeats
from sim.engine.run import Run
from sim.engine.steady import Steady
from sim.engine.timeline import Timeline
from sim.engine.timer import INSTANT_S, Timer
from sim.garbage import seldom_searched
from sim.program import Job


class DeadlockError(RuntimeError):
    """Tasks wait for each other and nothing can happen any more; the program, not the user's input, is at fault."""


@seldom_searched()
def simulate(job: Job, machine: Machine, *, steps: int = 2, skip_repeats: bool = True) -> Timeline:
    """Run a job and report its steady step.

    Args:
        job: what runs; must be the machine's own job.
        machine: what it runs on.
        steps: optimizer steps simulated one after another, the host's lead carried over; the last is reported.
        skip_repeats: leave out section runs that repeat the one before exactly, and later steps when a step begins on
            an idle machine. Changes no result (tested to 1e-9).

    Raises:
        DeadlockError: the program cannot run to its end.
        ValueError: the ranks of a communicator disagree on an operation.
    """
    if job is not machine.job:
        raise ValueError("the machine was built for another job")
    if steps < 1:
        raise ValueError("at least one step must be simulated")
    return Engine(machine, steps, skip_repeats).run()


class Engine:
    """One simulation.

    Attributes:
        known_shares, known_states, known_near: the machine's memos of `Machine.shares`, `state` and `near`.
        contends: whether flows slow one another and kernels; else no contention state ever changes.
        flowing: for each class its active flows and who runs them.
        active: flow number -> the communicator that is running it.
        changed: flows that have begun or ended since rates were last set.
        unsettled: whether `_settle` has anything to do.
        starting: communicators whose next operation is to start now.
        offset_s: time of the repeats skipped so far.
        idle: classes held back at the beginning of a step on an idle rank.
        idle_after_s: when the first step left the machine idle, so that nothing further needs simulating; else None.
    """

    def __init__(self, machine: Machine, steps: int, skip_repeats: bool) -> None:
        self.env = Environment()
        self.machine = machine
        self.steps = steps
        self.skip = skip_repeats
        self.active: dict[int, Fifo] = {}
        self.flowing: list[dict[int, Fifo]] = [{} for _ in machine.job.classes]
        self.changed: list[Flow] = []
        self.unsettled = False
        self.starting: list[Fifo] = []
        self.known_shares = machine.known_shares
        self.known_states = machine.known_states
        self.known_near = machine.known_near
        self.contends = machine.contention
        self.offset_s = 0.0
        self.idle_after_s: float | None = None
        self.idle: set[int] = set()
        self.fifos = [Fifo(self, communicator.parties) for communicator in machine.job.communicators]
        self.hosts = [Host(self, number) for number in range(len(machine.job.classes))]
        several = skip_repeats and steps > 1 and len(self.hosts) > 1  # one alone is idle between steps
        self.steady = Steady(self) if several else None
        self.repeats = Repeats(self) if skip_repeats and any(n > 3 for h in self.hosts for _, n in h.schedule) else None

    def run(self) -> Timeline:
        """Simulate to the end and collect the steady step."""
        for host in self.hosts:
            host.advance(0.0)
        self._play()
        ended = [host.ended for host in self.hosts]
        if self.steady is not None and self.steady.found:
            ended = self.steady.ended(ended)
        elif self.idle_after_s is None:
            self._check_all_ended()
        timers: list[Timer] = [*self.hosts, *self.fifos, *(s for h in self.hosts for s in h.streams)]
        return Timeline.collect(
            self.machine, ended, tasks=sum(run.plan.size for host in self.hosts for run in host.ended),
            idle_after_s=self.idle_after_s, events=sum(timer.firings for timer in timers))

    def _play(self) -> None:
        """Event by event, until nothing is left to happen or the rest is known."""
        env = self.env
        step = env.step
        try:
            while not ((self.unsettled or self.idle) and self._instant_over(env.now)):
                step()
        except EmptySchedule:
            return

    def _instant_over(self, now: float) -> bool:
        """When nothing more happens in this instant, settle, then let go who was held back; True: the rest is known."""
        while self.env.peek() > now + INSTANT_S:
            if self.unsettled:
                if self._settle(now):
                    return True
            elif self.idle and self.idle_after_s is None:
                held = sorted(self.idle)
                self.idle.clear()
                for number in held:
                    self.hosts[number].advance(now)
            else:
                break
        return False

    def _settle(self, now: float) -> bool:
        """Start collectives that are ready; if the active set has changed, look up everyone's rate and state.

        Returns:
            Whether the rest need not be simulated.
        """
        self.unsettled = False
        active = self.active
        starting = self.starting
        if starting:
            drains = self.machine.drain
            for fifo in starting:
                operation = fifo.queue[0]
                drain_s = 0.0
                if drains:
                    for host, _, _ in operation.members:
                        wait_s = host.drain_s(now)
                        if wait_s > drain_s:
                            drain_s = wait_s
                fifo.activate(now, drain_s)
                flow = operation.flow
                active[flow.number] = fifo
                if self.contends:
                    for c in flow.classes:
                        self.flowing[c][flow.number] = fifo
                self.changed.append(flow)
            starting.clear()
        if self.changed:
            self._share(now)
        if self.steady is not None and self.steady.due and self.steady.observe(now):
            return True
        if self.repeats is not None and self.repeats.due and self.repeats.observe(now) and self.steady is not None:
            self.steady.skipped()
        return False

    def _share(self, now: float) -> None:
        """New rates for the active flows that those begun or ended can reach, and new contention states."""
        active = self.active
        changed = self.changed
        if len(changed) == 1 and self._share_alone(changed[0], now):
            return
        near = self.machine.near
        known = {flow.number for flow in changed}  # one may have ended and begun again
        reached = list(known)
        for number in reached:  # grows
            met = near(number)
            if not met.isdisjoint(active):
                for other in met:
                    if other in active and other not in known:
                        known.add(other)
                        reached.append(other)
        running = [number for number in reached if number in active]
        key = (running[0],) if len(running) == 1 else tuple(sorted(running))
        shares = self.known_shares.get(key) or self.machine.shares(key)
        for number, rate_bps in shares.rates_bps:
            fifo = active[number]
            if fifo.rate_bps != rate_bps:
                fifo.set_rate(rate_bps, now)
        classes = shares.classes
        if len(running) < len(reached):
            classes = tuple({*classes, *(c for flow in changed for c in flow.classes)})
        changed.clear()
        if self.contends:
            for c in classes:
                self._contend(c, now)

    def _share_alone(self, flow: Flow, now: float) -> bool:
        """`_share` for one flow that has begun or ended and meets no active one; False if it does meet one."""
        number = flow.number
        met = self.known_near.get(number)
        if met is None:
            met = self.known_near[number] = self.machine.near(number)
        active = self.active
        if not met.isdisjoint(active):
            return False
        self.changed.clear()
        classes = flow.classes
        fifo = active.get(number)
        if fifo is not None:
            key = (number,)
            shares = self.known_shares.get(key) or self.machine.shares(key)
            rate_bps = shares.rates_bps[0][1]
            if fifo.rate_bps != rate_bps:
                fifo.set_rate(rate_bps, now)
            classes = shares.classes
        if self.contends:
            for c in classes:
                self._contend(c, now)
        return True

    def _contend(self, c: int, now: float) -> None:
        """Look up the contention state of a class anew."""
        fifos = self.flowing[c]
        host = self.hosts[c]
        if not fifos:
            state = 0
        elif len(fifos) == 1:
            number, fifo = next(iter(fifos.items()))
            key = ((number, fifo.rate_bps),)
            state = self.known_states.get(key, -1)
            if state < 0:
                state = self.machine.state(key)
        else:
            state = self.machine.state(tuple([(number, fifos[number].rate_bps) for number in sorted(fifos)]))
        if host.state != state:
            host.contend(state, now)

    def run_ended(self, host: Host, run: Run) -> None:
        """A section run of `host` is over."""
        if host.number == 0:
            if self.repeats is not None:
                self.repeats.run_ended(host, run)
            if self.steady is not None:
                self.steady.run_ended(run)

    def hold_if_idle(self, host: Host, now: float) -> bool:
        """A host is at a new step and nothing of its rank is in flight: hold it back, if steps may be skipped.

        If all hosts get there at one instant, the machine is where it was before the first step, and every further step
        equals the first, moved in time. Until the others have had their say the host is held back: to the end of this
        instant.
        """
        if not self.skip:
            return False
        self.idle.add(host.number)
        if len(self.idle) == sum(1 for h in self.hosts if h.schedule):
            self.idle_after_s = now + self.offset_s
        return True

    def _check_all_ended(self) -> None:
        waiting = []
        for host in self.hosts:
            for run in host.live:
                tasks = [task for task in range(run.plan.size) if run.end[task] < 0]
                waiting.append(f"class {host.number}, section {run.plan.section!r}, task {tasks[0]}")
        if waiting:
            raise DeadlockError("nothing can proceed; still waiting: " + "; ".join(waiting[:8]))
