"""Exact comparisons with what PyTorch issues and computes (oracle files): equal or not, no tolerance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.program import Kind, Program
from sim.validation.cases.files import Case
from sim.validation.statistics import Record

if TYPE_CHECKING:
    from sim.parallel import Lowered

#: What identifies a collective in an oracle's `order`; `where` is PyTorch's own name and is not compared.
_ORDER = ("micro", "phase", "kind", "dtype", "ranks", "bytes")


def compare_exact(case: Case) -> Record:
    """The record of an oracle case: measured, predicted and `equal` (true or false) per compared key.

    Raises:
        UserError: the scenario cannot be expressed.
    """
    from sim.parallel import lower
    from sim.scenario import resolve

    scenario = resolve(case.given, case.path, case.sets, Path(case.path).parent)
    lowered = lower(scenario, cuda_kernels=False)
    if case.kind == "oracle-memory":
        from sim.validation.cases import oracle_memory

        policy = scenario.training.recompute
        return oracle_memory.compare(case.measured, oracle_memory.predicted(
            lowered, policy if isinstance(policy, str) else "full", scenario.parallel.strategy == "fsdp"))
    predicted: dict[str, Any] = {"parameters": lowered.architecture.parameters}
    if case.kind == "oracle-flops":
        predicted.update(flops(lowered))
    else:
        from sim.report.numbers.traffic import traffic_order, traffic_totals

        predicted.update(traffic=traffic_totals(lowered.job), order=traffic_order(lowered.job))
    return verdict(case.measured, predicted)


def verdict(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> Record:
    """Which keys are equal; the first difference of each other key is the reason."""
    equal, reasons = {}, []
    for key, value in measured.items():
        if key == "order":
            difference = _first_difference(unfold(value), unfold(predicted[key]))
        elif key == "traffic":
            difference = _traffic_difference(value, predicted[key])
        else:
            difference = "" if value == predicted[key] else f"{predicted[key]} instead of {value}"
        equal[key] = not difference
        if difference:
            reasons.append(f"{key}: {difference}")
    return {"predicted": {k: predicted[k] for k in measured}, "equal": equal, "reason": "; ".join(reasons)}


def flops(lowered: Lowered) -> dict[str, int]:
    """Matrix-product FLOPs that one rank's Program really runs in forward and in backward (recomputation included)."""
    done = {"forward": 0.0, "backward": 0.0}
    program = lowered.job.programs[0]
    for section, repeats in program.schedule:
        for phase, amount in _section_flops(program, section):
            done[phase] += repeats * amount
    return {"forward_flops": round(done["forward"]), "backward_flops_with_recompute": round(done["backward"])}


def _section_flops(program: Program, number: int) -> Iterable[tuple[str, float]]:
    from sim.report.numbers.breakdown import segment_flops

    section = program.sections[number]
    flops = segment_flops(program)
    for kind, payload, label in zip(section.kind, section.payload, section.label, strict=True):
        phase = program.labels[label].phase
        if kind == Kind.KERNELS and phase != "optimizer":
            yield ("forward" if phase == "forward" else "backward"), float(flops[payload])


def unfold(order: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """One (micro, phase, kind, dtype, ranks, bytes) per call, repeats written out."""
    return [tuple(entry[n] for n in _ORDER) for entry in order for _ in range(entry.get("repeat", 1))]


def _first_difference(measured: Sequence[tuple[Any, ...]], predicted: Sequence[tuple[Any, ...]]) -> str:
    for place, (want, got) in enumerate(zip(measured, predicted, strict=False)):
        if want != got:
            return f"call {place} is {got} instead of {want}"
    return "" if len(measured) == len(predicted) else f"{len(predicted)} calls instead of {len(measured)}"


def _traffic_difference(measured: Sequence[Mapping[str, Any]], predicted: Sequence[Mapping[str, Any]]) -> str:
    names = ("phase", "kind", "dtype", "ranks", "count", "bytes")
    want, got = ({tuple(row[n] for n in names) for row in rows} for rows in (measured, predicted))
    return "" if want == got else f"{sorted(got - want)} instead of {sorted(want - got)}"
