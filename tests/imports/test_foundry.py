"""LLM Foundry's YAML as scenarios: a file of its own, MPT's sizes and defaults, and what is refused."""

from __future__ import annotations

import copy
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
from sim.imports.foundry.read import read as read_foundry

FILE = (Path(__file__).parent / "files" / "foundry_mpt_7b.yaml").read_text(encoding="utf-8")
ON = ("cluster.topology=hgx-h100-3200",)
HF: dict[str, Any] = {"model.name": "hf_causal_lm", "model.pretrained_model_name_or_path": "meta-llama/Llama-2-7b-hf"}
Read = Callable[..., Imported]


def job(**more: Any) -> dict[str, Any]:
    """The file with settings at dotted names (underscores twice for a dot) changed; None takes one out."""
    data = copy.deepcopy(yaml.safe_load(FILE))
    for name, value in more.items():
        *above, last = name.replace("__", ".").split(".")
        here = data
        for part in above:
            here = here.setdefault(part, {})
        here[last] = value
    return data


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.chdir(tmp_path)

    def run(*contents: str | dict[str, Any], sets: tuple[str, ...] = ()) -> Imported:
        names = []
        for number, content in enumerate(contents):
            names.append(f"job{number}.{'json' if isinstance(content, dict) and 'model_type' in content else 'yaml'}")
            text = content if isinstance(content, str) else (
                json.dumps(content) if "model_type" in content else yaml.safe_dump(content, sort_keys=False))
            Path(names[-1]).write_text(text, encoding="utf-8")
        draft = Draft("", (*ON, *sets))
        read_foundry(names, draft)
        return draft.finish()

    return run


def test_mpt_7b(read: Read) -> None:
    found = read(FILE)
    expected = {
        "model": {"hidden": 4096, "heads": 32, "layers": 32, "vocab": 50368, "ffn": 16384, "positions": "learned",
                  "max_positions": 2048, "norm": "layernorm"},
        "training.micro_batch": 16, "training.global_batch": 1024, "training.sequence": 2048,
        "training.precision": "fsdp-bf16", "training.recompute": "none", "training.optimizer": "adamw",
        "parallel.strategy": "fsdp", "parallel.prefetch.backward": "post", "parallel.reduce_every_micro_step": True,
        "software.framework": "composer"}
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown") and not found.of("left")
    assert plan_memory(found.scenario).stages


def test_it_is_the_published_row_with_its_batch(read: Read) -> None:
    """scenarios/published/llm_foundry_v5_h100.yaml has the same layout, written by hand."""
    row = yaml.safe_load((Path(__file__).parents[2] / "scenarios/published/llm_foundry_v5_h100.yaml").read_text())
    defaults = row["defaults"]
    scenario = read(FILE).scenario
    assert scenario.parallel.model_dump(exclude_unset=False)["prefetch"] == defaults["parallel"]["prefetch"]
    assert scenario.parallel.reduce_every_micro_step == defaults["parallel"]["reduce_every_micro_step"]
    assert read(FILE).data["software"]["fsdp"] == defaults["software"]["fsdp"]
    row_precision = defaults["training"]["precision"]
    assert {name: getattr(scenario.training.precision, name) for name in row_precision} == row_precision


