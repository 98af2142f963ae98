"""The breakdown of a rank's step, from its columns and from the times of its kernels running alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.engine import Machine
from sim.engine.machine import Profile
from sim.program import ON_CPU, Kind, Program
from sim.report.numbers.behind import Tasks, common, gaps, launch_s, paced
from sim.report.numbers.columns import Columns
from sim.report.numbers.exposure import Spans, axis, split, waits_between
from sim.work import CATEGORIES

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: The stream that runs the model's kernels; a technique's own streams follow it (sim/parallel/step.py).
COMPUTE_STREAM = 0
#: Transfers between stages.
POINT_TO_POINT = ("send", "recv")


@dataclass(slots=True)
class Breakdown:
    """Where a step of the critical rank goes, seconds; the rows sum to the step.

    Attributes:
        compute: by kernel category.
        exposed_communication: by collective kind, then by group.
        communication_total: seconds in which collectives of a kind and group move data, hidden or not; of those that
            wait longer than they move, what is exposed.
        pipeline_bubble: waiting for another stage.
        host: the GPU has nothing to do because the host is late.
        offload: waiting for copies between host and device, and for an optimizer on the CPU.
        contention: part of `compute` by which kernels ran longer than alone, because collectives took SMs and memory
            bandwidth; not a row of its own.
        optimizer_products: part of `compute` in the optimizer's matrix products (Muon's); not a row of its own.
    """

    compute: dict[str, float]
    exposed_communication: dict[str, dict[str, float]] = field(default_factory=dict)
    communication_total: dict[str, dict[str, float]] = field(default_factory=dict)
    pipeline_bubble: float = 0.0
    host: float = 0.0
    offload: float = 0.0
    contention: float = 0.0
    optimizer_products: float = 0.0

    @property
    def exposed_s(self) -> float:
        """All exposed communication."""
        return sum(s for groups in self.exposed_communication.values() for s in groups.values())

    @property
    def compute_s(self) -> float:
        """All compute categories."""
        return sum(self.compute.values())

    def to_json(self) -> dict[str, object]:
        """`breakdown_s` of result.md."""
        return {"compute": dict(self.compute),
                "exposed_communication": {k: dict(v) for k, v in self.exposed_communication.items()},
                "pipeline_bubble": self.pipeline_bubble, "host": self.host, "offload": self.offload}

    def communication_json(self) -> dict[str, object]:
        """`communication_s` of result.md."""
        return {kind: {group: {"total": total, "exposed": self.exposed_communication[kind][group]}
                       for group, total in groups.items()} for kind, groups in self.communication_total.items()}


def kernel_shares(program: Program, profiles: Sequence[Profile], kernel_s: Sequence[float] | Floats = ()) -> Floats:
    """Share of every kernel category, then of every distinct collective, in the time of every segment.

    An inline collective's share is its time beyond that of the kernels beside it: what is exposed.

    Args:
        profiles: the engine's profile of each segment in the state without contention.
        kernel_s: seconds of each distinct kernel alone; needed where kernels run beside inline collectives.

    Returns:
        shape (segments, categories + collectives); rows sum to 1.
    """
    kernels = [CATEGORIES.index(k.category) for k in program.kernels]
    column = np.array([*kernels, *(len(CATEGORIES) + i.collective for i in reversed(program.inlines))], dtype=np.int64)
    width = len(CATEGORIES) + len(program.collectives)
    shares = np.zeros((len(profiles), width))
    for i, (segment, profile) in enumerate(zip(program.segments, profiles, strict=True)):
        rows = np.array(segment.kernels, dtype=np.int64)
        seconds = np.diff(profile.elapsed)
        sums: Floats = np.bincount(column[rows], weights=seconds, minlength=width).astype(np.float64)
        for row in segment.kernels:
            if row < 0 and program.inlines[-1 - row].beside:
                _hidden(program, row, sums, float(seconds[np.flatnonzero(rows == row)[0]]), kernels,
                        kernel_s)
        if sums.any():
            shares[i] = sums / sums.sum()
        else:
            shares[i, CATEGORIES.index("memory_bound")] = 1.0
    return shares


def product_shares(program: Program, profiles: Sequence[Profile]) -> Floats | None:
    """Share of each segment's time in matrix products of the optimizer, shape (segments,); None: there are none."""
    chosen = np.array([k.op == "gemm" and k.category == "optimizer" for k in program.kernels], dtype=np.float64)
    if not chosen.any():
        return None
    column = np.concatenate((chosen, np.zeros(len(program.inlines))))
    found = [(column[np.array(segment.kernels, dtype=np.int64)] * np.diff(profile.elapsed)).sum() / profile.total_s
             if profile.total_s else 0.0 for segment, profile in zip(program.segments, profiles, strict=True)]
    return np.array(found)


