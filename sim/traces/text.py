"""A difference as people read it, and a trace's products as `calibrate` takes them. Knows rich."""

from __future__ import annotations

import csv
import io

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sim.report.units import seconds, size
from sim.traces.diff import Difference, Term
from sim.traces.steps import Shape, Sum

#: Rows of tables behind the terms.
_MOST = 12
#: Differences below this share are no difference in a sentence.
_ALIKE = 0.01
#: Share of products without a shape from which nothing is said of shapes that are missing.
_UNSHAPED = 0.05
#: Numbers of kernels that differ by less are as many.
_AS_MANY = 0.03
#: Kineto's clock does not tell less apart.
_NOTHING_S = 1e-6


def render(found: Difference, to: Console) -> None:
    """Print the comparison."""
    to.print(Group(*_head(found), Text(), _terms(found), *_behind(found), *_products(found), *_collectives(found),
                   *(Text(f"\nnote: {note}", "dim") for note in found.notes)))


def products_csv(found: Difference) -> str:
    """The trace's products that ran alone, a row a shape with its mean time, as `calibrate --gemm` takes them."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["gpu", "dtype", "m", "n", "k", "batch", "time_us", "source"])
    for shape, total in sorted(found.measured.products.items()):
        if total.alone and shape.dtype:
            rows.writerow([found.trace.gpu or found.result.gpu, shape.dtype, shape.m, shape.n, shape.k, shape.batch,
                           f"{total.alone_s / total.alone * 1e6:.3f}", "trace"])
    return out.getvalue()


def _head(found: Difference) -> list[Text]:
    trace, measured = found.trace, found.measured
    rank = f"rank {trace.rank} of {trace.ranks:,}, " if trace.ranks and trace.rank >= 0 else ""
    gpu = f"{trace.gpu}, " if trace.gpu else ""
    if len(measured.times_s) == 1:
        spread = "one step"
    else:
        spread = (f"{len(measured.times_s)} steps of {seconds(min(measured.times_s))} to "
                  f"{seconds(max(measured.times_s))}")
    predicted = found.predicted.step_time_s
    share = abs(found.error)
    verdict = "as long as measured" if share < 0.0005 else f"{predicted / measured.step_time_s:.3g} times as long" if (
        share > 1) else f"{share:.1%} {'shorter' if found.error < 0 else 'longer'} than measured"
    return [Text.assemble(("measured   ", "dim"), (seconds(measured.step_time_s), "bold"),
                          f"  {trace.file}: {rank}{gpu}{spread}"),
            Text.assemble(("predicted  ", "dim"), (seconds(predicted), "bold"),
                          f"  {found.result.scenario.name}: {verdict}")]


def _terms(found: Difference) -> Table:
    table = _table("where the gap is", "measured", "predicted", "gap", "of the step")
    for term in found.terms:
        if max(term.measured_s, term.predicted_s) < 1e-3 * found.measured.step_time_s:
            continue
        table.add_row(term.words, _time(term.measured_s), _time(term.predicted_s), _gap(term.gap_s),
                      _share(term.gap_s / found.measured.step_time_s))
    gap = found.measured.step_time_s - found.predicted.step_time_s
    table.add_section()
    table.add_row("step", seconds(found.measured.step_time_s), seconds(found.predicted.step_time_s), _gap(gap),
                  _share(gap / found.measured.step_time_s))
    return table


def _behind(found: Difference) -> list[Padding]:
    """What stands behind the largest gaps, a sentence each."""
    lines = [_sentence(term, found) for term in found.terms[:3]
             if abs(term.gap_s) > _ALIKE * found.measured.step_time_s]
    return [Padding(Text(line), (1 if place == 0 else 0, 0, 0, 0)) for place, line in enumerate(filter(None, lines))]


def _sentence(term: Term, found: Difference) -> str:
    kind = term.name.removeprefix("exposed ")
    if term.name == "gemm" and found.measured.products:
        return f"{term.words}: {_work(found)}"
    if kind in found.measured.collectives and kind in found.predicted.collectives:
        measured, predicted = found.measured.collectives[kind], found.predicted.collectives[kind]
        counts = f"{measured.count:,.0f} measured, {predicted.count:,.0f} predicted"
        return (f"{term.words}: {counts}; on the wire {seconds(measured.seconds)} against {seconds(predicted.seconds)} "
                "(a measured kernel's time includes waiting for the other ranks)")
    if term.name == "memory_bound":
        measured_count, predicted_count = found.measured.kernels, found.predicted.kernels
        many = f"{measured_count:,.0f} kernels of all kinds measured, {predicted_count:,.0f} predicted"
        if abs(measured_count - predicted_count) < _AS_MANY * predicted_count:
            return f"{term.words}: as many as predicted ({many}), so each takes another time"
        return f"{term.words}: {many}: what is fused decides (software.compile, software.modules)"
    if term.name == "idle":
        return f"{term.words}: the host launches late, or something outside the model runs on it (data, logging)"
    return ""


def _work(found: Difference) -> str:
    """Whether products differ in how many there are or in how long each takes."""
    measured = {shape: one for shape, one in found.measured.products.items() if one.count}
    predicted = found.predicted.products
    shared = [shape for shape in measured if shape in predicted and predicted[shape].count]
    here = sum(measured[s].each_s * predicted[s].count for s in shared)
    there = sum(predicted[s].each_s * predicted[s].count for s in shared)
    parts = []
    if there and abs(here / there - 1) > _ALIKE:
        parts.append(f"those of equal shape take {abs(here / there - 1):.1%} {'longer' if here > there else 'less'} "
                     "each than predicted, alone")
    more = sum((measured[s].count - predicted[s].count) * predicted[s].each_s for s in shared)
    if abs(more) > _ALIKE * there:
        parts.append(f"there are {'more' if more > 0 else 'fewer'} of them than predicted ({seconds(abs(more))})")
    if found.measured.unshaped_s > _UNSHAPED * found.measured.terms.get("gemm", 0.0):
        parts.append(f"of {seconds(found.measured.unshaped_s)} the trace does not say the shape (fused layers, "
                     "convolutions)")
    else:
        only = sum(one.seconds for shape, one in measured.items() if shape not in predicted)
        missing = sum(one.seconds for shape, one in predicted.items() if shape not in measured)
        if max(only, missing) > _ALIKE * there:
            parts.append(f"{seconds(only)} are of shapes that are not predicted, {seconds(missing)} are predicted of "
                         "shapes that are not there")
    return "; ".join(parts) or "alone they take what is predicted: collectives beside them make the difference"


def _products(found: Difference) -> list[Padding]:
    rows = found.products()
    if not rows:
        return []
    table = _table("products (rows × columns × inner)", "measured", "alone", "predicted", "alone", "gap")
    for shape, measured, predicted in rows[:_MOST]:
        known = measured.count or not found.measured.unshaped_s  # else it may be among those without a shape
        table.add_row(_shape(shape), *_counted(measured), *_counted(predicted),
                      _gap(measured.seconds - predicted.seconds) if known else "")
    rest = rows[_MOST:]
    if rest:
        gap = sum(measured.seconds - predicted.seconds for _, measured, predicted in rest)
        table.add_row(f"{len(rest)} other shapes", "", "", "", "", _gap(gap))
    if found.measured.unshaped_s:
        table.add_row("shape unknown", _time(found.measured.unshaped_s), "", "", "", "")
    return [Padding(table, (1, 0, 0, 0))]


def _collectives(found: Difference) -> list[Padding]:
    rows = found.collectives()
    if not rows:
        return []
    table = _table("collectives", "measured", "bytes", "each", "predicted", "bytes", "each")
    for kind, measured, predicted in rows:
        table.add_row(kind.replace("_", "-"), *_sized(measured), *_sized(predicted))
    return [Padding(table, (1, 0, 0, 0))]


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _shape(shape: Shape) -> str:
    batch = f"{shape.batch} of " if shape.batch > 1 else ""
    return f"{batch}{shape.m} × {shape.n} × {shape.k} {shape.dtype}".strip()


def _counted(total: Sum) -> tuple[str, str]:
    return (f"{total.count:,.0f}", seconds(total.each_s)) if total.count else ("–", "")


def _sized(total: Sum) -> tuple[str, str, str]:
    if not total.count:
        return "–", "", ""
    return (f"{total.count:,.0f}", size(total.size_bytes) if total.size_bytes else "?",
            seconds(total.seconds / total.count))


def _time(value: float) -> str:
    return seconds(value) if value >= _NOTHING_S else "0"


def _gap(value: float) -> str:
    return "0" if abs(value) < _NOTHING_S else f"{'+' if value > 0 else '−'}{seconds(abs(value))}"


def _share(value: float) -> str:
    return "0" if abs(value) < 0.0005 else f"{'+' if value > 0 else '−'}{abs(value):.1%}"
