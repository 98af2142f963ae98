"""One step of a trace as terms that sum to it, products by shape, and collectives by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sim.errors import Fault, UserError
from sim.traces.classes import COMMUNICATION, COPY, class_of, collective_of
from sim.traces.kineto import Ran, Trace

Floats = npt.NDArray[np.float64]

_MICRO = 1e-6
#: dtypes as PyTorch writes them in a trace's operators.
_DTYPES = {"c10::bfloat16": "bf16", "c10::half": "fp16", "float": "fp32", "c10::float8_e4m3fn": "fp8"}
#: Operators that are one matrix product, and where its two matrices stand among their inputs.
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2),
             "aten::_scaled_mm": (0, 1)}


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A matrix product, whatever its layout: the smaller of rows and columns first.

    Attributes:
        batch, m, n, k: sizes; dtype: bf16, fp16, fp32 or fp8, "" if unknown.
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

    @property
    def flops(self) -> int:
        """Of one product."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(slots=True)
class Sum:
    """How many of a kind there are in a step, what they take, and the bytes of their buffers (0 if unknown)."""

    count: float = 0.0
    seconds: float = 0.0
    size_bytes: float = 0.0

    def add(self, seconds: float, size_bytes: float = 0.0, count: float = 1.0) -> None:
        """One more, or several."""
        self.count += count
        self.seconds += seconds
        self.size_bytes += size_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """A step, on average over those measured.

    Attributes:
        numbers: of the steps; times_s: of each.
        terms: seconds by class of kernels, of exposed communication by kind (`exposed all_gather`), of copies that
            nothing runs beside (`copy`), and in which the GPU has nothing to do (`idle`); they sum to `step_time_s`.
        products, collectives: by shape, and by kind; kernels: how many, without those of collectives.
        unshaped_s: seconds of products whose shape the trace does not say.
    """

    numbers: tuple[int, ...]
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


def measure(trace: Trace, steps: int | None = None) -> Step:
    """The mean step of a trace.

    Args:
        steps: how many steps it holds, where it has no marks of `torch.profiler`'s `step()`.

    Raises:
        UserError: nothing tells where a step begins.
    """
    spans = _spans(trace, steps)
    terms: defaultdict[str, float] = defaultdict(float)
    products: defaultdict[Shape, Sum] = defaultdict(Sum)
    collectives: defaultdict[str, Sum] = defaultdict(Sum)
    kernels = unshaped = 0.0
    share = 1 / sum(span.holds for span in spans)
    for span in spans:
        for name, seconds in _terms(span.ran, span.start_us, span.end_us).items():
            terms[name] += seconds * share
        for ran in span.ran:
            seconds, kind = (ran.end_us - ran.start_us) * _MICRO * share, class_of(ran)
            kernels += share if kind not in (COMMUNICATION, COPY) else 0.0
            if kind == COMMUNICATION:
                collectives[collective_of(ran)].add(seconds, ran.size_bytes * share, share)
            elif (shape := _shape(ran)) is not None:
                products[shape].add(seconds, count=0.0 if "splitk" in ran.name.lower() else share)
            elif kind == "gemm":
                unshaped += seconds
    return Step(tuple(span.number for span in spans), tuple((s.end_us - s.start_us) * _MICRO / s.holds for s in spans),
                dict(terms), dict(products), dict(collectives), kernels, unshaped)


@dataclass(frozen=True, slots=True)
class _Span:
    """Steps on the GPU: what was launched for them, from the first of it to the first of the next step's."""

    number: int
    start_us: float
    end_us: float
    ran: Sequence[Ran]
    holds: int = 1


def _spans(trace: Trace, steps: int | None) -> list[_Span]:
    start, end = trace.ran[0].start_us, max(one.end_us for one in trace.ran)
    if steps is not None:
        return [_Span(0, start, end, trace.ran, steps)]
    by_step: dict[int, list[Ran]] = {number: [] for number, _, _ in trace.steps}
    begins = np.array([begin for _, begin, _ in trace.steps])
    for ran in trace.ran:
        place = int(np.searchsorted(begins, ran.launched_us, side="right")) - 1
        if place >= 0 and (place + 1 < len(begins) or ran.launched_us < trace.steps[place][2]):
            by_step[trace.steps[place][0]].append(ran)
    full = [(number, ran) for number, ran in by_step.items() if ran]
    if not full:
        raise UserError(Fault("nothing in it tells where a step begins", "", trace.file,
                              hint="call the profiler's step() once a step, or say how many it holds: --steps N"))
    if len(full) == 1:
        number, launched = full[0]
        begin, stop = next((b, e) for n, b, e in trace.steps if n == number)
        first = min(one.start_us for one in launched)
        return [_Span(number, first, max(first + stop - begin, *(one.end_us for one in launched)), launched)]
    firsts = [min(one.start_us for one in launched) for _, launched in full]
    return [_Span(number, first, following, launched)
            for (number, launched), (first, following) in zip(full, pairwise(firsts), strict=False)]


def _terms(ran: Iterable[Ran], start_us: float, end_us: float) -> dict[str, float]:
    """Seconds between two moments by what runs; where several do, kernels come first, then communication, then copies,
    and of one kind what began first."""
    named: dict[int, list[tuple[float, float, str]]] = {0: [], 1: [], 2: []}
    for one in ran:
        kind = class_of(one)
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
        begin = np.minimum(np.maximum(spans[:, 0], reached), np.maximum(spans[:, 1], reached))
        free = (np.maximum(spans[:, 1], begin) - begin) - _within(covered, begin, np.maximum(spans[:, 1], begin))
        for (_, _, name), seconds in zip(rows, free.tolist(), strict=True):
            terms[name] += seconds * _MICRO
        covered = _union(np.concatenate((covered, spans)))
    terms["idle"] = (end_us - start_us) * _MICRO - sum(terms.values())
    return dict(terms)


def _union(spans: Floats) -> Floats:
    """Disjoint stretches in order that cover the same, shape (n, 2)."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate(([True], spans[1:, 0] > reached[:-1])))
    last = np.append(first[1:], len(spans)) - 1
    return np.stack((spans[first, 0], reached[last]), axis=1)


def _within(covered: Floats, begin: Floats, end: Floats) -> Floats:
    """Length of disjoint stretches between each begin and end."""
    if not len(covered):
        return np.zeros(len(begin))
    lengths = np.concatenate(([0.0], np.cumsum(covered[:, 1] - covered[:, 0])))

    def until(at: Floats) -> Floats:
        place = np.searchsorted(covered[:, 0], at, side="right") - 1
        inside = np.clip(at - covered[np.maximum(place, 0), 0], 0.0,
                         covered[np.maximum(place, 0), 1] - covered[np.maximum(place, 0), 0])
        found: Floats = np.where(place < 0, 0.0, lengths[np.maximum(place, 0)] + inside)
        return found

    return until(end) - until(begin)


def _shape(ran: Ran) -> Shape | None:
    """Of the product that launched a kernel, where the trace says it."""
    places = _PRODUCTS.get(ran.op)
    if places is None or len(ran.shapes) <= max(places):
        return None
    left, right = (ran.shapes[place] for place in places)
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2]:
        return None
    return Shape.of(left[0] if len(left) == 3 else 1, left[-2], right[-1], left[-1],
                    _DTYPES.get(ran.dtype.lower(), ""))
