"""`drystep import` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import sim

FILES = Path(__file__).resolve().parent.parent / "imports" / "files"
ZERO = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2}, "mystery": 1}
GPT2 = ("--set", "model.preset=gpt2", "--set", "training.sequence=1024")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO))
    (tmp_path / "bad.json").write_text('{"zero_optimization": {"stage": 7}, "train_batch_size": 8}')
    return tmp_path


def test_a_scenario_is_written_and_runs(folder: Path, drystep: Any) -> None:
    ran = drystep("import", "deepspeed", "ds.json", "--cluster", "dgx-a100-80g", "--nodes", "2", *GPT2, "--out",
                  "s.yaml")
    assert ran.code == 0, ran.err
    assert "1 not known here, so not read\n  ds.json: mystery" in ran.out and "wrote s.yaml" in ran.err
    scenario = sim.load(folder / "s.yaml").scenario
    assert (scenario.parallel.strategy, scenario.training.global_batch, scenario.gpus) == ("zero2", 128, 16)
    assert drystep("run", "s.yaml").code == 0


def test_without_out_the_scenario_is_all_of_standard_output(folder: Path, drystep: Any) -> None:
    ran = drystep("import", "deepspeed", "ds.json", "--cluster", "dgx-a100-80g", *GPT2)
    assert yaml.safe_load(ran.out)["parallel"]["strategy"] == "zero2" and "taken" in ran.err
    data = drystep("import", "deepspeed", "ds.json", "--cluster", "dgx-a100-80g", *GPT2, "--json", "-").json
    assert data["scenario"]["model"] == {"preset": "gpt2"} and data["notes"]


@pytest.mark.parametrize(("kind", "file", "cluster"), [
    ("megatron", "train_gpt3_175b_distributed.sh", "dgx-a100-80g"), ("torchtitan", "llama3_8b.toml", "dgx-h100"),
])
def test_scripts_and_toml_are_taken(kind: str, file: str, cluster: str, folder: Path, drystep: Any) -> None:
    ran = drystep("import", kind, str(FILES / file), "--cluster", cluster, "--nodes", "16", "--out", "s.yaml")
    assert ran.code == 0, ran.err
    assert sim.load(folder / "s.yaml").scenario.cluster.nodes == 16


@pytest.mark.parametrize(("kind", "file", "cluster"), [
    ("axolotl", "axolotl_llama_8b_hsdp_tp.yaml", "dgx-h100"),
    ("llamafactory", "llamafactory_qwen3_qlora.yaml", "single-a100-80g-sxm"),
    ("torchtune", "torchtune_llama3_1_70b_lora.yaml", "dgx-a100-80g"),
    ("llm-foundry", "foundry_mpt_7b.yaml", "hgx-h100-3200"), ("nemo", "nemo_gpt_5b.yaml", "dgx-h100"),
    ("litgpt", "litgpt_llama2_7b_lora.yaml", "single-a10g"),
    ("chakra", "chakra/llama_tp2_vocab.0.json.gz", "dgx-a100-80g"),
])
def test_files_of_other_tools_are_taken_and_run(kind: str, file: str, cluster: str, folder: Path, drystep: Any) -> None:
    more = ("--set", "training.sequence=2048") if kind == "torchtune" else ()
    ran = drystep("import", kind, str(FILES / file), "--cluster", cluster, *more, "--out", "s.yaml")
    assert ran.code == 0 and "not known here" not in ran.out, ran.err
    result = drystep("run", "s.yaml", "--json", "-").json
    assert (0.001 if kind == "chakra" else 0.02) < result["step_time_s"] < 120


def test_what_was_written_is_not_overwritten_by_chance(folder: Path, drystep: Any) -> None:
    (folder / "s.yaml").write_text("mine")
    given = ("import", "deepspeed", "ds.json", "--cluster", "dgx-a100-80g", *GPT2, "--out", "s.yaml")
    refused = drystep(*given)
    assert refused.code == 2 and "s.yaml exists" in refused.err and (folder / "s.yaml").read_text() == "mine"
    assert drystep(*given, "--overwrite").code == 0


@pytest.mark.parametrize(("arguments", "words"), [
    (["deepseed", "ds.json"], "did you mean 'deepspeed'?"), (["chakra", "ds.json"], "is no execution trace"),
    (["deepspeed", "none.json"], "no such file"), (["deepspeed", "bad.json"], "bad.json:1: zero_optimization.stage"),
    (["deepspeed", "ds.json"], "cluster.topology: is said in none of the files (--cluster NAME"),
    (["deepspeed", "ds.json", "--cluster", "dgx-a100", *GPT2], "did you mean 'dgx-a100-40g' or 'dgx-a100-80g'?"),
    (["deepspeed", "ds.json", "--out", "ds.json"], "it is read"), (["deepspeed"], "Missing argument"),
])
def test_wrong_input_is_told(arguments: list[str], words: str, folder: Path, drystep: Any) -> None:
    ran = drystep("import", *arguments)
    assert ran.code == 2 and words in ran.err and ran.out == ""


@pytest.mark.parametrize("command", ["import", "diff", "list", "collective", "kernel", "calibrate"])
def test_a_command_without_anything_says_what_it_lacks(command: str, drystep: Any) -> None:
    ran = drystep(command)
    assert ran.code == 2 and "Missing" in ran.err and "internal" not in ran.err
