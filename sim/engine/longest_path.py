"""The contention-free longest path of a step: a second opinion on the engine and a lower bound for the sizing search.

Without contention a task's end is max-plus arithmetic on other tasks' ends: the maximum of what it waits for, plus its
duration. So the times of all tasks follow from one sweep in topological order, with no clock and no events, and the
order does not depend on the durations: one sweep over numpy columns answers for thousands of sets of durations at once.
(Max-plus view of event graphs: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, chapter 2.)

Nothing here is shared with the event engine but the Machine's durations: dependencies are read from the Program anew.
The sum of the simulated steps' times is never shorter than this path (contention only lengthens durations); equality
holds when nothing contends. For one late step by itself the bound is certain if steps begin on an idle machine (a host
that synchronises), else it holds for the mean of the steps swept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.engine.machine import Machine
from sim.program import Job, Kind, Program, Section

Floats = npt.NDArray[np.float64]


def longest_path(job: Job, machine: Machine, *, infinite_network: bool = False, steps: int = 2) -> float:
    """Seconds of a steady step when nothing contends: longest path over streams, communicators and host.

    Args:
        job: the machine's job.
        infinite_network: collectives take no time (they still wait for each other and for their ranks).
        steps: steps swept with the host's lead carried over; the last one is returned.

    Raises:
        ValueError: tasks wait for each other in a circle.
    """
    return float(LongestPath(job, machine.infinite() if infinite_network else machine, steps).step_time_s())


class LongestPath:
    """The sweep of a job in topological order, to be repeated with other durations.

    Args:
        job, machine: what runs and on what (only durations are asked of the machine).
        steps: steps swept one after another.
    """

    def __init__(self, job: Job, machine: Machine, steps: int = 2) -> None:
        self.job = job
        self.machine = machine
        self.steps = steps
        #: For each class, contention-free seconds of its program's tasks, sections one after another, shape (tasks,).
        self.alone_s: list[Floats] = [
            np.concatenate([np.zeros(0), *machine.alone_s(number)]) for number in range(len(job.classes))]
        self._graph = _Graph(job, steps)
        self._order = self._graph.order()

    def step_time_s(self, durations_s: Sequence[Floats] | None = None) -> Any:
        """Seconds of the last step.

        Args:
            durations_s: for each class, seconds of its program's tasks in the order of `alone_s`, shape
                (variants, tasks); None = `alone_s`. Kernels of a segment are scaled alike.

        Returns:
            A float, or an array of shape (variants,).
        """
        ends = self.step_ends_s(durations_s)
        return ends[-1] - (ends[-2] if len(ends) > 1 else 0.0)

    def step_ends_s(self, durations_s: Sequence[Floats] | None = None) -> list[Any]:
        """When each step ends, counted from the beginning of the first; see `step_time_s`."""
        graph = self._graph
        if durations_s is None:
            maximum: Callable[[Any, Any], Any] = max
            durations: list[list[Any]] = [alone.tolist() for alone in self.alone_s]
            late = [self._late(number, None) for number in range(len(self.job.classes))]
        else:
            maximum = np.maximum
            durations = [list(np.asarray(d, dtype=np.float64).T) for d in durations_s]
            late = [self._late(number, np.asarray(d, dtype=np.float64)) for number, d in enumerate(durations_s)]
        ends: list[Any] = [0.0] * self.steps
        time: list[Any] = [0.0] * len(graph.before)
        for node in self._order:
            value: Any = 0.0
            for other in graph.before[node]:
                value = maximum(value, time[other])
            for task, add in graph.issued[node]:
                # What the host has issued is available after its launch; a segment after its latest launch.
                offset = late[graph.of[task]][graph.column[task]] if add is None else add
                value = maximum(value, time[2 * task] + offset)
            which = graph.duration[node]
            if which is not None:
                number, column = which
                value = value + durations[number][column]
                ends[graph.step[node]] = maximum(ends[graph.step[node]], value)
            time[node] = value
        for step in range(1, self.steps):
            ends[step] = maximum(ends[step], ends[step - 1])
        return ends

    def _late(self, number: int, durations: Floats | None) -> list[Any]:
        """For each segment task: seconds after issue before which it cannot have begun, had it never to wait inside.

        With launches at launched[i] and elapsed[i] kernel seconds before kernel i that is max(launched - elapsed).
        """
        c = self.job.classes[number]
        program = self.job.programs[c.program]
        out: list[Any] = []
        column = 0
        for section in program.sections:
            for kind, payload in zip(section.kind, section.payload, strict=True):
                if kind != Kind.KERNELS:
                    out.append(0.0)
                else:
                    launched = np.cumsum(program.segments[payload].host_s)
                    elapsed = np.array(self.machine.profile(number, 0, payload).elapsed)
                    if not len(launched):
                        out.append(0.0)
                    elif durations is None or not elapsed[-1]:
                        out.append(float(np.max(launched - elapsed[:-1])))
                    else:
                        scale = durations[:, column] / elapsed[-1]
                        out.append(np.max(launched[None, :] - scale[:, None] * elapsed[None, :-1], axis=1))
                column += 1
        return out


class _Graph:
    """Nodes 2g: the host begins to issue task g. Nodes 2g + 1: task g ends. Further nodes: a collective ends.

    A task is numbered over all classes, steps and repeats. The members of a collective share one node.

    Attributes:
        before: nodes whose time a node's must reach.
        issued: (task, seconds) pairs: the node must wait that long after the task's issue has begun; None = until the
            segment's kernels are launched.
        duration: (class, column of its durations) to be added, None for nodes of issue.
        step: step of each node.
        of, column: class and column of durations of each task.
    """

    def __init__(self, job: Job, steps: int) -> None:
        tasks = steps * sum(job.programs[c.program].tasks() for c in job.classes)
        self.before: list[list[int]] = [[] for _ in range(2 * tasks)]
        self.issued: list[list[tuple[int, float | None]]] = [[] for _ in range(2 * tasks)]
        self.duration: list[tuple[int, int] | None] = [None] * (2 * tasks)
        self.step = [0] * (2 * tasks)
        self.of = [0] * tasks
        self.column = [0] * tasks
        self._operations: list[list[int]] = [[] for _ in job.communicators]  # nodes, in order
        self._tasks = 0
        for number in range(len(job.classes)):
            self._add_class(job, number, steps)

    def _add_class(self, job: Job, number: int, steps: int) -> None:
        program = job.programs[job.classes[number].program]
        firsts = np.concatenate(([0], np.cumsum([len(s) for s in program.sections]))).tolist()
        walk = _Walk(job, number)
        for step in range(steps):
            for s in program.section_runs():
                section = program.sections[s]
                walk.ends = []
                for i in range(len(section)):
                    task = self._tasks
                    self._tasks += 1
                    self.of[task], self.column[task] = number, firsts[s] + i
                    self.step[2 * task] = self.step[2 * task + 1] = step
                    self._add_task(walk, section, i, task)

    def _add_task(self, walk: _Walk, section: Section, i: int, task: int) -> None:
        begin, end = 2 * task, 2 * task + 1
        kind, stream, host_s = section.kind[i], section.stream[i], section.host_s[i]
        if walk.host_after >= 0:
            if walk.host_after % 2:
                self.before[begin].append(walk.host_after)
            else:
                self.issued[begin].append((walk.host_after // 2, walk.host_s))
        waits = [walk.ends[w] for w in section.waits[i]]
        waits += [walk.tails[j] for j in section.joins[i] if j in walk.tails]
        if kind == Kind.HOST:
            self.issued[end].append((task, 0.0))
            walk.host_after, walk.host_s = end, 0.0
        else:
            if stream in walk.tails:
                waits.append(walk.tails[stream])
            if kind == Kind.COLLECTIVE:
                end = self._operation(walk, section.payload[i], self.step[begin])
            elif kind == Kind.KERNELS:
                room = walk.queue.room_after(section.payload[i], end)
                if room >= 0:
                    self.before[begin].append(room)
            self.issued[end].append((task, None if kind == Kind.KERNELS else host_s))
            walk.tails[stream] = end
            walk.host_after, walk.host_s = begin, host_s
        self.before[end] += waits
        if self.duration[end] is None:
            self.duration[end] = (self.of[task], self.column[task])
        walk.ends.append(end)

    def _operation(self, walk: _Walk, collective: int, step: int) -> int:
        """The node of this class's next collective on a communicator; each follows the one before."""
        communicator = walk.communicators[walk.program.collectives[collective].communicator]
        nodes = self._operations[communicator]
        number = walk.issued.get(communicator, 0)
        walk.issued[communicator] = number + 1
        if number == len(nodes):
            nodes.append(len(self.before))
            self.before.append(nodes[-2:-1])
            self.issued.append([])
            self.duration.append(None)
            self.step.append(step)
        return nodes[number]

    def order(self) -> list[int]:
        """All nodes, each after those it depends on (Kahn 1962).

        Raises:
            ValueError: there is a circle.
        """
        after: list[list[int]] = [[] for _ in self.before]
        missing = [0] * len(self.before)
        for node, others in enumerate(self.before):
            for other in (*others, *(2 * task for task, _ in self.issued[node])):
                after[other].append(node)
                missing[node] += 1
        order = [node for node, count in enumerate(missing) if not count]
        for node in order:  # grows while we walk it
            for later in after[node]:
                missing[later] -= 1
                if not missing[later]:
                    order.append(later)
        if len(order) < len(missing):
            raise ValueError("tasks wait for each other in a circle: the job cannot run")
        return order


