"""`drystep memory`: text, JSON, sweeps, snapshots, exit codes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

SCENARIO = """\
name: small
cluster: {topology: dgx-a100-80g, nodes: 1}
model: {preset: gpt2}
training: {micro_batch: 1, global_batch: 64, sequence: 1024, precision: fsdp-bf16}
parallel: {strategy: fsdp}
"""
SWEEP = SCENARIO + "sweep: {training.micro_batch: [1, 4, 64], training.recompute: [none, full]}\n"


@pytest.fixture
def memory(tmp_path: Path, drystep: Any) -> Any:
    (tmp_path / "small.yaml").write_text(SCENARIO)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return lambda *arguments: drystep("memory", *arguments)


def test_text_says_phases_largest_sizes_and_rules(memory: Any) -> None:
    code, out, err = memory("small.yaml")
    assert (code, err) == (0, "")
    for words in ("fragmentation", "reserved", "device", "largest micro-batch", "16 B"):
        assert words in out


def test_json_is_nothing_but_json_and_set_goes_on_top(memory: Any) -> None:
    code, out, _ = memory("small.yaml", "--json", "-", "--set", "training.recompute=full")
    found = json.loads(out)
    assert code == 0
    assert found["scenario"]["training"]["recompute"] == "full"
    assert found["memory"]["fits"] is True
    assert {"stages", "rules_of_thumb", "largest", "changes", "parameters"} <= found.keys()


def test_out_of_memory_is_a_verdict(memory: Any) -> None:
    code, out, _ = memory("small.yaml", "--set", "training.micro_batch=256", "--set", "training.global_batch=2048")
    assert code == 0
    assert "does not fit" in out
    assert "it would fit with" in out
    assert "step " in out


def test_several_scenarios_come_one_after_another(memory: Any) -> None:
    code, out, _ = memory("small.yaml", "small.yaml", "--json", "two.json")
    assert code == 0
    assert out.count("rules of thumb") == 2
    assert len(json.loads(Path("two.json").read_text())) == 2


def test_a_sweep_is_a_table(memory: Any) -> None:
    code, out, _ = memory("sweep.yaml", "--json", "s.json")
    assert code == 0
    assert len([line for line in out.splitlines() if line.split()[0] in ("1", "4")]) == 4
    found = json.loads(Path("s.json").read_text())
    assert found["axes"] == {"training.micro_batch": [1, 4, 64], "training.recompute": ["none", "full"]}
    assert len(found["points"]) + len(found["skipped"]) == 6
    assert found["skipped"]
    assert "skipped" in out


def test_the_snapshot_is_written(memory: Any) -> None:
    assert memory("small.yaml", "--snapshot", "m.pickle")[0] == 0
    found = pickle.loads(Path("m.pickle").read_bytes())
    assert found["device_traces"][0][0]["action"] == "segment_alloc"


@pytest.mark.parametrize("arguments", [
    ["missing.yaml"], [], ["small.yaml", "--set", "training.micro_batch"], ["small.yaml", "--json", "no/such/r.json"],
    ["small.yaml", "--snapshot", "no/such/m.pickle"], ["small.yaml", "small.yaml", "--snapshot", "m.pickle"],
    ["sweep.yaml", "--snapshot", "m.pickle"], ["small.yaml", "--no-such"], ["small.yaml", "--snapshot", "-"],
])
def test_wrong_input_is_exit_code_2(memory: Any, arguments: list[str]) -> None:
    code, out, err = memory(*arguments)
    assert code == 2
    assert err.strip()
    assert out == ""
