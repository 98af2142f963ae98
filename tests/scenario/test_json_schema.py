"""The JSON Schema for editors takes every scenario that is shipped, and refuses what no scenario may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sim.catalog import folder
from sim.scenario.json_schema import json_schema

SHIPPED = sorted([*folder("scenarios").glob("*.yaml"), *(folder("scenarios") / "claims").glob("*.yaml")])
GOOD: dict[str, Any] = {
    "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 2}, "model": {"preset": "llama-2-7b"},
    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 4096, "precision": "fsdp-bf16"}}


@pytest.fixture(scope="module")
def editor() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_scenarios_are_taken(path: Path, editor: jsonschema.Draft202012Validator) -> None:
    faults = editor.iter_errors(yaml.safe_load(path.read_text()))
    assert not [f"{fault.json_path}: {fault.message[:200]}" for fault in faults]


@pytest.mark.parametrize(("section", "field", "value"), [
    ("cluster", "topology", "dgx-a1000"), ("cluster", "nodes", 0), ("model", "preset", "llama-9"),
    ("model", "qk_norm", "both"), ("model", "hiden", 4096), ("training", "micro_batch", -1),
    ("training", "precision", "bf17"), ("training", "recompute", "some")])
def test_what_is_wrong_is_refused(section: str, field: str, value: Any,
                                  editor: jsonschema.Draft202012Validator) -> None:
    assert editor.is_valid(GOOD)
    assert not editor.is_valid({**GOOD, section: {**GOOD[section], field: value}})
