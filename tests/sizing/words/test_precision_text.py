"""What a search over precisions prints, and the command that runs its best."""

from __future__ import annotations

import csv
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sim
from sim.api import load
from sim.cli import main
from sim.report.units import seconds
from sim.sizing import Choice, Sizing, Wish, size
from sim.sizing.words.precisions import lines as precision_lines
from sim.sizing.words.rerun import command
from sim.sizing.words.size import lines

FILE = """\
name: small
cluster: {topology: dgx-h100, nodes: 1}
model: {preset: gpt2, layers: 4}
training: {micro_batch: 1, global_batch: 16, sequence: 512, precision: fsdp-bf16}
software: {framework: pytorch, year: 2024}
"""
AXES = {"tensor": [1], "context": [1], "pipeline": [1], "micro_batch": [1, 2], "recompute": ["none"],
        "strategies": ["fsdp", "ddp"], "partial_recompute": False}
CHOICE = Choice([8], **AXES, precision=["pure-bf16", "fp32"])  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.yaml").write_text(FILE, encoding="utf-8")
    return tmp_path / "a.yaml"


@pytest.mark.parametrize("own", ["fsdp-bf16", "{compute: bf16, parameters: fp32, master: none, gradients: fp32, "
                                 "optimizer: fp32, gather: bf16, reduce: fp32}", None])
def test_the_command_reproduces_a_row_of_any_precision(path: Path, own: str | None) -> None:
    path.write_text(FILE.replace(", precision: fsdp-bf16", "" if own is None else f", precision: {own}"), "utf-8")
    loaded = load(path)
    found = size(loaded, CHOICE, top=30)
    seen = set()
    for row in found.rows:
        seen.add(name := str(row["set"]["training.precision"]))
        target = sim.scenario.resolve(loaded.scenario.given.data, "", {  # type: ignore[union-attr]
            **row["set"], "training.global_batch": 16})
        text = command(str(path), [], target, row["set"], None)
        assert text is not None, row["set"]
        sets = shlex.split(text)[4::2]
        again = sim.run(load(path, sets).scenario)
        assert again.step_time_s == pytest.approx(row["step_time_s"], rel=1e-12), name
        assert again.memory.device_used_bytes == row["device_used_bytes"]
    assert len(seen) == 3


def test_the_printed_command_runs_the_best(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, table = path.with_name("f.json"), path.with_name("t.csv")
    only = [part for one in ("strategy=fsdp,ddp", "tensor=1", "pipeline=1", "context=1", "recompute=none")
            for part in ("--only", one)]
    with pytest.raises(SystemExit) as left:
        main(["size", str(path), "--gpus", "8", "--precision", "pure-bf16, fp32", *only, "--json", str(out), "--csv",
              str(table)])
    told = capfd.readouterr().out.splitlines()
    assert left.value.code == 0
    words = shlex.split(told[told.index("run the best:") + 1])
    found = json.loads(out.read_text())
    best = found["best"][0]
    assert best["set"]["training.precision"] == "pure-bf16" and "training.precision=pure-bf16" in words
    with pytest.raises(SystemExit):
        main([*words[1:], "--json", "-"])
    assert json.loads(capfd.readouterr().out)["step_time_s"] == best["step_time_s"]
    assert [one["precision"] for one in found["precisions"]] == ["fsdp-bf16", "pure-bf16", "fp32"]
    assert found["untried"] == []
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["training.precision"] for row in rows} == {"fsdp-bf16", "pure-bf16", "fp32"}
    assert len(rows) == found["simulated"]


def _block(found: Sizing) -> list[str]:
    said = "\n".join(lines(found)).splitlines()
    start = next(i for i, line in enumerate(said) if line.startswith("by precision"))
    return said[start:start + len(found.precisions) + 3]


def test_the_precisions_stand_side_by_side(path: Path) -> None:
    found = size(load(path), CHOICE, top=3)
    assert found.own is not None and found.own["set"]["training.precision"] == "fsdp-bf16"
    head, names, *rows, warning = _block(found)
    assert "change against fsdp-bf16, the scenario's own" in head and warning.startswith("! a precision changes")
    assert names.split()[:4] == ["precision", "step", "change", "memory"]
    assert [row.split()[0] for row in rows] == ["pure-bf16", "fsdp-bf16", "fp32"]  # the best first
    steps = {one["precision"]: one["best"]["step_time_s"] for one in found.precisions}
    for row, name in zip(rows, ("pure-bf16", "fsdp-bf16", "fp32"), strict=True):
        change = f"{100 * (steps[name] / steps['fsdp-bf16'] - 1):+.1f}%"
        assert (change in row) == (name != "fsdp-bf16") and "not proven" not in row
    assert rows[0].endswith("the best")
    said = "\n".join(lines(found)).splitlines()
    at = said.index(next(line for line in said if line.startswith("best by time")))
    assert said[at + 1].split()[-3:] == ["cluster", "precision", "layout"]
    assert said[at + 2].split()[said[at + 1].split().index("precision") + 2] == "pure-bf16"  # units are words
    assert not any("precision=" in line for line in said[at:at + 5])
    alone = "\n".join(lines(size(load(path), replace(CHOICE, precision=[]), top=3)))
    assert "by precision" not in alone and "precision  layout" not in alone


