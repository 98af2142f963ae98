"""Where a peak is, and how many ranks are like the one shown."""

from __future__ import annotations

import io
from typing import Any

import pytest

from sim.api import plan_memory, run
from sim.report.pictures.memory import memory_figure
from sim.report.pictures.timeline import timeline_figure
from sim.report.terminal.memory import render_memory
from sim.report.terminal.render import as_text, console
from sim.report.words import forward_of, others
from sim.scenario import resolve

SERVING: dict[str, Any] = {
    "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": 2},
    "model": {"kind": "decoder", "layers": 2, "hidden": 256, "heads": 8, "vocab": 1024},
    "training": {"precision": "pure-bf16", "mode": {"inference": {"prompt": 512, "generate": 4, "batch": 2}}},
    "parallel": {"tensor": 2}}


def test_only_sections_of_a_request_are_forwards_of_it() -> None:
    assert [forward_of(name) for name in ("prompt", "token at 12 cached", "micro-step of 1, reduced")] == [
        "the prompt", "a token", ""]


@pytest.mark.parametrize(("alike", "said"), [(0, ""), (1, ", like 1 other"), (63, ", like 63 others")])
def test_one_other_is_no_others(alike: int, said: str) -> None:
    assert others(alike) == said


def test_the_peak_of_a_request_is_in_its_prompt_and_its_collectives_are_not_denied() -> None:
    result = run(resolve(SERVING))
    assert "reached in the prompt" in as_text(result)
    heading = timeline_figure(result).texts[1].get_text()
    assert "like 1 other:" in heading and "exposed communication" in heading and "no communication" not in heading
    text = io.StringIO()
    render_memory(plan_memory(resolve(SERVING)), console(text))
    assert "peak in the prompt: " in text.getvalue()


def test_the_legend_of_memory_adds_up_to_the_peak() -> None:
    """What the allocator holds beyond the tensors belongs to the peak, though no layer of the stack shows it."""
    result = run(resolve({**SERVING, "training": {"micro_batch": 1, "global_batch": 16, "sequence": 512}}))
    assert result.memory.at_peak["fragmentation"] > 0
    (legend,) = memory_figure(result).legends
    told = [text.get_text().rsplit(maxsplit=1) for text in legend.get_texts()]
    assert "fragmentation" in [name for name, _ in told]
    assert sum(float(value) for _, value in told) == pytest.approx(result.memory.device_used_bytes / 2**30, abs=0.05)
