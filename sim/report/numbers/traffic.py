"""What a rank puts on the wire in one step: the list of result.md, and the sums and order the oracle files compare."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sim.engine import Machine, Timeline
from sim.program import Job, Kind, Program
from sim.work import TORCH_DTYPES


def traffic_list(job: Job, timeline: Timeline, rank_class: int) -> list[dict[str, Any]]:
    """One entry per collective of a class's step, in issue order, as result.md says.

    A collective inside a segment is placed by its share of the segment's own time.
    """
    program, sizes = _program(job, rank_class)
    fixed: dict[int, list[tuple[int, float, float, dict[str, Any]]]] = {}
    entries: list[dict[str, Any]] = []
    machine = timeline.machine
    for run in timeline.classes[rank_class]:
        if run.section not in fixed:
            fixed[run.section] = [
                (task, *_stretch(machine, rank_class, segment, place), entry)
                for task, segment, place, entry in _described(program, run.section, sizes)]
        calls = fixed[run.section]
        for again in range(run.repeats):
            shift = again * run.delta_s
            for task, begin, end, entry in calls:
                start = float(run.start_s[task]) + shift
                length = float(run.end_s[task]) + shift - start
                entries.append({**entry, "start_s": start + begin * length, "end_s": start + end * length})
    return entries


def traffic_count(job: Job, rank_class: int) -> int:
    """How many entries `traffic_list` has."""
    program = job.programs[job.classes[rank_class].program]
    return sum(repeats * sum(1 for _ in _calls_of(program, number)) for number, repeats in program.schedule)


def _stretch(machine: Machine, rank_class: int, segment: int, place: int) -> tuple[float, float]:
    """Begin and end of row `place` of a segment as shares of its time; the whole for a task of its own."""
    if segment < 0:
        return 0.0, 1.0
    elapsed = machine.profile(rank_class, 0, segment).elapsed
    total = elapsed[-1] or 1.0
    return elapsed[place] / total, elapsed[place + 1] / total


def _calls_of(program: Program, number: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(task, segment or -1, place in it, collective, label) of every collective of a section, in issue order."""
    section = program.sections[number]
    for task, (kind, payload, label) in enumerate(zip(section.kind, section.payload, section.label, strict=True)):
        if kind == Kind.COLLECTIVE:
            yield task, -1, 0, payload, label
        elif kind == Kind.KERNELS and program.inlines:
            for place, row in enumerate(program.segments[payload].kernels):
                if row < 0:
                    yield task, payload, place, program.inlines[-1 - row].collective, label


def _described(program: Program, number: int, sizes: list[int]) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    """(task, segment, place in it, fields without times) of every collective of a section."""
    for task, segment, place, collective, label in _calls_of(program, number):
        call, names = program.collectives[collective], program.labels[label]
        yield task, segment, place, {
            "kind": call.kind, "group": program.communicators[call.communicator], "ranks": sizes[call.communicator],
            "bytes": call.size_bytes, "dtype": call.dtype, "layer": names.layer, "phase": names.phase}


def traffic_totals(job: Job, rank_class: int = 0) -> list[dict[str, Any]]:
    """Per step and per (phase, kind, dtype, ranks): count and summed bytes, sorted, dtypes by PyTorch's names.

    The `traffic` of an oracle-traffic case (spec/cases.md).
    """
    program, sizes = _program(job, rank_class)
    sums: dict[tuple[str, str, str, int], list[int]] = {}
    for number, repeats in program.schedule:
        for phase, kind, dtype, ranks, size in _calls(program, number, sizes):
            entry = sums.setdefault((phase, kind, dtype, ranks), [0, 0])
            entry[0] += repeats
            entry[1] += repeats * size
    keys = ("phase", "kind", "dtype", "ranks", "count", "bytes")
    return [dict(zip(keys, (*key, *sums[key]), strict=True)) for key in sorted(sums)]


def traffic_order(job: Job, rank_class: int = 0) -> list[dict[str, Any]]:
    """The same collectives in issue order, equal neighbours folded by `repeat`, with their micro-step.

    The `order` of an oracle-traffic case (spec/cases.md): bytes are per call. What follows the last micro-step (an
    optimizer step's gathers) counts as part of it.
    """
    program, sizes = _program(job, rank_class)
    micro_steps = sum(n for s, n in program.schedule if _trains(program, s))
    calls = {number: list(_calls(program, number, sizes)) for number, _ in program.schedule}
    entries = []
    flat = ((*call, min(run, max(0, micro_steps - 1)))
            for run, number in enumerate(program.section_runs()) for call in calls[number])
    for (phase, kind, dtype, ranks, size, micro), same in groupby(flat):
        entries.append({"kind": kind, "phase": phase, "micro": micro, "bytes": size, "dtype": dtype, "ranks": ranks,
                        "repeat": sum(1 for _ in same)})
    return entries


def _program(job: Job, rank_class: int) -> tuple[Program, list[int]]:
    simulated = job.classes[rank_class]
    return job.programs[simulated.program], [job.communicators[c].size for c in simulated.communicators]


def _trains(program: Program, section: int) -> bool:
    return any(program.labels[label].phase in ("forward", "backward") for label in program.sections[section].label)


def _calls(program: Program, number: int, sizes: list[int]) -> Iterator[tuple[str, str, str, int, int]]:
    for _, _, _, collective, label in _calls_of(program, number):
        call = program.collectives[collective]
        yield (program.labels[label].phase, call.kind, TORCH_DTYPES.get(call.dtype, call.dtype),
               sizes[call.communicator], call.size_bytes)