def tasks_of(columns: Columns) -> Tasks:
    """The tasks of `columns` as `sim.report.numbers.behind` asks for them."""
    outside = np.zeros(len(columns.kind), dtype=bool)
    outside[on_cpu(columns)] = True
    return Tasks(columns.kind == Kind.HOST, (columns.kind == Kind.KERNELS) & (columns.stream == COMPUTE_STREAM),
                 outside, columns.issue_s, columns.start_s, columns.end_s, columns.starved_s, columns.host_s,
                 launch_s(columns.program, columns.kind, columns.payload))


def _pending(columns: Columns, calls: Ints, key: Ints, rows: Sequence[tuple[str, str]],
             across: Collection[str]) -> list[Spans]:
    """Collectives issued and not begun: those between stages, for which everything behind waits, and others."""
    stages = np.array([between_stages(row, across) for row in rows], dtype=bool)
    between = stages[key] if len(calls) else np.zeros(0, dtype=bool)
    issued, start = columns.issue_s[calls] + columns.host_s[calls], columns.start_s[calls]
    return [waits_between(issued[between], start[between], key[between], len(rows), columns.step_time_s),
            Spans(issued[~between], start[~between], key[~between], len(rows))]


def between_stages(row: tuple[str, str], across: Collection[str]) -> bool:
    """Whether a kind of collective in a group is one for which a stage waits for another."""
    return row[0] in POINT_TO_POINT or row[1] in across


def _hidden(program: Program, row: int, sums: Floats, row_s: float, category: Sequence[int],
            kernel_s: Sequence[float] | Floats) -> None:
    """Move the time of kernels beside an inline collective from the collective to the kernels."""
    inline = program.inlines[-1 - row]
    left = row_s
    for kernel in inline.beside:
        own = min(left, float(kernel_s[kernel]))
        sums[category[kernel]] += own
        sums[len(CATEGORIES) + inline.collective] -= own
        left -= own


