"""axolotl's YAML as scenarios: files of its own examples, defaults of its schemas, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hugging_files import Read, at, config, fields, reader

from sim.api import plan_memory
from sim.errors import UserError
from sim.imports.hugging.files import read_axolotl, read_hf

FILES = Path(__file__).parent / "files"
QLORA = (FILES / "axolotl_qlora_fsdp_70b.yaml").read_text(encoding="utf-8")
MESH = (FILES / "axolotl_llama_8b_hsdp_tp.yaml").read_text(encoding="utf-8")
FP8 = (FILES / "axolotl_3b_fp8_fsdp2.yaml").read_text(encoding="utf-8")
ON = ("cluster.topology=dgx-a100-80g",)
PLAIN: dict[str, Any] = {"base_model": "NousResearch/Llama-2-7b-hf", "sequence_len": 1024, "micro_batch_size": 2,
                         "attn_implementation": "flash_attention_2"}
FSDP = {"fsdp_version": 2, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
LORA = {"adapter": "lora", "lora_r": 16, "lora_target_linear": True, "lora_mlp_kernel": False}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    inner = reader(tmp_path, monkeypatch)

    def run(*contents: Any, **more: Any) -> Any:
        return inner(*contents, **{"by": read_axolotl, "sets": ON, **more})

    return run


def names(found: Any, kind: str) -> set[str]:
    return {note.said.rpartition(": ")[2] for note in found.of(kind)}


# ------------------------------------------------------------------------------------------------- its own examples
def test_quantised_lora_of_70b_under_fsdp(read: Read) -> None:
    found = read(QLORA)
    expected = {
        "model.preset": "llama-3-70b", "training.sequence": 512, "training.micro_batch": 1, "training.micro_steps": 4,
        "training.precision": "fsdp-bf16", "training.recompute": "full", "parallel.strategy": "fsdp",
        "parallel.sharding_factor": "full", "parallel.offload": {"parameters": "cpu", "optimizer": "cpu"},
        "software.fsdp": 1, "software.optimizer_kernel": "fused",
        "training.finetune": {"method": "qlora", "base": "nf4-dq", "unquantised": "bf16", "rank": 8, "dropout": 0.05,
                              "targets": ["query", "key", "value", "projection", "mlp"]}}
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown")
    assert names(found, "left") == {"gradient_checkpointing_kwargs.use_reentrant"}
    assert plan_memory(found.scenario).stages


def test_shards_replicas_and_tensor_ranks(read: Read) -> None:
    found = read(MESH)
    assert fields(found, "model.preset", "parallel.sharding_factor", "parallel.tensor", "training.chunked_loss",
                  "cluster.nodes", "training.precision") == ["llama-3.1-8b", 4, 2, None, 2, "fsdp-bf16"]
    assert not found.of("unknown") and names(found, "left") == {"sample_packing", "plugins"}
    whole = read({**PLAIN, **FSDP, "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]})
    assert at(whole, "training.chunked_loss") is True


def test_fp8_products_and_gathers(read: Read) -> None:
    found = read(FP8)
    precision = at(found, "training.precision")
    assert {precision[name] for name in ("compute", "gather")} == {"fp8"}
    assert (precision["parameters"], precision["reduce"]) == ("fp32", "bf16")
    assert fields(found, "software.compile", "training.chunked_loss", "training.recompute", "software.fsdp",
                  "training.attention") == [True, True, "none", 2, "flash"]
    assert at(found, "software.versions") == {"liger_kernel": "0.8"} and "liger_layer_norm" in names(found, "left")
    assert not found.of("unknown")


def test_every_setting_is_told_once_by_its_own_name(read: Read) -> None:
    found = read({**PLAIN, **LORA, "optimizer": "adamw_torch", "peft_use_dora": True, "tf32": False, "fp16": False,
                  "dataset_prepared_path": "x", "mystery": 1})
    told = [(note.said, note.field) for note in found.notes if note.said.startswith("file0.json: ")]
    assert len(told) == len(set(told))
    assert {said.removeprefix("file0.json: ") for said, _ in told} == {
        *PLAIN, *LORA, "optimizer", "peft_use_dora", "tf32", "fp16", "dataset_prepared_path", "mystery"}
    assert names(found, "unknown") == {"mystery"} and names(found, "left") == {"peft_use_dora"}


# ------------------------------------------------------------------------------------------------------- its defaults
def test_defaults_of_axolotl_are_assumed(read: Read) -> None:
    found = read({"base_model": "Qwen/Qwen2.5-7B", "attn_implementation": "flash_attention_2"})
    assert fields(found, "training.micro_batch", "training.micro_steps", "training.sequence", "training.recompute",
                  "training.precision", "training.optimizer") == [1, 1, 512, "none", "pure-bf16", "adamw"]
    assert found.scenario.software.allocator.expandable_segments
    assert {"training.micro_batch", "training.micro_steps", "training.sequence", "training.recompute"} <= {
        note.field for note in found.of("assumed")}


@pytest.mark.parametrize(("more", "precision"), [
    ({}, "pure-bf16"), ({"bf16": "auto"}, "pure-bf16"), ({"bf16": "full"}, "pure-bf16"),
    ({"bf16": True}, "pure-bf16"), ({"fp16": True}, "pure-fp16"), ({"bf16": True, "fp16": True}, "pure-bf16"),
    ({"bf16": False}, "tf32"), ({"bf16": False, "tf32": False}, "fp32"), (FSDP, "fsdp-bf16"),
    ({"bf16": "full", **FSDP}, "pure-bf16"),
    ({"deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}}, "mixed-bf16"),
    (LORA, "amp-bf16"), ({**LORA, "bf16": False, "tf32": False}, "fp32"),
])
def test_dtypes(read: Read, more: dict[str, Any], precision: str) -> None:
    assert at(read({**PLAIN, **more}), "training.precision") == precision


@pytest.mark.parametrize(("more", "base"), [
    ({"load_in_8bit": True}, "int8"), ({"adapter": "qlora", "load_in_4bit": True}, "nf4-dq"), ({}, "bf16"),
    ({"load_in_4bit": True}, "bf16"),  # bits of qlora alone
    ({"adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}, "nf4"),
])
def test_frozen_weights(read: Read, more: dict[str, Any], base: str) -> None:
    found = read({**PLAIN, **LORA, **more})
    tuned = at(found, "training.finetune")
    quantised = {} if base == "bf16" else {"unquantised": "bf16"}  # cast back from fp32 (loaders/model.py)
    assert tuned == {"method": "qlora" if quantised else "lora", "base": base, "rank": 16, "dropout": 0.0,
                     "targets": ["query", "key", "value", "projection", "mlp"], **quantised}
    assert names(found, "left") == ({"load_in_4bit"} if base == "bf16" and "load_in_4bit" in more else set())


@pytest.mark.parametrize(("more", "expected"), [
    ({"gradient_checkpointing": True}, ["full", None]), ({"gradient_checkpointing": False}, ["none", None]),
    ({"gradient_checkpointing": True, "activation_offloading": True}, ["full", "cpu"]),
    ({"gradient_checkpointing": True, "activation_offloading": True, **LORA}, ["none", "cpu"]),
    ({"gradient_checkpointing": True, "activation_offloading": "disk", **LORA}, ["none", "nvme"]),
    ({"gradient_checkpointing": True, "activation_offloading": "hidden_states", **LORA}, ["full", "cpu"]),
    ({"gradient_checkpointing": "offload", **LORA}, ["none", "cpu"]),
    ({"gradient_checkpointing": False, "fsdp_version": 2, "fsdp_config": {"activation_checkpointing": True}},
     ["full", None]),
])
def test_recomputation_and_where_activations_live(read: Read, more: dict[str, Any], expected: list[Any]) -> None:
    assert fields(read({**PLAIN, **more}), "training.recompute", "parallel.offload.activations") == expected


@pytest.mark.parametrize(("more", "expected"), [
    ({"sdp_attention": True, "attn_implementation": None}, {"training.attention": "sdpa"}),
    ({"eager_attention": True, "attn_implementation": None}, {"training.attention": "eager"}),
    ({"attn_implementation": "kernels-community/flash-attn3@v2"},
     {"training.attention": "flash", "software.versions": {"flash_attn": "3.0"}}),
    ({"optimizer": "muon"}, {"training.optimizer": "muon"}),
    ({"optimizer": "ao_adamw_4bit"}, {"training.optimizer": "adamw-8bit"}),
    ({"optimizer": "came_pytorch"}, {"training.optimizer": "adafactor"}),
    ({"chunked_cross_entropy": True}, {"training.chunked_loss": True}),
    ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"], "cut_cross_entropy": False},
     {"training.chunked_loss": None}),
    *(({"liger_rms_norm": True, "liger_rope": True, gate: True}, {"software.versions": {"liger_kernel": "0.8"}})
      for gate in ("liger_glu_activation", "liger_swiglu")),
    ({"torch_compile": "auto"}, {"software.compile": True}), ({"ddp_bucket_cap_mb": 50}, {"parallel.bucket_mb": 50.0}),
    ({"context_parallel_size": 2, **FSDP}, {"parallel.context": 2, "parallel.context_exchange": "ring"}),
    ({"sequence_parallel_degree": 2, "sample_packing": True, **FSDP},
     {"parallel.context": 2, "parallel.context_exchange": "all-gather"}),
    ({"dp_shard_size": 4, **FSDP}, {"parallel.sharding_factor": 4, "cluster.nodes": 1}),
    ({"dp_replicate_size": 4, **FSDP}, {"parallel.sharding_factor": 2}),
    ({"use_ray": True, "ray_num_workers": 4}, {"cluster.gpus_per_node": 4}),
    ({"fsdp": ["shard_grad_op", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": False}},
     {"parallel.reshard_after_forward": False, "software.fsdp": 1}),
])
def test_fields(read: Read, more: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read({**PLAIN, **more})
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown")


@pytest.mark.parametrize(("more", "setting", "why"), [
    ({"rl": "dpo"}, "rl", "plain training"), ({"batch_size": 8}, "batch_size", "whose default is 1"),
    ({"attn_implementation": "sdpa"}, "attn_implementation", "stay in fp32"),
    ({"attn_implementation": "fp8", **FSDP}, "attn_implementation", "counted in 16 bits"),
    ({"unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters", "training of all"),
    ({"sample_packing": True}, "sample_packing", "training.document=N"),
    ({"liger_rms_norm": True}, "liger_rms_norm", "all three together"),
    ({"liger_rms_norm": True, "liger_rope": True}, "liger_rms_norm", "(liger_rms_norm, liger_rope)"),
    ({"liger_layer_norm": True}, "liger_layer_norm", "layer norm is not simulated"),
    ({"liger_cross_entropy": True}, "liger_cross_entropy", "whole logits"),
    ({**LORA, "lora_mlp_kernel": True}, "lora_mlp_kernel", "not simulated"),
    ({**LORA, "lora_mlp_kernel": None}, "adapter", "turns on by itself"),
    ({"gpu_count": 4}, "gpu_count", "gpus_per_node=N"), ({"optimizer": "dion"}, "optimizer", "orthogonalisation"),
])
def test_what_no_field_says_is_left_with_a_reason(read: Read, more: dict[str, Any], setting: str, why: str) -> None:
    found = read({**PLAIN, **more})
    assert {note.said.rpartition(": ")[2]: why in note.text for note in found.of("left")} == {setting: True}


def test_a_sequence_is_an_upper_bound_unless_filled(read: Read) -> None:
    def text(**more: Any) -> str:
        return next(note.text for note in read({**PLAIN, **more}).notes if note.field == "training.sequence")

    assert "upper bound" in text()
    assert text(pad_to_sequence_len=True) == text(sample_packing=True) == ""


# ------------------------------------------------------------------------------------------------- beside other files
def test_files_beside_it(read: Read) -> None:
    zero = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    for by in (read_axolotl, read_hf):
        found = read({**PLAIN, "deepspeed": "deepspeed_configs/zero3.json"}, zero, config("bfloat16"), by=by)
        assert fields(found, "parallel.strategy", "training.precision", "model.hf", "training.sequence") == [
            "zero3", "mixed-bf16", "file2.json", 1024]


def test_without_its_file(read: Read) -> None:
    with pytest.raises(UserError, match="none of the files is axolotl's YAML"):
        read(config())


@pytest.mark.parametrize(("more", "message"), [
    ({"load_in_4bit": True}, "load_in_4bit: expected false without an adapter"),
    ({**LORA, "adapter": "qlora"}, "adapter: expected load_in_4bit beside qlora"),
    ({"batch_size": 4, "gradient_accumulation_steps": 2}, "batch_size: expected nothing beside"),
    ({"activation_offloading": True}, "activation_offloading: expected false without gradient_checkpointing"),
    ({"activation_offloading": "tape", "gradient_checkpointing": True}, "expected true, false, legacy, disk"),
    ({"fsdp_version": 3, "fsdp_config": {"offload_params": True}}, r"file0.json:\d: fsdp_version: expected 1 or 2"),
    ({"dp_shard_size": 4}, "dp_shard_size: expected nothing without fsdp_config"),
    ({"deepspeed": "x.json", **FSDP}, "expected nothing beside deepspeed"),
    ({"attn_implementation": "magic"}, "attn_implementation: expected one of flash_attention_2"),
    ({"context_parallel_size": 2, "ring_attn_func": "zigzag"}, "ring_attn_func: expected one of varlen_llama3"),
    ({"cut_cross_entropy": True, "chunked_cross_entropy": True}, "expected false beside cut_cross_entropy"),
    ({"optimizer": "adamm"}, "optimizer: expected one of adamw_torch"),
    ({"optimizer": "paged_adamw_8bit", "fsdp": ["full_shard"], "fsdp_config": {"fsdp_offload_params": True}},
     r"optimizer: paged_adamw_8bit steps on the GPU and pages .*fsdp_offload_params \(line \d+\) keeps the optimizer "
     r".*exclude each other \(take adamw_torch beside the offload, or drop the offload"),
    ({"bf16": "some"}, "bf16: expected true or false"), ({"micro_batch_size": 0}, "micro_batch_size: expected a whole"),
    ({"deepspeed": "none.json"}, "deepspeed: no such file"), ({"base_model": ["a"]}, "base_model: expected a model's"),
])
def test_refusals(read: Read, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read({**PLAIN, **more})


# ------------------------------------------------------- what axolotl 0.19 decides where a file says nothing
@pytest.mark.parametrize(("more", "told"), [
    ({}, True), ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, False), ({"rl": "dpo"}, False),
    ({"activation_offloading": True}, False)])
def test_checkpoints_are_reentrant_unless_told_otherwise(read: Read, more: dict[str, Any], told: bool) -> None:
    """normalize_config fills gradient_checkpointing_kwargs; recomputation is counted as not reentrant, and told."""
    found = read({**PLAIN, "gradient_checkpointing": True, **more})
    assert any("reentrant" in note.text for note in found.of("left")) is told


@pytest.mark.parametrize(("more", "told"), [
    ({}, True), (FSDP, True), ({**FSDP, "fsdp_version": 1}, False), ({"trust_remote_code": True}, False),
    ({"load_in_8bit": True}, False)])
def test_kernels_of_lora_that_turn_themselves_on(read: Read, more: dict[str, Any], told: bool) -> None:
    lora = {key: value for key, value in LORA.items() if key != "lora_mlp_kernel"}
    found = read({**PLAIN, **lora, **more})
    assert any("turns on by itself" in note.text for note in found.of("left")) is told


def test_weights_in_8_and_in_4_bits_are_refused(read: Read) -> None:
    with pytest.raises(UserError, match="load_in_8bit: expected false beside load_in_4bit"):
        read({**PLAIN, **LORA, "load_in_8bit": True, "load_in_4bit": True})


def test_8_bit_weights_without_bf16_compute_in_fp16(read: Read) -> None:
    found = read({**PLAIN, **LORA, "load_in_8bit": True, "bf16": False})
    assert fields(found, "training.precision") == ["amp-fp16"]


def test_expert_ranks_count_among_the_gpus(read: Read) -> None:
    found = read({**PLAIN, **FSDP, "base_model": "mistralai/Mixtral-8x7B-v0.1", "expert_parallel_size": 4,
                  "dp_shard_size": 2, "dp_replicate_size": 2})
    assert fields(found, "cluster.nodes", "software.dispatcher", "parallel.sharding_factor") == [2, "flex", 8]


def test_adapters_kept_in_their_own_dtype_are_told(read: Read) -> None:
    found = read({**PLAIN, **LORA, "peft_autocast_adapter_dtype": False})
    assert "peft_autocast_adapter_dtype" in names(found, "left")


@pytest.mark.parametrize("name", ["s2_attention", "sage_attention", "flash_attn_fuse_qkv", "unsloth_rope"])
def test_other_attention_is_told(read: Read, name: str) -> None:
    plain = {key: value for key, value in PLAIN.items() if key != "attn_implementation"}
    assert name in names(read({**plain, name: True}), "left")


def test_a_misspelt_optimizer_gets_the_nearest_name(read: Read) -> None:
    with pytest.raises(UserError, match="did you mean 'adamw_torch_fused'"):
        read({**PLAIN, "optimizer": "adamw_torch_fuzed"})


@pytest.mark.parametrize(("dequantised", "told"), [(True, False), (False, True)])
def test_weights_that_a_checkpoint_alone_has_in_4_bits(read: Read, dequantised: bool, told: bool) -> None:
    """examples/gpt-oss: Mxfp4Config with dequantize computes in bf16."""
    found = read({**PLAIN, "model_quantization_config": "Mxfp4Config",
                  "model_quantization_config_kwargs": {"dequantize": dequantised}})
    assert ("model_quantization_config" in names(found, "left")) is told


def test_segments_of_before_they_could_grow(read: Read) -> None:
    """utils/__init__.py asks for them from torch 2.2 on: a year before it is no fault."""
    assert at(read(PLAIN), "software.allocator") == {"expandable_segments": True}
    assert at(read(PLAIN, sets=(*ON, "software.year=2022")), "software.allocator") is None
