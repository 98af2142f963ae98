"""A measured step beside a predicted one: where the gap is, and what stands behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sim.api import Source, run
from sim.catalog import plain_spelling
from sim.errors import UserError
from sim.hardware.gpu import canonical_gpu
from sim.report.result import Result
from sim.report.words import term
from sim.traces.foreseen import foresee, spelled_out
from sim.traces.kineto import Trace, read_trace
from sim.traces.steps import Shape, Step, Sum, measure

#: Terms that a trace has and a breakdown has not by that name.
_WORDS = {"copy": "host-device copies", "idle": "GPU idle",
          "exposed send_recv": "transfers between stages and waiting for them"}


@dataclass(frozen=True, slots=True)
class Term:
    """One row: what a term takes in the trace and in the prediction, seconds."""

    name: str
    measured_s: float
    predicted_s: float

    @property
    def gap_s(self) -> float:
        """By how much more is measured."""
        return self.measured_s - self.predicted_s

    @property
    def words(self) -> str:
        """The term's name for people."""
        kind = self.name.removeprefix("exposed ")
        own = term(kind) if kind == self.name else f"exposed {kind.replace('_', '-')}"
        return _WORDS.get(self.name, own)


@dataclass(frozen=True)
class Difference:
    """A trace held against a scenario.

    Attributes:
        trace, result: what was compared.
        measured, predicted: the two steps; terms: side by side, the largest gap first.
        notes: what makes the two less comparable.
    """

    trace: Trace
    result: Result
    measured: Step
    predicted: Step
    terms: tuple[Term, ...]
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """Predicted over measured step time, less 1."""
        return self.predicted.step_time_s / self.measured.step_time_s - 1

    def products(self) -> list[tuple[Shape, Sum, Sum]]:
        """Shape, measured and predicted, of products of which either side has any, the largest gap first."""
        shapes = {*self.measured.products, *self.predicted.products} if self.measured.products else set()
        rows = [(shape, self.measured.products.get(shape, Sum()), self.predicted.products.get(shape, Sum()))
                for shape in shapes]
        return sorted(rows, key=lambda row: (-abs(row[1].seconds - row[2].seconds), row[0]))

    def collectives(self) -> list[tuple[str, Sum, Sum]]:
        """Kind, measured and predicted, the longest first."""
        kinds = {*self.measured.collectives, *self.predicted.collectives}
        rows = [(kind, self.measured.collectives.get(kind, Sum()), self.predicted.collectives.get(kind, Sum()))
                for kind in kinds]
        return sorted(rows, key=lambda row: (-max(row[1].seconds, row[2].seconds), row[0]))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data, times in seconds."""
        return {
            "step_time_s": {"measured": self.measured.step_time_s, "predicted": self.predicted.step_time_s,
                            "error": self.error, "steps": list(self.measured.times_s)},
            "terms": [{"term": t.name, "measured_s": t.measured_s, "predicted_s": t.predicted_s, "gap_s": t.gap_s}
                      for t in self.terms],
            "products": [{"batch": s.batch, "m": s.m, "n": s.n, "k": s.k, "dtype": s.dtype, **_pair(a, b)}
                         for s, a, b in self.products()],
            "collectives": [{"kind": kind, **_pair(a, b), "measured_bytes": a.size_bytes,
                             "predicted_bytes": b.size_bytes} for kind, a, b in self.collectives()],
            "kernels": {"measured": self.measured.kernels, "predicted": self.predicted.kernels},
            "notes": list(self.notes)}


def diff(trace: str | Path, scenario: Source, steps: int | None = None) -> Difference:
    """Hold the trace in a file against the prediction of a scenario (a path, or what `sim.run` takes).

    Raises:
        UserError: the trace or the scenario is wrong, or nothing in the trace tells where a step begins.
    """
    return compare(read_trace(str(trace)), run(scenario), steps)


def compare(trace: Trace, result: Result, steps: int | None = None) -> Difference:
    """Hold a trace against a prediction of what it is of.

    Args:
        steps: see `sim.traces.steps.measure`.

    Raises:
        UserError: nothing in the trace tells where a step begins.
    """
    predicted = foresee(result, trace.rank)
    measured = _alike(measure(trace, steps, spelled_out(result)), predicted, result)
    names = {*measured.terms, *predicted.terms}
    terms = [Term(name, measured.terms.get(name, 0.0), predicted.terms.get(name, 0.0)) for name in names]
    shown = [term for term in terms if term.measured_s or term.predicted_s]
    return Difference(trace, result, measured, predicted, tuple(sorted(shown, key=lambda t: (-abs(t.gap_s), t.name))),
                      tuple(_notes(trace, result, measured, predicted, steps)))


#: dtypes that a trace calls alike -> what they may be.
_CALLED = {"fp32": ("tf32",), "fp8": ("mxfp8",)}


def _alike(measured: Step, predicted: Step, result: Result) -> Step:
    """The measured step with the prediction's names where a trace has one for several things: fp32 tensors that are
    multiplied as TF32, and all-to-alls that are sends to NCCL."""
    dtypes = {shape.dtype for shape in predicted.products}
    renamed = {called: one for called, others in _CALLED.items() for one in others
               if one in dtypes and called not in dtypes}
    products: dict[Shape, Sum] = {}
    for shape, total in measured.products.items():
        products[replace(shape, dtype=renamed.get(shape.dtype, shape.dtype))] = total
    terms, collectives = dict(measured.terms), dict(measured.collectives)
    if (result.scenario.parallel.pipeline == 1 and "all_to_all" in predicted.collectives
            and "all_to_all" not in collectives and "send_recv" in collectives):
        collectives["all_to_all"] = collectives.pop("send_recv")
        terms["exposed all_to_all"] = terms.pop("exposed send_recv", 0.0)
    return replace(measured, products=products, terms=terms, collectives=collectives)


def _notes(trace: Trace, result: Result, measured: Step, predicted: Step, steps: int | None) -> Iterator[str]:
    if trace.ranks and trace.ranks != result.gpus:
        yield f"the trace is of a job of {trace.ranks:,} ranks, the scenario of {result.gpus:,}"
    if trace.gpu and not _same_gpu(trace.gpu, result.gpu):
        yield f"the trace is of {trace.gpu}, the scenario of {result.gpu}"
    if len(trace.devices) > 1:
        yield f"the file shows {len(trace.devices)} GPUs; compared is number {trace.devices[0]}"
    if result.scenario.parallel.pipeline > 1 and trace.rank < 0:
        yield "the trace does not say which rank it is of; predicted is the stage that computes longest"
    inside = [begin for begin, _ in trace.updates if trace.steps and trace.steps[0][1] <= begin < trace.steps[-1][2]]
    if steps is None and 0 < len(inside) < len(trace.steps):
        yield (f"the profiler's step() was called {len(trace.steps)} times for {len(inside)} optimizer steps: a step "
               "here is a micro-step; call it once an optimizer step")
    if not measured.products and measured.unshaped_s:
        yield "the trace has no shapes, so products are compared as a whole: profile with record_shapes=True"
    if len(measured.times_s) == 1 and len(trace.steps) == 1:
        yield "the trace holds one step: what the host does between steps is not seen"
    if measured.terms.get("idle", 0.0) - predicted.terms.get("idle", 0.0) > 0.1 * measured.step_time_s:
        yield ("a profiler slows the host down (shapes, stacks and memory most), which shows as an idle GPU: compare "
               "with the step time without it")


def _same_gpu(traced: str, predicted: str) -> bool:
    """Whether a card as CUDA names it is the catalogue's (or one fitted to measurements of it), or of its chip."""
    with suppress(UserError):
        known = canonical_gpu(traced)
        return predicted == known or predicted.startswith(f"{known}-")
    chip = predicted.partition("-")[0]
    return plain_spelling(chip) in plain_spelling(traced)


def _pair(measured: Sum, predicted: Sum) -> dict[str, float]:
    return {"measured_count": round(measured.count, 3), "predicted_count": predicted.count,
            "measured_s": measured.seconds, "predicted_s": predicted.seconds}
