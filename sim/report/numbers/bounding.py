"""What bounds a step: the resource of which 10% more would help most (`bound` of result.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.engine import Machine, Timeline
from sim.hardware.whatif import scaled
from sim.program import Job, Kind
from sim.program.columns import Inline
from sim.report.numbers.behind import Tasks, paced
from sim.report.numbers.breakdown import COMPUTE_STREAM, Breakdown, tasks_of
from sim.report.numbers.columns import Columns, of_class
from sim.report.numbers.exposure import Spans, axis, split
from sim.report.numbers.more import MORE, OFFLOAD, SAVED, offloads, step_with_more

Floats = npt.NDArray[np.float64]

#: What is estimated to save so much of what the best does may be the best: it is simulated.
_CLOSE = 0.8
#: Waiting for collectives from this share of a step on may mean that they set the pace, and kernels hide behind them.
_FELT = 0.01
#: What to have more of, by bound; of a pipeline there is nothing.
_MORE_OF = {"compute": ("tensor_cores",), "memory_bandwidth": ("memory_bandwidth",), "host": ("host",),
            "communication": ("every link", OFFLOAD)}


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was simulated.

    Attributes:
        job, machine, timeline: what ran, on what, and when.
        critical: its class of ranks that the breakdown is of.
        waits_s: what 10% more of the storage, and fewer retries of the allocator, would save.
    """

    job: Job
    machine: Machine
    timeline: Timeline
    critical: int
    waits_s: float = 0.0


def bound_of(parts: Breakdown, step: Step) -> str:
    """What limits a step that was simulated: where 10% more would save most.

    What that saves is estimated first, from the seconds of the critical rank (`estimates`); resources whose estimates
    are close, and collectives that may hide the kernels beside them, are then simulated.
    """
    saved, most = estimates(parts, step)
    best = max(saved, key=lambda name: saved[name])
    near = [name for name in saved if saved[name] > _CLOSE * saved[best] or most[name] > saved[best]]
    if len(near) == 1:
        return best
    own_s = step.timeline.step_time_s
    for name in near:
        if name in _MORE_OF:
            more = [one for one in _MORE_OF[name] if one != OFFLOAD or offloads(step.job)]
            saved[name] = own_s - step_with_more(step.job, step.machine, *more)
            saved[name] += step.waits_s if name == "host" else 0.0
    return max(near, key=lambda name: saved[name])


def estimates(parts: Breakdown, step: Step) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds that 10% more of what each bound stands for would save, without simulating it, and the most it could.

    Kernels save what each of them does alone, but for those that run while the host sets the pace. Where a pipeline's
    stages wait for one another they wait less.
    """
    columns = of_class(step.job, step.timeline, step.critical)
    step_s = columns.step_time_s
    busy_s, paced_s = _busy(columns, tasks_of(columns))
    alone = max(0.0, 1.0 - parts.contention / parts.compute_s) if parts.compute_s else 1.0
    waits = step_s / max(step_s - parts.pipeline_bubble, 0.1 * step_s)
    gains = kernel_gains(step.machine, step.critical)
    wire_s = sum(total for groups in parts.communication_total.values() for total in groups.values())
    felt_s = parts.exposed_s + parts.contention
    saved = {"compute": float(busy_s @ gains["arithmetic"]) * alone * waits,
             "communication": SAVED * (felt_s + parts.offload),
             "memory_bandwidth": float(busy_s @ gains["memory_bandwidth"]) * alone * waits,
             "host": SAVED * paced_s + step.waits_s, "pipeline": SAVED * parts.pipeline_bubble}
    hidden = {"communication": SAVED * (wire_s + parts.offload)} if felt_s > _FELT * step_s else {}
    return saved, {name: max(seconds, hidden.get(name, 0.0)) for name, seconds in saved.items()}


def kernel_gains(machine: Machine, number: int) -> dict[str, Floats]:
    """Share of each segment's time that 10% more arithmetic, or memory bandwidth, saves; shape (segments,)."""
    job = machine.job
    program, device = job.programs[job.classes[number].program], machine.devices[job.classes[number].device]
    own, wire_s = machine.kernel_s(number), machine.lockstep_s(number)
    total = np.array([machine.profile(number, 0, i).total_s for i in range(len(program.segments))], dtype=np.float64)
    found = {}
    for name in ("arithmetic", "memory_bandwidth"):
        faster = scaled(device, **{name: MORE}).times(program.kernels) if len(own) else own
        beside = [_beside(inline, own, faster, wire_s) for inline in program.inlines]
        rows = np.concatenate((own - faster, beside[::-1]))
        saved = np.array([rows[np.array(segment.kernels, dtype=np.intp)].sum() for segment in program.segments])
        found[name] = saved / np.maximum(total, 1e-30)
    return found


def _beside(inline: Inline, own_s: Floats, faster_s: Floats, wire_s: Sequence[float]) -> float:
    """Seconds that faster kernels save beside a collective: as far as they outlast it."""
    beside, least = list(inline.beside), wire_s[inline.collective]
    return max(0.0, float(own_s[beside].sum()) - max(float(faster_s[beside].sum()), least)) if beside else 0.0


def _busy(columns: Columns, tasks: Tasks) -> tuple[Floats, float]:
    """Seconds in which each segment runs and the host does not set the pace, and those in which it does."""
    program = columns.program
    pace = paced(tasks, columns.step_time_s)
    rows = columns.where(Kind.KERNELS)
    rows = rows[columns.stream[rows] == COMPUTE_STREAM]
    layers = [pace, Spans(columns.start_s[rows], columns.end_s[rows], columns.payload[rows], len(program.segments))]
    (host, busy), _ = split(axis(layers, columns.step_time_s, columns.windows), layers)
    return busy, float(host.sum())


def felt(found: str, parts: Breakdown, waits: Mapping[str, float]) -> str:
    """A bound as a person reads it, where result.md has one word for several: "offload" for communication that is
    mostly waiting for the host's copies and its optimizer; "data" and "allocator" for two kinds of waits of the host.

    Args:
        waits: seconds of the breakdown's `host` by what is waited for.
    """
    if found == "host":
        return max(waits, key=lambda name: waits[name])
    return "offload" if found == "communication" and parts.offload > parts.exposed_s + parts.contention else found
