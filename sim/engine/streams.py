"""Streams of one rank.

A stream runs one task at a time. A copy simply takes its time. A segment of kernels takes the time its kernels take in
the present *contention state*; when the state changes, the stream works out how far it has come (which kernel, what
fraction of it) and goes on from there with the new state's prefix sums. Progress is exact, so it does not matter
whether kernels are put in one segment or in many.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np
from simpy import Environment

from sim.engine.run import Run
from sim.engine.timer import Timer

if TYPE_CHECKING:
    from sim.engine.host import Host
    from sim.engine.machine import Profile

#: A kernel launched within this many seconds is on the device: a thousandth of the shortest kernel.
_LAUNCHED_S = 1e-9


class Stream(Timer):
    """One CUDA stream of one rank; its timer is the end of the running task.

    Attributes:
        run, task: what is running, None if nothing is.
        profile: prefix sums in the present state, None for a copy.
        base_s: when the running segment would have begun had it run in the present state all along, never waiting for
            the host since the state last changed.
        first: first kernel that may still have to wait for its launch.
        issue_s: when the host began to issue the segment.
    """

    def __init__(self, env: Environment, host: Host) -> None:
        super().__init__(env)
        self.host = host
        self.run: Run | None = None
        self.task = -1
        self.profile: Profile | None = None
        self.segment = -1
        self.base_s = 0.0
        self.first = 0
        self.issue_s = 0.0

    def start_segment(self, run: Run, task: int, now: float) -> None:
        """Everything but the host's launches is in place: run the kernels."""
        host = self.host
        self.run = run
        self.task = task
        self.segment = segment = run.plan.payload[task]
        self.profile = profile = host.profiles[segment] or host.profile(segment)
        self.issue_s = issue = run.issue[task]
        launch = issue + profile.first_launch_s
        run.start[task] = self.base_s = base = now if now > launch else launch
        self.first = 0
        late = issue + profile.late[0]
        self.arm((base if base > late else late) + profile.total_s, now)

    def start_copy(self, run: Run, task: int, now: float) -> None:
        """Copy as soon as the host has issued it."""
        self.run = run
        self.task = task
        issued = run.issue[task] + run.plan.host_s[task]
        run.start[task] = start = now if now > issued else issued
        self.arm(start + self.host.copies_s[run.plan.payload[task]], now)

    def elapsed(self, now: float) -> None:
        """The running task has ended."""
        run = self.run
        assert run is not None
        task = self.task
        host = self.host
        self.run = None
        profile = self.profile
        if profile is not None:
            self.profile = None
            host.outstanding -= run.plan.launches[task]
            waited = self.issue_s + profile.late[self.first] - self.base_s
            if waited > 0:
                run.starved[task] += waited
        host.complete(run, task, now)
        if host.queue_full:
            host.launch_queue_moved(now)

    def position(self, now: float) -> tuple[int, float, float]:
        """Where the segment is: (kernel, fraction of it done, seconds it waited for the host since `base_s`).

        A kernel whose launch is still awaited has fraction 0.
        """
        profile = self.profile
        assert profile is not None
        elapsed = profile.elapsed
        base = self.base_s
        if now <= base:
            return self.first, 0.0, 0.0
        last = len(elapsed) - 1
        if self.issue_s + profile.late[self.first] <= base:  # the host is ahead: no gaps from here on
            done = now - base
            kernel = bisect_right(elapsed, done) - 1
            if kernel >= last:
                return last, 0.0, 0.0
            return kernel, (done - elapsed[kernel]) / (elapsed[kernel + 1] - elapsed[kernel]), 0.0
        first, issue = self.first, self.issue_s
        if first and base + elapsed[first] > now:  # the kernel before the first that may wait was not through
            begin, kernel = base, first - 1
        else:  # kernel j ends at elapsed[j + 1] after the latest of its own launch and those before it (see Profile)
            begins = np.maximum(base, issue + np.maximum.accumulate(profile.delay_column[first:]))
            kernel = first + int(np.searchsorted(begins + profile.elapsed_column[first + 1:], now, "right"))
            if kernel >= last:
                return last, 0.0, float(begins[-1]) - base
            begin = float(begins[kernel - first])
        done = now - begin - elapsed[kernel]
        if done <= 0.0:
            return kernel, 0.0, now - elapsed[kernel] - base
        return kernel, done / (elapsed[kernel + 1] - elapsed[kernel]), begin - base

    def contend(self, now: float) -> None:
        """The contention state has changed: carry the progress over to the new state's prefix sums."""
        run = self.run
        old = self.profile
        if run is None or old is None:
            return
        host = self.host
        new = host.profiles[self.segment] or host.profile(self.segment)
        base = self.base_s
        if now > base:
            kernel, fraction, waited = self.position(now)
            elapsed = new.elapsed
            done = elapsed[kernel]
            if fraction:
                done += fraction * (elapsed[kernel + 1] - done)
                kernel += 1
            self.first = kernel
            self.base_s = base = now - done
            if waited > 0:
                run.starved[self.task] += waited
        self.profile = new
        late = self.issue_s + new.late[self.first]
        self.arm((base if base > late else late) + new.total_s, now)

    def running_kernel(self, now: float) -> int:
        """Number, within its segment, of the kernel that is on the device now; -1 if none is.

        A kernel launched in this very instant counts, whatever the rounding of its time: the host issues it before the
        collective on whose behalf this is asked.
        """
        now += _LAUNCHED_S
        if self.profile is None or now < self.base_s:
            return -1
        kernel, fraction, _ = self.position(now)
        if fraction:
            return kernel
        run = self.run
        assert run is not None
        if kernel >= len(self.profile.delay):
            return -1
        launched = self.issue_s + self.profile.delay[kernel] + self.profile.elapsed[kernel]
        return kernel if launched <= now else -1
