"""Tables for notebooks and pictures on axes; where communication starts to bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

import sim
from sim.api import Sweep
from sim.report.pictures.axes import terms_of
from sim.report.scaling import scaling
from sim.scenario.load import Loaded, load_document
from sim.scenario.text.document import Document

PLAIN: dict[str, Any] = {
    "name": "tables", "cluster": {"topology": "p4d", "nodes": 1}, "model": {"preset": "gpt2"},
    "training": {"micro_batch": 2, "micro_steps": 1, "sequence": 512}, "parallel": {"strategy": "ddp"}}


def loaded(**more: Any) -> Loaded:
    return load_document(Document({**PLAIN, **more}, {}, "tables", Path(".")))


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return sim.run_sweep(loaded(sweep={"cluster.nodes": [1, 2, 4], "training.micro_batch": [1, 4]}))


def test_a_sweep_is_a_table_of_its_points(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    rows = sweep.table()
    assert [(r["cluster.nodes"], r["training.micro_batch"]) for r in rows] == [(p.set["cluster.nodes"],
            p.set["training.micro_batch"]) for p in sweep.points]
    assert rows[3]["step_time_s"] == sweep.points[3].step_time_s and rows[3]["fits"] is True
    [row] = sim.run(loaded()).table()
    parts = sum(row[f"{name}_s"] for name in ("gemm", "attention", "memory_bound", "optimizer"))
    whole = parts + row["exposed_communication_s"] + row["pipeline_bubble_s"] + row["host_s"] + row["offload_s"]
    assert whole == pytest.approx(row["step_time_s"])


def test_pandas_gets_the_rows_where_it_is_installed(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("frame", len(rows))))
    assert sweep.table() == ("frame", 6)


def test_efficiency_and_where_communication_bounds(sweep: Sweep) -> None:
    lines = scaling(sweep.points, sweep.axes)
    assert [(line.axis, line.held) for line in lines] == [("cluster.nodes", {"training.micro_batch": 1}),
                                                          ("cluster.nodes", {"training.micro_batch": 4})]
    for line in lines:
        assert line.values == (1, 2, 4) and line.efficiency[0] == 1.0
        bounded = [bound == "communication" for bound in line.bound]
        if line.communication_from is None:
            assert not bounded[-1]
        else:
            at = line.values.index(line.communication_from)
            assert all(bounded[at:]) and not (at and bounded[at - 1])
    assert "scaling" in sweep.summary()


def test_a_sweep_over_words_has_no_scaling() -> None:
    found = sim.run_sweep(loaded(sweep={"training.recompute": ["none", "full"]}))
    assert found.scaling() == []


def test_every_picture_is_drawn_on_the_axes_given(sweep: Sweep) -> None:
    results = [sim.run(loaded()), sim.run(loaded(parallel={"strategy": "fsdp"}))]
    grid = Figure().subplots(1, 5)
    drawn = [sim.plot_breakdown(results, ax=grid[0]), sim.plot_memory(results[0], ax=grid[1]),
             sim.plot_sweep(sweep, "mfu", ax=grid[2]), sim.plot_scaling(sweep, ax=grid[3]),
             sim.plot_comparison(sim.compare(results), ax=grid[4])]
    assert drawn == list(grid)
    widths = sum(bar.get_width() for bar in grid[0].patches)
    shown = sum(sum(terms_of(r).values()) for r in results)
    assert widths == pytest.approx(shown * (1 if max(r.step_time_s for r in results) >= 2 else 1e3))
    heights = grid[3].lines[0].get_ydata()
    assert heights[0] == 100


def test_nothing_that_varies_is_no_picture() -> None:
    with pytest.raises(ValueError, match="nothing varies"):
        sim.plot_sweep(sim.run_sweep(loaded()))


def test_without_axes_a_figure_is_made() -> None:
    """In a process of its own: pyplot, which a notebook needs, must not be loaded by anything else."""
    code = ("import matplotlib; matplotlib.use('agg'); import sim; from sim.scenario.load import resolve\n"
            f"ax = sim.plot_memory(sim.run(resolve({ {**PLAIN, 'name': 'own'}!r})))\n"
            "assert ax.get_xlabel() == 'GiB' and ax.figure.get_size_inches()[0] == 8.0")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])


def test_one_run_of_a_file_that_sweeps_warns_that_it_is_one_point(tmp_path: Path) -> None:
    file = tmp_path / "swept.yaml"
    file.write_text("name: swept\ncluster: {topology: p4d}\nmodel: {preset: gpt2}\n"
                    "training: {micro_batch: 1, micro_steps: 1, sequence: 128}\n"
                    "sweep: {training.micro_batch: [1, 2]}\n")
    assert any("'drystep run' (in Python run_sweep) predicts them all" in warning for warning in sim.run(file).warnings)
    assert not any("run_sweep" in warning for point in sim.run_sweep(file).points for warning in point.warnings)


def test_what_a_notebook_shows_of_a_result_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("name: small\ncluster: {topology: dgx-h100}\nmodel: {preset: gpt2}\n"
                    "training: {micro_batch: 1, micro_steps: 1, sequence: 1024}\nparallel: {strategy: ddp}\n"
                    "sweep: {cluster.gpus_per_node: [1, 2]}\n")
    sweep = sim.run_sweep(file)
    assert repr(sweep) == "<Sweep over cluster.gpus_per_node: 2 points>"
    assert repr(sweep.points[1]).startswith("<Result 'small': ")
    assert "on 2 × h100-80g-sxm, MFU " in repr(sweep.points[1])
    assert repr(sim.plan_memory(file)).startswith("<MemoryPlan 'small' on h100-80g-sxm: ")
    assert all(len(repr(one)) < 120 for one in (sweep, *sweep.points))


def test_a_wrong_scenario_is_caught_by_name(tmp_path: Path) -> None:
    with pytest.raises(sim.UserError, match="no such file"):
        sim.run(tmp_path / "none.yaml")


def test_a_mapping_is_a_scenario_too_and_what_is_neither_is_refused(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "name": "small", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 1024}, "parallel": {"strategy": "ddp"}}
    result = sim.run(data)
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(data))
    assert result.step_time_s == sim.run(file).step_time_s
    assert len(sim.run_sweep({**data, "sweep": {"cluster.gpus_per_node": [1, 2]}}).points) == 2
    assert sim.plan_memory(data).memory.fits
    assert sim.load(data, ["training.micro_batch=2"]).scenario.training.micro_batch == 2
    assert data["training"]["micro_batch"] == 1
    assert sim.compare(result).names == ["small"]
    with pytest.raises(sim.UserError, match="there is no topology named"):
        sim.run({**data, "cluster": {"topology": "dgx-h1000"}})
    for wrong in (None, 3, b"small.yaml"):
        with pytest.raises(sim.UserError, match="the path of a file, or a mapping"):
            sim.run(wrong)  # type: ignore[arg-type]
    with pytest.raises(sim.UserError, match="nope: no such case file"):
        sim.validate("nope")
