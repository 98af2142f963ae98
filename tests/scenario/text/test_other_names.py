"""Names of other tools are answered with ours, and every one of ours that they point at exists."""

from __future__ import annotations

import re

import pytest

from sim.catalog import table
from sim.errors import UserError, bare
from sim.report.fields import field_rows
from sim.scenario import resolve
from sim.scenario.fields.precisions import PRECISIONS
from sim.scenario.named.presets import preset_names
from sim.scenario.named.topologies import topology_names
from sim.scenario.text.other_names import other_field, other_value

NAMES = table("scenario/text/other_names.yaml")


def test_every_field_and_value_pointed_at_exists() -> None:
    takes = {row["field"]: row["takes"] for row in field_rows()}
    inside = {f"{place}.{ours}" for place, fields in NAMES["inside"].items() for ours in fields}
    assert set(NAMES["fields"]) | set(NAMES["values"]) | inside <= set(takes)
    for path, values in NAMES["values"].items():
        lists = {"training.precision": PRECISIONS, "cluster.topology": topology_names(), "model.preset": preset_names()}
        words = set(lists.get(path, takes[path].replace(",", "").split()))
        for ours in map(str, values):  # quoted ones stand in a sentence, which may name fields too
            named = re.findall(r"'([^']+)'", ours) or ours.replace(",", "").replace(" or ", " ").split()
            assert set(named) <= words
            fields = {f"{path.partition('.')[0]}.{name}" for name in re.findall(r"\b[a-z]+_[a-z_]+\b", ours)}
            assert fields <= set(takes)


def test_no_name_means_two_things() -> None:
    meanings = [{bare(str(name)) for name in names} for part in ("fields", "follows") for names in NAMES[part].values()]
    said = [name for meaning in meanings for name in meaning]
    assert len(said) == len(set(said))


@pytest.mark.parametrize(("name", "inside", "hint"), [
    ("tensor_model_parallel_size", "parallel", "did you mean 'tensor'?"),
    ("tp", "training", "did you mean 'parallel.tensor'?"),
    ("Gradient-Accumulation-Steps", "training", "did you mean 'micro_steps'?"),
    ("dp", "parallel", "it follows: GPUs over tensor x pipeline x context"),
    ("max_grad_norm", "training", "gradients are clipped where the framework does it by itself ('drystep list "
                                  "software' says which), always or never"),
    ("compression", "training", "gradients go over the wire as training.precision.reduce says; compressing them "
                                "(PowerSGD, 1-bit Adam) is not simulated"),
    ("lr", "training", "no prediction depends on it: leave it out"),
    ("num_train_epochs", "training", "write the tokens of the run: budget.tokens"),
    ("data", "parallel", "it follows: GPUs over tensor x pipeline x context"),
    ("data", "training", ""),
    ("no_sync", "parallel", "write reduce_every_micro_step: false is no_sync, true sums gradients in every micro-step"),
    ("max_new_tokens", "training.mode.inference", "did you mean 'generate'?"),
    ("input_len", "training", "did you mean 'mode.inference.prompt'?"),
    ("batch_size", "training.mode.inference", "did you mean 'batch'?"),
    ("batch_size", "training", "did you mean 'micro_batch'?"),
    ("kv_cache_dtype", "training.mode.inference", "did you mean 'kv_cache'?"),
    ("target_modules", "training.finetune", "did you mean 'targets'?"),
    ("lora_alpha", "training.finetune", "no prediction depends on it: leave it out"),
    ("nothing_known", "parallel", ""),
])
def test_fields(name: str, inside: str, hint: str) -> None:
    assert other_field(name, inside) == hint


@pytest.mark.parametrize(("name", "inside", "part"), [
    ("spare_nodes", "cluster", "budget.restart"), ("rampup_batch_size", "training", "predict the first and the last"),
    ("diloco", "parallel", "drystep collective all_reduce"),
    ("oversubscription", "cluster", "inter.oversubscription=4"), ("nics", "cluster", "inter_gbps_per_node")])
def test_fields_that_stand_elsewhere_are_answered_with_how(name: str, inside: str, part: str) -> None:
    assert part in other_field(name, inside)


