"""The step as a trace for ui.perfetto.dev or chrome://tracing.

Format: "Trace Event Format" (Google, 2016), JSON object form: complete events (`ph: X`) with times in microseconds, and
metadata events that name processes and threads. One process per simulated rank; its threads are the host, the device
streams and one track per communicator; a task of kernels is a slice with its kernels inside, and collectives that a
chain of kernels waits for are drawn on their communicators' tracks (`sim.report.numbers.inside`), as far as the number
of events allows; its counters (`ph: C`) are the bytes it holds, by category and in all ("allocated"), at the times at
which the host allocates and frees, and what the allocator reserves. Of a pipeline every stage is a process, and what it
does carries the number of its micro-batch. No event begins before 0: where hosts of later stages are ahead of the step
they issue, all moves by that much, and `otherData.step_begins_us` says by how much.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sim.engine import SectionRun
from sim.memory.curve import Replay
from sim.memory.ledger import CATEGORIES, TENSORS
from sim.program import Job, Kind, Program, Section
from sim.report.numbers.inside import Inside, Parts
from sim.report.numbers.memory import MemoryResult, by_class
from sim.report.pictures.pipeline_rows import MicroBatches
from sim.report.result import Result
from sim.report.whole_file import whole_file

#: Beyond so many events a viewer turns slow; runs that repeat are then shown once, with a mark saying how often.
EVENT_LIMIT = 200_000

_HOST_TRACK = 1
_STREAM_TRACKS = 10
_COMMUNICATOR_TRACKS = 100
_MICROSECONDS = 1e6


def write_trace(result: Result, path: str | Path) -> None:
    """Write the trace to `path`, compressed when it ends with .gz (Perfetto reads both).

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(trace(result), separators=(",", ":"))
    with whole_file(path) as part:
        if str(path).endswith(".gz"):
            with open(part, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as file:
                file.write(text.encode())
        else:
            part.write_text(text, encoding="utf-8")


def trace(result: Result, event_limit: int = EVENT_LIMIT) -> dict[str, Any]:
    """The trace as an object ready for `json.dumps`; beyond `event_limit` events repeats are marked, not drawn."""
    detail = result.detail
    job = detail.lowered.job
    events: list[dict[str, Any]] = []
    tasks = sum(job.programs[c.program].tasks() for c in job.classes) * 2
    whole = tasks <= event_limit
    opened = [Inside(detail.machine, number) for number in range(len(job.classes))]
    kernels, collectives = (tasks + sum(_inner(job, opened, count)) <= event_limit for count in (
        lambda parts: len(parts.row), lambda parts: int((parts.row < 0).sum())))
    memories = by_class(result.scenario, detail.lowered, detail.machine.devices)
    for number, simulated in enumerate(job.classes):
        program = job.programs[simulated.program]
        events += _names(number, _process(result, number), program, _peers(job, number))
        algorithms = _algorithms(result, number)
        replay, held = Replay(program), _held(program)
        micro_batches = MicroBatches(result.scenario.parallel.schedule, result.scenario.micro_steps)
        counters: list[dict[str, Any]] = []
        for run in detail.timeline.classes[number]:
            drawn = list(run) if whole else [run]
            mark = {} if len(drawn) == run.repeats else {
                "repeated": f"{run.repeats - 1} more times, each {run.delta_s:.6g} s later"}
            templates = [_template(program, run.section, task, algorithms, mark)
                         for task in range(len(program.sections[run.section]))]
            parts = opened[number].of(run.section)
            parts = parts if kernels else parts.collectives
            for place, one in enumerate(drawn):
                numbered = _numbered(program, program.sections[run.section], templates, micro_batches)
                events += _tasks(number, program.sections[run.section], one, numbered)
                if collectives or place == 0:
                    events += _inside(number, program, parts, one, numbered, algorithms)
                counters += _memory(number, replay, one, held)
            replay.skip(run.section, run.repeats - len(drawn))
        events += _reserved(number, counters, memories[number])
        events += counters
    begin = _from_zero(events)
    return {"traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"scenario": result.scenario.name, "step_time_s": result.step_time_s, "step_begins_us": begin}}


def _from_zero(events: list[dict[str, Any]]) -> float:
    """Move events so that none begins before 0, where viewers drop it (Perfetto's trace_sorter_negative_timestamp_
    dropped): hosts of later stages are ahead of the step they issue. Returns when the step begins, us."""
    early = min((event["ts"] for event in events if "ts" in event), default=0.0)
    if early >= 0:
        return 0.0
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - early, 3)
    return float(-early)


def _inner(job: Job, opened: Sequence[Inside], count: Callable[[Parts], int]) -> Iterator[int]:
    """Events inside the tasks of every class over the step, of those that `count` counts."""
    for simulated, inside in zip(job.classes, opened, strict=True):
        yield sum(times * count(inside.of(section)) for section, times in Counter(
            job.programs[simulated.program].section_runs()).items())


def _process(result: Result, number: int) -> str:
    """A rank's name; a pipeline's begins with its stage."""
    lowered = result.detail.lowered
    simulated = lowered.job.classes[number]
    count = len(simulated.members)
    name = f"rank {simulated.representative}" + (f" (stands for {count:,} ranks)" if count > 1 else "")
    if result.scenario.parallel.pipeline < 2:
        return name
    layers = lowered.layers_of(number)
    holds = f", {layers[0]} to {layers[-1]}" if layers else ""
    return f"stage {simulated.program}: {name}{holds}"


def _peers(job: Job, number: int) -> list[str]:
    """For each communicator of a class, which stage is at its other end, where that is one."""
    found = []
    simulated = job.classes[number]
    for own in simulated.communicators:
        others = {c.program for c in job.classes if c.program != simulated.program and own >= 0
                  and own in c.communicators}
        found.append(f" with stage {others.pop()}" if len(others) == 1 else "")
    return found


def _numbered(program: Program, section: Section, templates: list[_Template],
              micro_batches: MicroBatches) -> list[_Template]:
    """A pipeline's actions with the number of their micro-batch; other tasks as they are."""
    found = list(templates)
    for task, label in enumerate(section.label):
        if section.kind[task] == Kind.KERNELS:
            number = micro_batches.of(program.labels[label])
            if number is not None:
                one = templates[task]
                found[task] = replace(one, name=f"{one.name} {number}", args={**one.args, "micro_batch": number})
    return found


def _reserved(process: int, counters: list[dict[str, Any]], memory: MemoryResult) -> Iterator[dict[str, Any]]:
    """What the caching allocator keeps: all it ever took, from the first step on."""
    if counters:
        for event in (counters[0], counters[-1]):
            yield {"ph": "C", "pid": process, "tid": 0, "name": "reserved", "ts": event["ts"],
                   "args": {"bytes": memory.reserved_bytes}}


def _algorithms(result: Result, number: int) -> list[dict[str, Any]]:
    """Arguments of every distinct collective of a class: size of the group and what the network runs it as."""
    detail = result.detail
    job = detail.lowered.job
    simulated = job.classes[number]
    network = detail.machine.network
    assert network is not None, "a result is of a real network"
    found = []
    for call in job.programs[simulated.program].collectives:
        group = job.communicators[simulated.communicators[call.communicator]]
        flow = network.coflow(call.kind, call.size_bytes, group.ranks, call.dtype)
        found.append({"bytes": call.size_bytes, "dtype": call.dtype, "ranks": group.size, "group": group.name,
                      "algorithm": flow.algorithm, "protocol": flow.protocol})
    return found


def _names(process: int, name: str, program: Program, peers: Sequence[str]) -> Iterator[dict[str, Any]]:
    used: dict[bool, set[int]] = {False: set(), True: set()}
    for section in program.sections:
        for kind, stream, payload in zip(section.kind, section.stream, section.payload, strict=True):
            if kind == Kind.COLLECTIVE:
                used[True].add(program.collectives[payload].communicator)
            elif kind != Kind.HOST:
                used[False].add(stream)
                inner = program.segments[payload].kernels if kind == Kind.KERNELS else ()
                used[True] |= {program.collectives[program.inlines[-1 - row].collective].communicator
                               for row in inner if row < 0}
    tracks = [(_HOST_TRACK, "host")]
    tracks += [(_STREAM_TRACKS + i, f"stream {program.streams[i]}") for i in sorted(used[False])]
    tracks += [(_COMMUNICATOR_TRACKS + i, f"communicator {program.communicators[i]}{peers[i]}")
               for i in sorted(used[True])]
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for track, title in tracks:
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": title}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": track, "args": {"sort_index": track}}


