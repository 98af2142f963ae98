"""Files of the Trainer, accelerate and DeepSpeed: what each combination really does to dtypes, layout and batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hugging_files import BATCH, FSDP_1, FSDP_2, MULTI_GPU, ON, TRL_FILES, ZERO_2, Read, at, config, fields, reader

from sim.errors import UserError
from sim.imports.hugging.files import read_accelerate, read_deepspeed, read_hf


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    return reader(tmp_path, monkeypatch)


# ---------------------------------------------------------------------------------------------------------- precision
@pytest.mark.parametrize(("stored", "arguments", "precision"), [
    (None, {"bf16": True}, "amp-bf16"),
    (None, {"fp16": True}, "amp-fp16"),
    (None, {}, "fp32"),
    (None, {"tf32": True}, "tf32"),
    (None, {"torch_compile": True}, "tf32"),  # training_args.py, step 9
    (None, {"torch_compile": True, "tf32": False}, "fp32"),
    ("float32", {"bf16": True}, "amp-bf16"),
    ("bfloat16", {"bf16": True}, "pure-bf16"),
    ("bfloat16", {}, "pure-bf16"),
    ("bfloat16", {"bf16": True, "torch_dtype": "float32"}, "amp-bf16"),
    ("bfloat16", {"bf16": True, "dtype": "auto"}, "pure-bf16"),
    ("float16", {}, "pure-fp16"),
    ("float16", {"fp16": True}, "amp-fp16"),  # the gradient scaler refuses fp16 gradients
    ("float32", {"dtype": "bfloat16"}, "pure-bf16"),
    ("bfloat16", {"bf16": True, "max_length": 2048}, "amp-bf16"),  # TRL loads fp32
    (None, {"max_length": 2048}, "amp-bf16"),  # and has bf16 on
    (None, {"max_length": 2048, "bf16": False}, "fp32"),
    ("bfloat16", {"bf16": True, "fsdp": True}, "fsdp-bf16"),
    ("bfloat16", {"fsdp": True}, "pure-bf16"),
    (None, {"fsdp": True}, "fp32"),
])
def test_precision_of_the_trainer(read: Read, stored: str | None, arguments: dict[str, Any], precision: str) -> None:
    found = read(config(stored), {**BATCH, **arguments})
    assert at(found, "training.precision") == precision


def test_half_weights_under_the_other_autocast_are_said_dtype_by_dtype(read: Read) -> None:
    found = read(config("bfloat16"), {**BATCH, "fp16": True})
    assert at(found, "training.precision") == {"compute": "fp16", "parameters": "bf16", "master": "none",
                                               "gradients": "bf16", "optimizer": "bf16", "gather": "bf16",
                                               "reduce": "bf16"}


@pytest.mark.parametrize(("zero", "precision"), [
    ({"bf16": {"enabled": True}}, "mixed-bf16"),
    ({"bfloat16": {"enabled": True}}, "mixed-bf16"),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, "mixed-fp16"),
    ({}, "fp32"),
    ({"bf16": {"enabled": False}}, "fp32"),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
     "megatron-bf16"),
    ({"bf16": {"enabled": True}, "communication_data_type": "fp32"},
     {"compute": "bf16", "parameters": "bf16", "master": "fp32", "gradients": "bf16", "optimizer": "fp32",
      "gather": "bf16", "reduce": "fp32"}),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
     {"compute": "bf16", "parameters": "bf16", "master": "bf16", "gradients": "bf16", "optimizer": "bf16",
      "gather": "bf16", "reduce": "bf16"}),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}, "fsdp-bf16"),
])
def test_precision_of_deepspeed(read: Read, zero: dict[str, Any], precision: Any) -> None:
    found = read(config("bfloat16"), {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, **zero},
                 by=read_deepspeed)
    assert at(found, "training.precision") == precision


def test_accelerate_sets_the_precision_and_the_trainer_goes_over_it(read: Read) -> None:
    assert at(read(config(), MULTI_GPU, BATCH), "training.precision") == "amp-bf16"
    found = read(config(), MULTI_GPU, {**BATCH, "fp16": True})
    assert at(found, "training.precision") == "amp-fp16"
    assert [note.said for note in found.of("left")] == ["file1.yaml: mixed_precision"]
    fp8 = read(config(), FSDP_2.replace("mixed_precision: 'bf16'", "mixed_precision: fp8"), BATCH)
    assert at(fp8, "training.precision") == {"compute": "fp8", "parameters": "fp32", "master": "none",
                                             "gradients": "fp32", "optimizer": "fp32", "gather": "bf16",
                                             "reduce": "bf16"}


# ------------------------------------------------------------------------------------------------------------ layout
@pytest.mark.parametrize(("name", "expected"), [
    ("multi_gpu", ["ddp", "pytorch", "amp-bf16", None, None]),
    ("single_gpu", [None, "pytorch", "amp-bf16", None, None]),
    ("fsdp1", ["fsdp", "pytorch", "fsdp-bf16", 1, False]),
    ("fsdp2", ["fsdp", "pytorch", "fsdp-bf16", 2, False]),
    ("zero1", ["zero1", "deepspeed", "mixed-bf16", None, None]),
    ("zero2", ["zero2", "deepspeed", "mixed-bf16", None, None]),
    ("zero3", ["zero3", "deepspeed", "mixed-bf16", None, None]),
])
@pytest.mark.parametrize("by", [read_hf, read_accelerate])
def test_the_files_of_trl(read: Read, name: str, expected: list[Any], by: Callable[..., None]) -> None:
    found = read(config("bfloat16"), TRL_FILES[name], {"per_device_train_batch_size": 1, "dtype": "float32"}, by=by)
    assert fields(found, "parallel.strategy", "software.framework", "training.precision", "software.fsdp",
                  "parallel.reduce_every_micro_step") == expected
    assert at(found, "software.modules") == "transformers"
    assert not found.of("unknown")
    assert found.scenario.gpus == (1 if name == "single_gpu" else 8)


def test_prefetch_of_fsdp(read: Read) -> None:
    assert at(read(config(), FSDP_1, BATCH), "parallel.prefetch") == {"backward": "pre", "forward": True}
    plain = FSDP_1.replace("  fsdp_backward_prefetch: BACKWARD_PRE\n", "").replace("fsdp_forward_prefetch: true",
                                                                                   "fsdp_forward_prefetch: false")
    assert at(read(config(), plain, BATCH), "parallel.prefetch") == {"backward": "none"}
    assert at(read(config(), FSDP_2, BATCH), "parallel.prefetch") is None
    found = read(config(), {**BATCH, "fsdp": True, "fsdp_config": {"version": 1, "limit_all_gathers": False}})
    assert at(found, "parallel.prefetch") == {"backward": "none", "limit": "none"}


@pytest.mark.parametrize(("strategy", "factor", "reshard", "machines"), [
    ("FULL_SHARD", "full", True, 2), ("SHARD_GRAD_OP", "full", False, 2), ("NO_SHARD", 1, True, 2),
    ("HYBRID_SHARD", 8, True, 2), ("HYBRID_SHARD_ZERO2", 8, False, 2), ("4", 8, True, 2), ("2", "full", False, 1),
])
def test_strategies_of_fsdp_1(read: Read, strategy: str, factor: Any, reshard: bool, machines: int) -> None:
    text = FSDP_1.replace("fsdp_reshard_after_forward: FULL_SHARD", f"fsdp_sharding_strategy: {strategy}").replace(
        "num_machines: 1", f"num_machines: {machines}").replace("num_processes: 8", f"num_processes: {8 * machines}")
    found = read(config(), text, BATCH)
    assert fields(found, "parallel.sharding_factor", "parallel.reshard_after_forward") == [factor, reshard]
    assert found.scenario.gpus == 8 * machines


def test_hybrid_sharding_of_the_trainer_is_as_large_as_a_node(read: Read) -> None:
    arguments = {**BATCH, "bf16": True, "fsdp": "hybrid_shard auto_wrap"}
    found = read(config(), arguments)
    assert fields(found, "software.fsdp", "parallel.sharding_factor") == [1, 8]
    assert at(read(config(), arguments, sets=(*ON, "parallel.sharding_factor=4")), "parallel.sharding_factor") == 4


@pytest.mark.parametrize(("asked", "expected"), [
    ({"fsdp": "full_shard auto_wrap"}, [2, True, None]),
    ({"fsdp": ["shard_grad_op", "auto_wrap"]}, [2, False, None]),
    ({"fsdp": "full_shard offload"}, [2, True, {"parameters": "cpu", "optimizer": "cpu"}]),
    ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True}},
     [2, False, {"parameters": "cpu", "optimizer": "cpu"}]),
    ({"fsdp": True, "fsdp_config": {"fsdp_version": 1, "fsdp_reshard_after_forward": "shard_grad_op"}},
     [1, False, None]),
    ({"fsdp": True, "fsdp_config": "fsdp.json"}, [1, True, None]),
    ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"backward_prefetch": "backward_pre"}}, [1, True, None]),
    ({"fsdp": "full_shard", "fsdp_config": {"fsdp_sync_module_states": True}}, [1, True, None]),
    ({"fsdp": "full_shard", "fsdp_config": {"limit_all_gathers": True, "reshard_after_forward": False}},
     [2, False, None]),
    ({"fsdp": True, "fsdp_config": {"use_orig_params": True}}, [2, None, None]),  # transformers 5's own form
])
def test_fsdp_of_the_trainer(read: Read, asked: dict[str, Any], expected: list[Any]) -> None:
    found = read(config(), {**BATCH, "bf16": True, **asked},
                 beside={"fsdp.json": {"version": 1, "reshard_after_forward": "full_shard"}})
    assert fields(found, "software.fsdp", "parallel.reshard_after_forward", "parallel.offload") == expected
    assert fields(found, "parallel.strategy", "training.precision") == ["fsdp", "fsdp-bf16"]


def test_each_setting_of_fsdp_is_told_once(read: Read) -> None:
    found = read(config(), {**BATCH, "bf16": True, "fsdp": "full_shard auto_wrap", "fsdp_config": {
        "backward_prefetch": "backward_pre", "forward_prefetch": False, "use_orig_params": False,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "mystery": 1}})
    of_fsdp = [(note.kind, note.said.rpartition(": ")[2]) for note in found.notes if "fsdp_config" in note.said]
    assert of_fsdp == [("taken", "fsdp_config.backward_prefetch"), ("idle", "fsdp_config.forward_prefetch"),
                       ("idle", "fsdp_config.use_orig_params"), ("idle", "fsdp_config.transformer_layer_cls_to_wrap"),
                       ("unknown", "fsdp_config.mystery")]
    unused = read(config(), {**BATCH, "fsdp": [], "fsdp_config": {"min_num_params": 0, "xla": False}})
    assert not unused.of("unknown")


def test_original_parameters_of_fsdp_1(read: Read) -> None:
    counted = read(config(), FSDP_1, BATCH)
    assert [note.said.rpartition(".")[2] for note in counted.of("left")] == ["fsdp_use_orig_params"]
    usual = read(config(), FSDP_1.replace("fsdp_use_orig_params: true", "fsdp_use_orig_params: false"), BATCH)
    assert not usual.of("left")


@pytest.mark.parametrize(("policy", "wrap"), [
    ("  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 20000000\n", 20_000_000),
    ("  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n", 10**8),
    ("  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 0\n", 10**13),
    ("  fsdp_auto_wrap_policy: NO_WRAP\n", 10**13), ("", 10**13),
])
def test_units_of_fsdp(read: Read, policy: str, wrap: int) -> None:
    text = FSDP_2.replace("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", policy)
    assert at(read(config(), text, BATCH), "parallel.wrap") == wrap


def test_checkpointing_and_its_offload_under_fsdp(read: Read) -> None:
    text = FSDP_2.replace("fsdp_activation_checkpointing: false",
                          "fsdp_activation_checkpointing: true\n  fsdp_activation_checkpointing_offload: true")
    found = read(config(), text, BATCH)
    assert fields(found, "training.recompute", "parallel.offload.activations") == ["full", "cpu"]


def test_the_mesh_of_accelerate(read: Read) -> None:
    mesh = """parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 2
