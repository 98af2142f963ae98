"""The terms of a predicted step as a trace shows them: those of `sim.traces.steps`."""

from __future__ import annotations

from collections import defaultdict

from sim.program import Kind, Program
from sim.report.result import Result
from sim.traces.steps import Shape, Step, Sum

#: Kinds of collectives as a trace tells them apart: NCCL has one kernel for both ends of a transfer.
_TRANSFERS = {"send": "send_recv", "recv": "send_recv"}


def foresee(result: Result) -> Step:
    """The step of the critical rank. Kernels of products are counted alone, terms as they ran."""
    parts = result.breakdown
    terms: defaultdict[str, float] = defaultdict(float, parts.compute)
    for kind, groups in parts.exposed_communication.items():
        terms[f"exposed {_TRANSFERS.get(kind, kind)}"] += sum(groups.values())
    if parts.pipeline_bubble:
        terms["exposed send_recv"] += parts.pipeline_bubble
    terms["copy"] += parts.offload
    terms["idle"] += parts.host
    collectives: defaultdict[str, Sum] = defaultdict(Sum)
    for entry in result.traffic:
        collectives[_TRANSFERS.get(entry["kind"], entry["kind"])].add(entry["end_s"] - entry["start_s"], entry["bytes"])
    products, kernels = _products(result)
    return Step((), (result.step_time_s,), dict(terms), products, dict(collectives), kernels)


def _products(result: Result) -> tuple[dict[Shape, Sum], float]:
    """Products of a step by shape, and how many kernels there are in all."""
    detail = result.detail
    number = detail.critical
    program = detail.lowered.job.programs[detail.lowered.job.classes[number].program]
    seconds = detail.machine.kernel_s(number)
    products: defaultdict[Shape, Sum] = defaultdict(Sum)
    kernels = 0.0
    for row, count in _counts(program).items():
        kernel = program.kernels[row]
        kernels += count
        if kernel.op == "gemm":
            batch, m, n, k = kernel.shape
            products[Shape.of(batch, m, n, k, kernel.dtype)].add(float(seconds[row]) * count, count=count)
    return dict(products), kernels


def _counts(program: Program) -> dict[int, int]:
    """How often each distinct kernel runs in a step."""
    counts: defaultdict[int, int] = defaultdict(int)
    for number in program.section_runs():
        section = program.sections[number]
        for kind, payload in zip(section.kind, section.payload, strict=True):
            if kind != Kind.KERNELS:
                continue
            for row in program.segments[payload].kernels:
                for kernel in (row,) if row >= 0 else program.inlines[-1 - row].beside:
                    counts[kernel] += 1
    return counts
