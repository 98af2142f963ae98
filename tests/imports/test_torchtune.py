"""torchtune's YAML files as scenarios: its own configurations, what its recipes do, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hugging_files import at, config, fields

from sim.api import plan_memory
from sim.errors import UserError
from sim.imports.draft import Draft, Imported
from sim.imports.torchtune.read import read as read_torchtune

FILES = Path(__file__).parent / "files"
LORA = (FILES / "torchtune_llama3_1_70b_lora.yaml").read_text(encoding="utf-8")
ONE = (FILES / "torchtune_llama3_1_8b_full_single_device.yaml").read_text(encoding="utf-8")
ON = ("cluster.topology=dgx-a100-80g", "training.sequence=2048")
PLAIN: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}, "batch_size": 2, "dtype": "bf16",
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5}, "gradient_accumulation_steps": 4}
RUN = "# tune run --nnodes 1 --nproc_per_node 4 full_finetune_distributed --config llama3_1/8B_full\n"
Read = Callable[..., Imported]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.chdir(tmp_path)

    def run(content: str | dict[str, Any], *sets: str, head: str = RUN, name: str = "job.yaml") -> Imported:
        text = content if isinstance(content, str) else head + yaml.safe_dump(content, sort_keys=False)
        Path(name).write_text(text, encoding="utf-8")
        draft = Draft()
        read_torchtune([name], draft)
        return draft.finish((*ON, *sets))

    return run


def with_(**more: Any) -> dict[str, Any]:
    return {**PLAIN, **more}


def model(component: str, **more: Any) -> dict[str, Any]:
    return with_(model={"_component_": f"torchtune.models.{component}", **more})


def left(found: Imported) -> list[str]:
    return [note.said.rpartition(": ")[2] for note in found.of("left")]


def test_lora_over_eight_gpus(read: Read) -> None:
    found = read(LORA)
    expected = {
        "model.preset": "llama-3.1-70b", "cluster.gpus_per_node": 8, "parallel.strategy": "fsdp", "software.fsdp": 2,
        "training.precision": "pure-bf16", "training.recompute": "full", "training.chunked_loss": True,
        "training.micro_batch": 2, "training.micro_steps": 1, "parallel.reduce_every_micro_step": True,
        "software.optimizer_kernel": "fused", "training.finetune": {
            "method": "lora", "base": "bf16", "rank": 16, "dropout": 0.0,
            "targets": ["query", "value", "projection", "mlp"]}}
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown") and not found.of("left")
    assert plan_memory(found.scenario).stages


def test_all_weights_on_one_gpu(read: Read) -> None:
    found = read(ONE)
    assert fields(found, "model.preset", "cluster.gpus_per_node", "parallel.strategy", "training.optimizer",
                  "training.optimizer_in_backward", "parallel.offload.optimizer") == [
                      "llama-3.1-8b", 1, "none", "adamw-8bit", True, None]
    assert not found.of("unknown") and left(found) == ["optimizer._component_"]
    assert plan_memory(found.scenario).stages


@pytest.mark.parametrize(("component", "preset", "vocab"), [
    ("llama2.llama2_7b", "llama-2-7b", None), ("llama3.llama3_70b", "llama-3-70b", None),
    ("llama3_1.llama3_1_405b", "llama-3.1-405b", None), ("llama3_2.llama3_2_1b", "llama-3.2-1b", None),
    ("llama3_3.llama3_3_70b", "llama-3.3-70b", None), ("qwen2.qwen2_0_5b", "qwen2.5-0.5b", None),
    ("qwen2_5.qwen2_5_7b_instruct", "qwen2.5-7b", None), ("qwen2_5.qwen2_5_14b_base", "qwen2.5-14b", None),
    ("gemma.gemma_2b", "gemma-2b", None), ("gemma2.gemma2_9b", "gemma-2-9b", None),
    ("mistral.mistral_7b", "mistral-7b", None), ("phi3.phi3_mini", "phi-3-mini", None),
    ("phi4.phi4_14b", "phi-4", None), ("code_llama2.code_llama2_7b", "llama-2-7b", 32016),
])
def test_builders_are_presets(read: Read, component: str, preset: str, vocab: int | None) -> None:
    assert fields(read(model(component)), "model.preset", "model.vocab") == [preset, vocab]


def test_a_builder_with_sizes(read: Read) -> None:
    found = read(model("qwen2.qwen2", num_layers=4, num_heads=8, num_kv_heads=2, embed_dim=512, intermediate_dim=1024,
                       vocab_size=32000, max_seq_len=4096, attn_dropout=0.0))
    assert fields(found, "model.layers", "model.heads", "model.kv_heads", "model.hidden", "model.ffn", "model.vocab",
                  "model.gated_mlp", "model.qkv_bias") == [4, 8, 2, 512, 1024, 32000, True, True]
    assert not found.of("unknown")


@pytest.mark.parametrize(("component", "more", "tuned"), [
    ("llama3_1.lora_llama3_1_8b", {"lora_attn_modules": ["q_proj"]},
     {"method": "lora", "base": "bf16", "rank": 8, "dropout": 0.0, "targets": ["query"]}),
    ("llama3_1.qlora_llama3_1_8b", {"lora_attn_modules": ["v_proj", "q_proj"], "apply_lora_to_mlp": True},
     {"method": "qlora", "base": "nf4-dq", "rank": 8, "dropout": 0.0, "targets": ["query", "value", "mlp"]}),
    ("llama3_1.lora_llama3_1_8b", {"lora_attn_modules": ["k_proj"], "quantize_base": True, "lora_dropout": 0.1,
                                   "apply_lora_to_output": True, "lora_rank": 4},
     {"method": "qlora", "base": "nf4-dq", "rank": 4, "dropout": 0.1, "targets": ["key", "head"]}),
])
def test_adapters(read: Read, component: str, more: dict[str, Any], tuned: dict[str, Any]) -> None:
    found = read(model(component, **more))
    assert at(found, "training.finetune") == tuned
    assert not found.of("unknown")


@pytest.mark.parametrize(("optimizer", "expected"), [
    ({"_component_": "torch.optim.AdamW"}, ["adamw", "foreach", None, "pure-bf16"]),
    ({"_component_": "torch.optim.AdamW", "fused": True}, ["adamw", "fused", None, "pure-bf16"]),
    ({"_component_": "torch.optim.SGD", "momentum": 0.9, "foreach": False},
     ["sgd-momentum", "loop", None, "pure-bf16"]),
    ({"_component_": "bitsandbytes.optim.PagedAdamW8bit"}, ["adamw-8bit", None, "paged", "pure-bf16"]),
    ({"_component_": "bitsandbytes.optim.PagedAdamW"}, ["adamw", None, "paged", {"name": "pure-bf16",
                                                                                 "optimizer": "fp32"}]),
    ({"_component_": "torchao.optim.AdamW4bit"}, ["adamw-8bit", None, None, "pure-bf16"]),
])
def test_optimizers(read: Read, optimizer: dict[str, Any], expected: list[Any]) -> None:
    found = read(with_(optimizer=optimizer))
    assert fields(found, "training.optimizer", "software.optimizer_kernel", "parallel.offload.optimizer",
                  "training.precision") == expected


@pytest.mark.parametrize(("more", "expected"), [
    ({}, {"training.recompute": "none", "training.micro_steps": 4}),
    ({"ac_mode": "selective", "ac_option": 3}, {"training.recompute": {"layers": 10}}),  # 32 blocks, every third
    ({"ac_mode": "full"}, {"training.recompute": "full"}),
    ({"enable_activation_checkpointing": True, "ac_mode": "full"}, {"training.recompute": "none"}),
    ({"enable_activation_checkpointing": True, "enable_activation_offloading": True},
     {"training.recompute": "full", "parallel.offload.activations": "cpu"}),
    ({"fsdp_cpu_offload": True}, {"parallel.offload": {"parameters": "cpu", "optimizer": "cpu"}}),
    ({"fsdp_reshard_after_forward": False}, {"parallel.reshard_after_forward": False}),
    ({"tensor_parallel_dim": 2}, {"parallel.tensor": 2}), ({"compile": True}, {"software.compile": True}),
    ({"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}, {"training.chunked_loss": None}),
    ({"dtype": "fp32"}, {"training.precision": "fp32"}),
])
def test_fields(read: Read, more: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read(with_(**more))
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown") and not found.of("left")


@pytest.mark.parametrize(("head", "name", "gpus", "strategy"), [
    (RUN, "job.yaml", 4, "fsdp"),
    ("#   tune run full_finetune_single_device --config llama2/7B_full\n", "job.yaml", 1, "none"),
    ("", "8B_full_single_device.yaml", 1, "none"), ("", "8B_full.yaml", None, "fsdp"),
])
def test_its_comments_tell_the_launch(read: Read, head: str, name: str, gpus: int | None, strategy: str) -> None:
    found = read(PLAIN, head=head, name=name)
    assert fields(found, "cluster.gpus_per_node", "parallel.strategy") == [gpus, strategy]
    over = read(PLAIN, "cluster.gpus_per_node=8", "parallel.strategy=ddp", head=head, name=name)
    assert fields(over, "cluster.gpus_per_node", "parallel.strategy") == [8, "ddp"]


@pytest.mark.parametrize(("more", "head", "setting", "why"), [
    ({"clip_grad_norm": 1.0}, RUN, "clip_grad_norm", "clips"),
    ({"custom_sharded_layers": ["output"]}, RUN, "custom_sharded_layers", "gathered"),
    ({"dataset": {"packed": True}}, RUN, "dataset.packed", "documents"),
    ({}, RUN.replace("full_finetune", "lora_dpo"), "tune run", "reference model"),
    ({}, RUN.replace("full_finetune", "qat"), "tune run", "fake"),
    ({"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, RUN, "loss._component_", "this loss"),
    ({"teacher_model": {"_component_": "torchtune.models.qwen2.qwen2_1_5b"}}, RUN, "teacher_model._component_",
     "another model"),
])
def test_what_no_field_says_is_left_with_a_reason(read: Read, more: dict[str, Any], head: str, setting: str,
                                                  why: str) -> None:
    found = read(with_(**more), head=head)
    assert left(found) == [setting] and why in found.of("left")[0].text
    assert not found.of("unknown")


def test_a_sequence_is_an_upper_bound_unless_packed(read: Read) -> None:
    def note(packed: bool) -> Any:
        Path("job.yaml").write_text(RUN + yaml.safe_dump(with_(
            tokenizer={"max_seq_len": 512}, dataset={"packed": packed})), encoding="utf-8")
        draft = Draft()
        read_torchtune(["job.yaml"], draft)
        return next(one for one in draft.finish(ON[:1]).notes if one.field == "training.sequence")

    assert note(False).value == note(True).value == 512
    assert "upper bound" in note(False).text and not note(True).text


def test_a_config_beside_it(read: Read) -> None:
    Path("config.json").write_text(json.dumps(config("bfloat16")), encoding="utf-8")
    Path("job.yaml").write_text(RUN + yaml.safe_dump(PLAIN), encoding="utf-8")
    draft = Draft()
    read_torchtune(["config.json", "job.yaml"], draft)
    assert fields(draft.finish(ON), "model.hf", "model.preset") == ["config.json", None]


@pytest.mark.parametrize(("content", "message"), [
    (with_(dtype="fp16"), "dtype: expected one of bf16, fp32"), (with_(batch_size=0), r"job.yaml:\d+: batch_size"),
    (with_(optimizer={"_component_": "some.Optimizer"}), "expected one of torch.optim.adamw"),
    (with_(optimizer={}), "optimizer._component_: is said in none"),
    (with_(optimizer_in_bwd=True), "gradient_accumulation_steps: expected 1 beside optimizer_in_bwd"),
    (with_(enable_activation_offloading=True), "expected false without enable_activation_checkpointing"),
    (with_(ac_mode="some"), "ac_mode: expected one of none, full, selective"),
    (model("llama3_1.lora_llama3_1_8b", lora_attn_modules=["w1"]), "expected a list of q_proj"),
    (model("llama3_2_vision.llama3_2_vision_11b"), "model: is said in none of the files"),
    ({"batch_size": 2}, "no configuration of torchtune's training"),
    ("# tune run eleuther_eval --config x\nmodel: {_component_: torchtune.models.llama2.llama2_7b}\n",
     "job.yaml:1: is a configuration of the recipe eleuther_eval"),
])
def test_refusals(read: Read, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(content)
