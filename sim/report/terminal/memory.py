"""The terminal report of memory alone: phases by categories, stages, largest sizes, rules of thumb. Knows rich."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from sim.memory.ledger import CATEGORIES, PHASES, allocated_bytes
from sim.report.memory_plan import MemoryPlan, StageMemory
from sim.report.numbers.memory import MemoryResult
from sim.report.terminal.changes import changes_lines
from sim.report.terminal.head import described
from sim.report.terminal.narrow import fitted
from sim.report.terminal.render import host_line, largest_lines, memory_bar, memory_verdict
from sim.report.units import size
from sim.report.words import forward_of, written

#: Stages whose tables by phase are all printed; of more only the fullest's, unless asked for.
FEW_STAGES = 4
#: Stages that stand side by side; stages of which each has a row; rows at both ends of more.
_COLUMNS, _ROWS, _ENDS = 8, 16, 4
_HEADS = dict(zip(PHASES, ("after init", "end of forward", "backward", "optimizer step"), strict=True))
#: Changes listed of a job that does not fit.
_CHANGES = 10
#: Columns that numbers of all phases take, with a few for what they are of.
_PHASES_WIDTH = 52
#: Lost inside blocks or held by the driver: no tensors.
_NO_TENSORS = ("fragmentation", "context")


def render_memory(plan: MemoryPlan, to: Console, every_stage: bool = False) -> None:
    """Print memory, what dominates it, what is the most that fits, and the rules of thumb.

    Args:
        every_stage: print the phases of every stage of a pipeline, however many.
    """
    memory = plan.memory
    changes = changes_lines(plan.changes, _CHANGES, plan.scenario.training.mode != "train", to.width)
    to.print(Group(*described(plan.scenario, plan.gpu), Text(), memory_bar(memory, to.width), *host_line(memory),
                   memory_verdict(memory), *_peak(plan), *changes, Text()), crop=False)
    if len(plan.stages) > 1:
        to.print(fitted(_stages_table(plan, every_stage), to.width), Text())
    every = every_stage or len(plan.stages) <= FEW_STAGES
    for stage in plan.stages if every else [plan.fullest]:
        to.print(_title(stage, plan), _phases_table(stage.memory, to.width), Text())
    if not every:
        to.print(Text(f"the phases of the other {len(plan.stages) - 1} stages: --stages", style="dim"), Text())
    to.print(Group(*largest_lines(plan.largest), Text(),
                   Text(f"rules of thumb, per GPU, {plan.parameters / 1e9:.4g}B parameters", style="bold"),
                   fitted(_rules_table(plan), to.width, label=3),
                   *(Text.assemble(("! ", "bold yellow"), w) for w in plan.memory.warnings)))


def render_memory_sweep(plans: Sequence[MemoryPlan], skipped: Sequence[Mapping[str, Any]], axes: Sequence[str],
                        to: Console) -> None:
    """One row per point of a sweep."""
    if plans:
        table = _table(*(axis.rpartition(".")[2].replace("_", " ") for axis in axes), "allocated", "reserved", "device",
                       "free", "fits", "most of it", left=len(axes))
        for plan in plans:
            memory = plan.memory
            most = max(CATEGORIES, key=lambda name: memory.at_peak[name])
            table.add_row(*(written(plan.set[axis]) for axis in axes), size(memory.use.peak_allocated_bytes),
                          size(memory.reserved_bytes), size(memory.device_used_bytes), size(memory.headroom_bytes),
                          Text("yes", style="green") if memory.fits else Text("no", style="bold red"),
                          most.replace("_", " "))
        to.print(Text(plans[0].scenario.name, style="bold"), fitted(table, to.width, len(axes) + 5), crop=False)
    for point in skipped:
        sets = ", ".join(f"{k}={written(v)}" for k, v in point["set"].items())
        to.print(Text.assemble(("skipped ", "yellow"), f"{sets}: {point['reason']}"))


def _peak(plan: MemoryPlan) -> Iterator[Text]:
    """When the peak is, whose it is, and what dominates there."""
    memory, where, stage = plan.memory, plan.memory.use.where, plan.fullest
    of = f" on {stage.name} (rank {stage.rank} and {stage.ranks - 1:,} like it)" if len(plan.stages) > 1 else ""
    parts = sorted(((held, name.replace("_", " ")) for name, held in memory.at_peak.items() if held), reverse=True)
    shares = ", ".join(f"{name} {100 * held / memory.device_used_bytes:.0f}%" for held, name in parts[:3])
    if where is None:
        yield Text(f"the step allocates nothing beyond what it holds all the time{of}: {shares}")
        return
    operator = f", operator {where.operator}" if where.operator not in ("", where.layer) else ""
    step = f" ({where.section})" if len(where.section) < 40 else ""
    place = forward_of(where.section) or f"{where.phase} of {where.layer}{operator}{step}"
    yield Text(f"peak{of} in {place}: {shares}")


def _title(stage: StageMemory, plan: MemoryPlan) -> Text:
    if len(plan.stages) == 1:
        return Text("when and what", style="bold")
    mark = ", the fullest" if stage.memory is plan.memory else ""
    ends = f": {stage.layers[0]} to {stage.layers[-1]}" if stage.layers else ""
    return Text(f"{stage.name}{ends} ({stage.ranks:,} ranks{mark})", style="bold")


def _stages_table(plan: MemoryPlan, every_stage: bool) -> Table:
    """Categories at every stage's own peak, a column per stage; of many stages a row each."""
    if len(plan.stages) > _COLUMNS:
        return _stage_rows(plan, every_stage)
    memories = [stage.memory for stage in plan.stages]
    table = _table("GiB at the peak", *(stage.name.removeprefix("stage ") for stage in plan.stages), left=1)
    for name in CATEGORIES:
        if any(memory.at_peak[name] for memory in memories):
            table.add_row(name.replace("_", " "), *(_gib(memory.at_peak[name]) for memory in memories))
    for title, row in (("allocated", [m.use.peak_allocated_bytes for m in memories]),
                       ("reserved", [m.reserved_bytes for m in memories]),
                       ("device", [m.device_used_bytes for m in memories]),
                       ("free", [m.headroom_bytes for m in memories])):
        table.add_row(Text(title, style="bold"), *map(_gib, row))
    return table


