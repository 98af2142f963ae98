"""`drystep size --csv`, `--parquet`, and a file of results that cannot grow."""

from __future__ import annotations

import csv
import importlib.util
import json
import shlex
import sqlite3
import sys
from pathlib import Path

import pytest

from sim.cli import main
from sim.sizing.search.store import Store

SMALL = """\
name: small
cluster: {topology: dgx-a100-80g, nodes: 1, gpus_per_node: 2}
model: {preset: gpt2}
training: {micro_batch: 1, global_batch: 4, sequence: 256}
parallel: {strategy: ddp}
"""


def leave(tmp_path: Path, *arguments: str) -> object:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    with pytest.raises(SystemExit) as left:
        main(["size", str(file), "--gpus", "2", "--top", "3", *arguments])
    return left.value.code


def test_csv_has_every_simulated_row_once(tmp_path: Path) -> None:
    table, found = tmp_path / "t.csv", tmp_path / "f.json"
    assert leave(tmp_path, "--csv", str(table), "--json", str(found), "--seconds", "0.3") == 0
    told = json.loads(found.read_text())
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == told["simulated"] and len({json.dumps(row) for row in rows}) == len(rows)
    fastest = min((row for row in rows if row["fits"] == "True"), key=lambda row: float(row["step_time_s"]))
    assert float(fastest["step_time_s"]) == told["best"][0]["step_time_s"]
    assert fastest["parallel.strategy"] == told["best"][0]["set"]["parallel.strategy"]
    assert not list(tmp_path.glob(".*part"))


@pytest.mark.parametrize(("arguments", "topology"), [((), ""), (("--cluster", "dgx-h100"), "dgx-h100")])
def test_the_command_that_runs_the_best_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                   arguments: tuple[str, ...], topology: str) -> None:
    found = tmp_path / "f.json"
    assert leave(tmp_path, "--set", "training.sequence=128", "--json", str(found), "--only", "strategy=ddp,fsdp",
                 *arguments) == 0
    told = capfd.readouterr().out.splitlines()
    command = shlex.split(told[told.index("run the best:") + 1])
    assert command[:2] == ["drystep", "run"] and "training.sequence=128" in command
    assert (f"cluster.topology={topology}" in command) == bool(topology)
    with pytest.raises(SystemExit) as left:
        main([*command[1:], "--json", "-"])
    again = json.loads(capfd.readouterr().out)
    assert left.value.code == 0
    assert again["step_time_s"] == json.loads(found.read_text())["best"][0]["step_time_s"]


def test_parquet_without_pyarrow_is_said_before_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert leave(tmp_path, "--parquet", str(tmp_path / "t.parquet")) == 2
    err = capfd.readouterr().err
    assert "drystep[parquet]" in err and "Traceback" not in err and not (tmp_path / "t.parquet").exists()


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_is_the_csv_with_types(tmp_path: Path) -> None:
    from pyarrow import parquet

    assert leave(tmp_path, "--parquet", str(tmp_path / "t.parquet"), "--csv", str(tmp_path / "t.csv"),
                 "--seconds", "0.3") == 0
    rows = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [r["step_time_s"] for r in rows] == [float(r["step_time_s"]) for r in csv.DictReader(file)]


def test_a_full_disk_is_said_and_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capfd: pytest.CaptureFixture[str]) -> None:
    out, kept = tmp_path / "runs.db", Store.add
    calls: list[int] = []

    def add(self: Store, outcomes: list[object]) -> None:
        calls.append(1)
        if len(calls) == 9 and self._file is not None:
            pages = self._file.execute("pragma page_count").fetchone()[0]
            self._file.execute(f"pragma max_page_count = {pages}")
        kept(self, outcomes)

    monkeypatch.setattr(Store, "add", add)
    assert leave(tmp_path, "--out", str(out)) == 2
    err = capfd.readouterr().err
    assert "disk is full" in err and "--resume" in err and "Traceback" not in err
    before = sqlite3.connect(out).execute("select count(*) from runs").fetchone()[0]
    assert before == len(calls) - 1 >= 8
    monkeypatch.undo()
    assert leave(tmp_path, "--out", str(out), "--resume", "--seconds", "0") == 0
    after = sqlite3.connect(out).execute("select count(*) from runs").fetchone()[0]
    assert after >= before


def test_a_table_that_cannot_be_written_is_wrong_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").mkdir()
    assert leave(tmp_path, "--csv", str(tmp_path / "taken")) == 2
    assert capfd.readouterr().err.startswith("--csv: ")
