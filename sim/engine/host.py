"""The host of one simulated rank: it issues tasks in order and runs ahead of its devices until something blocks it.

The host needs no event of its own. Between two blocking points its clock is a running sum, so it is worked out as far
ahead as possible at once: tasks are handed to their streams together with the (perhaps future) time of their issue.
What blocks it are HOST tasks whose waits are not over, and a full launch queue; the end of the task it waits for brings
it back, at the later of its own clock and that end.

A task starts when its count of unfinished business falls to zero. The count (`Run.pending`) holds one for every edge of
the section's plan, one for being issued, and one for each stream of *earlier* section runs it must follow.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sim.engine.run import UNKNOWN, Run
from sim.engine.streams import Stream
from sim.engine.timer import Timer
from sim.program import Kind

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.machine import Profile

_KERNELS = int(Kind.KERNELS)
_COLLECTIVE = int(Kind.COLLECTIVE)
_HOST = int(Kind.HOST)


class Host(Timer):
    """One simulated rank: its host's place in the program, its streams and its contention state.

    Its timer is used only between section runs, to hold the host back until the simulation has caught up with it where
    what it does next depends on what the machine is doing then (see `_enter`).
    """

    def __init__(self, engine: Engine, number: int) -> None:
        super().__init__(engine.env)
        machine = engine.machine
        c = machine.job.classes[number]
        program = machine.job.programs[c.program]
        self.engine = engine
        self.number = number
        self.plans = machine.plans[c.program]
        self.schedule = [(s, n) for s, n in program.schedule if n > 0]
        self.launch_queue = program.launch_queue
        self.flows = [machine.flows[f] for f in machine.class_flows[number]]
        self.copies_s = machine.copies_s(c.program, c.device)
        self.streams = [Stream(engine.env, self) for _ in program.streams]
        self.compute = [self.streams[s] for s in sorted({s for plan in self.plans for s in plan.compute})]
        self.state = 0
        self.profiles = machine.table(number, 0)
        self.tables = {0: self.profiles}  # of the contention states met so far

        self.clock = 0.0
        self.run: Run | None = None
        self.next_task = 0
        self.queue_full = False
        self.outstanding = 0  # kernels issued and not finished
        self.position = (0, 0, 0)  # what `_enter` enters next: step, entry of the schedule, repeat
        self.asked_idle = -1
        self.tails: list[tuple[Run, int] | None] = [None] * len(program.streams)
        self.live: deque[Run] = deque()
        self.ended: list[Run] = []

    # -- the host's own order -----------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Issue everything up to the next blocking point."""
        while True:
            run = self.run
            if run is None:
                if not self._enter(now):
                    return
                run = self.run
                assert run is not None
            if not self._issue(run, now):
                return
            tails = self.tails
            for stream, task in run.plan.tails.items():
                tails[stream] = (run, task)
            self.run = None
            if not run.left:
                self._retire()

    def elapsed(self, now: float) -> None:
        """The simulation has caught up with the host: go on."""
        if self.engine.idle_after_s is None:
            self.advance(now)

    def _enter(self, now: float) -> bool:
        """Begin the next section run; False if the host has to wait or has nothing left to do.

        Repeats of a section and new steps are entered only when the simulation has reached the host's clock. Else a
        host that nothing blocks would issue all repeats at once, and none could be skipped any more.
        """
        step, entry, repeat = self.position
        engine = self.engine
        if step == engine.steps or not self.schedule:
            return False
        section, repeats = self.schedule[entry]
        opening = step > 0 and entry == 0 and repeat == 0
        if (opening or repeats > 1) and self.clock > now:
            self.arm(self.clock, now)
            return False
        if opening and self.asked_idle < step and not self.live:
            self.asked_idle = step
            if engine.hold_if_idle(self, now):
                return False
        if repeat + 1 < repeats:
            self.position = (step, entry, repeat + 1)
        else:
            self.position = (step, entry + 1, 0) if entry + 1 < len(self.schedule) else (step + 1, 0, 0)
        self.run = run = Run(section, self.plans[section], (step, entry, repeat))
        self.next_task = 0
        self.live.append(run)
        return True

    def _issue(self, run: Run, now: float) -> bool:
        """Issue tasks of `run` from `next_task` on; False if blocked."""
        plan = run.plan
        pending = run.pending
        issue = run.issue
        host_s = plan.host_s
        kinds = plan.kind
        launches = plan.launches
        across = plan.across
        limit = self.launch_queue
        clock = self.clock
        for task in range(self.next_task, plan.size):
            kind = kinds[task]
            issue[task] = clock
            if kind == _KERNELS:
                outstanding = self.outstanding
                if outstanding and outstanding + launches[task] > limit:
                    self.queue_full = True
                    self.next_task = task
                    self.clock = clock
                    return False
                self.outstanding = outstanding + launches[task]
            if across[task]:
                self._follow_earlier_runs(run, task)
            left = pending[task] - 1
            pending[task] = left
            if kind == _HOST:
                if left:
                    self.next_task = task
                    self.clock = clock
                    return False
                run.start[task] = clock
                clock += host_s[task]
                run.end[task] = clock
                run.left -= 1
                continue
            clock += host_s[task]
            if kind == _COLLECTIVE:
                flow = self.flows[plan.payload[task]]
                run.arrive[task] = self.engine.fifos[flow.communicator].issue(self, run, task, flow).arrive
            if not left:
                self.ready(run, task, now)
        self.clock = clock
        return True

    def _follow_earlier_runs(self, run: Run, task: int) -> None:
        """Wait for the last task of earlier section runs on each stream of the plan's `across`."""
        for stream in run.plan.across[task]:
            tail = self.tails[stream]
            if tail is not None and tail[0].end[tail[1]] == UNKNOWN:
                earlier, last = tail
                if earlier.followers is None:
                    earlier.followers = {}
                earlier.followers.setdefault(last, []).append((run, task))
                run.pending[task] += 1

    def launch_queue_moved(self, now: float) -> None:
        """Kernels have finished while the host waited for room in the launch queue."""
        run = self.run
        assert run is not None
        if not self.outstanding or self.outstanding + run.plan.launches[self.next_task] <= self.launch_queue:
            self.queue_full = False
            if self.clock < now:
                self.clock = now
            self.advance(now)

    # -- what tasks of this rank do to each other ---------------------------------------------------------------------

    def ready(self, run: Run, task: int, now: float) -> None:
        """Nothing but time stands between the task and its start."""
        plan = run.plan
        kind = plan.kind[task]
        if kind == _KERNELS:
            self.streams[plan.stream[task]].start_segment(run, task, now)
        elif kind == _COLLECTIVE:
            run.arrive.pop(task)(run.issue[task] + plan.host_s[task], now)
        elif kind == _HOST:  # the host was blocked on it
            clock = self.clock if self.clock > now else now
            run.start[task] = clock
            run.end[task] = self.clock = clock + plan.host_s[task]
            run.left -= 1
            self.next_task = task + 1
            self.advance(now)
        else:
            self.streams[plan.stream[task]].start_copy(run, task, now)

    def complete(self, run: Run, task: int, now: float) -> None:
        """A device task has ended: count down whatever waits for it."""
        run.end[task] = now
        run.left -= 1  # first, for what follows may bring the host to a new step, where it asks what is in flight
        pending = run.pending
        for dependent in run.plan.dependents[task]:
            left = pending[dependent] - 1
            pending[dependent] = left
            if not left:
                self.ready(run, dependent, now)
        followers = run.followers
        if followers is not None and task in followers:
            for later, dependent in followers.pop(task):
                left = later.pending[dependent] - 1
                later.pending[dependent] = left
                if not left:
                    self.ready(later, dependent, now)
        if not run.left:
            self._retire()

    def _retire(self) -> None:
        """Move finished runs, oldest first, to `ended`."""
        live = self.live
        while live and not live[0].left:
            run = live.popleft()
            run.shift_s = self.engine.offset_s
            self.ended.append(run)
            self.engine.run_ended(self, run)

    # -- contention ---------------------------------------------------------------------------------------------------

    def profile(self, segment: int) -> Profile:
        """Prefix sums of a segment in the present contention state."""
        return self.engine.machine.profile(self.number, self.state, segment)

    def contend(self, state: int, now: float) -> None:
        """Collectives have begun or ended on this rank: go on in another contention state."""
        self.state = state
        profiles = self.tables.get(state)
        if profiles is None:
            profiles = self.tables[state] = self.engine.machine.table(self.number, state)
        self.profiles = profiles
        for stream in self.compute:
            if stream.profile is not None:
                stream.contend(now)

    def drain_s(self, now: float) -> float:
        """How long a collective that starts now waits until running kernels give up an SM."""
        longest = 0.0
        for stream in self.compute:
            if stream.profile is not None:
                kernel = stream.running_kernel(now)
                if kernel >= 0:
                    wait_s = self.engine.machine.drains_s(self.number, stream.segment)[kernel]
                    if wait_s > longest:
                        longest = wait_s
        return longest
