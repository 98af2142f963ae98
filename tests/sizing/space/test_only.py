"""A search over some values of some axes, as the command line asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.cli import main
from sim.errors import UserError
from sim.scenario import resolve
from sim.sizing import Choice
from sim.sizing.space.base import alone
from sim.sizing.space.layouts import STRATEGIES, build_space
from sim.sizing.space.only import only
from sim.sizing.space.policies import POLICIES

SMALL = """
name: small
cluster: {topology: dgx-a100-80g}
model: {preset: gpt2}
training: {micro_batch: 1, global_batch: 16, sequence: 1024}
"""


def test_fields_become_axes_with_or_without_what_is_before_their_dot() -> None:
    found = only(Choice([8]), ["parallel.tensor=4,2", "micro_batch=1", "tensor= 8 ,2", "strategy=zero1,fsdp",
                               "training.recompute=full,none"])
    assert found.tensor == (4, 2, 8) and found.micro_batch == (1,) and found.strategies == ("zero1", "fsdp")
    assert found.recompute == ("full", "none") and not found.partial_recompute
    assert found.gpus == [8] and found.pipeline == ()
    assert only(Choice([8]), []) == Choice([8])


def test_the_first_blocks_are_asked_for_by_a_name_of_their_own() -> None:
    found = only(Choice([8]), ["recompute=none,blocks"])
    assert found.recompute == ("none",) and found.partial_recompute
    alone_blocks = only(Choice([8]), ["recompute=blocks"])
    base = alone(resolve({"name": "x", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
                          "training": {"micro_batch": 1, "global_batch": 16, "sequence": 1024}}, ""), None)
    kept = set(build_space([base], alone_blocks).columns["recompute"].tolist())
    assert kept and min(kept) >= len(POLICIES)


@pytest.mark.parametrize(("text", "said"), [
    ("parallel.tenser=1", "did you mean 'parallel.tensor'"), ("tensor", "is given no value"),
    ("tensor=", "given no value"), ("tensor=-2", "no number of 1"), ("tensor=two", "no number of 1"),
    ("strategy=fsdpp", "did you mean 'fsdp'"), ("schedule=fast", "it has 1f1b"),
    ("cluster.nodes=2", "the axes are parallel.tensor")])
def test_what_is_no_axis_or_no_value_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match="--only") as told:
        only(Choice([8]), [text])
    assert said in str(told.value)


def _json(tmp_path: Path, *options: str) -> dict[str, Any]:
    (tmp_path / "s.yaml").write_text(SMALL, encoding="utf-8")
    out = tmp_path / "found.json"
    with pytest.raises(SystemExit) as left:
        main(["size", str(tmp_path / "s.yaml"), "--gpus", "8", "--json", str(out), *options])
    assert left.value.code == 0
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_the_command_searches_what_is_left(tmp_path: Path) -> None:
    found = _json(tmp_path, "--only", "parallel.tensor=2", "--only", "pipeline=1", "--only", "strategy=ddp,zero1",
                  "--only", "recompute=none")
    assert found["best"] and all(
        (row["set"]["parallel.tensor"], row["set"]["parallel.pipeline"], row["set"]["training.recompute"]) == (
            2, 1, "none") and row["set"]["parallel.strategy"] in ("ddp", "zero1") for row in found["best"])
    assert found["own"] is None  # it is none of these


def test_values_that_leave_nothing_are_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text(SMALL, encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        main(["size", str(tmp_path / "s.yaml"), "--gpus", "8", "--only", "tensor=5"])
    assert left.value.code == 2
    assert "--only: no layout of this model that --only leaves" in capsys.readouterr().err


def test_the_only_strategy_is_tried_also_where_another_equals_it() -> None:
    base = alone(resolve({"name": "x", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
                          "training": {"micro_batch": 1, "global_batch": 16, "sequence": 1024}}, ""), None)
    rows = build_space([base], only(Choice([8]), ["strategy=zero3"])).columns["strategy"]
    assert {STRATEGIES[i] for i in np.unique(rows)} <= {"zero3", "none"} and len(rows)