class _Walk:
    """Where we are in one class's program.

    Attributes:
        ends: end nodes of the present section's tasks so far. tails: of the last task on each stream.
        issued: collectives issued so far on each communicator.
        host_after, host_s: the host is free `host_s` seconds after this node's time (-1: at the start).
    """

    def __init__(self, job: Job, number: int) -> None:
        self.program = job.programs[job.classes[number].program]
        self.communicators = job.classes[number].communicators
        self.queue = _LaunchQueue(self.program)
        self.ends: list[int] = []
        self.tails: dict[int, int] = {}
        self.issued: dict[int, int] = {}
        self.host_after = -1
        self.host_s = 0.0


class _LaunchQueue:
    """Which earlier segment must have ended before the host may issue the next one.

    On one stream segments end in order, so the bounded launch queue is one more dependency. With kernels on several
    streams the order of their ends is not known beforehand; the queue is then left out (a lower bound all the same).
    """

    def __init__(self, program: Program) -> None:
        streams = {stream for section in program.sections
                   for kind, stream in zip(section.kind, section.stream, strict=True) if kind == Kind.KERNELS}
        self.limit: float = program.launch_queue if len(streams) == 1 else math.inf
        self.launches = program.launches()
        self.outstanding: list[tuple[int, int]] = []  # (node, launches), oldest first
        self.oldest = 0
        self.sum = 0

    def room_after(self, segment: int, node: int) -> int:
        """Issue `segment`, whose end is `node`; the node that must have ended before, -1 if none."""
        room = -1
        launches = self.launches[segment]
        while self.sum and self.sum + launches > self.limit:
            room, ended = self.outstanding[self.oldest]
            self.oldest += 1
            self.sum -= ended
        self.outstanding.append((node, launches))
        self.sum += launches
        return room