def test_what_does_not_fit_or_was_not_found_is_said(path: Path) -> None:
    found = size(load(path), CHOICE, top=1)
    best, other, third = sorted(found.precisions, key=lambda one: float(one["best"]["step_time_s"]))
    alike = {"step_time_s": None, "fits": False, "device_used_bytes": 90 * 2**30, "outcome": "ok", "reason": ""}
    found.precisions = [best, {**other, "with_the_best_layout": alike, "proven": False, "best": {
        **other["best"], "set": {**other["best"]["set"], "parallel.sharding_factor": 4}}},
        {**third, "best": None, "with_the_best_layout": alike}]
    said = list(precision_lines(found))
    assert "its layout in pure-bf16" in said[1]
    back = other["its_layout_in_the_best_precision"]
    assert f"{seconds(back['step_time_s'])}, {back['device_used_bytes'] / 2**30:.1f} GiB" in said[3]
    assert "does not fit (90.0 GiB)" in said[3] and said[3].endswith("(not proven)")
    assert "–" in said[4] and said[4].endswith("no layout does what is asked")
    found.precisions[2] = {**found.precisions[2], "proven": False,
                           "with_the_best_layout": {**alike, "outcome": "refused"}}
    said = list(precision_lines(found))
    assert said[4].endswith("none was found in time") and "is refused" in said[4]
    found.precisions = [best, *({**one, "best": None} for one in (other, third))]
    assert "change against" not in next(precision_lines(found))  # there is but one
    found.precisions = [{**one, "best": None} for one in found.precisions]
    assert not list(precision_lines(found))  # that nothing does what is asked is said anyway


@pytest.mark.parametrize(("wish", "head"), [(Wish("cost"), "GPU-hours"), (Wish("energy"), "kWh"), (Wish("gpus"), "")])
def test_other_objectives_have_their_figure(path: Path, wish: Wish, head: str) -> None:
    found = size(load(path), replace(CHOICE, gpus=[4, 8]), wish, top=2)
    _, names, *rows, _ = _block(found)
    assert (head or "change") in names and len(rows) == 3
    column = {"cost": "cost", "energy": "energy_kwh", "gpus": "step_time_s"}[wish.objective]
    of = {one["precision"]: one["best"] for one in found.precisions}
    change = 100 * (of["pure-bf16"][column] / of["fsdp-bf16"][column] - 1)
    assert f"{change:+.1f}%" in next(row for row in rows if row.split()[0] == "pure-bf16")


def test_what_a_cluster_has_not_is_said_before_all(path: Path) -> None:
    found = size(load(path), replace(CHOICE, precision=["fp8", "mixed-fp16", "megatron-fp16"]),
                 clusters=["p4d", "dgx-h100"], top=2)
    first, second, *_ = lines(found)
    assert first == "not tried: precision fp8 on p4d: a100-40g-sxm has no tensor cores for fp8"
    assert second == "not tried: precision megatron-fp16: has the dtypes of mixed-fp16"
    assert found.to_json()["untried"][0]["cluster"] == "p4d"
    told: dict[str, Any] = {one["precision"]: one["best"]["cluster"] for one in found.precisions}
    assert told["fp8"] == "dgx-h100"


def test_a_precision_that_was_tried_is_no_hint(path: Path) -> None:
    path.write_text(FILE.replace("fsdp-bf16", "amp-bf16"), encoding="utf-8")
    fsdp = replace(CHOICE, strategies=["fsdp"])
    assert any("--precision fsdp-bf16" in hint for hint in size(load(path), replace(fsdp, precision=[])).hints)
    assert not size(load(path), replace(fsdp, precision=["fsdp-bf16"])).hints
    slower = size(load(path), replace(fsdp, precision=["fp32"]))  # the best is autocast's
    assert any("--precision fsdp-bf16" in hint for hint in slower.hints)
