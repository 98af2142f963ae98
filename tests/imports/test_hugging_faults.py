"""Files that contradict each other, name what is not there, or hold anything: a message with its place, no
traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hugging_files import BATCH, FSDP_1, FSDP_2, MULTI_GPU, ON, ZERO_1, ZERO_2, Read, config, reader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.imports.draft import Draft
from sim.imports.hugging.files import read_accelerate, read_deepspeed, read_hf


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    return reader(tmp_path, monkeypatch)


ZERO = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(("contents", "message"), [
    ([{**BATCH, "bf16": True, "fp16": True}], r"file0.json:\d: fp16: bf16 and fp16 are both on"),
    ([{**BATCH, "per_device_train_batch_size": 0}], r"file0.json:2: per_device_train_batch_size: expected a whole"),
    ([{**BATCH, "per_device_train_batch_size": "two"}], "expected a whole number of at least 1, found 'two'"),
    ([{**BATCH, "bf16": [True]}], "bf16: expected true or false"),
    ([{**BATCH, "optim": "adamm"}], "optim: expected one of adamw_torch, adamw_torch_fused"),
    ([{**BATCH, "attn_implementation": "fast"}], "attn_implementation: expected one of eager, sdpa"),
    ([{**BATCH, "torch_dtype": "int8"}], "torch_dtype: expected one of bfloat16"),
    ([{**BATCH, "use_cpu": True}], "use_cpu: expected false: training on CPUs is not simulated"),
    ([{**BATCH, "fsdp": "sharded"}], "fsdp: expected true, false, or words of full_shard"),
    ([{**BATCH, "fsdp": 3}], "fsdp: expected true, false, or words"),
    ([{**BATCH, "fsdp": True, "fsdp_config": 7}], "fsdp_config: expected a mapping or the path of a file"),
    ([{**BATCH, "fsdp": True, "fsdp_config": {"version": 3}}], "version: expected 1 or 2"),
    ([{**BATCH, "fsdp": True, "fsdp_config": {"forward_prefetch": True}}], "accelerate refuses it with FSDP 2"),
    ([{**BATCH, "fsdp": True, "fsdp_config": {"reshard_after_forward": "some"}}], "expected true or false"),
    ([{**BATCH, "deepspeed": "none.json"}], r"file0.json:\d: deepspeed: no such file: none.json \(looked for in"),
    ([{**BATCH, "deepspeed": "{broken"}], "deepspeed: expected JSON"),
    ([{**BATCH, "deepspeed": ZERO, "fsdp": True}], r"fsdp: says True, but file0.json: deepspeed"),
    ([{**BATCH, "deepspeed": {**ZERO, "train_micro_batch_size_per_gpu": 4}}], "says 4, but file0.json: per_device"),
    ([{**BATCH, "load_in_4bit": True, "load_in_8bit": True}], "load_in_8bit: expected false beside load_in_4bit"),
    ([{**BATCH, "quantization_config": "nf4"}], "quantization_config: expected a mapping"),
    ([{**ZERO, "zero_optimization": {"stage": 4}}], r"zero_optimization.stage: expected 0, 1, 2 or 3"),
    ([{**ZERO, "zero_optimization": [3]}], "zero_optimization: expected a mapping"),
    ([{**ZERO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}}],
     "offload_optimizer.device: expected one of none, cpu, nvme"),
    ([{**ZERO, "bf16": {"enabled": True}, "fp16": {"enabled": True}}], "says True, but file0.json: bf16.enabled"),
    ([{**ZERO, "optimizer": {"type": "Magic"}}], "optimizer.type: expected one of adam"),
    ([{**ZERO, "optimizer": {"type": ["AdamW"]}}], "optimizer.type: expected a word"),
    ([{**ZERO, "train_batch_size": 10, "gradient_accumulation_steps": 2}], "says 10, but micro-batch times"),
    ([{**ZERO, "bf16": {"enabled": True}}, {**BATCH, "fp16": True}], "says True, but file0.json: bf16.enabled"),
    ([ZERO_1, BATCH], r"file0.yaml:\d+: deepspeed_config.gradient_accumulation_steps: says 1, but file1.json"),
    ([MULTI_GPU.replace("MULTI_GPU", "MULTI_CPU"), BATCH], "distributed_type: expected one of no, multi_gpu, fsdp"),
    ([MULTI_GPU.replace("num_processes: 8", "num_processes: many"), BATCH], "num_processes: expected a whole number"),
    ([MULTI_GPU.replace("'bf16'", "int8"), BATCH], "mixed_precision: expected one of no, none, fp32, fp16, bf16, fp8"),
    ([MULTI_GPU.replace("use_cpu: false", "use_cpu: true"), BATCH], "use_cpu: expected false"),
    ([FSDP_1.replace("FULL_SHARD", "SOME_SHARD"), BATCH], "fsdp_reshard_after_forward: expected one of full_shard"),
    ([FSDP_1.replace("BACKWARD_PRE", "BACKWARD"), BATCH], "fsdp_backward_prefetch: expected one of backward_pre"),
    ([FSDP_2.replace("TRANSFORMER_BASED_WRAP", "WRAP"), BATCH], "auto_wrap_policy: expected one of transformer_based"),
    ([FSDP_2, {**BATCH, "deepspeed": ZERO}], "distributed_type: says 'FSDP', but file1.json: deepspeed"),
    ([ZERO_2.replace("zero_stage: 2", "deepspeed_config_file: nowhere.json"), BATCH], "no such file: nowhere.json"),
    ([{"peft_type": "IA3", "target_modules": ["k_proj"]}, BATCH], "peft_type: expected LORA"),
    ([{"peft_type": "LORA", "r": 0}, BATCH], "file0.json:3: r: expected a whole number of at least 1"),
    ([{"peft_type": "LORA", "r": 8, "target_modules": 3}, BATCH], "target_modules: expected a list of modules' names"),
    ([{"peft_type": "LORA", "r": 8, "lora_dropout": 2}, BATCH], "lora_dropout: expected a probability"),
    ([{"some": "thing"}], "expected a model's config.json, the Trainer's arguments"),
])
def test_what_cannot_be(read: Read, contents: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(*contents, config("bfloat16"))


def test_a_file_named_in_a_file_is_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}), encoding="utf-8")
    (tmp_path / "run" / "args.json").write_text(json.dumps({**BATCH, "deepspeed": "ds.json"}), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(config()), encoding="utf-8")
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}), encoding="utf-8")

    def strategy(deepspeed: str, *more: str) -> Any:
        (tmp_path / "run" / "args.json").write_text(json.dumps({**BATCH, "deepspeed": deepspeed}), encoding="utf-8")
        draft = Draft()
        read_hf(["run/args.json", "config.json", *more], draft)
        return draft.finish(ON).data["parallel"]["strategy"]

    assert strategy("ds.json") == "zero3"
    assert strategy("zero.json") == "zero2"  # the working directory, where transformers looks
    assert strategy("run/ds.json") == strategy(str(tmp_path / "run" / "ds.json")) == "zero3"
    assert strategy("ds.json", "run/ds.json") == "zero3"  # given too
    assert strategy("/somewhere/else.json", "zero.json") == "zero2"  # given instead
    with pytest.raises(UserError, match=r"no such file: nowhere/ds.json \(looked for in this file's folder and in"):
        strategy("nowhere/ds.json")
    with pytest.raises(UserError, match=r"no such file: /somewhere/else.json$"):
        strategy("/somewhere/else.json")


def test_files_that_are_not_there_or_not_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    for file in ("nothing.json", "empty", "broken.json"):
        with pytest.raises(UserError):
            read_hf([file], Draft())


def test_a_json_given_is_the_one_that_accelerates_file_names(read: Read) -> None:
    text = ZERO_2.replace("zero_stage: 2", "deepspeed_config_file: /home/me/ds.json")
    found = read(text, {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}, config("bfloat16"))
    assert found.data["parallel"]["strategy"] == "zero3"


@pytest.mark.parametrize(("name", "text", "message"), [
    ("go.sh", "torchrun train.py", "go.sh: is a script, not a file of settings .*import megatron"),
    ("job.toml", "[model]\nname = 'llama3'\n", "job.toml:1: expected a model's config.json.*import torchtitan"),
    ("other.yaml", "lr: 1\n", "other.yaml:1: expected a model's config.json, .*found 'lr'"),
])
def test_files_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str,
                               message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    for by in (read_hf, read_deepspeed):
        with pytest.raises(UserError, match=message):
            by([name], Draft())


# ------------------------------------------------------------------------------------------------------------ anything
NAMES = ["per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "tf32", "optim", "optim_args",
         "deepspeed", "fsdp", "fsdp_config", "torch_compile", "torch_compile_mode", "max_length", "block_size",
         "dtype", "attn_implementation", "use_peft", "lora_r", "lora_target_modules", "load_in_4bit", "load_in_8bit",
         "packing", "gradient_checkpointing", "gradient_checkpointing_kwargs", "model_init_kwargs",
         "accelerator_config", "quantization_config", "model_name_or_path", "parallelism_config", "ddp_bucket_cap_mb",
         "loss_type", "zero_optimization", "stage", "offload_optimizer", "offload_param", "device", "overlap_comm",
         "ratio", "reduce_bucket_size", "mics_shard_size", "sub_group_size", "train_batch_size", "enabled",
         "optimizer", "type", "train_micro_batch_size_per_gpu", "data_types", "grad_accum_dtype",
         "communication_data_type", "torch_autocast", "pipeline", "tensor_parallel", "autotp_size",
         "activation_checkpointing", "distributed_type", "num_processes", "num_machines", "mixed_precision",
         "deepspeed_config", "deepspeed_config_file", "zero_stage", "dynamo_config", "dynamo_backend",
         "megatron_lm_config", "megatron_lm_tp_degree", "fsdp_version", "fsdp_sharding_strategy",
         "fsdp_reshard_after_forward", "fsdp_offload_params", "fsdp_auto_wrap_policy", "fsdp_min_num_params",
         "parallelism_config_cp_size", "dp_shard_size", "dp_replicate_size", "peft_type", "r", "target_modules",
         "bias", "lora_dropout", "modules_to_save", "model_type", "architectures", "torch_dtype", "hidden_size",
         "version", "use_orig_params", "use_reentrant", "is_encoder_decoder", "sparse_attention", "finetuning_type",
         "adafactor", "max_source_length", "max_target_length"]
WORDS = ["auto", "no", "bf16", "fp16", "cpu", "full_shard", "hybrid_shard", "FSDP", "DEEPSPEED", "MEGATRON_LM",
         "LORA", "MULTI_GPU", "adamw_torch", "AdamW", "sdpa", "bfloat16", "inductor", "none", "true", "1", "-1", "",
         "x.json", "{", "all-linear", "llama", "SIZE_BASED_WRAP", "\0", "~", "/"]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 40), st.floats(), st.sampled_from(WORDS),
                    st.text(max_size=4))
VALUES = st.recursive(SCALARS, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)), max_leaves=12)
FILES = st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=3)), VALUES, max_size=12)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(FILES, min_size=1, max_size=3), by=st.sampled_from([read_hf, read_accelerate, read_deepspeed]),
       model=st.booleans())
def test_whatever_files_hold_a_message_is_all_that_is_raised(
        files: list[dict[str, Any]], by: Any, model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for number, data in enumerate([*files, *([config()] if model else [])]):
        (tmp_path / f"{number}.json").write_text(json.dumps(data), encoding="utf-8")
        names.append(f"{number}.json")
    draft = Draft()
    try:
        by(names, draft)
        draft.finish(ON)
    except UserError:
        pass


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3), which=st.integers(0, 3))
def test_one_strange_value_among_right_ones(changes: dict[str, Any], which: int, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = {**BATCH, "bf16": True, "max_length": 512, "fsdp": True, "fsdp_config": {}, "optim": "adamw_torch"}
    zero = {**ZERO, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    launch = {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 1, "fsdp_config": {"fsdp_version": 1}}
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
    parts = [whole, zero, launch, adapter]
    inside = {0: "fsdp_config", 1: "zero_optimization", 2: "fsdp_config"}.get(which)
    parts[which] = {**parts[which], **changes}
    if inside is not None and isinstance(parts[which][inside], dict):
        parts[which] = {**parts[which], inside: {**parts[which][inside], **changes}}
    names = []
    for name, data in (("config", config("bfloat16")), ("args", whole if which != 0 else parts[0]),
                       ("part", parts[which])):
        (tmp_path / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
        names.append(f"{name}.json")
    draft = Draft()
    try:
        read_hf(names if which else names[:2], draft)
        draft.finish(ON)
    except UserError:
        pass
