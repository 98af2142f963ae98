"""NeMo 1's YAML as scenarios: a file in its form, what it says otherwise than Megatron-LM, and what is refused."""

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
from sim.imports.megatron.nemo import read as read_nemo

FILE = (Path(__file__).parent / "files" / "nemo_gpt_5b.yaml").read_text(encoding="utf-8")
ON = ("cluster.topology=dgx-h100",)
Read = Callable[..., Imported]
ADAM = {"name": "fused_adam", "lr": 1e-4}


def job(**more: Any) -> dict[str, Any]:
    """The file with settings of `model` changed, or of `trainer` where the name starts so."""
    data = copy.deepcopy(yaml.safe_load(FILE))
    for name, value in more.items():
        room, _, rest = name.partition("__")
        if rest:
            data[room][rest] = value
        else:
            data["model"][name] = value
    return data


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.chdir(tmp_path)

    def run(content: str | dict[str, Any], *sets: str, beside: dict[str, Any] | None = None) -> Imported:
        Path("job.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        Path("config.json").write_text(json.dumps(beside), encoding="utf-8")
        draft = Draft()
        read_nemo(["job.yaml", *(["config.json"] if beside else [])], draft)
        return draft.finish((*ON, *sets))

    return run


def left(found: Imported) -> set[str]:
    """What is left but for what every job with distributed_fused_adam leaves."""
    return {note.said.rpartition(": ")[2] for note in found.of("left")} - {
        "model.optim.name", "model.optim.overlap_grad_sync"}


def test_a_job_in_its_form(read: Read) -> None:
    found = read(FILE)
    expected = {
        "cluster.nodes": 8, "cluster.gpus_per_node": 8,
        "model": {"layers": 24, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50257, "max_positions": 2048,
                  "dropout": 0.1},
        "training.sequence": 2048, "training.micro_batch": 4, "training.global_batch": 2048,
        "training.precision": {"name": "fp8", "gradients": "bf16", "reduce": "bf16"}, "training.recompute": None,
        "parallel.strategy": "zero1", "parallel.overlap": True, "parallel.bucket_mb": 200.0,
        "software.framework": "megatron", "software.year": 2024}
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown") and not left(found)
    assert plan_memory(found.scenario).stages


def test_every_setting_is_told_by_its_own_name(read: Read) -> None:
    def leaves(data: dict[str, Any], above: str = "") -> set[str]:
        return {name for key, value in data.items() for name in (
            leaves(value, f"{above}{key}.") if isinstance(value, dict) and value else
            {f"{above}{key}"} if value is not None else set())}

    found = read(FILE)
    told = {note.said.removeprefix("job.yaml: ") for note in found.notes if note.said.startswith("job.yaml: ")}
    assert told == leaves(yaml.safe_load(FILE))


@pytest.mark.parametrize(("more", "expected"), [
    ({"fp8": False}, {"training.precision": {"name": "megatron-bf16", "gradients": "bf16", "reduce": "bf16"}}),
    ({"fp8": False, "megatron_amp_O2": False}, {"training.precision": "amp-bf16"}),
    ({"fp8": False, "optim": ADAM}, {"training.precision": "megatron-bf16", "parallel.strategy": None,
                                     "parallel.overlap": True}),
    ({"fp8": False, "trainer__precision": 32}, {"training.precision": "fp32"}),
    ({"fp8": False, "optim": ADAM, "sequence_parallel": True, "tensor_model_parallel_size": 2},
     {"parallel.overlap": False, "parallel.sequence_parallel": True, "parallel.tensor": 2}),
    ({"fp8": False, "optim": ADAM, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
     {"parallel.overlap": False, "parallel.pipeline": 2, "parallel.virtual_stages": 3}),
    ({"activations_checkpoint_granularity": "selective"}, {"training.recompute": "selective"}),
    ({"activations_checkpoint_granularity": "full", "activations_checkpoint_method": "block",
      "activations_checkpoint_num_layers": 3}, {"training.recompute": {"layers": 3}}),
    ({"activation": "fast-swiglu", "bias": False, "normalization": "rmsnorm", "position_embedding_type": "rope",
      "share_embeddings_and_output_weights": False, "num_query_groups": 8},
     {"model.gated_mlp": True, "model.bias": False, "model.norm": "rmsnorm", "model.positions": "rotary",
      "model.tied_embeddings": False, "model.kv_heads": 8}),
    ({"normalization": "layernorm1p", "activation": "squared-relu"}, {"model.norm": "layernorm",
                                                                      "model.activation": "relu"}),
    ({"override_vocab_size": 32000}, {"model.vocab": 32000}), ({"context_parallel_size": 2}, {"parallel.context": 2}),
    ({"tokenizer": {"library": "huggingface", "type": "meta-llama/Llama-2-7b"}}, {"model.vocab": 32000}),
    ({"num_moe_experts": 8, "moe_router_topk": 2, "expert_model_parallel_size": 4, "moe_grouped_gemm": True},
     {"model.moe": {"experts": 8, "top_k": 2}, "parallel.expert": 4}),
    ({"transformer_engine": False, "mcore_gpt": False, "fp8": False}, {"training.attention": "eager"}),
    ({"transformer_engine": False, "mcore_gpt": False, "fp8": False, "use_flash_attention": True},
     {"training.attention": "flash"}),
    ({"ub_tp_comm_overlap": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
     {"parallel.async_tensor": True}),
    ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3}, {"parallel.overlap_p2p": False}),
    ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3, "overlap_p2p_comm": True},
     {"parallel.overlap_p2p": True}),
    ({"pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}, {"parallel.overlap_p2p": None}),
    ({"gradient_accumulation_fusion": True}, {"software.fused_accumulation": None}),
    ({"gradient_accumulation_fusion": True, "megatron_amp_O2": False}, {"software.fused_accumulation": False}),
    ({"gradient_accumulation_fusion": True, "fp8": False, "optim": ADAM}, {"software.fused_accumulation": False}),
    ({}, {"software.fused_accumulation": False}),
    ({"fp8": False, "optim": ADAM, "megatron_amp_O2": False}, {"parallel.overlap": False}),
    ({"activation": "swiglu", "ffn_hidden_size": None}, {"model.ffn": 16384, "model.gated_mlp": True}),
    ({"encoder_seq_length": None, "data": {"train_ds": {"max_seq_length": 1024}}}, {"training.sequence": 1024}),
    ({"openai_gelu": True}, {"model.activation": "gelu-new"}),
    ({"trainer__devices": -1}, {"cluster.gpus_per_node": None, "cluster.nodes": 8}),
    ({"ffn_hidden_size": "${multiply:${.num_layers}, ${model.num_attention_heads}}"}, {"model.ffn": 768}),
])
def test_fields(read: Read, more: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read(job(**more))
    assert {path: at(found, path) for path in expected} == expected
    assert not found.of("unknown")


@pytest.mark.parametrize("more", [{}, {"fp8": False}, {"megatron_amp_O2": False}])
def test_a_part_of_the_precision_is_told_as_a_part(read: Read, more: dict[str, Any]) -> None:
    """megatron_amp_O2 says in what parameters are stored, and no precision has the name of a dtype alone."""
    taken = [note for note in read(job(**more)).notes if note.kind == "taken" and "precision" in note.field]
    assert [note.field for note in taken].count("training.precision") == 1
    assert all(note.value in ("bf16", "fp8") for note in taken if note.field != "training.precision")


def test_fp8_without_o2(read: Read) -> None:
    precision = at(read(job(megatron_amp_O2=False)), "training.precision")
    assert (precision["compute"], precision["parameters"], precision["reduce"]) == ("fp8", "fp32", "fp32")


@pytest.mark.parametrize(("more", "setting"), [
    ({"fp8_params": True}, "model.fp8_params"),
    ({"mcore_customization_config": {"moe_aux_loss": 1}}, "model.mcore_customization_config.moe_aux_loss"),
    ({"rampup_batch_size": [32, 32, 1000]}, "model.rampup_batch_size"),
    ({"fp32_residual_connection": True}, "model.fp32_residual_connection"),
    ({"transformer_block_type": "normformer"}, "model.transformer_block_type"),
    ({"headscale": True}, "model.headscale"),
    ({"optim": {"name": "distributed_fused_adam"}}, "model.optim.overlap_param_sync (default)"),
    ({"cpu_offloading": True}, "model.cpu_offloading"), ({"peft": {"peft_scheme": "lora"}}, "model.peft.peft_scheme"),
    ({"data": {"train_ds": {"packed_sequence": True}}}, "model.data.train_ds.packed_sequence"),
])
def test_what_no_field_says_is_left_with_a_reason(read: Read, more: dict[str, Any], setting: str) -> None:
    assert left(read(job(**more))) == {setting}


def test_unknown_settings_are_told(read: Read) -> None:
    found = read(job(mystery=3))
    assert [note.said for note in found.of("unknown")] == ["job.yaml: model.mystery"]


def test_a_config_beside_it(read: Read) -> None:
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings",
             "hidden_dropout")
    data = job()
    data["model"] = {key: value for key, value in data["model"].items() if key not in sizes}
    assert fields(read(data, "training.sequence=2048", beside=config()), "model.hf") == ["config.json"]


@pytest.mark.parametrize(("content", "message"), [
    (job(fsdp=True), "model.fsdp: expected false"), (job(fp8_hybrid=False), "model.fp8: expected fp8_e4m3"),
    (job(trainer__precision="int4"), r"job.yaml:\d+: trainer.precision: expected one of 16"),
    (job(trainer__accumulate_grad_batches=4), "accumulate_grad_batches: expected 1"),
    (job(activation="magic"), "model.activation: expected one of"),
    (job(num_layers="many"), "model.num_layers: expected"),
    (job(normalization="batchnorm"), "model.normalization: expected one of"),
    (job(optim={"name": "sophia"}), "model.optim.name: expected one of"),
    ({"recipe": 1}, "recipes of NeMo 2 are Python"),
])
def test_refusals(read: Read, content: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(content)
