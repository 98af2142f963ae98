"""The list of a result's fields against what runs of all kinds write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from sim import api
from sim.catalog import table
from sim.cli import cli
from sim.scenario import resolve

SMALL = {"kind": "decoder", "layers": 4, "hidden": 512, "heads": 8, "vocab": 4096}
TRAIN = {"micro_batch": 1, "global_batch": 16, "sequence": 512, "precision": "pure-bf16"}
RUNS: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel": {"strategy": "fsdp"}, "budget": {"tokens": 1e9, "mtbf_per_gpu": "50000 h"}},
    "pipeline": {"parallel": {"pipeline": 2, "tensor": 2}, "software": {"framework": "megatron"}},
    "offload": {"parallel": {"strategy": "zero2", "offload": {"optimizer": "cpu"}},
                "software": {"framework": "deepspeed"},
                "training": {**TRAIN, "precision": "megatron-bf16"}},
    "trouble": {"parallel": {"strategy": "ddp"},
                "cluster": {"topology": "dgx-a100-80g", "slow_gpus": [{"gpu": 1, "clock": 0.8}]}},
    "short": {"model": {"preset": "llama-2-13b"}, "cluster": {"topology": "dgx-a100-40g"},
              "parallel": {"strategy": "ddp"}},
    "request": {"training": {"precision": "pure-bf16",
                             "mode": {"inference": {"prompt": 64, "generate": 9, "batch": 2}}}},
    "pair": {"model": {"preset": "t5-3b", "layers": 2, "decoder_layers": 2},
             "training": {"precision": "pure-bf16", "attention": "eager",
                          "mode": {"inference": {"prompt": 64, "generate": 9, "batch": 2}}}},
}


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value and path != "scenario":
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    elif value != {}:
        yield path


def pattern(field: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", field)
    return re.compile("".join(r".+?" if part.startswith("<") else re.escape(part) for part in parts) + r"\Z")


@pytest.fixture(scope="module")
def written() -> set[str]:
    found: set[str] = set()
    for name, own in RUNS.items():
        result = api.run(resolve({"name": name, "cluster": {"topology": "dgx-a100-80g"}, "model": SMALL,
                                  "training": TRAIN} | own))
        if name == "fsdp":
            result.ask_sensitivity()
        found |= set(leaves(result.to_json()))
    return found


def test_every_field_is_listed(written: set[str]) -> None:
    patterns = [pattern(row["field"]) for row in table("report/result_fields.yaml")["fields"]]
    assert sorted(path for path in written if not any(one.match(path) for one in patterns)) == []


def test_every_listed_field_is_written(written: set[str]) -> None:
    rows = [row["field"] for row in table("report/result_fields.yaml")["fields"]]
    unseen = [field for field in rows if not any(pattern(field).match(path) for path in written)]
    assert unseen == ["set"]  # of a sweep's points


def test_the_command_prints_them() -> None:
    found = CliRunner().invoke(cli, ["list", "result", "prompt"])
    assert found.exit_code == 0 and "inference.prompt_time_s" in found.output and "mfu" not in found.output
