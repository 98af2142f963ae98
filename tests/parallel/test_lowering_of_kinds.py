"""Encoder-decoders, experts and tables of layers under every technique: units, shared embeddings, conserved bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sim.parallel import lower
from sim.program import Kind, Program
from sim.scenario import resolve

T5 = {"kind": "encoder-decoder", "layers": 2, "decoder_layers": 3, "hidden": 512, "heads": 8, "ffn": 1024,
      "vocab": 8000, "activation": "relu", "norm": "rmsnorm", "bias": False}
MIXTURE = {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 4, "vocab": 1000, "gated_mlp": True,
           "positions": "rotary", "norm": "rmsnorm", "bias": False, "tied_embeddings": False,
           "moe": {"experts": 8, "top_k": 2, "expert_ffn": 64, "first_dense": 1}}
MODELS: dict[str, Any] = {"encoder-decoder": T5, "mixture": MIXTURE, "table": {"preset": "resnet-50"},
                          "encoder": {"preset": "bert-base", "layers": 2}}


def scenario(model: dict[str, Any], framework: str = "pytorch", recompute: Any = "none", **parallel: Any) -> Any:
    sequence = {} if model.get("preset") == "resnet-50" else {"sequence": 128}
    return resolve({
        "name": "test", "cluster": {"topology": "dgx-a100-80g"}, "model": model,
        "training": {"micro_batch": 2, "global_batch": 16, "precision": "fp32", "recompute": recompute} | sequence,
        "parallel": parallel, "software": {"framework": framework, "year": 2025}})


def program(s: Any) -> Program:
    return lower(s).job.programs[0]


def calls(p: Program) -> list[tuple[str, str, str, int]]:
    """(phase, kind, layer, bytes) of every collective of a step, in host order."""
    found = []
    for number in p.section_runs():
        section = p.sections[number]
        for kind, payload, label in zip(section.kind, section.payload, section.label, strict=True):
            if kind == Kind.COLLECTIVE:
                call, name = p.collectives[payload], p.labels[label]
                found.append((name.phase, call.kind, name.layer, call.size_bytes))
    return found


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("framework,parallel", [
    ("pytorch", {"strategy": "ddp"}), ("pytorch", {"strategy": "fsdp"}), ("pytorch", {"strategy": "zero2"}),
    ("pytorch", {"strategy": "fsdp", "wrap": 100_000}), ("pytorch", {"strategy": "fsdp", "sharding_factor": 4}),
    ("deepspeed", {"strategy": "zero1"}), ("deepspeed", {"strategy": "zero2"}), ("deepspeed", {"strategy": "zero3"}),
    ("megatron", {"strategy": "zero1"})])
def test_every_gradient_is_reduced_once(model: Any, recompute: str, framework: str, parallel: dict[str, Any]) -> None:
    lowered = lower(scenario(model, framework, recompute, **parallel))
    whole = parallel["strategy"] == "ddp" or (framework == "deepspeed" and parallel["strategy"] != "zero3")
    reduced = sum(size for phase, kind, _, size in calls(lowered.job.programs[0])
                  if kind == ("all_reduce" if whole else "reduce_scatter") and phase == "backward")
    per_parameter = reduced / lowered.architecture.parameters
    assert 4 <= per_parameter < 4.25  # fp32, and FSDP 2's padding of rows


def test_fsdp_gathers_both_stacks_in_order_and_the_shared_embedding_with_the_root() -> None:
    found = calls(program(scenario(T5, strategy="fsdp")))
    forward = [layer for phase, kind, layer, _ in found if (phase, kind) == ("forward", "all_gather")]
    assert forward == ["root", "encoder0", "encoder1", "decoder0", "decoder1", "decoder2"]
    reduced = [layer for _, kind, layer, _ in found if kind == "reduce_scatter"]
    assert reduced == [*forward[:0:-1], "root"]


def test_zero3_fetches_the_shared_embedding_once_while_it_is_used_again_soon() -> None:
    found = calls(program(scenario(T5, "deepspeed", strategy="zero3")))
    table = 8064 * 512 * 4  # Megatron-DeepSpeed pads the vocabulary of 8000 to a multiple of 128
    users = Counter(layer for _, kind, layer, size in found if kind == "all_gather" and size == table)
    assert users == {"embedding": 1}


def test_rows_without_parameters_are_no_units() -> None:
    found = calls(program(scenario({"preset": "resnet-50"}, strategy="fsdp")))
    layers = {layer for _, kind, layer, _ in found if kind == "all_gather"}
    assert "layer1.0.conv1" in layers
    assert not layers & {"maxpool", "avgpool"}
    assert all(size > 0 for *_, size in found)


def test_recomputed_blocks_are_counted_over_both_stacks() -> None:
    """The first three blocks are the encoder's two and the decoder's first."""
    def flops(recompute: Any) -> float:
        p = program(scenario(T5, recompute=recompute, strategy="ddp"))
        return sum(p.kernels[row].flops for number in p.section_runs() for section in [p.sections[number]]
                   for kind, payload in zip(section.kind, section.payload, strict=True) if kind == Kind.KERNELS
                   for row in p.segments[payload].kernels)
    architecture = lower(scenario(T5, strategy="ddp")).architecture
    assert flops({"layers": 3}) - flops("none") == architecture.recompute_flops(3)
    assert flops("full") - flops("none") == architecture.recompute_flops()