@dataclass(frozen=True, slots=True)
class _Template:
    """What all events of one task of a section share."""

    track: int
    name: str
    category: str
    host_s: float
    args: dict[str, Any]


def _template(program: Program, number: int, task: int, algorithms: list[dict[str, Any]],
              mark: dict[str, Any]) -> _Template:
    section = program.sections[number]
    label, payload, kind = program.labels[section.label[task]], section.payload[task], section.kind[task]
    args: dict[str, Any] = {"layer": label.layer, "phase": label.phase, "section": section.name, **mark}
    if kind == Kind.HOST:
        return _Template(_HOST_TRACK, label.name, "host", 0.0, args)
    if kind == Kind.COLLECTIVE:
        call = program.collectives[payload]
        return _Template(_COMMUNICATOR_TRACKS + call.communicator, f"{call.kind} {label.layer}", "communication",
                         section.host_s[task], {**args, **algorithms[payload]})
    extra = ({"bytes": program.copies[payload].size_bytes} if kind == Kind.COPY
             else {"kernels": len(program.segments[payload].kernels)})
    category = "copy" if kind == Kind.COPY else label.phase
    name = label.layer if label.name == label.layer else f"{label.layer} {label.name}"
    return _Template(_STREAM_TRACKS + section.stream[task], name, category,
                     section.host_s[task], {**args, **extra})