def breakdown(columns: Columns, shares: Floats, alone_s: Floats, inline_s: Floats | None = None,
              across: Collection[str] = (), products: Floats | None = None, seen: bool = False) -> Breakdown:
    """Split the step of `columns` (see `sim.report.numbers.exposure` for the order of precedence).

    Inside a segment the GPU may wait for the launch of its next kernel; that part goes to the host.

    Args:
        shares: see `kernel_shares`.
        inline_s: seconds collectives inside segments take by themselves, shape (segments, collectives), or None.
        alone_s: seconds of each segment's kernels running alone, shape (segments,).
        across: groups that span stages of a pipeline; waiting for one of them to begin is waiting for another stage.
        products: see `product_shares`.
        seen: as a trace of the device shows it, which does not tell that a collective moves while the host is late.
    """
    program = columns.program
    kernels = columns.where(Kind.KERNELS)
    on_compute = columns.stream[kernels] == COMPUTE_STREAM
    main, aside = kernels[on_compute], kernels[~on_compute]
    calls, copies = columns.where(Kind.COLLECTIVE), np.concatenate((columns.where(Kind.COPY), on_cpu(columns)))
    keys = [(c.kind, program.communicators[c.communicator]) for c in program.collectives]
    rows = sorted(set(keys))
    named = np.array([rows.index(key) for key in keys], dtype=np.int64)
    call_key = named[columns.payload[calls]] if len(calls) else calls
    count, tasks = max(1, len(program.segments)), tasks_of(columns)
    layers = [
        _spans(columns, main, columns.payload[main], count),
        common(gaps(tasks), paced(tasks, columns.step_time_s)) if not seen else Spans.none(),
        _spans(columns, calls, call_key, len(rows)),
        _spans(columns, copies, np.zeros(len(copies), dtype=np.int64), 1),
        _spans(columns, aside, columns.payload[aside], count),
        *_pending(columns, calls, call_key, rows, across),
    ]
    on = axis(layers, columns.step_time_s, columns.windows)
    (on_main, unlaunched, moving, copying, on_aside, for_stages, pending), rest = split(on, layers)

    starved = np.minimum(_starved_s(columns, main, count), on_main)
    busy = on_main - starved + on_aside
    spent = busy @ shares if len(program.segments) else np.zeros(len(CATEGORIES) + len(keys))
    inside = np.bincount(named, weights=spent[len(CATEGORIES):], minlength=len(rows)) if keys else np.zeros(0)
    result = Breakdown(dict(zip(CATEGORIES, spent.tolist(), strict=False)), offload=float(copying.sum()),
                       host=rest + float(unlaunched.sum() + starved.sum()),
                       contention=_contention_s(columns, main, alone_s))
    if products is not None:
        result.optimizer_products = float(busy @ products)
    total = np.zeros(len(rows))
    np.add.at(total, call_key, (columns.end_s[calls] - columns.start_s[calls]) * columns.times[calls])
    if inline_s is not None:
        runs = np.bincount(columns.payload[kernels], weights=columns.times[kernels], minlength=count)
        alone = np.bincount(named, weights=runs[:len(inline_s)] @ inline_s, minlength=len(rows))
        total += np.maximum(alone, inside)  # others on their links make them longer
    pending = pending + for_stages
    for i, (kind, group) in enumerate(rows):
        bubble = float(pending[i]) if between_stages((kind, group), across) else 0.0
        result.pipeline_bubble += bubble
        exposed = float(moving[i] + pending[i] + inside[i]) - bubble
        result.exposed_communication.setdefault(kind, {})[group] = exposed
        # one that is issued and waits is exposed before it moves anything
        result.communication_total.setdefault(kind, {})[group] = max(float(total[i]), exposed)
    return result


def of_rank(machine: Machine, columns: Columns, number: int, seen: bool = False) -> Breakdown:
    """The breakdown of simulated class `number`, whose step `columns` is; `seen`: see `breakdown`."""
    program = columns.program
    profiles = [machine.profile(number, 0, i) for i in range(len(program.segments))]
    return breakdown(columns, kernel_shares(program, profiles, machine.kernel_s(number)),
                     np.array([p.total_s for p in profiles]), inline_seconds(program, machine.lockstep_s(number)),
                     across(machine, number), product_shares(program, profiles), seen)


def across(machine: Machine, number: int) -> set[str]:
    """Groups of a class whose operations wait for other programs of the job: the norm of all gradients, tied tables.

    Classes of one program (ranks of a stage, one of them slow) that meet in a group wait for no other stage.
    """
    job = machine.job
    if len(job.programs) < 2:
        return set()
    simulated = job.classes[number]
    names = job.programs[simulated.program].communicators
    return {name for name, c in zip(names, simulated.communicators, strict=True)
            if c >= 0 and job.communicators[c].parties > 1
            and any(c in other.communicators and other.program != simulated.program for other in job.classes)}


