"""A section compiled for the engine: who waits for whom, as counters and lists of dependents.

Everything CUDA's rules say about order inside a section is known before it runs, so it is worked out once: stream
order, events and joins all become edges between task numbers. What reaches back before the section (its first task on a
stream, a join on a stream it has not used yet) depends on what ran before and is left as a list of stream numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.program import Kind, Program, Section


class SectionPlan:
    """One section, column by column (lists: the event loop reads them one element at a time).

    Attributes:
        section: name, for messages.
        size: number of tasks.
        kind, stream, payload, host_s: as in `Section`.
        launches: CUDA kernels of a KERNELS task, 0 for others; what it takes up in the launch queue.
        dependents: tasks of the section that wait for this one.
        pending: how many tasks of the section each waits for, plus one for being issued by the host.
        across: streams whose last task of *earlier* section runs must have finished.
        tails: for each stream the section uses, its last task.
        compute: streams that run kernels.
    """

    __slots__ = ("across", "compute", "dependents", "host_s", "kind", "launches", "payload", "pending", "section",
                 "size", "stream", "tails")

    def __init__(self, section: Section) -> None:
        self.section = section.name
        self.size = len(section)
        self.kind = [int(k) for k in section.kind]
        self.stream = list(section.stream)
        self.payload = list(section.payload)
        self.host_s = list(section.host_s)
        self.launches = [0] * self.size
        self.dependents: list[list[int]] = [[] for _ in range(self.size)]
        self.pending = [1] * self.size
        self.across: list[tuple[int, ...]] = [()] * self.size
        self.tails: dict[int, int] = {}
        self.compute: set[int] = set()


def compile_programs(programs: Sequence[Program]) -> list[list[SectionPlan]]:
    """Every section of every program; what programs share (segments, whole sections) is compiled once.

    Raises:
        ValueError: as `compile_section`.
    """
    launches: dict[int, list[int]] = {}
    for program in programs:
        if id(program.segments) not in launches:
            launches[id(program.segments)] = program.launches()
    known: dict[tuple[int, int], SectionPlan] = {}
    plans = []
    for program in programs:
        segments = id(program.segments)
        for section in program.sections:
            if (id(section), segments) not in known:
                known[id(section), segments] = compile_section(section, launches[segments])
        plans.append([known[id(section), segments] for section in program.sections])
    return plans


def compile_section(section: Section, launches: Sequence[int]) -> SectionPlan:
    """Turn waits, joins and stream order into edges.

    A stream finishes its tasks in order, so of several tasks of one stream only the last needs waiting for. A HOST task
    needs no edge to what comes after it: the host issues nothing until it has ended.

    Args:
        launches: CUDA kernels launched by each segment of the program.

    Raises:
        ValueError: a task waits for itself or a later one.
    """
    plan = SectionPlan(section)
    host = int(Kind.HOST)
    kernels = int(Kind.KERNELS)
    tails = plan.tails
    for task in range(plan.size):
        kind = plan.kind[task]
        newest: dict[int, int] = {}
        for other in section.waits[task]:
            if other >= task:
                raise ValueError(f"section {section.name!r}: task {task} waits for task {other}, which comes later")
            if plan.kind[other] != host and newest.get(plan.stream[other], -1) < other:
                newest[plan.stream[other]] = other
        across = []
        for stream in section.joins[task] if kind == host else (*section.joins[task], plan.stream[task]):
            if stream in tails:
                newest[stream] = tails[stream]
            elif stream not in across:
                across.append(stream)
        for other in newest.values():
            plan.dependents[other].append(task)
        plan.pending[task] += len(newest)
        plan.across[task] = tuple(across)
        if kind == kernels:
            plan.launches[task] = launches[plan.payload[task]]
            plan.compute.add(plan.stream[task])
        if kind != host:
            tails[plan.stream[task]] = task
    return plan
