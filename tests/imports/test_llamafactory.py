"""LLaMA-Factory's arguments as scenarios: files of its own examples, its defaults, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hugging_files import Read, at, config, fields, reader

from sim.api import plan_memory
from sim.errors import UserError
from sim.imports.hugging.files import read_factory, read_hf

FILES = Path(__file__).parent / "files"
FULL, QLORA, SHARDED = ((FILES / f"llamafactory_{name}.yaml").read_text(encoding="utf-8")
                        for name in ("qwen3_full_sft", "qwen3_qlora", "fsdp_qlora"))
ON = ("cluster.topology=dgx-a100-80g",)
#: examples/deepspeed/ds_z3_config.json
ZERO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9,
                              "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}}
#: examples/accelerate/fsdp_config.yaml
LAUNCH = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
          "num_machines": 1, "num_processes": 2,
          "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE",
                          "fsdp_offload_params": False, "fsdp_sharding_strategy": "FULL_SHARD"}}
PLAIN: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "stage": "sft", "finetuning_type": "full",
                         "cutoff_len": 1024, "bf16": True, "per_device_train_batch_size": 2}
LORA = {**PLAIN, "finetuning_type": "lora"}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    inner = reader(tmp_path, monkeypatch)

    def run(*contents: Any, **more: Any) -> Any:
        return inner(*contents, **{"by": read_factory, "sets": ON, **more})

    return run


def left(found: Any) -> dict[str, str]:
    """What is left but for the kind of its checkpoints, which LLaMA-Factory has otherwise in every job."""
    return {note.said.rpartition(": ")[2]: note.text for note in found.of("left") if "reentrant" not in note.said}


def test_all_weights_under_zero_3(read: Read) -> None:
    found = read(FULL, ZERO)
    expected = {"model.preset": "qwen3-4b", "parallel.strategy": "zero3", "parallel.overlap": False,
                "training.precision": "mixed-bf16", "training.recompute": "full", "training.micro_steps": 2,
                "training.finetune": None, "training.optimizer": "adamw", "software.framework": "deepspeed"}
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown")
    assert plan_memory(found.scenario).stages


def test_a_bucket_of_auto_is_the_square_of_the_preset_s_width(read: Read) -> None:
    """transformers' integrations/deepspeed.py, trainer_config_finalize: hidden_size * hidden_size elements, in bf16."""
    found = read(LORA, ZERO)
    assert at(found, "parallel.bucket_mb") == 3584**2 * 2 / 2**20
    assert not left(found)
    unknown = read({**LORA, "model_name_or_path": "unknown/of-own"}, ZERO, sets=(*ON, "model.preset=qwen2.5-7b"))
    assert "config.json" in left(unknown)["zero_optimization.reduce_bucket_size"]


def test_quantised_weights_leave_the_rest_in_the_half_type(read: Read) -> None:
    """checkpointing.py, prepare_model_for_training casts nothing, where peft's function for k bits makes it fp32."""
    assert at(read({**LORA, "quantization_bit": 4}), "training.finetune.unquantised") == "bf16"
    assert at(read({**LORA, "quantization_bit": 4}, ZERO), "training.finetune.unquantised") is None  # casts all itself
    assert at(read(LORA), "training.finetune.unquantised") is None


def test_quantised_lora(read: Read) -> None:
    found = read(QLORA)
    assert at(found, "training.finetune") == {"method": "qlora", "base": "nf4-dq", "unquantised": "bf16", "rank": 8,
                                              "dropout": 0.0,
                                              "targets": ["query", "key", "value", "projection", "mlp"]}
    assert fields(found, "training.precision", "training.recompute", "training.sequence") == ["amp-bf16", "full", 2048]
    assert not found.of("unknown") and not left(found)


def test_quantised_lora_under_fsdp(read: Read) -> None:
    found = read(SHARDED, LAUNCH)
    assert fields(found, "model.preset", "parallel.strategy", "training.precision", "cluster.gpus_per_node",
                  "parallel.prefetch.backward", "software.fsdp") == ["llama-3-8b", "fsdp", "fsdp-bf16", 2, "pre", 1]
    assert not found.of("unknown") and not left(found)