def on_cpu(columns: Columns) -> Ints:
    """Rows of an optimizer that runs on the CPU."""
    rows = columns.where(Kind.HOST)
    labels = columns.program.labels
    chosen: Ints = rows[np.array([labels[number].name.endswith(ON_CPU) for number in columns.label[rows]], dtype=bool)]
    return chosen


def _starved_s(columns: Columns, rows: Ints, count: int) -> Floats:
    """Seconds in which kernels of each segment waited for their launch, shape (count,)."""
    seconds = columns.starved_s[rows] * columns.times[rows]
    total: Floats = np.bincount(columns.payload[rows], weights=seconds, minlength=count).astype(np.float64)
    return total


def _contention_s(columns: Columns, rows: Ints, alone_s: Floats) -> float:
    """Seconds by which kernels ran longer than alone, waits for their launch left out."""
    if not len(rows):
        return 0.0
    longer = columns.end_s[rows] - columns.start_s[rows] - columns.starved_s[rows] - alone_s[columns.payload[rows]]
    return float((np.maximum(longer, 0.0) * columns.times[rows]).sum())


def inline_seconds(program: Program, of_collective: Sequence[float]) -> Floats | None:
    """Seconds that collectives inside each segment take by themselves, shape (segments, collectives); None: none are.

    Args:
        of_collective: seconds of each distinct collective alone.
    """
    if not program.inlines:
        return None
    seconds = np.zeros((len(program.segments), len(program.collectives)))
    for i, segment in enumerate(program.segments):
        for row in segment.kernels:
            if row < 0:
                collective = program.inlines[-1 - row].collective
                seconds[i, collective] += of_collective[collective]
    return seconds


def segment_flops(program: Program) -> Floats:
    """Matrix-product FLOPs of each segment, shape (segments,)."""
    own = [k.flops for k in program.kernels]
    flops = program.by_row(lambda k: k.flops, lambda i: sum(own[row] for row in i.beside))
    return np.array([sum(flops[k] for k in s.kernels) for s in program.segments], dtype=np.float64)


def step_flops(program: Program) -> float:
    """Matrix-product FLOPs one rank executes in a step, recomputation included."""
    flops = segment_flops(program)
    total = 0.0
    for number, repeats in program.schedule:
        section = program.sections[number]
        kind = np.array(section.kind, dtype=np.int64)
        payload = np.array(section.payload, dtype=np.int64)
        total += repeats * float(flops[payload[kind == Kind.KERNELS]].sum())
    return total


def category_flops(program: Program) -> dict[str, float]:
    """Matrix-product FLOPs one rank executes in a step, recomputation included, by the category of its kernels."""
    found: dict[str, float] = {}
    for kernel, often in zip(program.kernels, kernel_counts(program), strict=True):
        if kernel.flops and often:
            found[kernel.category] = found.get(kernel.category, 0.0) + float(often) * kernel.flops
    return found


def kernel_counts(program: Program) -> Floats:
    """How often each distinct kernel of a program runs in a step, those beside inline collectives included."""
    of_segment = np.zeros(len(program.segments))
    for number, repeats in program.schedule:
        section = program.sections[number]
        for kind, payload in zip(section.kind, section.payload, strict=True):
            if kind == Kind.KERNELS:
                of_segment[payload] += repeats
    counts = np.zeros(len(program.kernels))
    for segment, often in zip(program.segments, of_segment, strict=True):
        if often:
            for row in segment.kernels:
                for kernel in (row,) if row >= 0 else program.inlines[-1 - row].beside:
                    counts[kernel] += often
    return counts


def _spans(columns: Columns, rows: Ints, key: Ints, keys: int) -> Spans:
    return Spans(columns.start_s[rows], columns.end_s[rows], key, keys)


def leaves(tree: Mapping[str, Any]) -> float:
    """Sum of all numbers of a nested mapping, e.g. of `breakdown_s`."""
    return sum(leaves(v) if isinstance(v, Mapping) else float(v) for v in tree.values())
