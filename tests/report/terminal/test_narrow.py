"""On narrow terminals numbers and commands stay whole."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console, Group
from rich.table import Table

import sim
from sim.report.advice.trials import Change
from sim.report.terminal.changes import changes_lines
from sim.report.terminal.memory import render_memory
from sim.report.terminal.narrow import fitted
from sim.report.terminal.render import as_text
from sim.scenario import resolve

STAGED = {
    "name": "t", "cluster": {"topology": "dgx-h100"},
    "model": {"kind": "decoder", "layers": 8, "hidden": 1024, "heads": 16, "vocab": 32000},
    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 1024, "precision": "megatron-bf16"},
    "parallel": {"strategy": "zero1", "tensor": 2, "pipeline": 2, "sequence_parallel": True},
    "software": {"framework": "megatron", "year": 2025}}


@pytest.fixture(scope="module")
def staged() -> sim.Result:
    return sim.run(resolve(STAGED))


def figures(text: str) -> list[str]:
    """Figures of the breakdown with their units, and those of the table of stages."""
    part = text[text.index("where the step goes"):text.index("bound by")]
    return re.findall(r"[\d.,]+ (?:ms|s|µs) +[\d.]+%", re.sub(r" +(?=[\d.]+%)", " ", part))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_figure_of_a_report_is_cut(staged: sim.Result, width: int) -> None:
    text, wide = as_text(staged, width), as_text(staged, 200)
    assert figures(text) == figures(wide)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    narrow, whole = ([line.split() for line in one[one.index("stages, share"):].splitlines()
                      if line[:2] in ("0 ", "1 ")] for one in (text, wide))
    assert len(narrow) == 2 and narrow == whole


@pytest.mark.parametrize("width", [40, 50, 60])
def test_no_figure_of_a_plan_of_memory_is_cut(width: int) -> None:
    buffer = io.StringIO()
    render_memory(sim.plan_memory(Path("scenarios/llama2-7b-fsdp.yaml")), Console(file=buffer, width=width))
    assert "…" not in buffer.getvalue()
    assert max(map(len, buffer.getvalue().splitlines())) <= width


def test_a_command_to_copy_is_never_broken() -> None:
    sets = {"training.recompute": {"layers": 31}, "parallel.offload.optimizer": "paged"}
    buffer = io.StringIO()
    lines = changes_lines([Change(sets, "much", True, 1, 8, 1.0, 1.0, 1.0)], width=30)
    Console(file=buffer, width=30).print(Group(*lines), crop=False)
    options = ("--set 'training.recompute={layers: 31}'", "--set parallel.offload.optimizer=paged")
    assert "".join(f"    {option}\n" for option in options) in buffer.getvalue()


def test_labels_give_way_before_numbers() -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("what it is of", "seconds of the step", "share"):
        table.add_column(head)
    table.add_row("matrix products of experts", "12345.6789 s", "57.6%")
    buffer = io.StringIO()
    Console(file=buffer, width=32).print(fitted(table, 32))
    assert "12345.6789 s" in buffer.getvalue() and "57.6%" in buffer.getvalue() and "…" not in buffer.getvalue()