"""
    found = read(config(), FSDP_2 + mesh, BATCH)
    assert fields(found, "parallel.sharding_factor", "parallel.context", "parallel.context_exchange") == [
        4, 2, "all-gather"]
    other = mesh.replace("cp_size: 2", "cp_size: 2\n  parallelism_config_cp_comm_strategy: alltoall")
    assert at(read(config(), FSDP_2 + other, BATCH), "parallel.context_exchange") == "ring"
    ulysses = read(config(), FSDP_2 + mesh.replace("cp_size", "sp_size"), BATCH)
    assert fields(ulysses, "parallel.context", "parallel.context_exchange") == [2, "all-to-all"]
    assert at(read(config(), FSDP_2 + mesh.replace("tp_size: 1", "tp_size: 2").replace("dp_replicate_size: 2",
                                                                                       "dp_replicate_size: 1"), BATCH),
              "parallel.tensor") == 2


def test_megatron_through_accelerate(read: Read) -> None:
    text = MULTI_GPU.replace("MULTI_GPU", "MEGATRON_LM") + """megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_pp_degree: 2
  megatron_lm_num_micro_batches: 4
  megatron_lm_sequence_parallelism: true
  megatron_lm_recompute_activations: true
  megatron_lm_use_distributed_optimizer: true
  megatron_lm_gradient_clipping: 1.0
