"""LitGPT's YAML files as scenarios: its finetuning and pretraining, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hugging_files import at, fields

from sim.api import plan_memory
from sim.errors import UserError
from sim.imports.draft import Draft, Imported
from sim.imports.litgpt.read import read as read_litgpt

FILE = (Path(__file__).parent / "files" / "litgpt_llama2_7b_lora.yaml").read_text(encoding="utf-8")
ON = ("cluster.topology=dgx-a100-80g",)
PRETRAIN: dict[str, Any] = {"model_name": "Llama-3.1-8B", "devices": 8, "num_nodes": 2, "precision": "bf16-true",
                            "train": {"max_seq_length": 4096, "max_norm": 1.0}}
Read = Callable[..., Imported]


def job(kind: str = "lora", **more: Any) -> dict[str, Any]:
    """The file with settings changed; of a full finetuning without what LoRA has."""
    data = copy.deepcopy(yaml.safe_load(FILE))
    if kind == "full":
        data = {key: value for key, value in data.items() if not key.startswith("lora_") and key != "quantize"}
    for name, value in more.items():
        room, _, rest = name.partition("__")
        if rest:
            data[room][rest] = value
        else:
            data[name] = value
    return data


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.chdir(tmp_path)

    def run(content: str | dict[str, Any], *sets: str) -> Imported:
        Path("job.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        draft = Draft()
        read_litgpt(["job.yaml"], draft)
        return draft.finish((*ON, *sets))

    return run


def test_lora_on_one_gpu(read: Read) -> None:
    found = read(FILE)
    expected = {
        "model.preset": "llama-2-7b", "cluster.gpus_per_node": 1, "parallel.strategy": "none",
        "training.precision": "pure-bf16", "training.sequence": 512, "training.global_batch": 8,
        "training.micro_batch": 2, "training.recompute": "none", "training.optimizer": "adamw",
        "software.optimizer_kernel": "foreach", "training.finetune": {
            "method": "lora", "base": "bf16", "rank": 32, "dropout": 0.05, "targets": ["query", "value"]}}
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown") and not found.of("left")
    assert plan_memory(found.scenario).stages


@pytest.mark.parametrize(("quantize", "base", "measured"), [(None, "bf16", 19.77e9), ("bnb.nf4", "nf4", 13.68e9)])
def test_its_memory_is_near_what_the_config_hub_measured(read: Read, quantize: str | None, base: str,
                                                         measured: float) -> None:
    """scenarios/published/litgpt.yaml, litgpt-hub-llama-2-7b-lora and -qlora: samples may be shorter than 512."""
    found = read(job(quantize=quantize), "software.year=2024")
    assert at(found, "training.finetune.base") == base
    assert plan_memory(found.scenario).memory.use.peak_allocated_bytes == pytest.approx(measured, rel=0.15)


def test_all_weights_over_four_gpus(read: Read) -> None:
    found = read(job("full", devices=4))
    assert fields(found, "parallel.strategy", "software.fsdp", "training.recompute", "cluster.gpus_per_node",
                  "training.finetune", "training.precision", "parallel.reduce_every_micro_step") == [
                      "fsdp", 1, "full", 4, None, "pure-bf16", False]
    assert not found.of("unknown") and not found.of("left")


def test_lora_over_two_gpus(read: Read) -> None:
    found = read(job(devices=2, precision="bf16-mixed"))
    assert fields(found, "parallel.strategy", "software.fsdp", "training.recompute", "training.precision",
                  "training.finetune.base") == ["fsdp", 2, "full", "amp-bf16", "fp32"]


def test_pretraining(read: Read) -> None:
    found = read(PRETRAIN)
    expected = {
        "model.preset": "llama-3.1-8b", "cluster.nodes": 2, "parallel.strategy": "fsdp", "parallel.sharding_factor": 8,
        "training.recompute": "none", "training.global_batch": 512, "training.micro_batch": 4,
        "software.compile": True, "software.optimizer_kernel": "fused", "training.sequence": 4096}
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown") and not found.of("left")
    every = read({**PRETRAIN, "devices": "auto", "num_nodes": 1})
    assert fields(every, "cluster.nodes", "cluster.gpus_per_node", "parallel.strategy") == [1, None, "fsdp"]


def test_a_model_by_its_sizes(read: Read) -> None:
    sizes = {"name": "mine", "n_layer": 4, "n_head": 8, "n_query_groups": 2, "n_embd": 512, "intermediate_size": 1024,
             "padded_vocab_size": 32000, "mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm", "bias": False,
             "parallel_residual": False, "block_size": 4096}
    found = read({**PRETRAIN, "model_name": "mine", "model_config": sizes})
    assert at(found, "model") == {
        "layers": 4, "heads": 8, "kv_heads": 2, "hidden": 512, "ffn": 1024, "vocab": 32000, "gated_mlp": True,
        "activation": "silu", "norm": "rmsnorm", "bias": False, "parallel_block": False, "positions": "rotary",
        "tied_embeddings": False}


@pytest.mark.parametrize(("more", "expected"), [
    ({"lora_key": True, "lora_mlp": True, "lora_head": True},
     {"training.finetune.targets": ["query", "key", "value", "mlp", "head"]}),
    ({"quantize": "bnb.nf4-dq"}, {"training.finetune.base": "nf4-dq", "parallel.offload.optimizer": "paged",
                                  "training.precision": {"name": "pure-bf16", "optimizer": "fp32"}}),
    ({"quantize": "bnb.int8-training"}, {"training.finetune.base": "int8"}),
    ({"precision": None}, {"training.precision": "amp-bf16", "training.finetune.base": "fp32"}),
    ({"precision": "32-true"}, {"training.precision": "fp32"}),
    ({"optimizer": "SGD"}, {"training.optimizer": "sgd"}),
    ({"optimizer": {"class_path": "bitsandbytes.optim.PagedAdamW8bit"}},
     {"training.optimizer": "adamw-8bit", "parallel.offload.optimizer": "paged"}),
    ({"num_nodes": 2}, {"cluster.nodes": 2, "cluster.gpus_per_node": 1, "parallel.strategy": "fsdp"}),
])
def test_fields(read: Read, more: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read(job(**more))
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown")


@pytest.mark.parametrize(("content", "message"), [
    (job(precision="bf16"), r"job.yaml:\d+: precision: expected one of bf16_true"),
    (job(quantize="bnb.nf4", devices=2), "quantize: expected one GPU"),
    (job(quantize="bnb.nf4", precision="bf16-mixed"), "quantize: expected one GPU"),
    ({**job("full"), "quantize": "bnb.nf4"}, "finetune_adapter"), (job(quantize="gptq"), "quantize: expected one of"),
    (job(optimizer={"lr": 1}), "optimizer: expected a name"), (job(devices=0), "devices: expected a whole number"),
    (job(checkpoint_dir="checkpoints/who/knows"), "model: is said in none"), ({"lr": 1}, "none of LitGPT's settings"),
])
def test_refusals(read: Read, content: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(content)
