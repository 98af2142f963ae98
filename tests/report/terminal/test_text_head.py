"""The head of a report: how the model is cut, whose GPU it is, what a sample is; a sweep's table is never cut."""

from __future__ import annotations

from typing import Any

import pytest
from report_scenarios import small

import sim
from sim.report.catalogue import rows
from sim.report.terminal.head import described, layout
from sim.report.terminal.render import as_text, sweep_as_text
from sim.scenario import resolve

OWN = {"gpu": {"like": "h100-80g-sxm", "memory": "96 GB", "tflops": {"bf16": 148}}, "gpus_per_node": 8,
       "intra": {"kind": "nvswitch", "link": "nvlink4", "links_per_gpu": 18}}


@pytest.mark.parametrize(("sets", "said"), [
    ({}, "fsdp over 8"), ({"parallel.sharding_factor": 4}, "fsdp over 4 × 2 replicas"),
    ({"parallel.strategy": "zero1", "parallel.tensor": 4, "parallel.pipeline": 2},
     "tensor 4 × pipeline 2 · zero1 over 1"),
    ({"parallel.strategy": "ddp", "parallel.context": 2}, "context 2 · ddp")], ids=str)
def test_a_layout_names_every_cut(sets: dict[str, Any], said: str) -> None:
    assert layout(small(1024, 1, "amp-bf16", "fsdp", **sets)) == said


def test_one_replica_is_one() -> None:
    lines = [str(line) for line in described(small(1024, 1, "amp-bf16", "ddp", **{"parallel.tensor": 8}), "a100")]
    assert lines[1].endswith("tensor 8 · ddp · amp-bf16") and "= 1 replica × 1 × 64 micro-steps" in lines[2]


def test_what_keeps_nothing_alike_is_not_named() -> None:
    one = small(1024, 1, "amp-bf16", "none", **{"cluster.gpus_per_node": 1})
    assert layout(one) == "" and str(described(one, "a100")[1]).endswith(f"{one.cluster.topology.name}) · amp-bf16")
    request = resolve({"name": "x", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 2},
                       "model": {"preset": "gpt2"}, "parallel": {"tensor": 2},
                       "training": {"mode": {"inference": {"prompt": 8, "generate": 2, "batch": 1}}}})
    assert layout(request) == "tensor 2"


@pytest.mark.parametrize(("micro", "batch", "said"), [
    (2, 64, "= 8 replicas × 2 × 4 micro-steps"), (8, 64, "= 8 replicas × 8"),
    (3, 64, "= 8 replicas × (3 × 2 + 2), 3 micro-steps"), (5, 64, "= 8 replicas × (5 + 3), 2 micro-steps")])
def test_the_sizes_multiply_to_the_batch(micro: int, batch: int, said: str) -> None:
    scenario = small(1024, micro, "amp-bf16", "ddp", **{"training.global_batch": batch})
    assert str(described(scenario, "a100")[2]).endswith(said)


def test_figures_of_ones_own_are_said_to_be() -> None:
    plain = {"name": "own", "cluster": {"topology": OWN, "nodes": 1}, "model": {"preset": "gpt2"},
             "training": {"micro_batch": 1, "global_batch": 8, "sequence": 256}}
    result = sim.run(resolve(plain))
    assert "8 × own GPU like h100-80g-sxm" in as_text(result)
    assert any("the scenario's own" in warning for warning in result.warnings)
    usual = sim.run(resolve({**plain, "cluster": {"topology": "dgx-h100"}}))
    assert "own" not in as_text(usual).replace("own\n", "") and not any("own" in w for w in usual.warnings)