def test_defaults_of_llama_factory_are_assumed(read: Read) -> None:
    for by in (read_factory, read_hf):
        found = read({"model_name_or_path": "Qwen/Qwen3-8B", "stage": "sft"}, by=by)
        assert fields(found, "training.micro_batch", "training.sequence", "training.recompute",
                      "training.finetune") == [8, 2048, "full", {
                          "method": "lora", "rank": 8, "dropout": 0.0, "base": "bf16",
                          "targets": ["query", "key", "value", "projection", "mlp"]}]


@pytest.mark.parametrize(("arguments", "precision", "base"), [
    (PLAIN, "amp-bf16", None), ({**PLAIN, "bf16": False}, "fp32", None),
    ({**PLAIN, "pure_bf16": True, "bf16": False}, "pure-bf16", None), ({**PLAIN, "pure_bf16": True}, "pure-bf16", None),
    ({**PLAIN, "bf16": False, "fp16": True}, "amp-fp16", None), (LORA, "amp-bf16", "bf16"),
    ({**LORA, "quantization_bit": 8}, "amp-bf16", "int8"),
    ({**LORA, "quantization_bit": 4, "double_quantization": False}, "amp-bf16", "nf4"),
    ({**PLAIN, "fsdp": "full_shard auto_wrap"}, "fsdp-bf16", None),
])
def test_dtypes(read: Read, arguments: dict[str, Any], precision: str, base: str | None) -> None:
    found = read(arguments, config("bfloat16"))
    assert fields(found, "training.precision", "training.finetune.base") == [precision, base]
    assert not found.of("unknown")


def test_fp8_products_and_gathers(read: Read) -> None:
    found = read({**PLAIN, "fp8": True, "fsdp": True, "fp8_enable_fsdp_float8_all_gather": True})
    precision = at(found, "training.precision")
    assert (precision["compute"], precision["gather"], precision["parameters"]) == ("fp8", "fp8", "fp32")


