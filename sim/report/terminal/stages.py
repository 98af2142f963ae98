"""The stages of a pipeline in the terminal report: who is busy, who waits, which one is critical. Knows rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from sim.report.numbers.stages import StageUse, critical
from sim.report.result import Result
from sim.report.terminal.narrow import fitted
from sim.report.units import seconds, size

#: Of more stages only the first, the last, the critical and the fullest are listed.
_MOST, _ENDS = 16, 4
#: Stages whose work differs by less than this share are equally slow.
_ALIKE = 0.002
_HEADS = ("stage", "blocks", "busy", "bubble", "transfers", "collectives", "host", "allocated")
#: Of terminals narrower than so many columns.
_SHORT, _WIDE = ("#", "blk", "busy", "bub.", "sent", "coll.", "cpu", "alloc."), 72


def stage_lines(result: Result, width: int = 100) -> list[Any]:
    """A table of stages and the critical one by name; nothing without a pipeline."""
    stages = result.stages
    if not stages:
        return []
    step = result.step_time_s
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(_HEADS if width >= _WIDE else _SHORT):
        table.add_column(head, justify="left" if number == 0 else "right", no_wrap=True)
    slowest, shown = critical(stages), _shown(stages)
    for before, stage in zip([None, *shown[:-1]], shown, strict=True):
        if before is not None and stage.stage > before.stage + 1:
            table.add_row("…")
        style = "bold" if stage is slowest else ""
        waits = (stage.bubble_s, stage.transfers_s, stage.collectives_s, stage.host_s)
        table.add_row(str(stage.stage), str(stage.blocks), _share(stage.busy_s, step),
                      *(_share(s, step) for s in waits), size(stage.peak_allocated_bytes), style=style)
    return [Text(), Text("stages, share of the step", style="bold"), fitted(table, width),
            _verdict(stages, slowest)]


def _verdict(stages: Sequence[StageUse], slowest: StageUse) -> Text:
    """Which stage holds the others up, and by how much."""
    works = sorted(stage.busy_s for stage in stages)
    middle = works[len(works) // 2]
    alike = sum(1 for work in works if work > (1 - _ALIKE) * works[-1])
    if alike > len(stages) // 2:
        return Text(f"the stages are even: {alike} of {len(stages)} compute for {seconds(works[-1])}")
    return Text.assemble(("critical: ", "bold"), f"stage {slowest.stage} (rank {slowest.rank}) computes for "
                         f"{seconds(works[-1])}, {seconds(works[-1] - middle)} more than the median stage")


def _shown(stages: Sequence[StageUse]) -> list[StageUse]:
    if len(stages) <= _MOST:
        return list(stages)
    fullest = max(stages, key=lambda s: s.peak_allocated_bytes)
    chosen = [*stages[:_ENDS], critical(stages), fullest, *stages[-_ENDS:]]
    return sorted({stage.stage: stage for stage in chosen}.values(), key=lambda s: s.stage)


def _share(value: float, step: float) -> str:
    return "·" if value < 0.0005 * step else f"{100 * value / step:.1f}%"
