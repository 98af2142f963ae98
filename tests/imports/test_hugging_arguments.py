"""LoRA, quantised weights, and the other arguments of the Trainer and of TRL, as fields of a scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hugging_files import BATCH, LLAMA, ON, Read, at, config, fields, reader

from sim.api import plan_memory
from sim.errors import UserError
from sim.imports.draft import Draft
from sim.imports.hugging.files import read_hf


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    return reader(tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------------- fine-tuning
ADAPTER = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "task_type": "CAUSAL_LM",
           "bias": "none", "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "llama-2-7b"}


@pytest.mark.parametrize(("stored", "arguments", "precision", "base"), [
    ("bfloat16", {"bf16": True}, "amp-bf16", "bf16"),
    ("float32", {"bf16": True}, "amp-bf16", "fp32"),
    ("float16", {"fp16": True}, "amp-fp16", "fp16"),
    ("bfloat16", {}, "fp32", "bf16"),
    ("float32", {}, "fp32", "fp32"),
    ("float32", {"bf16": True, "fsdp": True}, "fsdp-bf16", "fp32"),
    ("bfloat16", {"bf16": True, "fsdp": True}, "fsdp-bf16", "bf16"),
    ("float16", {"bf16": True, "fsdp": "full_shard offload"}, "fsdp-bf16", "bf16"),
    ("bfloat16", {"bf16": True, "fsdp": True, "load_in_4bit": True}, "fsdp-bf16", "nf4"),
    ("bfloat16", {"fsdp": True}, "fp32", "bf16"),
    ("float32", {"bf16": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, "mixed-bf16", "bf16"),
    ("bfloat16", {"bf16": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "amp-bf16", "nf4"),
    ("bfloat16", {"bf16": True, "load_in_4bit": True, "use_bnb_nested_quant": True}, "pure-bf16", "nf4-dq"),
    ("bfloat16", {"bf16": True, "load_in_8bit": True}, "amp-bf16", "int8"),
])
def test_lora(read: Read, stored: str, arguments: dict[str, Any], precision: str, base: str) -> None:
    found = read(config(stored), {**BATCH, **arguments}, ADAPTER)
    tuned = at(found, "training.finetune")
    assert at(found, "training.precision") == precision
    assert tuned == {"method": "lora" if base in ("fp32", "bf16", "fp16") else "qlora", "rank": 16, "base": base,
                     "targets": ["query", "value"], "dropout": 0.1}
    assert not found.of("unknown")
    assert not found.of("left")
    assert plan_memory(found.scenario).stages  # what is written is simulated too


@pytest.mark.parametrize(("arguments", "method"), [
    ({"use_lora": True, "lora_rank": 8, "lora_target": "all"}, "lora"),
    ({"adapter": "qlora", "lora_r": 8, "load_in_4bit": True, "lora_target_modules": ["q_proj"]}, "qlora"),
    ({"adapter": "full"}, None),
    ({"use_peft": True, "adapter": "lora", "lora_r": 8, "lora_target_modules": "all-linear"}, "lora"),
])
def test_lora_of_others(read: Read, arguments: dict[str, Any], method: str | None) -> None:
    found = read(config("bfloat16"), {**BATCH, "bf16": True, "cutoff_len": 2048, **arguments}, sets=ON[:1])
    assert fields(found, "training.finetune.method", "training.sequence") == [method, 2048]
    assert not found.of("unknown") and not found.of("left")
    frozen = read(config("bfloat16"), {**BATCH, "bf16": True, "adapter": "freeze"})
    assert ["training of all weights" in note.text for note in frozen.of("left")] == [True]


def test_lora_of_trl(read: Read) -> None:
    found = read(config("bfloat16"), {**BATCH, "use_peft": True, "lora_target_modules": "all-linear", "lora_alpha": 32,
                                      "load_in_4bit": True, "max_length": 512, "packing": True},
                 sets=("cluster.topology=dgx-a100-80g",))
    assert at(found, "training.finetune") == {"method": "qlora", "rank": 16, "base": "nf4", "dropout": 0.05,
                                              "targets": ["query", "key", "value", "projection", "mlp"]}
    assert fields(found, "training.sequence", "training.recompute", "training.precision") == [512, "full", "pure-bf16"]


@pytest.mark.parametrize(("modules", "targets", "left"), [
    (["query_key_value"], ["query", "key", "value"], 0),
    (["gate_proj", "up_proj", "down_proj", "o_proj"], ["projection", "mlp"], 0),
    (["q_proj", "down_proj"], ["query", "mlp"], 1),
    (["c_attn", "c_fc", "c_proj"], ["query", "key", "value", "projection", "mlp"], 0),
    ("q_proj,lm_head", ["query", "head"], 0),
    (["model.layers.0.self_attn.q_proj", "strange"], ["query"], 1),
])
def test_modules_of_lora(read: Read, modules: Any, targets: list[str], left: int) -> None:
    found = read(config("bfloat16"), {**BATCH, "bf16": True}, {**ADAPTER, "target_modules": modules})
    assert at(found, "training.finetune.targets") == targets
    assert len(found.of("left")) == left


def test_what_lora_cannot_say_is_left(read: Read) -> None:
    found = read(config("bfloat16"), {**BATCH, "bf16": True},
                 {**ADAPTER, "use_dora": True, "modules_to_save": ["lm_head"], "bias": "all",
                  "rank_pattern": {"q_proj": 8}})
    assert [note.said.rpartition(": ")[2] for note in found.of("left")] == [
        "use_dora", "modules_to_save", "rank_pattern", "bias"]
    assert not found.of("unknown")


# ------------------------------------------------------------------------------------------------- other arguments
@pytest.mark.parametrize(("arguments", "expected"), [
    ({"gradient_checkpointing": True}, {"training.recompute": "full"}),
    ({"gradient_checkpointing": False}, {"training.recompute": "none"}),
    ({"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 3, "offload": True}},
     {"training.recompute": {"layers": 3}, "parallel.offload.activations": "cpu"}),
    ({"optim": "adamw_torch"}, {"training.optimizer": "adamw", "software.optimizer_kernel": "foreach"}),
    ({}, {"training.optimizer": "adamw", "software.optimizer_kernel": "fused", "training.attention": "sdpa"}),
    ({"optim": "adamw_bnb_8bit"}, {"training.optimizer": "adamw-8bit"}),
    ({"optim": "paged_adamw_32bit"}, {"training.optimizer": "adamw", "parallel.offload.optimizer": "paged"}),
    ({"optim": "sgd", "optim_args": "momentum=0.9"}, {"training.optimizer": "sgd-momentum"}),
    ({"optim": "lion_32bit"}, {"training.optimizer": "sgd-momentum"}),
    ({"adafactor": True, "optim": "adafactor"}, {"training.optimizer": "adafactor"}),  # transformers 4
    ({"adafactor": False}, {"training.optimizer": "adamw"}),
    ({"micro_batch_size": 2, "per_device_train_batch_size": None}, {"training.micro_batch": 2}),
    ({"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
     {"software.compile": True, "software.cuda_graphs": True}),
    ({"torch_compile_backend": "eager"}, {"software.compile": False}),
    ({"full_determinism": True}, {"software.deterministic": True}),
    ({"attn_implementation": "eager"}, {"training.attention": "eager"}),
    ({"attn_implementation": "kernels-community/flash-attn2"},
     {"training.attention": "flash", "software.versions": None}),
    ({"attn_implementation": "flash_attention_3"},
     {"training.attention": "flash", "software.versions": {"flash_attn": "3.0"}}),
    ({"model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "bfloat16"}},
     {"training.attention": "sdpa", "training.precision": "pure-bf16"}),
    ({"ddp_bucket_cap_mb": 100}, {"parallel.bucket_mb": 100.0}),
    ({"use_liger_kernel": True}, {"training.chunked_loss": True, "software.versions": {"liger_kernel": "0.8"}}),
    ({"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False, "cross_entropy": True}},
     {"training.chunked_loss": None, "software.versions": {"liger_kernel": "0.8"}}),
    ({"use_liger_kernel": True, "liger_kernel_config": {"rope": False}},
     {"training.chunked_loss": True, "software.versions": None}),
    ({"use_liger_kernel": False}, {"training.chunked_loss": None, "software.versions": None}),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
     {"parallel.reduce_every_micro_step": True}),
    ({"fsdp": True, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
     {"parallel.reduce_every_micro_step": True}),
])
def test_arguments(read: Read, arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read(config(), {**BATCH, **arguments})
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown")


def test_liger_is_of_the_release_of_the_year(read: Read) -> None:
    found = read(config(), {**BATCH, "use_liger_kernel": True}, sets=(*ON, "software.year=2024"))
    assert found.scenario.software.versions == {"liger_kernel": "0.5"} and not found.of("left")
    found = read(config(), {**BATCH, "use_liger_kernel": True, "liger_kernel_config": {"rms_norm": False}})
    assert [(note.said.rpartition(": ")[2], "all three together" in note.text) for note in found.of("left")] == [
        ("liger_kernel_config.rms_norm", True)]


@pytest.mark.parametrize(("optim", "arguments", "precision"), [
    ("paged_adamw_32bit", {}, {"name": "pure-bf16", "optimizer": "fp32"}),
    ("lion_32bit", {}, {"name": "pure-bf16", "optimizer": "fp32"}),
    ("rmsprop_bnb", {}, {"name": "pure-bf16", "optimizer": "fp32"}),
    ("ademamix", {"fp16": True}, {"compute": "fp16", "parameters": "bf16", "master": "none", "gradients": "bf16",
                                  "optimizer": "fp32", "gather": "bf16", "reduce": "bf16"}),
    ("adagrad", {}, "pure-bf16"), ("adamw_torch", {}, "pure-bf16"), ("adamw_bnb_8bit", {}, "pure-bf16"),
    ("paged_adamw_32bit", {"dtype": "float32", "bf16": True}, "amp-bf16"),
    ("paged_adamw_32bit", {"bf16": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, "mixed-bf16"),
    ("paged_adamw_32bit", {"use_peft": True, "load_in_4bit": True}, {"name": "pure-bf16", "optimizer": "fp32"}),
])
def test_states_of_bitsandbytes_are_fp32(read: Read, optim: str, arguments: dict[str, Any], precision: Any) -> None:
    found = read(config("bfloat16"), {**BATCH, "optim": optim, **arguments})
    assert at(found, "training.precision") == precision
    if not isinstance(precision, str):
        assert found.scenario.training.precision.optimizer == "fp32"


T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "d_model": 512,
      "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128}


@pytest.mark.parametrize(("model", "lengths", "expected", "left"), [
    (T5, {"max_source_length": 512, "max_target_length": 64}, [512, 64], 0),
    (T5, {"max_source_length": 512}, [512, 128], 0),
    (T5, {"max_target_length": 64}, [1024, 64], 0),
    (T5, {"block_size": 256}, [256, None], 0),
    (config(), {"max_source_length": 512, "max_target_length": 64}, [512, None], 1),
])
def test_lengths_of_an_encoder_decoder(read: Read, model: dict[str, Any], lengths: dict[str, int], expected: list[Any],
                                       left: int) -> None:
    found = read(model, {**BATCH, **lengths}, sets=ON[:1])
    assert fields(found, "training.sequence", "training.decoder_sequence") == expected
    assert ["decoder beside an encoder" in note.text for note in found.of("left")] == [True] * left
    assert not found.of("unknown")


def test_a_preset_may_be_an_encoder_decoder(read: Read) -> None:
    found = read({**BATCH, "model_name_or_path": "google-t5/t5-small", "max_target_length": 64}, sets=ON[:1])
    assert fields(found, "model.preset", "training.decoder_sequence") == ["t5-small", 64]


@pytest.mark.parametrize("name", ["cutoff_len", "sequence_len", "seq_length", "context_length", "max_tokens",
                                  "model_max_length"])
def test_other_names_of_the_sequence(read: Read, name: str) -> None:
    found = read(config(), {**BATCH, name: 512}, sets=ON[:1])
    assert at(found, "training.sequence") == 512


@pytest.mark.parametrize(("arguments", "left"), [
    ({"packing": True, "max_length": 512}, ["packing"]), ({"sample_packing": True}, ["sample_packing"]),
    ({"packing": True, "packing_strategy": "wrapped", "max_length": 512}, []), ({"packing": False}, []),
    ({"packing": True, "cutoff_len": 512}, []), ({"packing": True, "neat_packing": True, "cutoff_len": 9},
                                                 ["neat_packing"]),
])
def test_packed_documents(read: Read, arguments: dict[str, Any], left: list[str]) -> None:
    found = read(config(), {**BATCH, "bf16": True, **arguments})
    assert [note.said.rpartition(": ")[2] for note in found.of("left")] == left
    assert not found.of("unknown")


def test_adafactor_goes_over_optim(read: Read) -> None:
    found = read(config(), {**BATCH, "adafactor": True, "optim": "adamw_torch"})
    assert at(found, "training.optimizer") == "adafactor"
    assert [(note.said, note.text) for note in found.of("left")] == [("file1.json: optim", "adafactor goes over it")]


@pytest.mark.parametrize(("arguments", "left"), [({}, [True]), ({"deepspeed": {"zero_optimization": {}}}, [])])
def test_reentrant_checkpoints(read: Read, arguments: dict[str, Any], left: list[bool]) -> None:
    for entering in (True, False):
        found = read(config(), {**BATCH, "gradient_checkpointing": True, **arguments,
                                "gradient_checkpointing_kwargs": {"use_reentrant": entering}})
        assert ["reentrant" in note.text for note in found.of("left")] == (left if entering else
                                                                           [True] * (not left))


def test_the_dtype_that_weights_are_loaded_in_is_told_where_it_matters(read: Read) -> None:
    def why(*contents: Any) -> str:
        return next(note.text for note in read(*contents).notes if note.field == "training.precision")

    assert "transformers 4" in why(config("bfloat16"), {**BATCH, "bf16": True})
    assert "loaded" not in why(config("bfloat16"), {**BATCH, "bf16": True, "fsdp": True})
    assert "loaded" not in why(config("float32"), {**BATCH, "bf16": True, "max_length": 512})
    assert "TRL's default" in why(config("bfloat16"), {**BATCH, "bf16": True, "max_length": 512})


def test_defaults_of_the_trainer_are_assumed(read: Read) -> None:
    found = read(config(), {"output_dir": "out", "bf16": True, "block_size": 1024}, sets=ON[:1])
    assert fields(found, "training.micro_batch", "training.micro_steps", "training.sequence") == [8, 1, 1024]
    assert {"training.micro_batch", "training.micro_steps"} <= {note.field for note in found.of("assumed")}


def test_a_model_by_its_name(read: Read) -> None:
    assert at(read({**BATCH, "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct"}),
              "model.preset") == "llama-3-8b"
    Path("mine").mkdir()
    Path("mine/config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert at(read({**BATCH, "model_name_or_path": "mine"}), "model.hf") == "mine"
    with pytest.raises(UserError, match="model: is said in none of the files"):
        read({**BATCH, "model_name_or_path": "nobody/knows"})
    with pytest.raises(UserError, match="model_name_or_path: expected a model's name or path"):
        read({**BATCH, "model_name_or_path": ["gpt2"]})


def test_a_folder_stands_for_its_config(read: Read, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config("bfloat16")), encoding="utf-8")
    (tmp_path / "args.json").write_text(json.dumps({**BATCH, "bf16": True}), encoding="utf-8")
    draft = Draft()
    read_hf(["model", "args.json"], draft)
    found = draft.finish(ON)
    assert fields(found, "model.hf", "training.precision") == ["model/config.json", "pure-bf16"]


def test_settings_without_effect_and_unknown_ones_are_told_apart(read: Read) -> None:
    found = read(config(), {**BATCH, "learning_rate": 1e-5, "save_steps": 10, "report_to": ["none"], "mystery": 1,
                            "lr_scheduler_kwargs": {"num_cycles": 1}})
    assert [note.said for note in found.of("unknown")] == ["file1.json: mystery"]
    assert len(found.of("idle")) == 4


@pytest.mark.parametrize(("arguments", "why"), [
    ({"beta": 0.1, "max_length": 1024}, "reference model"), ({"num_generations": 8, "max_length": 512}, "generated"),
    ({"loss_type": "nll"}, "chunked_loss=true"), ({"loss_type": "dft"}, "kernels of this loss"),
    ({"auto_find_batch_size": True}, "made smaller"), ({"label_smoothing_factor": 0.1}, "second pass"),
    ({"accelerator_config": {"split_batches": True}}, "BATCH_OF_ONE_GPU"), ({"optim": "ademamix"}, "third state"),
])
def test_what_no_field_says_is_left_with_a_reason(read: Read, arguments: dict[str, Any], why: str) -> None:
    found = read(config(), {**BATCH, **arguments})
    assert [why in note.text for note in found.of("left")] == [True]
    assert not found.of("unknown")
