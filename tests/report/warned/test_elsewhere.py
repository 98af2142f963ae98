"""Fields of another mode, strategy or cut than the scenario has: told, and true that they change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sim
from sim.report.warned.elsewhere import elsewhere
from sim.scenario import Scenario, resolve

_REQUEST = {"inference": {"prompt": 64, "generate": 4, "batch": 8}}


def scenario(**sets: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 4},
        "model": {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 8, "vocab": 1024},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "software": {"framework": "pytorch", "year": 2025}},
        sets={name.replace("__", "."): value for name, value in sets.items()})


@pytest.mark.parametrize(("sets", "said"), [
    ({"training__mode": _REQUEST, "training__optimizer": "sgd"}, "training: optimizer changes nothing"),
    ({"training__mode": _REQUEST, "training__recompute": "full", "training__micro_batch": 4},
     "training: recompute, micro_batch change nothing: they are of training, and this is a request of 8 sequences"),
    ({"parallel__split_slots": {"embedding": 1}}, "split_slots changes nothing: there is no pipeline"),
    ({"parallel__overlap_p2p": True, "parallel__pipeline_scatter": True}, "overlap_p2p, pipeline_scatter change"),
    ({"parallel__context_exchange": "all-gather"}, "context_exchange changes nothing: there are no context ranks"),
    ({"software__dispatcher": "flex"}, "dispatcher changes nothing: no experts are spread"),
    ({"parallel__prefetch": {"limit": 1, "forward": True}}, "prefetch.forward, prefetch.limit change nothing: ddp"),
    ({"parallel__strategy": "zero3", "software__framework": "deepspeed", "parallel__wrap": 1000},
     "wrap changes nothing: zero3 of deepspeed does not gather"),
    ({"parallel__strategy": "fsdp", "parallel__gradient_as_bucket_view": True}, "it is of DDP's buckets"),
    ({"training__finetune": {"dropout": 0.1}}, "finetune.dropout changes nothing"),
])
def test_what_is_of_elsewhere_is_told_and_changes_nothing(sets: dict[str, Any], said: str) -> None:
    bases = {"training__mode", "parallel__strategy", "software__framework"}
    plain = sim.run(scenario(**{name: value for name, value in sets.items() if name in bases}))
    asked = sim.run(scenario(**sets))
    assert [text for text in asked.warnings if said in text]
    assert not [text for text in plain.warnings if "nothing: " in text]
    assert (asked.step_time_s, asked.memory.headroom_bytes) == (plain.step_time_s, plain.memory.headroom_bytes)


@pytest.mark.parametrize("sets", [
    {}, {"training__mode": _REQUEST, "training__micro_batch": 8}, {"parallel__overlap_p2p": False},
    {"parallel__strategy": "fsdp", "parallel__prefetch": {"limit": 1}, "parallel__wrap": 1000},
    {"parallel__context": 2, "parallel__context_exchange": "all-gather"},
    {"parallel__pipeline": 2, "parallel__split_slots": {"head": 1}},
    {"parallel__split_slots": {"embedding": 0, "head": 0}},
    {"training__finetune": {"method": "lora", "dropout": 0.1}}, {"parallel__gradient_as_bucket_view": True}])
def test_what_is_read_or_a_default_is_not_told(sets: dict[str, Any]) -> None:
    assert elsewhere(scenario(**sets)) == []


@pytest.mark.parametrize(("sets", "told"), [
    ({"training__mode": _REQUEST}, True), ({}, False), ({"training__finetune": {"method": "lora"}}, True),
    ({"training__mode": _REQUEST, "training__precision": {"name": "pure-bf16", "parameters": "int4"}}, False),
    ({"training__finetune": {"method": "qlora"}}, False)])
def test_weights_that_their_config_calls_quantised_are_told(sets: dict[str, Any], told: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000,
        "intermediate_size": 512, "max_position_embeddings": 4096,
        "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    found = elsewhere(resolve({
        "name": "x", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"hf": "config.json"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}},
        sets={name.replace("__", "."): value for name, value in sets.items()}, base=tmp_path))
    assert [text for text in found if "config.json says that weights are quantised (gptq, 4 bits)" in text] == found
    assert bool(found) is told


def test_a_scenario_as_a_result_has_it_is_told_nothing_new() -> None:
    """The JSON of a result holds every field, defaults too."""
    for mode in ("train", _REQUEST):
        asked = scenario(training__mode=mode, parallel__strategy="fsdp" if mode == "train" else "ddp")
        again = resolve(json.loads(json.dumps(sim.run(asked).to_json()["scenario"])))
        assert elsewhere(again) == []
