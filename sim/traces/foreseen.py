"""The terms of a predicted step as a trace shows them: those of `sim.traces.steps`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from sim.report.numbers.breakdown import Breakdown, kernel_counts, of_rank
from sim.report.numbers.columns import of_class
from sim.report.numbers.traffic import traffic_list
from sim.report.result import Result
from sim.traces.classes import ATTENTION
from sim.traces.steps import Shape, Step, Sum
from sim.work import Kernel

#: Kinds of collectives as a trace tells them apart: NCCL has one kernel for both ends of a transfer.
_TRANSFERS = {"send": "send_recv", "recv": "send_recv"}


def foresee(result: Result, rank: int = -1) -> Step:
    """The step of a rank as it is predicted; of the rank that computes longest where the rank is unknown.

    Kernels of products are counted alone, terms as they ran.
    """
    number = class_of_rank(result, rank)
    parts = _breakdown(result, number)
    terms: defaultdict[str, float] = defaultdict(float, parts.compute)
    for kind, groups in parts.exposed_communication.items():
        terms[f"exposed {_TRANSFERS.get(kind, kind)}"] += sum(groups.values())
    if parts.pipeline_bubble:
        terms["exposed send_recv"] += parts.pipeline_bubble
    terms["copy"] += parts.offload
    terms["idle"] += parts.host
    detail = result.detail
    collectives: defaultdict[str, Sum] = defaultdict(Sum)
    for entry in traffic_list(detail.lowered.job, detail.timeline, number):
        collectives[_TRANSFERS.get(entry["kind"], entry["kind"])].add(entry["end_s"] - entry["start_s"], entry["bytes"])
    products, kernels = _products(result, number)
    return Step((result.step_time_s,), dict(terms), products, dict(collectives), kernels)


def class_of_rank(result: Result, rank: int) -> int:
    """The class that stands for a rank; the one that computes longest where no class does."""
    for number, simulated in enumerate(result.detail.lowered.job.classes):
        if rank >= 0 and bool((simulated.members == rank).any()):
            return number
    return result.detail.critical


def spelled_out(result: Result) -> set[Shape]:
    """Shapes of attention's own products, where it is predicted as no fused kernel."""
    return {_shape(kernel) for program in result.detail.lowered.job.programs
            for kernel in program.kernels if kernel.op == "gemm" and kernel.category == ATTENTION}


def _breakdown(result: Result, number: int) -> Breakdown:
    """As a trace shows it; what the report adds to the critical rank's waits (data, the allocator) is added too."""
    detail, whole = result.detail, result.breakdown
    columns = of_class(detail.lowered.job, detail.timeline, number)
    seen = of_rank(detail.machine, columns, number, seen=True)
    if number != detail.critical:
        return seen
    own = of_rank(detail.machine, columns, number)
    return replace(seen, host=seen.host + whole.host - own.host, offload=seen.offload + whole.offload - own.offload)


def _products(result: Result, number: int) -> tuple[dict[Shape, Sum], float]:
    """Products of a step by shape, and how many kernels there are in all."""
    detail = result.detail
    program = detail.lowered.job.programs[detail.lowered.job.classes[number].program]
    seconds = detail.machine.kernel_s(number)
    products: defaultdict[Shape, Sum] = defaultdict(Sum)
    counts = kernel_counts(program)
    for row, kernel in enumerate(program.kernels):
        if kernel.op == "gemm" and counts[row]:
            count = float(counts[row])
            products[_shape(kernel)].add(float(seconds[row]) * count, 0.0, count, alone=True)
    return dict(products), float(sum(count * kernel.launches for count, kernel in zip(counts, program.kernels,
                                                                                       strict=True)))


def _shape(kernel: Kernel) -> Shape:
    batch, m, n, k = kernel.shape
    return Shape.of(batch, m, n, k, kernel.dtype)
