"""What the pictures of a step show: rows, exposed stretches, memory; and that their files are the same twice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sim
from sim.report.folder import rounded, write_overview, write_run
from sim.report.pictures import style as look
from sim.report.pictures.memory import memory_digest, memory_figure, memory_view
from sim.report.pictures.timeline import _panel, timeline_digest, timeline_figure
from sim.report.pictures.timeline_rows import BUBBLE, EXPOSED, Bars, Rows, rows_of
from sim.report.result import Result
from sim.scenario import resolve
from sim.work import COLLECTIVES

Make = Callable[..., Result]
MS = 1e-3


def test_rows_are_host_compute_and_the_streams_that_carry_anything(result_of: Make) -> None:
    rows = rows_of(result_of(2))
    assert rows.names == ["host", "compute", "communication"]
    assert len(rows.micro_steps) == 2
    compute = rows.bars[1]
    phases = {rows.keys[k] for k in compute.key.tolist()}
    assert {"forward", "backward", "optimizer", EXPOSED} <= phases
    moved = rows.bars[2].within(0.0, rows.step_time_s)
    assert sorted(rows.keys[k] for k in moved.key.tolist()) == ["all_gather"] * 4 + ["reduce_scatter"] * 2
    assert float((moved.end_s - moved.start_s).sum()) == pytest.approx(20 * MS)


@pytest.mark.parametrize("micro_steps", [1, 2, 12])
def test_exposed_stretches_are_the_breakdowns(result_of: Make, micro_steps: int) -> None:
    result = result_of(micro_steps)
    rows = rows_of(result)
    assert rows.exposed_s(0.0, rows.step_time_s) == pytest.approx(result.breakdown.exposed_s, abs=1e-12)
    assert float(np.diff(rows.late).sum()) == pytest.approx(result.breakdown.host, abs=1e-12)


@pytest.mark.parametrize("sets", [
    {}, {"parallel.sequence_parallel": False}, {"parallel.context": 2}, {"parallel.pipeline": 2},
    {"training.mode": {"inference": {"prompt": 64, "generate": 8, "batch": 1}}, "parallel.strategy": "none",
     "parallel.sequence_parallel": False, "training.precision": "pure-bf16", "software.framework": "pytorch"}])
def test_collectives_inside_chains_of_kernels_have_a_row_and_are_exposed(sets: dict[str, Any]) -> None:
    """Tensor parallelism's, also where kernels run beside them and where the host is late; sums are the breakdown's."""
    result = sim.run(resolve({
        "name": "cut", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-2-7b", "layers": 4},
        "training": {"micro_batch": 1, "micro_steps": 2, "sequence": 2048, "precision": "megatron-bf16"},
        "parallel": {"strategy": "zero1", "tensor": 2, "sequence_parallel": True, "overlap": False},
        "software": {"framework": "megatron", "year": 2025}}, "cut", sets))
    rows = rows_of(result)
    row = rows.bars[rows.names.index("tensor")].within(0.0, rows.step_time_s)
    total = sum(groups.get("tensor", 0.0) for groups in result.breakdown.communication_total.values())
    assert float((row.end_s - row.start_s).sum()) == pytest.approx(total, rel=0.01)
    assert rows.exposed_s(0.0, rows.step_time_s) == pytest.approx(result.breakdown.exposed_s, rel=1e-3)
    assert rows.exposed_s(0.0, rows.step_time_s) > 0.3 * total


@pytest.mark.parametrize("micro_steps", [1, 5])
def test_the_compute_row_covers_the_step_once(result_of: Make, micro_steps: int) -> None:
    rows = rows_of(result_of(micro_steps))
    bars = rows.bars[1].within(0.0, rows.step_time_s)
    order = np.argsort(bars.start_s)
    assert (bars.start_s[order][1:] >= bars.end_s[order][:-1] - 1e-12).all()
    assert float((bars.end_s - bars.start_s).sum()) == pytest.approx(rows.step_time_s)


def test_repeats_are_drawn_one_by_one(result_of: Make) -> None:
    skipped, written = (rows_of(result_of(12, skip)) for skip in (True, False))
    for some, all_of_them in zip(skipped.bars, written.bars, strict=True):
        assert np.allclose(np.sort(some.start_s), np.sort(all_of_them.start_s), atol=1e-12)


@pytest.fixture(scope="module")
def staged() -> Result:
    """Two stages of two ranks each, four micro-batches."""
    return sim.run(resolve({
        "name": "two stages", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 4},
        "model": {"kind": "decoder", "layers": 4, "hidden": 1024, "heads": 8, "vocab": 4096, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 1024, "precision": "megatron-bf16"},
        "parallel": {"strategy": "zero1", "pipeline": 2}, "software": {"framework": "megatron", "year": 2023}}))


def test_waiting_for_another_stage_is_no_exposed_communication(staged: Result) -> None:
    rows, parts = rows_of(staged), staged.breakdown
    assert parts.pipeline_bubble > 0.1 * staged.step_time_s
    assert float(np.diff(rows.bubbles).sum()) == pytest.approx(parts.pipeline_bubble, rel=1e-6)
    assert rows.exposed_s(0.0, rows.step_time_s) == pytest.approx(parts.exposed_s, rel=1e-6)
    compute = rows.bars[1].within(0.0, rows.step_time_s)
    drawn = compute.key == rows.keys.index(BUBBLE)
    assert float((compute.end_s - compute.start_s)[drawn].sum()) == pytest.approx(parts.pipeline_bubble, rel=1e-6)


def test_connections_to_stages_are_told_apart_and_micro_batches_counted(staged: Result) -> None:
    rows = rows_of(staged)
    assert len(set(rows.names)) == len(rows.names)
    assert set(rows.names[-2:]) in ({"recv, forward", "send, backward"}, {"send, forward", "recv, backward"})
    assert (rows.counted, rows.piece) == ("4 micro-batches", "stretch")
    assert timeline_digest(staged)["panels"][0]["title"] == "the whole step: 4 micro-batches"
    assert memory_digest(staged)["panels"][0]["title"] == "the whole step: 4 micro-batches"


def test_the_ribbons_below_memory_never_lie_on_each_other(staged: Result) -> None:
    view = memory_view(staged)
    for spans in (view.host, view.gpu):
        ordered = sorted(spans)
        assert all(one[1] <= other[0] + 1e-12 for one, other in itertools.pairwise(ordered))
        assert {phase for _, _, phase in ordered} == {0, 1, 2}


def test_narrow_neighbours_of_one_key_are_drawn_as_one() -> None:
    bars = Bars(np.array([0.0, 1.0, 2.0, 9.0]), np.array([0.9, 1.9, 2.9, 10.0]), np.array([0, 0, 1, 1]),
                np.array([5, 6, 7, 8]), np.array([1.0, 0.5, 1.0, 1.0]))
    merged = bars.merged(gap_s=0.2, narrow_s=2.0)
    assert merged.start_s.tolist() == [0.0, 2.0, 9.0]
    assert merged.end_s.tolist() == [1.9, 2.9, 10.0]
    assert merged.text.tolist() == [-1, 7, 8]
    assert merged.share.tolist() == pytest.approx([0.75, 1.0, 1.0])
    assert bars.merged(gap_s=0.2, narrow_s=0.5).text.tolist() == [5, 6, 7, 8]


def test_shares_of_stretches_are_those_of_the_bars_in_them() -> None:
    bars = Bars(np.array([6.0, 1.0, 3.5]), np.array([8.0, 3.0, 4.5]), np.zeros(3, dtype=int), np.zeros(3, dtype=int),
                np.array([1.0, 0.5, 1.0]))
    assert bars.shares(np.array([0.0, 2.0, 4.0, 6.0, 10.0])).tolist() == pytest.approx([0.25, 0.5, 0.25, 0.5])


def test_a_crowded_row_stacks_the_shares_of_its_kinds() -> None:
    """Once, few bars of one kind were widened and hid many of another, which were not."""
    from matplotlib.collections import FillBetweenPolyCollection

    count = 3000
    start = np.arange(count) / count
    kind = np.where(np.arange(count) % 10 == 0, 0, 1)  # 300 gathers, 2,700 exchanges
    length = np.where(kind == 0, 0.1, 0.5) / count
    none = Bars(*(np.zeros(0, dtype=t) for t in (float, float, int, int, float)))
    rows = Rows(["host", "compute", "expert"], [none, none, Bars(start, start + length, kind, np.full(count, -1),
                                                                 np.ones(count))],
                ["all_gather", "all_to_all"], [], *(np.zeros((0, 2)) for _ in range(4)), "", "micro-step", -1, 1.0)
    with look.style():
        made = look.figure(2.0)
        ax = made.add_axes((0.1, 0.1, 0.8, 0.8))
        assert _panel(ax, rows, (0.0, 1.0), "", None) == {"all_gather", "all_to_all"}
        drawn = [one for one in ax.collections if isinstance(one, FillBetweenPolyCollection)]
    heights = [2.4 - float(one.get_paths()[0].vertices[:, 1].min()) for one in drawn]
    assert heights == pytest.approx([0.8 * 0.1 * 0.1, 0.8 * (0.9 * 0.5 + 0.1 * 0.1)], rel=0.01)


def test_memory_view_reaches_the_results_peak(result_of: Make) -> None:
    result = result_of(3)
    view = memory_view(result)
    assert len(view.micro_steps) == 3
    digest = memory_digest(result)
    assert max(digest["highest_total_bytes"]) == result.memory.device_used_bytes == 2**30 + 2**31 + 2**28


def test_every_bar_and_category_has_a_colour() -> None:
    from sim.memory.ledger import CATEGORIES

    assert set(CATEGORIES) == set(look.MEMORY)
    assert set(COLLECTIVES) <= set(look.BARS)
    assert len(set(look.MEMORY.values())) == len(look.MEMORY)
    assert len(set(look.BARS.values())) == len(look.BARS)


def test_a_report_folder_holds_what_it_says_and_is_the_same_twice(result_of: Make, tmp_path: Path) -> None:
    result = result_of(2)
    result = replace(result, scenario=result.scenario.model_copy(update={"name": "by <hand>"}))
    first, second = (write_run(tmp_path / name, result, "text", {"a": 1}) for name in ("one", "two"))
    names = [path.name for path in first]
    assert names == ["report.txt", "result.json", "timeline.png", "memory.png", "memory.pickle", "pictures.json",
                     "index.html"]
    for left, right in zip(first, second, strict=True):
        assert left.read_bytes() == right.read_bytes()
    for name in ("timeline.png", "memory.png"):
        assert (tmp_path / "one" / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert b"matplotlib" not in (tmp_path / "one" / name).read_bytes()
    page = (tmp_path / "one" / "index.html").read_text()
    assert "by &lt;hand&gt;" in page
    assert "<hand>" not in page
    digest = json.loads((tmp_path / "one" / "pictures.json").read_text())
    assert digest["timeline.png"] == rounded(timeline_digest(result))


def test_figures_are_of_readme_width_and_use_no_window(result_of: Make) -> None:
    import sys

    with look.style():
        for made in (timeline_figure(result_of(2)), memory_figure(result_of(2))):
            assert made.get_size_inches()[0] == look.WIDTH
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("figure", [timeline_figure, memory_figure])
def test_panels_of_one_step_share_a_unit(result_of: Make, figure: Callable[[Result], Any]) -> None:
    """200 micro-steps take seconds and one of them milliseconds: both panels are in seconds."""
    with look.style():
        made = figure(result_of(200))
        units = [ax.get_title(loc="right") for ax in made.axes]
        assert units == ["s"] * len(units) and len(units) > 1
        made.canvas.draw()
        assert not any(ax.xaxis.get_offset_text().get_text() for ax in made.axes)
        (begin, end), (inside, behind) = (ax.get_xlim() for ax in made.axes[:2])
    assert begin <= inside < behind <= end and behind - inside < 0.5


def test_an_overview_links_every_report(tmp_path: Path) -> None:
    page = write_overview(tmp_path, [("A & B", "a"), ("C", "c")]).read_text()
    assert 'href="a/index.html">A &amp; B<' in page
    assert 'href="c/index.html"' in page


def test_the_close_look_at_a_pipeline_is_where_its_schedule_is_steady(staged: Result) -> None:
    """Not at its end, where most communication is: the middle, and a title that says what the panel shows."""
    digest = timeline_digest(staged)
    rows = rows_of(staged)
    assert rows.closest == len(rows.micro_steps) // 2
    for panel in digest["panels"][1:]:
        inside = rows.bars[1].within(panel["start_s"], panel["end_s"])
        shown = {rows.keys[k] for k in inside.key.tolist()}
        assert "turns into" not in panel["title"] or {"forward", "backward"} <= shown


def test_transfers_of_all_chunks_of_a_rank_share_rows() -> None:
    """Each chunk has streams of its own to the stages beside it: four rows, not four for every chunk."""
    result = sim.run(resolve({
        "name": "four chunks", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 4},
        "model": {"kind": "decoder", "layers": 8, "hidden": 1024, "heads": 8, "vocab": 4096, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 1024, "precision": "megatron-bf16"},
        "parallel": {"strategy": "zero1", "pipeline": 2, "virtual_stages": 4, "schedule": "interleaved"},
        "software": {"framework": "megatron", "year": 2023}}))
    rows = rows_of(result)
    assert len(set(rows.names)) == len(rows.names)
    ways = [name for name in rows.names if name.startswith(("recv", "send"))]
    assert sorted(ways) == ["recv, backward", "recv, forward", "send, backward", "send, forward"]
    drawn = sum(len(rows.bars[rows.names.index(name)].within(0.0, rows.step_time_s).key) for name in ways)
    assert drawn == result.scenario.micro_steps * 14  # each goes 7 hops forth and 7 back, of which a rank has one end


def test_a_request_is_called_so_and_its_pieces_tokens() -> None:
    """Slivers of waiting that nobody can tell from each other are neither drawn nor named."""
    result = sim.run(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 512, "precision": "pure-bf16",
                     "mode": {"inference": {"prompt": 64, "generate": 12, "batch": 1}}},
        "software": {"compile": True}}))
    titles = [panel["title"] for panel in timeline_digest(result)["panels"]]
    assert titles[:2] == ["the whole request: 12 tokens", "token 2 of 12"]
    assert memory_digest(result)["panels"][0]["title"] == "the whole request: 12 tokens"
    with look.style():
        said = [text.get_text() for text in timeline_figure(result).texts]
    assert any(text.startswith("one request of rank 0") for text in said)


def test_a_key_says_what_dashed_lines_and_the_black_bar_mean(result_of: Make, staged: Result) -> None:
    def said(result: Result) -> list[str]:
        with look.style():
            return [text.get_text() for legend in timeline_figure(result).legends for text in legend.get_texts()]

    below = "the part that the next panel shows"
    assert {"the next micro-step begins", below} <= set(said(result_of(2)))
    assert not any("begins" in text for text in said(result_of(1)))
    assert {"a stretch ends: passes that the schedule repeats together", below} <= set(said(staged))