@pytest.mark.parametrize(("path", "value", "part"), [
    ("parallel.strategy", "mics", "'zero3' with sharding_factor"), ("parallel.strategy", "tp", "fields of their own"),
    ("parallel.strategy", "localsgd", "one worker by itself"), ("training.precision", "fp64", "fp32 is the widest"),
    ("training.optimizer", "shampoo", "not simulated"), ("software.framework", "jax", "not simulated"),
    ("software.framework", "vllm", "cuda_graphs: true"), ("parallel.schedule", "zero-bubble", "'zb-h1'"),
    ("parallel.schedule", "DualPipeV", "'zb-v'"), ("model.preset", "mamba", "only transformers")])
def test_values_that_are_none_of_ours_are_answered(path: str, value: str, part: str) -> None:
    assert part in other_value(path, value)


@pytest.mark.parametrize(("name", "ours"), [
    ("meta-llama/Meta-Llama-3.1-70B-Instruct", "'llama-3.1-70b'"), ("mistralai/Mistral-7B-v0.1", "'mistral-7b'"),
    ("tiiuae/falcon-rw", "hf: the path of its config.json")])
def test_a_model_of_the_hub_is_found_by_the_end_of_its_name(name: str, ours: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve({"name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": name},
                 "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}}, "x.yaml")
    assert ours in caught.value.faults[0].hint


def test_values() -> None:
    assert other_value("training.precision", "bf16-true") == "did you mean 'pure-bf16'?"
    assert other_value("parallel.strategy", "HYBRID_SHARD") == (
        "did you mean 'fsdp' with sharding_factor: the ranks that share a set of shards?")
    assert other_value("cluster.topology", "p4d.24xlarge") == "did you mean 'p4d'?"
    assert other_value("training.precision", "bf16").startswith("did you mean 'amp-bf16' (autocast), 'fsdp-bf16'")
    assert other_value("parallel.strategy", "deepspeed") == "did you mean zero1, zero2 or zero3?"
    assert other_value("model.norm", "deepspeed") == ""
    assert other_value("software.framework", "vLLM") == (
        "did you mean 'pytorch' with compile: true and cuda_graphs: true, which engines of inference have?")
    assert other_value("training.mode.inference.kv_cache", "auto") == "did you mean 'same'?"
    assert other_value("training.optimizer", "paged_adamw_8bit") == (
        "did you mean 'adamw-8bit' with parallel.offload.optimizer: paged?")


def test_one_figure_in_place_of_figures_by_dtype() -> None:
    with pytest.raises(UserError) as caught:
        resolve({"name": "x", "cluster": {"topology": "dgx-h100", "gpu": {"tflops": 989}}, "model": {"preset": "gpt2"},
                 "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}}, "x.yaml")
    assert [(f.field, f.hint) for f in caught.value.faults] == [("cluster.gpu.tflops", "write {bf16: 989}")]


@pytest.mark.parametrize("method", ["dpo", "GRPO", "orpo", "knowledge-distillation"])
def test_what_is_no_single_step_is_answered_with_its_parts(method: str) -> None:
    for path in ("training.finetune.method", "training.mode"):
        said = other_value(path, method)
        assert "did you mean" not in said and ("the policy's step" in said or "the student's step" in said
                                               or "it is the step of full or lora" in said)
    assert set(NAMES["answers"]) <= {row["field"] for row in field_rows()}
    for answers, values in ((NAMES["answers"][path], NAMES["values"][path]) for path in NAMES["answers"]):
        told = [bare(str(name)) for names in (*answers.values(), *values.values()) for name in names]
        assert len(told) == len(set(told))


def test_an_error_names_ours_instead_of_listing_everything() -> None:
    said = {"name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-3-8b"},
            "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128, "lora": 8, "recompute": True},
            "parallel": {"pp": 2}, "parallel.tensor": 2}
    with pytest.raises(UserError) as error:
        resolve(said, "x.yaml")
    faults = {fault.field: fault.hint for fault in error.value.faults}
    assert faults["training.lora"] == "did you mean 'finetune'?"
    assert faults["training.recompute"] == "did you mean 'full'?"
    assert faults["parallel.pp"] == "did you mean 'pipeline'?"
    assert faults["parallel.tensor"].startswith("dotted fields are for sweep and --set: write 'parallel:'")


@pytest.mark.parametrize(("field", "value", "hint"), [
    ("nodes", 8, "did you mean 'cluster.nodes'?"),  # and not 'model', which looks like it
    ("training.finetune", "lora", "write {method: lora}"),
    ("cluster.gpu", "h200", "single figures such as memory stand here; another GPU: --set cluster.topology.gpu=h200"),
    ("training.finetune", "dpo", "write {method: dpo}"),
    ("training.micro_batch", [1, 2], "to run each, 'sweep: {training.micro_batch: [1, 2]}'"),
    ("training.recompute", ["none", "full"], "to run each, 'sweep: {training.recompute: [none, full]}'"),
    ("training.recompute", "none, full", "to run each, 'sweep: {training.recompute: [none, full]}'; drystep compare "
                                         "takes a --set for each"),
    ("training.micro_batch", "1,2,4", "to run each, a sweep with the list [1,2,4]"),
    ("training.sequence", "131,072", "write 131072 without quotes, commas or underscores"),
    ("parallel", "fsdp", "write {strategy: fsdp}"),
    ("model", "llama-2-7b", "write {preset: llama-2-7b}"), ("model", "a/config.json", "write {hf: a/config.json}"),
    ("cluster", "p4d", "write {topology: p4d}"),
    ("parallel", "tensor", "write its fields indented below it"),
    ("parallel.strategy", "fsdp2", "did you mean 'fsdp' with software.fsdp: 2?"),
    ("training.precision", "bfloat16", "did you mean 'amp-bf16' (autocast), 'fsdp-bf16' (MixedPrecision of FSDP), "
                                       "'mixed-bf16' (fp32 master weights) or 'pure-bf16'?"),
    ("model.preset", "ViT-L-16", "did you mean 'bert-large' with its own layers, hidden, heads and a sequence of its "
                                 "patches: vision transformers have no preset?"),
    ("training.mode", "lora", "did you mean 'train', and what is trained with training.finetune: {method: lora}?"),
    ("software.dispatcher", "DeepEP", "did you mean 'flex'?"),
    ("model.preset", "gpt3", "did you mean 'gpt3-13b'?"),  # and not 'gpt2'
    ("model.preset", "llama3", "did you mean 'llama-3-8b'?"),  # and not 'llama-33b'
])
def test_a_hint_leads_on(field: str, value: object, hint: str) -> None:
    said: dict[str, object] = {
        "name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-3-8b"},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128}, "parallel": {}, "software": {}}
    head, _, rest = field.rpartition(".")
    inner = said[head] if head else said
    assert isinstance(inner, dict)
    inner[rest] = value
    with pytest.raises(UserError) as error:
        resolve(said, "x.yaml")
    assert {fault.field: fault.hint for fault in error.value.faults}[field] == hint


@pytest.mark.parametrize(("field", "value", "at", "hint"), [
    ("training.finetune", {"method": "lora", "rank": 8, "targets": "q_proj"}, ".targets", "did you mean 'query'?"),
    ("training.finetune", {"method": "lora", "rank": 8, "targets": ["mlp", "down_proj"]}, ".targets.1",
     "did you mean 'mlp'?"),
    ("training.precision", {"name": "pure-bf16", "parameters": "mxfp4"}, ".parameters",
     "did you mean 'int4' or 'nvfp4', which take as much memory within 6%?"),
    ("training.precision", {"name": "pure-bf16", "parameters": "q4_k_m"}, ".parameters", "did you mean 'int4'?"),
    ("training.precision", {"name": "pure-bf16", "parameters": "bnb"}, ".parameters", "did you mean 'nf4'?")], ids=str)
def test_words_of_peft_and_of_quantisers_are_one_fault_each(field: str, value: object, at: str, hint: str) -> None:
    said = {"name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-3-8b"},
            "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128}}
    with pytest.raises(UserError) as error:
        resolve(said, "x.yaml", {field: value})
    (fault,) = error.value.faults
    assert (fault.field, fault.hint) == (field + at, hint)