@pytest.mark.parametrize(("more", "expected"), [
    ({"model__attn_config": {"attn_impl": "torch", "alibi": True}},
     {"model.positions": "alibi", "model.max_positions": None, "training.attention": "eager"}),
    ({"model__attn_config": {"rope": True, "rope_theta": 10000, "attn_type": "grouped_query_attention",
                             "kv_n_heads": 8}}, {"model.positions": "rotary", "model.kv_heads": 8}),
    ({"model__attn_config": {"attn_type": "multiquery_attention", "qk_ln": True}},
     {"model.kv_heads": 1, "model.qk_norm": "whole"}),
    ({"model__attn_config": {"attn_impl": "triton"}}, {"software.versions": {"flash_attn": "triton"}}),
    ({"model__ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 11008, "ffn_act_fn": {"name": "silu"}}},
     {"model.gated_mlp": True, "model.ffn": 11008, "model.activation": "silu"}),
    ({"model__no_bias": True, "model__norm_type": "low_precision_rmsnorm", "model__tie_word_embeddings": False},
     {"model.bias": False, "model.norm": "rmsnorm", "model.tied_embeddings": False}),
    ({"model__resid_pdrop": 0.1}, {"model.dropout": 0.1}),
    ({"fsdp_config__mixed_precision": "DEFAULT"}, {"training.precision": {"name": "fsdp-bf16", "reduce": "fp32"}}),
    ({"fsdp_config__mixed_precision": "FULL"}, {"training.precision": "amp-bf16"}),
    ({"fsdp_config__mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}},
     {"training.precision": "fsdp-bf16"}),
    ({"precision": "fp32"}, {"training.precision": "fp32"}), ({"fsdp_config": None}, {
        "parallel.strategy": None, "training.precision": "amp-bf16"}),
    ({"fsdp_config__sharding_strategy": "HYBRID_SHARD"}, {"parallel.sharding_factor": 8}),
    ({"fsdp_config__sharding_strategy": "SHARD_GRAD_OP"}, {"parallel.reshard_after_forward": False}),
    ({"fsdp_config__data_parallel_replicate_degree": 2}, {"parallel.sharding_factor": 4}),
    ({"fsdp_config__activation_checkpointing": True, "fsdp_config__activation_checkpointing_reentrant": False,
      "fsdp_config__activation_cpu_offload": True},
     {"training.recompute": "full", "parallel.offload.activations": "cpu"}),
    ({"fsdp_config__backward_prefetch": "BACKWARD_PRE", "fsdp_config__forward_prefetch": True},
     {"parallel.prefetch": {"backward": "pre", "forward": True}}),
    ({"global_train_batch_size": 64}, {"training.micro_batch": 8}),  # 64 / 8 GPUs, less than 16
    ({"compile_config": {}}, {"software.compile": True}),
    ({"model__loss_fn": "torch_crossentropy"}, {"software.fused": False}),
    ({"model__loss_fn": "fused_crossentropy"}, {"software.fused": None}),
    ({"model__expansion_ratio": None, "model__ffn_config": {"ffn_type": "mptglu"}}, {"model.ffn": 16384}),
    ({}, {"software.allocator": {"expandable_segments": True}}),
    ({"model__attn_config": {"attn_impl": "triton"}}, {"software.allocator": None}),
    ({"expandable_segments": True, "max_split_size_mb": 512},
     {"software.allocator": {"expandable_segments": True, "max_split_size_mb": 512}}),
])
def test_fields(read: Read, more: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read(job(**more))
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown") and not found.of("left")


def test_fp8_products(read: Read) -> None:
    precision = at(read(job(precision="amp_fp8")), "training.precision")
    assert (precision["compute"], precision["gather"], precision["reduce"]) == ("fp8", "bf16", "bf16")


def test_a_model_of_the_hub_with_lora(read: Read) -> None:
    data = job(model={"name": "hf_causal_lm", "pretrained": True, "use_flash_attention_2": True,
                      "pretrained_model_name_or_path": "meta-llama/Llama-2-7b-hf",
                      "peft_config": {"peft_type": "LORA", "r": 8, "lora_dropout": 0.05,
                                      "target_modules": ["q_proj", "v_proj"]}})
    found = read(data)
    assert fields(found, "model.preset", "software.modules", "training.finetune") == ["llama-2-7b", "transformers", {
        "method": "lora", "rank": 8, "dropout": 0.05, "targets": ["query", "value"], "base": "fp32"}]
    assert not found.of("unknown") and not found.of("left")
    assert at(read(config(), data), "model.hf") == "job0.json"


@pytest.mark.parametrize(("more", "kernel"), [
    ({}, "eager"), ({"attn_implementation": "sdpa"}, "sdpa"), ({"use_flash_attention_2": True}, "flash"),
    ({"attn_implementation": "flash_attention_2"}, "flash")])
def test_attention_of_a_model_of_the_hub(read: Read, more: dict[str, Any], kernel: str) -> None:
    """hf_base.py: eager unless told otherwise (0.5.0 too)."""
    found = read(job(model={"name": "hf_causal_lm", "pretrained_model_name_or_path": "meta-llama/Llama-2-7b-hf",
                            **more}))
    assert at(found, "training.attention") == kernel


def test_segments_of_before_they_could_grow(read: Read) -> None:
    assert at(read(job(), sets=("software.year=2023",)), "software.allocator") is None


def test_experts_of_megablocks(read: Read) -> None:
    found = read(job(model__ffn_config={"ffn_type": "mb_dmoe", "moe_num_experts": 8, "moe_top_k": 2, "mlp_type": "glu",
                                        "moe_world_size": 4, "moe_loss_weight": 0.05, "mlp_impl": "grouped"}))
    assert fields(found, "model.moe", "model.gated_mlp", "parallel.expert") == [
        {"experts": 8, "top_k": 2, "expert_ffn": 16384}, True, 4]
    assert not found.of("unknown") and not found.of("left")
    dropped = read(job(model__ffn_config={"ffn_type": "mb_moe", "moe_num_experts": 8}))
    assert at(dropped, "model.moe.capacity") == 1.0
    assert plan_memory(found.scenario).stages


def test_a_run_file_of_the_platform(read: Read) -> None:
    found = read({"name": "run", "image": "x", "compute": {"gpus": 16, "cluster": "c"}, "command": "composer train.py",
                  "parameters": yaml.safe_load(FILE)})
    assert fields(found, "cluster.nodes", "training.sequence", "model.layers") == [2, 2048, 32]
    assert not found.of("unknown")
    assert any(note.said == "job0.yaml: parameters.max_seq_len" for note in found.notes)


@pytest.mark.parametrize(("more", "setting", "why"), [
    ({"model__attn_config": {"clip_qkv": 6}}, "model.attn_config.clip_qkv", "not counted"),
    ({"fsdp_config__activation_checkpointing": True, "fsdp_config__activation_checkpointing_reentrant": None},
     "fsdp_config.activation_checkpointing_reentrant (default)", "not reentrant"),
    ({"fsdp_config__use_orig_params": False}, "fsdp_config.use_orig_params", "parameter by parameter"),
    ({"fsdp_config__auto_wrap": False}, "fsdp_config.auto_wrap", "unit of its own"),
    ({"model__use_train_metrics": False}, "model.use_train_metrics", "losses of metrics"),
    ({"optimizer__name": "decoupled_lionw_8b"}, "optimizer.name", "8 bits"),
    ({"train_loader__dataset__allow_pad_trimming": True}, "train_loader.dataset.allow_pad_trimming", "longest"),
    ({"algorithms": {"alibi": {"max_sequence_length": 2048}}}, "algorithms.alibi", "not simulated"),
    ({"optimizer__name": "decoupled_lionw"}, "optimizer.name", "one state"),
    ({"fsdp_config__te_checkpoint_wrapper": True}, "fsdp_config.te_checkpoint_wrapper", "torch's"),
    ({"train_loader__dataset__packing_ratio": 4.0}, "train_loader.dataset.packing_ratio", "attention crosses"),
    ({"model__attn_config__attn_uses_sequence_id": True}, "model.attn_config.attn_uses_sequence_id",
     "training.document=N"),
])
def test_what_no_field_says_is_left_with_a_reason(read: Read, more: dict[str, Any], setting: str, why: str) -> None:
    found = read(job(**more))
    assert {note.said.rpartition(": ")[2]: why in note.text for note in found.of("left")} == {setting: True}
    assert not found.of("unknown")


@pytest.mark.parametrize(("more", "document", "left"), [
    ({"packing_ratio": 4.0}, 512, []), ({"packing_ratio": 3.3}, 621, []), ({"packing_ratio": 1.0}, 2048, []),
    ({"packing_ratio": "auto"}, None, ["model.attn_config.attn_uses_sequence_id", "train_loader.packing_ratio"])])
def test_documents_are_as_long_as_so_many_fill_a_sequence(read: Read, more: dict[str, Any], document: int | None,
                                                          left: list[str]) -> None:
    """2,048 tokens over the documents that are packed into a sequence."""
    found = read(job(model__attn_config__attn_uses_sequence_id=True, **{f"train_loader__{k}": v
                                                                        for k, v in more.items()}))
    assert found.scenario.training.document == document
    assert [note.said.rpartition(": ")[2] for note in found.of("left")] == left and not found.of("unknown")


def test_an_automatic_micro_batch_has_to_be_said(read: Read) -> None:
    with pytest.raises(UserError, match=r"training.micro_batch: is said in none(.|\n)*halves the batch"):
        read(job(device_train_microbatch_size="auto"))
    assert at(read(job(device_train_microbatch_size="auto"), sets=("training.micro_batch=4",)),
              "training.micro_batch") == 4


@pytest.mark.parametrize(("more", "message"), [
    ({"precision": "amp_int3"}, "precision: expected one of amp_bf16"),
    ({"tp_config": {"strategy": "ffn", "tensor_parallel_degree": 2}}, "tp_config: expected nothing"),
    ({"fsdp_config__cpu_offload": True}, "cpu_offload: expected false"),
    ({"fsdp_config__sharding_strategy": "SOME"}, r"job0.yaml:\d+: fsdp_config.sharding_strategy: expected one of"),
    ({"model__ffn_config": {"ffn_type": "mb_dmo"}}, "ffn_type: expected one of mptmlp"),
    ({"model__name": "openai_chat"}, "model.name: expected one of mpt_causal_lm"),
    ({"device_train_microbatch_size": 0.5}, "parts of a sequence"), ({"optimizer__name": "magic"}, "expected one of"),
    ({"max_seq_len": "${variables.length}", "variables": {"length": "${max_seq_len}"}}, "leads to a value"),
    ({"model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "who/knows"}}, "model: is said in none"),
])
def test_refusals(read: Read, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(job(**more))
    with pytest.raises(UserError, match="holds none of LLM Foundry's settings"):
        read({"lr": 1})