def _tasks(process: int, section: Section, run: SectionRun, templates: list[_Template]) -> Iterator[dict[str, Any]]:
    for task, one in enumerate(templates):
        start, end = float(run.start_s[task]), float(run.end_s[task])
        yield _event(process, one.track, one.name, one.category, start, end, one.args)
        if section.kind[task] != Kind.HOST and one.host_s > 0:
            issued = float(run.issue_s[task])
            yield _event(process, _HOST_TRACK, f"issue {one.name}", "host", issued, issued + one.host_s, one.args)


def _inside(process: int, program: Program, parts: Parts, run: SectionRun, templates: list[_Template],
            algorithms: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Kernels inside their task's slice, and collectives that they wait for."""
    begin, end, _, _ = parts.placed(run)
    for task, row, start, stop in zip(parts.task.tolist(), parts.row.tolist(), begin.tolist(), end.tolist(),
                                      strict=True):
        one = templates[task]
        if row < 0:
            number = program.inlines[-1 - row].collective
            call = program.collectives[number]
            yield _event(process, _COMMUNICATOR_TRACKS + call.communicator, f"{call.kind} {one.args['layer']}",
                         "communication", start, stop, {**one.args, **algorithms[number]})
        else:
            kernel = program.kernels[row]
            yield _event(process, one.track, f"{kernel.op} {'x'.join(map(str, kernel.shape))}", kernel.category,
                         start, stop, {"variant": kernel.variant, "dtype": kernel.dtype, "flops": kernel.flops,
                                       "bytes": kernel.bytes})


def _held(program: Program) -> list[tuple[int, str]]:
    """Categories that a program ever holds, with their number."""
    used = {op.category for section in program.sections for op in section.memory}
    used |= {category for _, _, category in program.resident}
    return [(i, name) for i, name in enumerate(CATEGORIES) if name in used]


def _memory(process: int, replay: Replay, run: SectionRun, held: list[tuple[int, str]]) -> Iterator[dict[str, Any]]:
    """Counters of one run: at every moment of the host the fullest level, then the one that lasts."""
    times, levels = replay.run(run)
    stamps = np.round(times * _MICROSECONDS, 3)
    edges = [*np.flatnonzero(np.diff(stamps, prepend=-np.inf) > 0).tolist(), len(stamps)]
    total = levels[:, TENSORS].sum(axis=1)
    for start, stop in pairwise(edges):
        top = start + int(total[start:stop].argmax())
        for row in dict.fromkeys((top, stop - 1)):
            level = levels[row]
            yield {"ph": "C", "pid": process, "tid": 0, "name": "memory", "ts": float(stamps[start]),
                   "args": {name: int(level[i]) for i, name in held}}
            yield {"ph": "C", "pid": process, "tid": 0, "name": "allocated", "ts": float(stamps[start]),
                   "args": {"bytes": int(total[row])}}


def _event(process: int, track: int, name: str, category: str, start_s: float, end_s: float,
           args: dict[str, Any]) -> dict[str, Any]:
    start = round(start_s * _MICROSECONDS, 3)
    return {"ph": "X", "pid": process, "tid": track, "name": name, "cat": category, "ts": start,
            "dur": max(0.0, round(end_s * _MICROSECONDS - start, 3)), "args": args}
