"""What a rank puts on the wire in one step: the list of result.md, and the sums and order the oracle files compare."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sim.engine import Timeline
from sim.program import Job, Kind, Program
from sim.report.numbers.inside import Inside
from sim.work import TORCH_DTYPES


def traffic_list(job: Job, timeline: Timeline, rank_class: int) -> list[dict[str, Any]]:
    """One entry per collective of a class's step, in issue order, as result.md says.

    A collective inside a segment is where `Inside` has it, as in the trace; kernels beside it that take longer are no
    part of it.
    """
    program, sizes = _program(job, rank_class)
    inside = Inside(timeline.machine, rank_class)
    fixed: dict[int, list[tuple[int, int, dict[str, Any]]]] = {}
    entries: list[dict[str, Any]] = []
    for run in timeline.classes[rank_class]:
        parts = inside.of(run.section).collectives
        if run.section not in fixed:
            fixed[run.section] = list(_placed(program, run.section, sizes, parts.task.tolist()))
        begin, over, _, _ = parts.placed(run)
        calls = [(float(run.start_s[task]), float(run.end_s[task]), entry) if part < 0
                 else (float(begin[part]), float(over[part]), entry) for task, part, entry in fixed[run.section]]
        for again in range(run.repeats):
            shift = again * run.delta_s
            entries += [{**entry, "start_s": start + shift, "end_s": end + shift} for start, end, entry in calls]
    return entries


def traffic_count(job: Job, rank_class: int) -> int:
    """How many entries `traffic_list` has."""
    program = job.programs[job.classes[rank_class].program]
    return sum(repeats * sum(1 for _ in _calls_of(program, number)) for number, repeats in program.schedule)


def _placed(program: Program, number: int, sizes: list[int], tasks: list[int]) -> Iterator[
        tuple[int, int, dict[str, Any]]]:
    """(task, its place among the collectives inside segments or -1, fields without times) of a section's collectives.

    Args:
        tasks: tasks of the collectives inside segments, in order; those of a segment that takes no time are not there.
    """
    timed, place = set(tasks), 0
    for task, segment, entry in _described(program, number, sizes):
        within = segment >= 0 and task in timed
        yield task, place if within else -1, entry
        place += within


def _calls_of(program: Program, number: int) -> Iterator[tuple[int, int, int, int]]:
    """(task, segment or -1, collective, label) of every collective of a section, in issue order."""
    section = program.sections[number]
    for task, (kind, payload, label) in enumerate(zip(section.kind, section.payload, section.label, strict=True)):
        if kind == Kind.COLLECTIVE:
            yield task, -1, payload, label
        elif kind == Kind.KERNELS and program.inlines:
            for row in program.segments[payload].kernels:
                if row < 0:
                    yield task, payload, program.inlines[-1 - row].collective, label


def _described(program: Program, number: int, sizes: list[int]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(task, segment or -1, fields without times) of every collective of a section."""
    for task, segment, collective, label in _calls_of(program, number):
        call, names = program.collectives[collective], program.labels[label]
        yield task, segment, {
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
    for _, _, collective, label in _calls_of(program, number):
        call = program.collectives[collective]
        yield (program.labels[label].phase, call.kind, TORCH_DTYPES.get(call.dtype, call.dtype),
               sizes[call.communicator], call.size_bytes)