@pytest.mark.parametrize(("more", "expected"), [
    ({"disable_gradient_checkpointing": True}, {"training.recompute": "none"}),
    ({"use_unsloth_gc": True}, {"training.recompute": "full", "parallel.offload.activations": "cpu"}),
    ({"flash_attn": "disabled"}, {"training.attention": "eager"}),
    ({"flash_attn": "fa3"}, {"training.attention": "flash", "software.versions": {"flash_attn": "3.0"}}),
    ({"flash_attn": "fa2"}, {"training.attention": "flash"}), ({"flash_attn": "sdpa"}, {"training.attention": "sdpa"}),
    ({"flash_attn": "auto"}, {"training.attention": "sdpa"}),  # as transformers chooses
    ({"use_muon": True}, {"training.optimizer": "muon"}),
    ({"enable_liger_kernel": True}, {"training.chunked_loss": True, "software.versions": {"liger_kernel": "0.8"}}),
    ({"finetuning_type": "lora", "lora_target": "q_proj,v_proj", "lora_rank": 4},
     {"training.finetune.targets": ["query", "value"], "training.finetune.rank": 4}),
    ({"ray_num_workers": 4}, {"cluster.gpus_per_node": 4}), ({"optim": "adamw_torch"}, {"training.optimizer": "adamw"}),
])
def test_fields(read: Read, more: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read({**PLAIN, **more})
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown") and not left(found)


@pytest.mark.parametrize(("more", "setting", "why"), [
    ({"stage": "dpo"}, "stage", "reference model"), ({"stage": "rm"}, "stage", "pairs"),
    ({"finetuning_type": "freeze"}, "finetuning_type", "training of all weights"),
    ({"use_badam": True}, "use_badam", "in turn"), ({"use_galore": True}, "use_galore", "low-rank"),
    ({"neat_packing": True}, "neat_packing", "training.document=N"), ({"shift_attn": True}, "shift_attn", "whole"),
    ({"finetuning_type": "lora", "additional_target": "embed_tokens"}, "additional_target", "the targets name alone"),
    ({"finetuning_type": "lora", "quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method", "bits"),
])
def test_what_no_field_says_is_left_with_a_reason(read: Read, more: dict[str, Any], setting: str, why: str) -> None:
    found = left(read({**PLAIN, **more}))
    assert list(found) == [setting] and why in found[setting]


def test_checkpoints_are_reentrant_unless_told_otherwise(read: Read) -> None:
    assert [note.said for note in read(PLAIN).of("left")] == ["file0.json: use_reentrant_gc (default)"]
    assert not read({**PLAIN, "use_reentrant_gc": False}).of("left")


@pytest.mark.parametrize(("more", "filled"), [
    ({}, False), ({"packing": True}, True), ({"neat_packing": True}, True), ({"stage": "pt"}, True),
    ({"stage": "pt", "packing": False}, False),
])
def test_a_sequence_is_an_upper_bound_unless_packed(read: Read, more: dict[str, Any], filled: bool) -> None:
    text = next(note.text for note in read({**PLAIN, **more}).notes if note.field == "training.sequence")
    assert ("upper bound" in text) is not filled


@pytest.mark.parametrize(("arguments", "message"), [
    ({**PLAIN, "tensor_model_parallel_size": 4}, "tensor_model_parallel_size: expected nothing: jobs of mcore_adapter"),
    ({**PLAIN, "quantization_bit": 4}, "quantization_bit: expected nothing beside full"),
    ({**LORA, "quantization_bit": 3}, "quantization_bit: expected 4 or 8"),
    ({**PLAIN, "fp16": True}, "fp16: bf16 and fp16 are both on"),
    ({**PLAIN, "finetuning_type": "some"}, "finetuning_type: expected one of lora, full, freeze, oft"),
    ({**PLAIN, "stage": "next"}, "stage: expected one of sft, pt"),
    ({**PLAIN, "flash_attn": "fa9"}, "flash_attn: expected one of auto, sdpa, fa2"),
    ({"model": "Qwen/Qwen3-0.6B", "model_class": "llm", "dist_config": {"name": "fsdp2"}}, "LLaMA-Factory's v1"),
])
def test_refusals(read: Read, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(arguments)


# ---------------------------------------------------------------------- what LLaMA-Factory decides beside the settings
@pytest.mark.parametrize(("said", "kernel"), [("off", "eager"), (True, "flash"), (False, "eager"), ("fa2", "flash")])
def test_attention_as_older_releases_name_it(read: Read, said: Any, kernel: str) -> None:
    assert at(read({**PLAIN, "flash_attn": said}), "training.attention") == kernel


def test_liger_has_no_chunked_loss_where_a_stage_needs_logits(read: Read) -> None:
    """apply_liger_kernel: require_logits of every stage but pt and sft."""
    assert at(read({**PLAIN, "enable_liger_kernel": True}), "training.chunked_loss") is True
    found = read({**PLAIN, "enable_liger_kernel": True, "stage": "dpo"})
    assert at(found, "training.chunked_loss") is None and list(left(found)) == ["stage"]
    assert at(found, "software.versions") == {"liger_kernel": "0.8"}


@pytest.mark.parametrize(("stored", "base"), [(None, "bf16"), ("bfloat16", "bf16"), ("float32", "fp16")])
def test_frozen_weights_without_mixed_precision(read: Read, stored: str | None, base: str) -> None:
    """infer_optim_dtype goes by the checkpoint's dtype."""
    more = {} if stored is None else {"torch_dtype": stored}
    found = read({key: value for key, value in LORA.items() if key != "bf16"}, config(**more))
    assert at(found, "training.finetune.base") == base


def test_badam_leaves_weights_in_half(read: Read) -> None:
    assert at(read({**PLAIN, "use_badam": True}), "training.precision") == "pure-bf16"


@pytest.mark.parametrize(("more", "told"), [({"export_dir": "out"}, True), ({"do_predict": True}, True), ({}, False),
                                            ({"do_predict": True, "do_train": True}, False)])
def test_a_file_that_trains_nothing_is_told(read: Read, more: dict[str, Any], told: bool) -> None:
    assert any("nothing is trained" in why for why in left(read({**LORA, **more})).values()) is told


@pytest.mark.parametrize("name", ["packing", "sft_packing"])
def test_packed_sequences_are_full(read: Read, name: str) -> None:
    (note,) = [one for one in read({**LORA, name: True}).of("taken") if one.field == "training.sequence"]
    assert "upper bound" not in note.text
