"""`drystep diff` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import sim

sys.path.append(str(Path(__file__).resolve().parent.parent / "traces"))
from kineto_of import kineto_of

SCENARIO = """\
name: small
cluster: {topology: single-a100-80g-sxm}
model: {preset: gpt2}
training: {micro_batch: 2, global_batch: 4, sequence: 1024}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (tmp_path / "sweep.yaml").write_text(SCENARIO + "sweep: {training.micro_batch: [1, 2]}\n")
    (tmp_path / "t.json").write_text(json.dumps(kineto_of(sim.run(tmp_path / "s.yaml"))))
    return tmp_path


def test_a_trace_beside_a_prediction(folder: Path, drystep: Any) -> None:
    ran = drystep("diff", "t.json", "s.yaml")
    assert ran.code == 0 and ran.err == ""
    assert "where the gap is" in ran.out and "as long as measured" in ran.out
    slower = drystep("diff", "t.json", "s.yaml", "--set", "cluster.topology=single-v100-32g-sxm", "--json", "-").json
    assert slower["step_time_s"]["error"] > 0.5 and "V100" in " ".join(slower["notes"]).upper()


def test_products_go_where_calibrate_takes_them(folder: Path, drystep: Any) -> None:
    assert "wrote times.csv" in drystep("diff", "t.json", "s.yaml", "--products", "times.csv").err
    fitted = drystep("calibrate", "--gemm", "times.csv", "--gpu", "a100-80g-sxm", "--out", "card.yaml")
    assert fitted.code == 0, fitted.err
    assert (folder / "card.yaml").is_file()


@pytest.mark.parametrize(("arguments", "words"), [
    (["none.json", "s.yaml"], "no such file"), (["t.json", "none.yaml"], "no such file"),
    (["t.json", "sweep.yaml"], "a trace is of one job"), (["s.yaml", "s.yaml"], "is not JSON"),
    (["t.json", "s.yaml", "--products", "t.json"], "it is read"), (["t.json", "s.yaml", "--steps", "0"], "--steps"),
])
def test_wrong_input_is_told(arguments: list[str], words: str, folder: Path, drystep: Any) -> None:
    ran = drystep("diff", *arguments)
    assert ran.code == 2 and words in ran.err
