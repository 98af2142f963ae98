"""One step of a trace as terms that sum to it, products by shape, and collectives by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sim.errors import Fault, UserError
from sim.traces.classes import ATTENTION, COMMUNICATION, COPY, SOFTMAX, class_of, collective_of
from sim.traces.kineto import Ran, Trace
from sim.traces.spans import union, within

_MICRO = 1e-6
#: dtypes as PyTorch writes them in a trace's operators.
_DTYPES = {"c10::bfloat16": "bf16", "c10::half": "fp16", "float": "fp32", "c10::float8_e4m3fn": "fp8"}
#: Operators that are one matrix product, and where its two matrices stand among their inputs.
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::_addmm_activation": (1, 2), "aten::bmm": (0, 1),
             "aten::baddbmm": (1, 2), "aten::_scaled_mm": (0, 1)}
#: A kernel beside which communication runs for less of its time is as good as alone.
_BESIDE = 0.05


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A matrix product, whatever its layout: the smaller of rows and columns first.

    Attributes:
        batch, m, n, k: sizes; dtype: bf16, fp16, fp32, tf32, fp8 and so on, "" if unknown.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str = ""

    @staticmethod
    def of(batch: int, m: int, n: int, k: int, dtype: str) -> Shape:
        """The shape with m and n in order: a product and its transposed one are one."""
        return Shape(batch, min(m, n), max(m, n), k, dtype)


@dataclass(slots=True)
class Sum:
    """How many of a kind there are in a step, what they take, and the bytes of their buffers (0 if unknown).

    `alone` and `alone_s` are of those that no communication runs beside.
    """

    count: float = 0.0
    seconds: float = 0.0
    size_bytes: float = 0.0
    alone: float = 0.0
    alone_s: float = 0.0

    @property
    def each_s(self) -> float:
        """Seconds of one, alone where any is."""
        return self.alone_s / self.alone if self.alone else self.seconds / self.count

    def add(self, seconds: float, size_bytes: float = 0.0, count: float = 1.0, alone: bool = False) -> None:
        """One more, or several."""
        self.count += count
        self.seconds += seconds
        self.size_bytes += size_bytes
        if alone:
            self.alone += count
            self.alone_s += seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A step, on average over those measured.

    Attributes:
        times_s: of each step.
        terms: seconds by class of kernels, of exposed communication by kind (`exposed all_gather`), of copies that
            nothing runs beside (`copy`), and in which the GPU has nothing to do (`idle`); they sum to `step_time_s`.
        products, collectives: by shape, and by kind; kernels: how many, without those of collectives.
        unshaped_s: seconds of products whose shape the trace does not say.
    """

    times_s: tuple[float, ...]
    terms: dict[str, float]
    products: dict[Shape, Sum] = field(default_factory=dict)
    collectives: dict[str, Sum] = field(default_factory=dict)
    kernels: float = 0.0
    unshaped_s: float = 0.0

    @property
    def step_time_s(self) -> float:
        """Mean of the steps."""
        return sum(self.times_s) / len(self.times_s)


def measure(trace: Trace, steps: int | None = None, spelled_out: Collection[Shape] = ()) -> Step:
    """The mean step of a trace.

    Args:
        steps: how many steps it holds, where it has no marks of `torch.profiler`'s `step()`.
        spelled_out: shapes of attention's own products where it is no fused kernel; these and the softmax between them
            count as attention.

    Raises:
        UserError: nothing tells where a step begins, or steps have no length.
    """
    spans = _spans(trace, steps)
    shapes = {(one.batch, one.m, one.n, one.k) for one in spelled_out}
    classes = [_class(ran, shapes) for ran in trace.ran]
    length_us = sum(span.end_us - span.start_us for span in spans)
    if not length_us > 0:
        raise UserError(Fault("its steps have no length on the GPU", "", trace.file))
    share = 1 / sum(span.holds for span in spans)
    terms: defaultdict[str, float] = defaultdict(float)
    starts = np.array([ran.start_us for ran in trace.ran])
    longest = max(ran.end_us - ran.start_us for ran in trace.ran)
    for span in spans:
        first, last = np.searchsorted(starts, (span.start_us - longest, span.end_us)).tolist()
        for name, seconds in _terms(trace.ran[first:last], classes[first:last], span.start_us, span.end_us).items():
            terms[name] += seconds * share
    chosen = [place for span in spans for place in span.places]
    found = _Counted(share)
    found.count(trace.ran, classes, chosen)
    return Step(tuple((span.end_us - span.start_us) * _MICRO / span.holds for span in spans for _ in range(span.holds)),
                dict(terms), dict(found.products), dict(found.collectives), found.kernels, found.unshaped_s)


def _class(ran: Ran, spelled_out: Collection[tuple[int, int, int, int]]) -> str:
    if spelled_out and ran.op in SOFTMAX:
        return ATTENTION
    shape = shape_of(ran) if spelled_out else None
    if shape is not None and (shape.batch, shape.m, shape.n, shape.k) in spelled_out:
        return ATTENTION
    return class_of(ran)


