"""torchtitan's TOML files as scenarios."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.catalog import table
from sim.errors import UserError
from sim.imports.draft import Draft, Imported
from sim.imports.torchtitan.read import read
from sim.scenario.fields.schema import Scenario

FILES = Path(__file__).parent / "files"
#: torchtitan/models/llama3/train_configs/llama3_8b.toml of torchtitan 0.1, as remembered.
LLAMA_8B = (FILES / "llama3_8b.toml").read_text(encoding="utf-8")
#: llama3_70b.toml, the same.
LLAMA_70B = LLAMA_8B.replace('"8B"', '"70B"').replace("local_batch_size = 1", "local_batch_size = 8").replace(
    "tensor_parallel_degree = 1", "tensor_parallel_degree = 8  # 8-way TP").replace(
    'mode = "selective"', 'mode = "full"')
#: llama3_405b.toml, the same.
LLAMA_405B = LLAMA_70B.replace('"70B"', '"405B"').replace("local_batch_size = 8", "local_batch_size = 2").replace(
    "compile = false", "compile = true").replace('# converters = ["float8"]', 'converters = ["float8"]').replace(
    "enable_fsdp_float8_all_gather = false", "enable_fsdp_float8_all_gather = true").replace(
    "precompute_float8_dynamic_scale_for_fsdp = false", "precompute_float8_dynamic_scale_for_fsdp = true").replace(
    "[checkpoint]", "enable_async_tensor_parallel = true\n[checkpoint]")
#: debug_model.toml of torchtitan 0.2, as remembered.
DEBUG = (FILES / "debug_model.toml").read_text(encoding="utf-8")
#: llama3_405b.toml of 2024, as remembered, with a pipeline.
OLD = (FILES / "llama3_405b_2024.toml").read_text(encoding="utf-8")


def finished(files: list[str], sets: tuple[str, ...]) -> Imported:
    draft = Draft("job")
    read(files, draft)
    return draft.finish(sets)


def imported(text: str, *sets: str, nodes: int = 8, name: str = "job.toml") -> Imported:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        return finished([str(path)], ("cluster.topology=dgx-h100", f"cluster.nodes={nodes}", *sets))


def names(found: Imported, kind: Any) -> set[str]:
    return {note.said.rpartition(": ")[2] for note in found.of(kind)}


def job(**tables: str) -> str:
    "A file of the 8B model with these tables' lines."
    head = {"model": 'name = "llama3"\nflavor = "8B"', "training": "local_batch_size = 4\nseq_len = 4096"}
    lines = {name: "\n".join(filter(None, (head.get(name, ""), tables.get(name, "")))) for name in {**head, **tables}}
    return "".join(f"[{name.replace('__', '.')}]\n{text}\n" for name, text in lines.items())


def scenario(*sets: str, nodes: int = 8, **tables: str) -> Scenario:
    return imported(job(**tables), *sets, nodes=nodes).scenario


def test_llama_8b() -> None:
    found = imported(LLAMA_8B)
    s = found.scenario
    precision = s.training.precision
    assert found.data["model"] == {"preset": "llama-3-8b"}
    assert (s.gpus, s.training.micro_batch, s.training.global_batch, s.training.sequence) == (64, 1, 64, 8192)
    assert (precision.compute, precision.parameters, precision.gather, precision.reduce) == (
        "bf16", "fp32", "bf16", "fp32")
    assert (s.training.recompute, s.training.optimizer) == ("selective-op", "adamw")
    assert (s.parallel.strategy, s.parallel.sharding_factor, s.parallel.reshard_after_forward) == ("fsdp", 64, True)
    assert (s.software.framework, s.software.fsdp, s.software.compile) == ("torchtitan", 2, False)
    assert s.software.versions == {"torchtitan": "0.1.0"}
    assert names(found, "left") == names(found, "unknown") == set()


def test_llama_70b() -> None:
    s = imported(LLAMA_70B, nodes=32).scenario
    assert (s.parallel.tensor, s.parallel.sequence_parallel, s.data_parallel) == (8, True, 32)
    assert (s.training.recompute, s.training.micro_batch, s.training.global_batch) == ("full", 8, 256)


def test_llama_405b() -> None:
    found = imported(LLAMA_405B, nodes=16)
    s = found.scenario
    assert (s.training.precision.compute, s.training.precision.gather, s.training.precision.reduce) == (
        "fp8", "fp8", "fp32")
    assert (s.parallel.async_tensor, s.software.compile, s.model.layers) == (True, True, 126)
    assert names(found, "left") == names(found, "unknown") == set()


def test_debug_model() -> None:
    found = imported(DEBUG, nodes=1)
    s = found.scenario
    assert (s.model.layers, s.model.hidden, s.model.ffn, s.model.vocab, s.model.gated_mlp) == (6, 256, 768, 2048, True)
    assert s.training.recompute.layers == 3  # type: ignore[union-attr]
    assert s.software.versions == {"torchtitan": "0.2.0"}
    assert "one block of every 2 of a rank" in [note.text for note in found.of("taken")]
    assert names(found, "left") == names(found, "unknown") == set()


def test_names_of_2024() -> None:
    found = imported(OLD, nodes=64)
    s = found.scenario
    assert (s.parallel.pipeline, s.parallel.virtual_stages, s.parallel.schedule) == (16, 2, "interleaved")
    assert (s.parallel.strategy, s.parallel.sharding_factor, s.gpus) == ("fsdp", 4, 512)
    assert (s.training.micro_batch, s.micro_steps) == (1, 32)
    assert (s.training.precision.compute, s.training.precision.gather) == ("fp8", "fp8")
    assert (s.software.year, s.software.fsdp, s.software.optimizer_kernel) == (2024, 2, "fused")
    assert s.parallel.split_slots.head == 0
    assert names(found, "unknown") == set()


def test_what_is_not_said() -> None:
    s = imported("[model]\nflavor = '8B'\n", nodes=1).scenario
    assert (s.training.micro_batch, s.training.sequence, s.training.global_batch) == (8, 2048, 64)
    assert s.training.recompute.layers == 16  # type: ignore[union-attr]


@pytest.mark.parametrize(("tables", "field", "value"), [
    ({"parallelism": "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 8"},
     "parallel.sharding_factor", 8),
    ({"training": "deterministic = true"}, "software.deterministic", True),
    ({"debug": "deterministic = true"}, "software.deterministic", True),
    ({"parallelism": "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 8\ncontext_parallel_degree = 4"},
     "parallel.sharding_factor", 32),
    ({"parallelism": "data_parallel_replicate_degree = 64\ndata_parallel_shard_degree = 1"},
     "parallel.strategy", "ddp"),
    ({"parallelism": "data_parallel_replicate_degree = 64\ndata_parallel_shard_degree = 1"},
     "parallel.bucket_mb", 100),
    ({"parallelism": "data_parallel_replicate_degree = 64\ndata_parallel_shard_degree = 1"},
     "training.precision.name", "amp-bf16"),
    ({"parallelism": "data_parallel_shard_degree = 1\ntensor_parallel_degree = 8\npipeline_parallel_degree = 8",
      "training": "mixed_precision_reduce = 'float32'"}, "training.precision.name", "fp32"),
    ({"parallelism": "data_parallel_shard_degree = 1\ncontext_parallel_degree = 64"}, "parallel.strategy", "fsdp"),
    ({"parallelism": "context_parallel_degree = 8"}, "parallel.context_exchange", "all-gather"),
    ({"parallelism": "context_parallel_degree = 8\ncontext_parallel_rotate_method = 'alltoall'"},
     "parallel.context_exchange", "ring"),
    ({"parallelism": "fsdp_reshard_after_forward = 'never'"}, "parallel.reshard_after_forward", False),
    ({"parallelism": "fsdp_reshard_after_forward = 'always'\npipeline_parallel_degree = 8"},
     "parallel.reshard_after_forward", True),
    ({"parallelism": "pipeline_parallel_degree = 8"}, "parallel.reshard_after_forward", False),
    ({"parallelism": "pipeline_parallel_degree = 8"}, "parallel.schedule", "1f1b"),
    ({"parallelism": "pipeline_parallel_degree = 8"}, "training.micro_batch", 1),
    ({"parallelism": "pipeline_parallel_degree = 8"}, "training.global_batch", 32),
    ({"parallelism": "pipeline_parallel_degree = 8\npipeline_parallel_microbatch_size = 2"}, "micro_steps", 2),
    ({"parallelism": "pipeline_parallel_degree = 8"}, "parallel.split_slots.embedding", 1),
    ({"parallelism": "pipeline_parallel_degree = 8\npipeline_parallel_last_stage_less_layers = 2"},
     "parallel.split_slots.head", 2),
    ({"parallelism": "pipeline_parallel_degree = 8\npipeline_parallel_schedule = 'Interleaved1F1B'"},
     "parallel.virtual_stages", 2),
    ({"parallelism": "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'\n"
                     "pipeline_parallel_layers_per_stage = 6"}, "parallel.virtual_stages", 3),
    ({"parallelism": "pipeline_parallel_degree = 8\npipeline_parallel_schedule = 'ZBVZeroBubble'"},
     "parallel.schedule", "zb-v"),
    ({"parallelism": "pipeline_parallel_degree = 2\npipeline_parallel_split_points = ['layers.14']"}, "parallel.split",
     [14, 18]),
    ({"parallelism": "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'\n"
                     "pipeline_parallel_split_points = ['layers.7', 'layers.15', 'layers.24']"}, "parallel.split",
     [16, 16]),
    ({"parallelism": "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'ZBVZeroBubble'\n"
                     "pipeline_parallel_split_points = ['layers.7', 'layers.15', 'layers.24']"}, "parallel.split",
     [15, 17]),
    ({"training": "global_batch_size = 1024"}, "micro_steps", 4),
    ({"training": "global_batch_size = -1"}, "micro_steps", 1),
    ({"training": "mixed_precision_param = 'float32'"}, "training.precision.name", "fp32"),
    ({"training": "dtype = 'bfloat16'"}, "training.precision.optimizer", "bf16"),
    ({"training": "enable_cpu_offload = true"}, "parallel.offload.optimizer", "cpu"),
    ({"training": "compile = true"}, "software.compile", True),
    ({"compile": "enable = true"}, "software.compile", True),
    ({"compile": "enable = true\ncomponents = ['loss']"}, "software.compile", False),
    ({"activation_checkpoint": "mode = 'none'"}, "training.recompute", "none"),
    ({"activation_checkpoint": "mode = 'full'"}, "training.recompute", "full"),
    ({"activation_checkpoint": "mode = 'selective'\nselective_ac_option = '1'"}, "training.recompute", "full"),
    ({"activation_checkpoint": "mode = 'selective'\nselective_ac_option = '3'"}, "training.recompute.layers", 10),
    ({"activation_checkpoint": "mode = 'selective'\nselective_ac_option = '3'",
      "parallelism": "pipeline_parallel_degree = 8"}, "training.recompute.layers", 1),
    ({"optimizer": "name = 'Adam'"}, "training.optimizer", "adam"),
    ({"optimizer": "implementation = 'for-loop'"}, "software.optimizer_kernel", "loop"),
    ({"optimizer": "early_step_in_backward = true"}, "training.optimizer_in_backward", True),
    ({"model": "converters = ['quantize.linear.float8']", "quantize__linear__float8": "filter_fqns = ['output']"},
     "training.precision.gather", "bf16"),
    ({"model": "converters = ['float8']", "float8": "enable_fsdp_float8_all_gather = true"},
     "training.precision.gather", "fp8"),
])
def test_one_field(tables: dict[str, str], field: str, value: Any) -> None:
    found: Any = scenario(**tables)
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(("tables", "left"), [
    ({"parallelism": "pipeline_parallel_degree = 8\npipeline_parallel_schedule = 'InterleavedZeroBubble'"},
     "parallelism.pipeline_parallel_schedule"),
    ({"parallelism": "tensor_parallel_degree = 2\ndisable_loss_parallel = true"}, "parallelism.disable_loss_parallel"),
    ({"parallelism": "pipeline_parallel_degree = 8", "training": "global_batch_size = 1024"},
     "training.global_batch_size"),
    ({"activation_checkpoint": "mode = 'memory_budget'"}, "activation_checkpoint.mode"),
    ({"model": "converters = ['float8']", "float8": "recipe_name = 'rowwise'"}, "float8.recipe_name"),
    ({"model": "converters = ['own']"}, "model.converters"),
    ({"model": "converters = ['mx']", "mx": "recipe_name = 'mxfp4_cutlass'"}, "mx.recipe_name"),
    ({"compile": "enable = true\ncomponents = ['model']"}, "compile.components"),
    ({"experimental": "custom_import = 'mine'"}, "experimental.custom_import"),
    ({"model": "attn_mask_type = 'block_causal'\nuse_flex_attn = true"}, "model.attn_mask_type"),
])
def test_what_no_field_says(tables: dict[str, str], left: str) -> None:
    assert left in names(imported(job(**tables)), "left")


def test_settings_of_unknown_names_are_listed() -> None:
    found = imported(job(parallelism="my_degree = 2"))
    assert [(note.said.rpartition(": ")[2], note.value) for note in found.of("unknown")] == [
        ("parallelism.my_degree", 2)]


@pytest.mark.parametrize(("tables", "words"), [
    ({"parallelism": "tensor_parallel_degree = 'x'"},
     "job.toml:8: parallelism.tensor_parallel_degree: expected a whole"),
    ({"parallelism": "data_parallel_shard_degree = 0"}, "-1, or a whole number"),
    ({"parallelism": "data_parallel_shard_degree = -2"}, "whole number of at least -1"),
    ({"parallelism": "fsdp_reshard_after_forward = 'sometimes'"}, "one of default, always, never"),
    ({"parallelism": "pipeline_parallel_degree = 8\npipeline_parallel_schedule = 'mine'"}, "ZBVZeroBubble"),
    ({"parallelism": "pipeline_parallel_degree = 8\npipeline_parallel_microbatch_size = 3"}, "a multiple of"),
    ({"parallelism": "pipeline_parallel_degree = 2\npipeline_parallel_split_points = ['layers.9', 'layers.3']"},
     "in order"),
    ({"parallelism": "pipeline_parallel_degree = 2\npipeline_parallel_split_points = ['layers.3', 'layers.9']"},
     "2 stages"),
    ({"parallelism": "context_parallel_rotate_method = 'ring'"}, "one of allgather, alltoall"),
    ({"training": "mixed_precision_param = 'int8'"}, "one of bfloat16"),
    ({"activation_checkpoint": "mode = 'all'"}, "one of selective, full, none"),
    ({"activation_checkpoint": "selective_ac_option = 'ops'"}, "'op', or a whole number"),
    ({"activation_checkpoint": "selective_ac_option = '0'"}, "'op', or a whole number"),
    ({"optimizer": "name = 'Lion'"}, "one of adamw, adam"),
    ({"model": "converters = 3"}, "a list of names"),
    ({"parallelism": "data_parallel_shard_degree = 7"}, "7 GPUs do not go over"),
])
def test_bad_values(tables: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        scenario(**tables)
    assert words in str(raised.value)


def test_a_model_that_is_not_known(tmp_path: Path) -> None:
    text = job().replace('"8B"', '"9B"')
    with pytest.raises(UserError, match="model"):
        imported(text)
    found = imported(text, "model.preset=llama-3-8b")
    assert "70B, 405B" in next(note.text for note in found.of("left"))
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "intermediate_size": 4096, "vocab_size": 1000}), encoding="utf-8")
    (tmp_path / "job.toml").write_text(job(activation_checkpoint="mode = 'full'"), encoding="utf-8")
    found = finished([str(tmp_path / name) for name in ("config.json", "job.toml")],
                 ("cluster.topology=dgx-h100",))
    assert (found.scenario.model.layers, found.scenario.training.recompute) == (4, "full")


@pytest.mark.parametrize(("name", "text", "message"), [
    ("none.toml", "# nothing\n", "holds none of torchtitan's tables"),
    ("args.json", '{"per_device_train_batch_size": 1}', "it looks like the Trainer's arguments .*import hf"),
    ("run.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n", "it looks like accelerate's YAML"),
    ("zero.json", '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}}', "looks like DeepSpeed's JSON"),
])
def test_files_of_another_kind(name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        imported(text, name=name)


def test_every_flavor_is_a_model() -> None:
    for family, flavors in table("imports/torchtitan/flavors.yaml")["flavors"].items():
        for flavor in flavors:
            s = imported(f"[model]\nname = '{family}'\nflavor = '{flavor}'\n", nodes=1).scenario
            assert s.model.vocab > 1000, (family, flavor)


@given(st.text(max_size=40), st.sampled_from([
    "model.name", "model.flavor", "model.converters", "training.local_batch_size", "compile.components",
    "parallelism.pipeline_parallel_split_points", "parallelism.module_fqns_per_model_part",
    "parallelism.data_parallel_shard_degree", "activation_checkpoint.selective_ac_option"]), st.booleans())
def test_any_value_ends_well(value: str, name: str, raw: bool) -> None:
    where, _, key = name.partition(".")
    more = "pipeline_parallel_degree = 2\n" if where == "parallelism" else ""
    with contextlib.suppress(UserError):
        imported(f"[{where}]\n{more}{key} = {value if raw else json.dumps(value)}\n", "model.preset=llama-3-8b")


def test_shards_of_replicas_follow_the_cluster() -> None:
    layout = "data_parallel_replicate_degree = 2\ntensor_parallel_degree = 4\ncontext_parallel_degree = 2"
    assert scenario(parallelism=layout).parallel.sharding_factor == 8
    assert scenario(nodes=4, parallelism=layout).parallel.sharding_factor == 4
    assert scenario("parallel.sharding_factor=2", parallelism=layout).parallel.sharding_factor == 2
    with pytest.raises(UserError, match="data_parallel_replicate_degree: expected a number that divides 64 GPUs"):
        scenario(parallelism="data_parallel_replicate_degree = 3")


def test_replicas_reduce_in_every_micro_step() -> None:
    """train.py accumulates without no_sync, under DDP as under FSDP."""
    found = scenario(parallelism="data_parallel_replicate_degree = 64\ndata_parallel_shard_degree = 1")
    assert found.parallel.strategy == "ddp" and found.parallel.reduce_every_micro_step is True


@pytest.mark.parametrize(("tables", "kernel"), [
    ({"training": "tensor_parallel_degree = 1"}, "foreach"),
    ({"training": "tensor_parallel_degree = 1", "optimizer": "fused = true"}, "fused"), ({"parallelism": ""}, "fused")])
def test_the_optimizer_s_kernels_of_each_era(tables: dict[str, str], kernel: str) -> None:
    """2024: optimizer.fused is a flag, off by default; 0.1.0: optimizer.implementation, fused."""
    assert scenario(**tables).software.optimizer_kernel == kernel


def test_ddp_by_the_type_of_spring_2024() -> None:
    found = scenario(training="data_parallel_degree = -1\ndata_parallel_type = 'ddp'")
    assert (found.parallel.strategy, found.parallel.bucket_mb) == ("ddp", 100)


@pytest.mark.parametrize(("tables", "left"), [
    ({"model": "converters = ['mx']"}, set()), ({"model": "converters = ['float8']"}, {"model.converters"}),
    ({"model": "converters = ['mx']", "mx": "filter_fqns = ['output', 'wq']"}, {"mx.filter_fqns"})])
def test_layers_that_stay_in_16_bits(tables: dict[str, str], left: set[str]) -> None:
    """mx.filter_fqns is ["output"] unless said, float8's is empty (job_config.py)."""
    assert names(imported(job(**tables)), "left") == left


def test_degrees_of_two_eras_that_contradict_each_other_are_refused() -> None:
    text = ("[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nseq_len = 8192\nlocal_batch_size = 1\n"
            "tensor_parallel_degree = {}\n[parallelism]\ntensor_parallel_degree = 4\n")
    assert imported(text.format(4)).scenario.parallel.tensor == 4
    with pytest.raises(UserError, match=r"training.tensor_parallel_degree: says 2, but parallelism.tensor_parallel_de"):
        imported(text.format(2))