def test_samples_of_a_table_of_layers_are_no_tokens() -> None:
    result = sim.run(resolve({
        "name": "images", "cluster": {"topology": "dgx-1v-16g"}, "model": {"preset": "resnet-50"},
        "training": {"micro_batch": 32, "global_batch": 256, "precision": "amp-fp16", "optimizer": "sgd-momentum"}}))
    text = as_text(result)
    assert "256 samples per step = 8 replicas × 32" in text and "samples/s/GPU" in text and "tokens" not in text
    result.set = {"training.micro_batch": 32}
    assert "samples/s" in sweep_as_text([result], [], {"training.micro_batch": [32]})


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_no_figure_of_a_sweep_is_cut(width: int) -> None:
    axes = {"cluster.nodes": [1], "parallel.sharding_factor": ["full"], "training.recompute": ["selective-op"]}
    result = sim.run(small(1024, 1, "fsdp-bf16", "fsdp"))
    result.set = {"cluster.nodes": 1, "parallel.sharding_factor": "full", "training.recompute": "selective-op"}
    rows = sweep_as_text([result], [], axes, width).splitlines()
    row = next(line for line in rows if line.startswith("1 "))
    assert "selective-op" in row and row.split()[-1] == "100.0%" and row.split()[-2] == "yes"


def test_the_whole_run_of_a_job_that_does_not_fit_is_said_not_to() -> None:
    sets = {"training.micro_batch": 64, "training.global_batch": 512, "training.sequence": 8192,
            "budget": {"tokens": 1e9, "deadline": "2 h"}}
    text = as_text(sim.run(small(4096, 1, "amp-bf16", "ddp", **sets)))
    assert "does not fit" in text and "runs out of memory" in text and "the deadline of 2 h is " in text
    fits = as_text(sim.run(small(1024, 1, "amp-bf16", "ddp", budget={"tokens": 1e9, "deadline": "2 h"})))
    assert "runs out of memory" not in fits


def test_a_dtype_without_tensor_cores_is_warned_of() -> None:
    plain: dict[str, Any] = {"name": "old", "cluster": {"topology": "single-v100-32g-sxm"}, "model": {"preset": "gpt2"},
             "training": {"micro_batch": 1, "global_batch": 1, "sequence": 256, "precision": "amp-bf16"}}
    assert any("no tensor cores for bf16" in w and "fp16: 125" in w for w in sim.run(resolve(plain)).warnings)
    half = {**plain, "training": {**plain["training"], "precision": "amp-fp16"}}
    assert not any("tensor cores" in w for w in sim.run(resolve(half)).warnings)
    # Given bf16 alone, fp16 stays the catalogue's: that says nothing of the tensor cores.
    card = {"topology": {"gpu": {"like": "h100-80g-sxm", "tflops": {"bf16": 148}}, "gpus_per_node": 1}}
    own = sim.run(resolve({**plain, "cluster": card}))
    assert own.peak_flops_per_gpu == 148e12 and not any("tensor cores" in w for w in own.warnings)


def test_one_sequence_is_one() -> None:
    assert "\n1 sequence of 1,024 tokens per step" in as_text(sim.run(resolve(
        {"name": "one", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "gpt2"},
         "training": {"micro_batch": 1, "global_batch": 1, "sequence": 1024}})))


def test_models_are_listed_with_their_parameters() -> None:
    found = {row["name"]: row["parameters_b"] for row in rows("models")}
    assert (found["llama-2-7b"], found["llama-3-70b"], found["mixtral-8x7b"]) == (6.74, 70.6, 46.7)


def test_a_card_of_ones_own_is_told_by_the_one_it_is_like() -> None:
    own = {"gpu": {"name": "mine", "memory": "96 GB", "memory_bandwidth": "4 TB/s", "tflops": {"bf16": 148}, "sms": 78},
           "gpus_per_node": 8, "intra": {"kind": "nvswitch", "link": "nvlink4", "links_per_gpu": 18}}
    result = sim.run(resolve({"name": "own", "cluster": {"topology": own}, "model": {"preset": "gpt2"},
                              "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 256},
                              "parallel": {"strategy": "ddp"}}))
    assert any("is taken from h20, and so are published runs" in warning for warning in result.warnings)
