"""The terminal report. The only file that knows rich; import it when something is printed, not before."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sim.memory.ledger import CATEGORIES
from sim.report import lengths
from sim.report.advice.largest import GPU_ALONE, Largest
from sim.report.numbers.bounding import felt
from sim.report.numbers.memory import TIGHT_HEADROOM, MemoryResult
from sim.report.result import Result, has_tokens
from sim.report.scaling import scaling
from sim.report.terminal.changes import changes_lines
from sim.report.terminal.head import headline
from sim.report.terminal.run import budget_lines, trouble_lines
from sim.report.terminal.stages import stage_lines
from sim.report.units import rate, seconds, size
from sim.report.warned.together import together
from sim.report.words import bound, forward_of, term, written
from sim.work import CATEGORIES as KERNEL_CATEGORIES

#: Share of the GPU from which on what the allocator wastes is told apart.
_WASTE = 0.02
_COLOURS = {"gemm": "green", "attention": "bright_green", "memory_bound": "cyan", "optimizer": "blue",
            "communication": "red", "pipeline_bubble": "magenta", "host": "yellow", "offload": "bright_red"}
#: Rows with less of the step than this would print as 0.0% and are left out.
_SMALLEST_SHARE = 0.0005
#: Waiting for the host from this share of a step on is part of what hides communication.
_FELT = 0.01
#: Exposed communication that a fast network would not save is explained from this share of a step on.
_MUCH_KEPT = 0.05
#: Columns of catalogues whose names are too long for a table head.
_HEADS = {"architecture": "arch", "half_tflops": "half TF", "fp8_tflops": "fp8 TF", "memory_gib": "GiB",
          "bandwidth_gb_s": "GB/s", "power_limit_w": "W", "gpus_per_node": "GPUs", "sms": "SMs",
          "host_forward_us": "fwd µs", "host_backward_us": "bwd µs", "host_collective_us": "call µs",
          "clips_gradients": "clips", "parameters_b": "10⁹ params"}
#: Shorter bars tell nothing: they go first on a narrow terminal.
_LEAST_BAR = 6
_PIPE_WIDTH = 200
_UNBOUND = 10_000
_EIGHTHS = " ▏▎▍▌▋▊▉"


class _Printed(Console):
    """Leaves a reader that went away to the command line: rich would exit with 1, which there is a fault of ours."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console on `file` (default standard output); colour only on a terminal that wants it."""
    return _Printed(file=file, width=width, highlight=False, soft_wrap=False)


def render(result: Result, to: Console) -> None:
    """Print the report of one run, each part before what the next one has to simulate: advice takes the longest."""
    to.print(Group(*headline(result), Text(), *_breakdown(result, to.width), Text()))
    to.print(Group(*_bound(result), *trouble_lines(result), Text(), *_memory(result, to.width)))
    to.print(Group(*changes_lines(result.changes, request=result.scenario.training.mode != "train", width=to.width),
                   *largest_lines(result.largest), *stage_lines(result, to.width), *budget_lines(result),
                   *_notes(result)), crop=False)


def as_text(result: Result, width: int = 100) -> str:
    """The report without colour, for a file."""
    buffer = io.StringIO()
    render(result, Console(file=buffer, width=width, highlight=False, color_system=None))
    return buffer.getvalue()


def render_sweep(points: Sequence[Result], skipped: Sequence[Mapping[str, Any]], axes: Mapping[str, Sequence[Any]],
                 to: Console) -> None:
    """Print one row per predicted point of a sweep, and the reasons of those that are impossible."""
    if points:
        to.print(Text(points[0].scenario.name, style="bold"))
        _print_whole(_sweep_table(points, list(axes)), to)
        for line in scaling(points, axes):
            to.print(Text(str(line), style="dim"))
        for point in points:
            if point.sensitivity is not None:
                to.print(Text(f"10% more at {_point(point, axes)}: {_gains(point.sensitivity)}"))
    for impossible in skipped:
        sets = ", ".join(f"{k}={written(v)}" for k, v in impossible["set"].items())
        to.print(Text.assemble(("skipped ", "yellow"), f"{sets}: {impossible['reason']}"))
    warnings = together([(_point(p, axes), p.warnings) for p in points])
    to.print(Group(*(_warning(w) for w in warnings), *(_claim(points[0]) if points else [])))


def _point(point: Result, axes: Iterable[str]) -> str:
    """A point of a sweep by its axes, in the words of the table's heads: "sequence 8192, recompute full"."""
    return ", ".join(f"{axis.rpartition('.')[2].replace('_', ' ')} {written(point.set[axis])}" for axis in axes)