"""
    found = read(config(), text, by=read_accelerate, sets=(*ON, "training.micro_batch=1"))
    assert fields(found, "software.framework", "software.modules", "parallel.tensor", "parallel.pipeline",
                  "training.micro_steps", "parallel.strategy", "training.recompute", "training.precision",
                  "parallel.sequence_parallel", "parallel.overlap") == [
        "megatron", "megatron", 2, 2, 4, "zero1", "selective", "megatron-bf16", True, False]
    assert not found.of("unknown")


# --------------------------------------------------------------------------------------------------------- deepspeed
AUTO = {"bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                              "offload_param": {"device": "nvme", "nvme_path": "/nvme"}, "overlap_comm": True,
                              "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
                              "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 1e9,
                              "stage3_param_persistence_threshold": "auto", "stage3_max_reuse_distance": 1e9,
                              "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False}


def test_the_trainer_fills_auto(read: Read) -> None:
    found = read(config("bfloat16"), {**BATCH, "bf16": True, "deepspeed": "ds.json"}, beside={"ds.json": AUTO})
    assert fields(found, "training.micro_batch", "training.micro_steps", "training.precision", "parallel.strategy",
                  "parallel.overlap", "training.optimizer") == [2, 4, "mixed-bf16", "zero3", True, "adamw"]
    assert at(found, "parallel.offload") == {"optimizer": "cpu", "parameters": "nvme"}
    assert at(found, "parallel.bucket_mb") == 1024 * 1024 * 2 / 2**20  # hidden squared, in bf16
    assert not found.of("unknown") and not found.of("left")
    inside = read(config("bfloat16"), {**BATCH, "bf16": True, "deepspeed": AUTO})
    assert inside.data["parallel"] == found.data["parallel"]
    assert not inside.of("unknown")


def test_an_auto_that_nobody_fills_is_listed(read: Read) -> None:
    found = read(AUTO, by=read_deepspeed, sets=(ON[0], "training.sequence=1024", "model.preset=gpt2",
                                                "training.micro_batch=1"))
    said = [note.said.partition(": ")[2] for note in found.of("left")]
    assert said == ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                    "zero_optimization.reduce_bucket_size", "bf16.enabled"]
    assert at(found, "software.modules") is None


def test_deepspeed_alone(read: Read) -> None:
    found = read({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "fp16": {"enabled": True},
                  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "allgather_bucket_size": 2e8,
                                        "zero_hpz_partition_size": 8, "round_robin_gradients": True},
                  "optimizer": {"type": "Lamb"}}, by=read_deepspeed,
                 sets=(ON[0], "training.sequence=512", "model.preset=bert-large"))
    assert fields(found, "software", "training.optimizer", "parallel.overlap", "parallel.strategy") == [
        {"framework": "deepspeed"}, "lamb", False, "zero2"]
    assert at(found, "parallel.bucket_mb") == round(5e8 * 2 / 2**20, 3)
    assert [note.said.rpartition(".")[2] for note in found.of("left")] == [
        "round_robin_gradients", "allgather_bucket_size", "zero_hpz_partition_size"]


@pytest.mark.parametrize(("batch", "expected"), [
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, [4, 64, None, 8]),
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
     [4, 64, None, 16]),
    ({"train_micro_batch_size_per_gpu": 4}, [4, None, 1, 8]),
    ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, [4, None, 3, 8]),
])
def test_batches_of_deepspeed(read: Read, batch: dict[str, int], expected: list[Any]) -> None:
    found = read(config(), {"zero_optimization": {"stage": 1}, **batch}, by=read_deepspeed)
    assert [*fields(found, "training.micro_batch", "training.global_batch", "training.micro_steps"),
            found.scenario.gpus] == expected


def test_a_whole_batch_over_known_gpus(read: Read) -> None:
    found = read(config(), ZERO_2.replace("zero_stage: 2", "deepspeed_config_file: ds.json"), by=read_accelerate,
                 beside={"ds.json": {"zero_optimization": {"stage": 2}, "train_batch_size": 64,
                                     "gradient_accumulation_steps": 2}})
    assert fields(found, "training.micro_batch", "training.global_batch", "training.micro_steps") == [4, 64, None]


@pytest.mark.parametrize(("batch", "sets", "micro"), [
    ({"train_batch_size": 128}, (), 16),
    ({"train_batch_size": 128, "gradient_accumulation_steps": 2}, (), 8),
    ({"train_batch_size": 128, "gradient_accumulation_steps": 2}, ("cluster.nodes=2",), 4),
    ({"train_batch_size": 128}, ("parallel.tensor=2",), 32),
    ({"train_batch_size": 128}, ("training.micro_batch=4",), 4),
])
def test_a_micro_batch_follows_from_the_gpus(read: Read, batch: dict[str, int], sets: tuple[str, ...],
                                             micro: int) -> None:
    found = read(config(), {"zero_optimization": {"stage": 1}, **batch}, by=read_deepspeed, sets=(*ON, *sets))
    assert fields(found, "training.micro_batch", "training.global_batch") == [micro, 128]


def test_a_whole_batch_that_does_not_divide(read: Read) -> None:
    for batch in ({"train_batch_size": 100}, {"train_batch_size": 8, "gradient_accumulation_steps": 2}):
        with pytest.raises(UserError, match=r"file1.json:\d: train_batch_size: expected a multiple of (8|16), 8 "):
            read(config(), {"zero_optimization": {"stage": 1}, **batch}, by=read_deepspeed)


@pytest.mark.parametrize(("old", "strategy"), [(True, "zero1"), (False, "ddp")])
def test_the_old_form_of_zero(read: Read, old: bool, strategy: str) -> None:
    found = read(config(), {"train_micro_batch_size_per_gpu": 1, "zero_optimization": old}, by=read_deepspeed)
    assert at(found, "parallel.strategy") == strategy
    assert "file1.json: zero_optimization" in [note.said for note in found.of("taken")]


def test_settings_that_a_file_does_not_have_are_not_cited(read: Read) -> None:
    found = read(config(), {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}, by=read_deepspeed)
    assert not [note for note in found.notes if "zero_optimization" in note.said]
    assert [note.field for note in found.of("assumed") if "ZeRO" in note.text] == ["parallel.strategy"]


def test_what_is_left_is_told_once(read: Read) -> None:
    found = read(config(), {"train_micro_batch_size_per_gpu": 1, "sparse_attention": {"mode": "fixed", "block": 16}},
                 by=read_deepspeed)
    assert [(note.kind, note.said) for note in found.notes if "sparse" in note.said] == [
        ("left", "file1.json: sparse_attention")]


def test_the_optimizer_of_deepspeed_is_told_where_it_differs(read: Read) -> None:
    for optim, left in (("adamw_torch", []), ("adafactor", ["file1.json: optim"])):
        found = read(config(), {**BATCH, "optim": optim, "deepspeed": {"optimizer": {"type": "AdamW"}}})
        assert at(found, "training.optimizer") == "adamw"
        assert [note.said for note in found.of("left")] == left


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_and_their_overlap(read: Read, stage: int) -> None:
    found = read(config(), {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}})
    assert at(found, "parallel.strategy") == ("ddp", "zero1", "zero2", "zero3")[stage]
    assert at(found, "parallel.overlap") is (stage == 3)


def test_mics_shares_shards_among_fewer(read: Read) -> None:
    found = read(config(), {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3,
                                                                                       "mics_shard_size": 4}})
    assert at(found, "parallel.sharding_factor") == 4


def test_zero_plus_plus_is_taken(read: Read) -> None:
    """ZeRO++ in fp16: second shards in a node, gathers in int8, reductions in int4."""
    found = read(config(), {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "zero_optimization": {
        "stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True}})
    assert fields(found, "parallel.strategy", "parallel.reshard_after_forward", "software.versions") == [
        "zero3", 8, None]
    precision = found.scenario.training.precision
    assert [precision.parameters, precision.gather, precision.reduce] == ["fp16", "int8", "int4"]
    assert {note.said.rpartition(".")[2] for note in found.of("taken")} > {
        "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"}
    assert not found.of("left") and not found.of("default")


def test_quantised_gathers_of_bf16_ask_for_a_release_that_has_them(read: Read) -> None:
    asked: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
                             "zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    assert at(read(config(), asked), "software.versions") == {"deepspeed": "0.19.8"}
    asked["zero_optimization"] = {"stage": 3, "zero_quantized_gradients": True}
    assert at(read(config(), asked), "software.versions") is None


def test_zero_plus_plus_below_stage_3_changes_nothing(read: Read) -> None:
    found = read(config(), {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {
        "stage": 2, "zero_hpz_partition_size": 8, "zero_quantized_weights": True}})
    assert at(found, "parallel.reshard_after_forward") is None
    assert found.scenario.training.precision.gather == "fp32"
    assert [note.text for note in found.of("left")] == ["changes nothing in stage 2: it is ZeRO-3's"] * 2


def test_what_is_off_of_zero_plus_plus_is_without_effect(read: Read) -> None:
    found = read(config(), {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {
        "stage": 3, "zero_hpz_partition_size": 1, "zero_quantized_weights": False}})
    assert not found.of("left") and found.scenario.parallel.reshard_after_forward is True


def test_mics_gathers_in_two_steps(read: Read) -> None:
    found = read(config(), {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {
        "stage": 3, "mics_shard_size": 16, "mics_hierarchical_params_gather": True}},
        sets=(*ON, "cluster.nodes=4"))
    assert fields(found, "parallel.sharding_factor", "parallel.hierarchical_gather") == [16, True]


def test_a_json_beside_accelerates_file_says_the_stage(read: Read) -> None:
    text = ZERO_2.replace("  zero_stage: 2\n", "")
    found = read(config(), text, {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2})
    assert fields(found, "parallel.strategy", "training.precision") == ["zero3", "mixed-bf16"]
    assert at(read(config(), text, BATCH), "parallel.strategy") == "zero2"  # DeepSpeedPlugin's default