def _stage_rows(plan: MemoryPlan, every_stage: bool) -> Table:
    """A row per stage; of very many only those at the ends and the fullest, unless all are asked for."""
    table = _table("stage", "allocated", "reserved", "device", "free", "peak in", "most of it", left=1)
    last = len(plan.stages) - 1
    few = every_stage or last < _ROWS
    before = -1
    for number, stage in enumerate(plan.stages):
        if not (few or min(number, last - number) < _ENDS or stage is plan.fullest):
            continue
        if number > before + 1:
            table.add_row("…")
        memory, where, before = stage.memory, stage.memory.use.where, number
        most = max(CATEGORIES, key=lambda name: memory.at_peak[name])
        table.add_row(stage.name.removeprefix("stage "), size(memory.use.peak_allocated_bytes),
                      size(memory.reserved_bytes), size(memory.device_used_bytes), size(memory.headroom_bytes),
                      where.phase if where is not None else "", most.replace("_", " "))
    return table


def _phases_table(memory: MemoryResult, width: int) -> Table:
    """Categories by phase and at the peak in GiB; below them what is allocated, reserved and on the device. A terminal
    too narrow for the phases has the peak alone."""
    phases, peak = memory.use.phases if width >= _PHASES_WIDTH else {}, memory.at_peak
    columns = [*(phases[name] for name in phases), peak]
    table = _table("GiB", *(_HEADS[name] for name in phases), "at the peak", left=1)
    for name in CATEGORIES:
        if name not in _NO_TENSORS and any(column[name] for column in columns):
            table.add_row(name.replace("_", " "), *(_gib(column[name]) for column in columns))
    table.add_row(Text("allocated", style="bold"), *(_gib(allocated_bytes(column)) for column in columns))
    blank = [""] * len(phases)
    table.add_row("fragmentation", *blank, _gib(peak["fragmentation"]))
    table.add_row(Text("reserved", style="bold"), *blank, _gib(memory.reserved_bytes))
    for title, held in _outside(memory):
        table.add_row(title, *blank, _gib(held))
    table.add_row(Text("device", style="bold"), *blank, _gib(memory.device_used_bytes))
    table.add_row("capacity", *blank, _gib(memory.capacity_bytes))
    table.add_row(Text("free", style="bold" if memory.fits else "bold red"), *blank, _gib(memory.headroom_bytes))
    return fitted(table, width)


def _outside(memory: MemoryResult) -> Iterator[tuple[str, int]]:
    """What the driver and the libraries hold beside tensors."""
    beside = memory.outside
    if beside is None:
        yield "CUDA context, NCCL", memory.at_peak["context"]
        return
    yield "CUDA context and kernels", beside.context_bytes
    if beside.nccl_bytes:
        yield "NCCL buffers", beside.nccl_bytes


def _rules_table(plan: MemoryPlan) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for head, justify in (("rule", "left"), ("says", "right"), ("predicted", "right"), ("why they differ", "left")):
        table.add_column(head, justify=justify, no_wrap=head != "why they differ")  # type: ignore[arg-type]
    for rule in plan.rules:
        times = f"{rule.off:.2f}×" if rule.off < 9.95 else f"{rule.off:,.0f}×"
        table.add_row(f"{rule.rule.bytes_per_parameter} B", size(rule.per_gpu_bytes), times, rule.why)
    return table


def _table(*heads: str, left: int) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right", no_wrap=number < left)
    return table


def _gib(size_bytes: int) -> str:
    """GiB with as many digits as a column can line up."""
    return "·" if size_bytes == 0 else f"{size_bytes / 2**30:.2f}"