def _print_whole(table: Table, to: Console) -> None:
    """A table whose columns have least widths: as narrow as these where its heads do not fit on one line, closer
    together where that is too wide still, never cut."""
    width = to.width
    least = sum(column.min_width or 0 for column in table.columns)
    if Measurement.get(to, to.options.update(max_width=_UNBOUND), table).maximum > width:
        for column in table.columns:  # rich by itself shares out what is left and may be one off
            column.width = column.min_width
        if least + 2 * len(table.columns) > width:
            table.padding = (0, 1, 0, 0)
        to.width = max(width, least + 2 * len(table.columns))
    to.print(table)
    to.width = width


def sweep_as_text(points: Sequence[Result], skipped: Sequence[Mapping[str, Any]], axes: Mapping[str, Sequence[Any]],
                  width: int = 160) -> str:
    """The sweep's table without colour, for a file."""
    buffer = io.StringIO()
    render_sweep(points, skipped, axes, Console(file=buffer, width=width, highlight=False, color_system=None))
    return buffer.getvalue()


def render_catalogue(rows: Sequence[Mapping[str, Any]], to: Console) -> None:
    """Print the rows of a catalogue as a table; columns are the first row's keys. A pipe gets one line per row."""
    if not to.is_terminal:
        to.width = max(to.width, _PIPE_WIDTH)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for key in rows[0]:
        table.add_column(_HEADS.get(key, key.replace("_", " ")), overflow="fold", no_wrap=key == "name")
    for row in rows:
        table.add_row(*("-" if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)
                        for value in row.values()))
    to.print(table)


def bar(share: float, width: int) -> str:
    """A bar of `share` of `width` columns, to an eighth of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[part].strip() if part else "")


def _rows(result: Result) -> Iterable[tuple[str, float, str]]:
    parts = result.breakdown
    for name in KERNEL_CATEGORIES:
        yield term(name), parts.compute[name], _COLOURS[name]
    for kind, groups in parts.exposed_communication.items():
        for group, exposed in groups.items():
            if group not in result.group_ranks:  # a stage between the first and the last ties no embedding
                continue
            words = f"exposed {kind.replace('_', '-')} ({group}, {result.group_ranks[group]} ranks)"
            yield words, exposed, _COLOURS["communication"]
    yield term("pipeline_bubble"), parts.pipeline_bubble, _COLOURS["pipeline_bubble"]
    yield term("offload"), parts.offload, _COLOURS["offload"]
    for name, waited in result.waits.items():
        yield term(name), waited, _COLOURS["host"]


def _breakdown(result: Result, width: int) -> list[Any]:
    step = result.step_time_s
    rows = [row for row in _rows(result) if row[1] > _SMALLEST_SHARE * step]
    figures = [(seconds(value), f"{100 * value / step:.1f}%") for _, value, _ in rows]
    columns = [max((len(row[column]) for row in figures), default=0) for column in range(2)]
    name_width = min(max((len(name) for name, _, _ in rows), default=0), max(4, width - sum(columns) - 2))
    room = min(48, width - name_width - sum(columns) - 3)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=name_width, overflow="fold")
    for column_width in columns:
        grid.add_column(justify="right", no_wrap=True, width=column_width)
    for (name, value, colour), told in zip(rows, figures, strict=True):
        grid.add_row(name, *told, *([Text(bar(value / step, room), style=colour)] if room >= _LEAST_BAR else []))
    return [Text("where the step goes", style="bold"), grid]


def _bound(result: Result) -> list[Any]:
    total = sum(s for groups in result.breakdown.communication_total.values() for s in groups.values())
    exposed = result.breakdown.exposed_s
    by = felt(result.bound, result.breakdown, result.waits)
    lines = [Text.assemble("bound by ", (bound(by, result.inference is not None), "bold"))]
    if total > 0:
        hidden = 100 * max(0.0, 1 - exposed / total)
        behind = "compute and the host's work" if result.waits["host"] > _FELT * result.step_time_s else "compute"
        lines.append(Text(f"communication: {seconds(total)} on the wire, {hidden:.0f}% hidden "
                          f"behind {behind}; {result.slowdown:.3f}× the step on an infinitely fast network"
                          f"{_kept_waits(result, exposed)}"))
        if result.breakdown.contention > _SMALLEST_SHARE * result.step_time_s:
            longer = seconds(result.breakdown.contention)
            lines.append(Text(f"kernels take {longer} longer because collectives hold SMs and memory bandwidth"))
    if result.copied is not None:
        left = result.breakdown.offload
        shown = f"; {seconds(left)} of it not hidden" if left > 1e-3 * result.step_time_s else "; hidden"
        lines.append(Text(f"offload: {result.copied}{shown}"))
    if result.sensitivity is not None:
        lines.append(Text(f"10% more of: {_gains(result.sensitivity)}"))
    if result.validated.count:
        lines.append(Text(str(result.validated), style="dim"))
    return list(lines)


def _gains(sensitivity: Mapping[str, float]) -> str:
    """What 10% more of each resource does to the step: "tensor cores -6.9%, network +0.0%"."""
    return ", ".join(f"{name.replace('_', ' ')} {round(100 * change, 1) + 0.0:+.1f}%"  # no -0.0
                     for name, change in sensitivity.items())


def _kept_waits(result: Result, exposed_s: float) -> str:
    """Why an infinitely fast network saves less than is exposed, where it does: other things are waited for then."""
    saved_s = result.step_time_s * (1.0 - 1.0 / result.slowdown)
    if exposed_s - saved_s < _MUCH_KEPT * result.step_time_s:
        return ""
    return (f", which saves {seconds(max(saved_s, 0.0))} of the {seconds(exposed_s)} exposed: the rest would be "
            "waited for others or the host")


def _memory(result: Result, width: int) -> list[Any]:
    memory = result.memory
    where = memory.use.where
    operator = f" ({where.operator})" if where is not None and where.operator not in ("", where.layer) else ""
    reached = "" if where is None else forward_of(where.section) or f"{where.phase} of {where.layer}{operator}"
    place = reached and f", reached in {reached}"
    parts = sorted(((memory.at_peak[name], name.replace("_", " ")) for name in CATEGORIES), reverse=True)
    detail = ", ".join(f"{name} {size(held)}" for held, name in parts if held)
    return [memory_bar(memory, width), *host_line(memory), Text.assemble(memory_verdict(memory), place),
            Text(detail, style="dim")]


def memory_bar(memory: MemoryResult, width: int) -> Text:
    """The device's memory as a bar."""
    share = memory.shown_bytes / memory.capacity_bytes
    room = max(10, min(48, width - 32))
    return Text.assemble(("memory ", "bold"), (bar(share, room).ljust(room, "·"), _colour(memory)),
                         f" {size(memory.shown_bytes)} of {size(memory.capacity_bytes)}")