@dataclass
class _Counted:
    """What was launched in the steps, a share of each."""

    share: float
    products: defaultdict[Shape, Sum] = field(default_factory=lambda: defaultdict(Sum))
    collectives: defaultdict[str, Sum] = field(default_factory=lambda: defaultdict(Sum))
    kernels: float = 0.0
    unshaped_s: float = 0.0

    def count(self, ran: Sequence[Ran], classes: Sequence[str], chosen: Iterable[int]) -> None:
        """Adds up all that was launched; an operator's kernels (split-K has two) are one product."""
        messages = union(np.array([(one.start_us, one.end_us) for one, kind in zip(ran, classes, strict=True)
                                   if kind == COMMUNICATION]).reshape(-1, 2))
        calls: dict[int, tuple[Shape, float, bool]] = {}
        for place in chosen:
            one, kind = ran[place], classes[place]
            seconds = (one.end_us - one.start_us) * _MICRO
            self.kernels += self.share if kind not in (COMMUNICATION, COPY) and not one.copy else 0.0
            if kind == COMMUNICATION:
                self.collectives[collective_of(one)].add(seconds * self.share, one.size_bytes * self.share, self.share)
            elif not one.copy and (shape := shape_of(one)) is not None:
                _, before, alone = calls.get(one.call, (shape, 0.0, True))
                span = np.array([one.start_us]), np.array([one.end_us])
                beside = float(within(messages, *span)[0]) * _MICRO
                calls[one.call] = shape, before + seconds, alone and beside <= _BESIDE * seconds
            elif kind == "gemm":
                self.unshaped_s += seconds * self.share
        for shape, seconds, alone in calls.values():
            self.products[shape].add(seconds * self.share, count=self.share, alone=alone)


@dataclass(frozen=True, slots=True)
class _Span:
    """Steps on the GPU, from the first kernel of the model launched for them to the first of the next step's.

    Attributes:
        places: in `Trace.ran`, of what was launched for them; holds: how many steps it is.
    """

    start_us: float
    end_us: float
    places: Sequence[int]
    holds: int = 1


def _spans(trace: Trace, steps: int | None) -> list[_Span]:
    if steps is not None:
        end = max(one.end_us for one in trace.ran)
        return [_Span(trace.ran[0].start_us, end, range(len(trace.ran)), steps)]
    launched = np.array([one.launched_us for one in trace.ran])
    begins = np.array([begin for _, begin, _ in trace.steps])
    last = trace.steps[-1][2] if trace.steps else 0.0
    of = np.searchsorted(begins, launched, side="right") - 1
    of[(of == len(begins) - 1) & (launched >= last)] = -1
    by_step = [np.flatnonzero(of == number).tolist() for number in range(len(begins))]
    full = [number for number, places in enumerate(by_step) if places]
    if not full:
        raise UserError(Fault("nothing in it tells where a step begins", "", trace.file,
                              hint="call the profiler's step() once a step, or say how many it holds: --steps N"))
    firsts = [_first(trace.ran, by_step[number]) for number in full]
    if len(full) == 1:
        places = by_step[full[0]]
        length = trace.steps[full[0]][2] - trace.steps[full[0]][1]
        end = max(firsts[0] + length, *(trace.ran[place].end_us for place in places))
        return [_Span(firsts[0], end, places)]
    return [_Span(first, following, by_step[number], after - number)
            for (number, after), (first, following) in zip(pairwise(full), pairwise(firsts), strict=True)]


def _first(ran: Sequence[Ran], places: Iterable[int]) -> float:
    """When a step begins on the GPU: with its first kernel of the model, since batches are copied, and parameters may
    be gathered, while the step before still runs."""
    starts = [(class_of(ran[place]) in (COMMUNICATION, COPY) or ran[place].copy, ran[place].start_us)
              for place in places]
    return min(starts)[1]


def _terms(ran: Sequence[Ran], classes: Sequence[str], start_us: float, end_us: float) -> dict[str, float]:
    """Seconds between two moments by what runs; where several do, kernels come first, then communication, then copies,
    and of one kind what began first."""
    named: dict[int, list[tuple[float, float, str]]] = {0: [], 1: [], 2: []}
    for one, kind in zip(ran, classes, strict=True):
        place = 1 if kind == COMMUNICATION else 2 if kind == COPY else 0
        name = f"exposed {collective_of(one)}" if place == 1 else kind
        begin, end = max(one.start_us, start_us), min(one.end_us, end_us)
        if end > begin:
            named[place].append((begin, end, name))
    terms: defaultdict[str, float] = defaultdict(float)
    covered = np.zeros((0, 2))
    for place in named:
        rows = sorted(named[place])
        if not rows:
            continue
        spans = np.array([(begin, end) for begin, end, _ in rows])
        reached = np.maximum.accumulate(np.concatenate(([start_us], spans[:-1, 1])))
        ends = np.maximum(spans[:, 1], reached)
        begins = np.minimum(np.maximum(spans[:, 0], reached), ends)
        free = ends - begins - within(covered, begins, ends)
        for (_, _, name), seconds in zip(rows, free.tolist(), strict=True):
            terms[name] += seconds * _MICRO
        covered = union(np.concatenate((covered, spans)))
    terms["idle"] = (end_us - start_us) * _MICRO - sum(terms.values())
    return dict(terms)


def shape_of(ran: Ran) -> Shape | None:
    """The product that launched a kernel, where the trace says it."""
    places = _PRODUCTS.get(ran.op)
    if places is None or len(ran.shapes) <= max(places):
        return None
    left, right = (ran.shapes[place] for place in places)
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2]:
        return None
    return Shape.of(left[0] if len(left) == 3 else 1, left[-2], right[-1], left[-1],
                    _DTYPES.get(ran.dtype.lower(), ""))
