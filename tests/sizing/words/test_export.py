"""Tables of simulated rows whose fields are not all the same."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sim.scenario import resolve
from sim.sizing import Choice, size
from sim.sizing.words.export import write_csv, write_parquet

#: Stages of FSDP say what becomes of gathered parameters, other rows do not; a mixture recomputes modules by name.
ROWS: list[dict[str, Any]] = [
    {"gpus": 8, "set": {"parallel.strategy": "ddp", "training.recompute": {"modules": ["layernorm", "moe_act"]}}},
    {"gpus": 8, "set": {"parallel.strategy": "fsdp", "training.recompute": {"layers": 3},
                        "parallel.reshard_after_forward": False,
                        "training.precision": {"name": "custom", "compute": "fp8", "parameters": "fp32"}}}]
FLAT = [("ddp", "layernorm+moe_act", None, None), ("fsdp", "layers:3", False, "custom")]
FIELDS = ("parallel.strategy", "training.recompute", "parallel.reshard_after_forward", "training.precision")


def test_a_column_that_some_rows_have_is_a_column_of_all(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ROWS)
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [tuple(row[name] for name in FIELDS) for row in rows] == [
        tuple("" if value is None else str(value) for value in row) for row in FLAT]


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_too(tmp_path: Path) -> None:
    from pyarrow import parquet

    write_parquet(tmp_path / "t.parquet", ROWS)
    rows = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [tuple(row[name] for name in FIELDS) for row in rows] == FLAT


def test_a_search_with_stages_of_fsdp_has_a_table(tmp_path: Path) -> None:
    found = size(resolve({"name": "x", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2", "layers": 4,
                          "tied_embeddings": False},
                          "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128}}, ""),
                 Choice([8], strategies=["fsdp"], tensor=[1], context=[1], micro_batch=[1], recompute=["none"],
                        partial_recompute=False), top=20)
    assert len({len(row["set"]) for row in found.rows}) > 1
    write_csv(tmp_path / "t.csv", found.rows)
    with (tmp_path / "t.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(found.rows)