def memory_verdict(memory: MemoryResult) -> Text:
    """Whether it fits, and by how much."""
    counted = "fits" if memory.complete else "fits by estimate"
    if memory.fits:
        cached = memory.fragmentation_bytes
        needed = f"{size(memory.capacity_bytes - cached)} are needed, and the allocator's cache takes the other"
        free = f", {size(memory.headroom_bytes)} free" if memory.headroom_bytes > 0 else (
            f": {needed} {size(cached)}" if cached > 0 else ", to the last byte")
        return Text(f"{counted}{free}", style=_colour(memory))
    if memory.fits_device:
        return Text(f"fits the GPU but not the host, which lacks {size(memory.host_missing_bytes)}", style="bold red")
    most = max(CATEGORIES, key=lambda name: memory.at_peak[name] if name != "fragmentation" else 0)
    return Text(f"does not fit: {lacking(memory)}, most of it {most.replace('_', ' ')}", style="bold red")


def lacking(memory: MemoryResult) -> str:
    """By how much tensors do not fit the GPU, and blocks around them where those waste much."""
    blocks = memory.missing_bytes + memory.fragmentation_bytes
    wasteful = memory.fragmentation_bytes > _WASTE * memory.capacity_bytes
    return f"{size(memory.missing_bytes)} too much" + (
        f" ({size(blocks)} with what the allocator's blocks waste)" if wasteful else "")


def _colour(memory: MemoryResult) -> str:
    share = memory.device_used_bytes / memory.capacity_bytes
    return "red" if not memory.fits else "yellow" if share > 1 - TIGHT_HEADROOM else "green"


def host_line(memory: MemoryResult) -> list[Any]:
    """Host memory of a node, where anything is offloaded."""
    host = memory.host
    if host is None:
        return []
    parts = sorted(((held, name.replace("_", " ")) for name, held in host.by_category.items()), reverse=True)
    detail = ", ".join(f"{name} {size(held)}" for held, name in parts)
    colour = "red" if host.needed_bytes > host.capacity_bytes else "green"
    used = f"{size(host.needed_bytes)} of {size(host.capacity_bytes)} of a node"
    return [Text.assemble(("host ", "bold"), (used, colour), (f": {detail}", "dim"))]


def largest_lines(found: Sequence[Largest]) -> list[Any]:
    """The largest sizes that fit, and why not more."""
    return [Text.assemble(*_largest(one)) for one in found]


def _largest(one: Largest) -> Iterator[tuple[str, str] | str]:
    yield f"largest {one.what} " if one.what != "sequence" else "longest sequence "
    yield (f"{one.value:,}" if one.value else f"none (not even {one.step:,})", "bold green" if one.value >= one.now
           else "bold red")
    tokens = " tokens" if one.what in ("sequence", "prompt") and one.value else ""
    yield f"{tokens}, now {one.now:,}"
    if one.what == "micro-batch" and one.value not in (0, one.now):
        yield ", with as many micro-steps as now"
    if one.ends == GPU_ALONE:
        yield f", by {one.ends}"
    elif one.value and one.ends != "memory":
        yield f"; beyond it: {one.ends}"


def _warning(text: str) -> Text:
    return Text.assemble(("! ", "bold yellow"), text)


def _claim(result: Result) -> list[Any]:
    """What the scenario puts to the test."""
    claim = result.scenario.claim
    if claim is None:
        return []
    return [Text.assemble("claim: ", (" ".join(claim.text.split()), "italic"), " ", (claim.verdict, "bold"))]


def _notes(result: Result) -> list[Any]:
    done = result.simulation
    lines: list[Any] = [Text()] if result.warnings else []
    lines += [_warning(w) for w in result.warnings]
    lines += _claim(result)
    lines.append(Text())
    lines.append(Text(
        f"simulated {done.ranks_simulated} of {done.ranks_represented:,} ranks, {done.tasks:,} tasks, "
        f"{done.events:,} events in {seconds(done.wall_s)}", style="dim"))
    return lines


def _sweep_table(points: Sequence[Result], axes: Sequence[str]) -> Table:
    """One row per point. On a narrow terminal headings wrap; figures never do."""
    scaling = "cluster.nodes" in axes
    serving = all(point.inference is not None for point in points)
    generating = any(point.scenario.model.kind != "encoder" for point in points)
    tokens = all(has_tokens(point.scenario) for point in points)
    budgets = [point.budget for point in points if point.budget is not None]
    told = slice(0, any(b.cost is not None for b in budgets) + 1 if budgets else 0)
    rows: list[list[Text]] = []
    for point in points:
        memory = point.memory
        cells = [written(point.set[axis]) for axis in axes]
        served = point.inference
        times = [seconds(point.step_time_s)]
        if serving and served is not None:
            times = [seconds(served.prompt_time_s), *([seconds(served.time_per_token_s)] if generating else [])]
        throughput = point.tokens_per_second if tokens else point.samples_per_second
        cells += [str(point.gpus), *times, rate(throughput / point.gpus),
                  f"{100 * point.mfu:.1f}%", f"{100 * point.breakdown.exposed_s / point.step_time_s:.1f}%",
                  size(memory.device_used_bytes)]
        fits = Text("yes", style="green") if memory.fits else Text("no", style="bold red")
        efficiency = [Text(_efficiency(point, points))] if scaling else []
        rows.append([*map(Text, cells), fits, *efficiency, *map(Text, lengths.cells(point.budget)[told])])
    heads = [axis.split(".")[-1].replace("_", " ") for axis in axes]
    heads += ["GPUs", *(["first token", "per token"] if serving and generating else ["pass" if serving else "step"])]
    heads += [f"{'tokens' if tokens else 'samples'}/s /GPU", "MFU", "exposed", "memory", "fits"]
    heads += [*(["scaling"] if scaling else []), *("whole run", "USD")[told]]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for i, head in enumerate(heads):
        widest = max([row[i].cell_len for row in rows] + [len(word) for word in head.split()])
        table.add_column(head, justify="left" if i < len(axes) else "right", min_width=widest)
    for row in rows:
        table.add_row(*row)
    return table


def _efficiency(point: Result, points: Sequence[Result]) -> str:
    """Throughput per GPU over that of the smallest cluster among the points that differ in nothing else."""
    alike = [p for p in points if all(p.set[k] == v for k, v in point.set.items() if k != "cluster.nodes")]
    first = min(alike, key=lambda p: p.scenario.cluster.nodes)  # the axis may hold a null
    return f"{100 * point.tokens_per_second_per_gpu / first.tokens_per_second_per_gpu:.1f}%"
