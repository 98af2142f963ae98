"""Length of a run: Daly's interval against a search, goodput by hand, and the field of a result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.parallel import lower
from sim.report.numbers.budget import best_interval_s, checkpoint_bytes, goodput, writing_nodes
from sim.report.terminal.render import as_text
from sim.scenario import resolve

SCENARIO = """
name: budget
cluster: {topology: dgx-a100-80g, nodes: 1}
model: {preset: gpt2}
training: {micro_batch: 4, global_batch: 32, sequence: 1024, precision: amp-bf16}
parallel: {strategy: ddp}
budget: {tokens: chinchilla, price_per_gpu_hour: 2.0, deadline: 30 days%s}
"""


def predicted(tmp_path: Path, more: str = "") -> sim.Result:
    file = tmp_path / "budget.yaml"
    file.write_text(SCENARIO % more, encoding="utf-8")
    return sim.run(file)


@settings(max_examples=40, deadline=None)
@given(st.floats(1, 600), st.floats(1e4, 1e7))
def test_the_interval_is_within_a_thousandth_of_the_best(checkpoint_s: float, mtbf_s: float) -> None:
    chosen = goodput(best_interval_s(checkpoint_s, mtbf_s), checkpoint_s, 0.0, mtbf_s)
    base = math.sqrt(2 * checkpoint_s * mtbf_s)
    best = max(goodput(base * 2 ** (k / 20), checkpoint_s, 0.0, mtbf_s) for k in range(-60, 61))
    assert chosen >= best * (1 - 1e-3)


def test_goodput_by_hand() -> None:
    # an hour of work, 6 minutes to write, 3 to read, a failure every 10 hours: 1 / (10 e^0.005 (e^0.11 - 1))
    assert goodput(3600, 360, 180, 36000) == pytest.approx(0.1 / (math.exp(0.005) * math.expm1(0.11)), rel=1e-12)
    assert goodput(3600, 360, 180, 1e15) == pytest.approx(3600 / 3960)
    assert goodput(1e6, 1, 1, 1) == 0.0


def test_a_run_without_failures(tmp_path: Path) -> None:
    result = predicted(tmp_path)
    found = result.to_json()["budget"]
    parameters = result.detail.lowered.architecture.parameters
    assert found["tokens"] == 20 * parameters
    assert found["steps"] == math.ceil(20 * parameters / (32 * 1024))
    assert found["days"] == pytest.approx(found["steps"] * result.step_time_s / 86400)
    assert found["cost"] == pytest.approx(found["days"] * 24 * 8 * 2.0)
    assert found["goodput"] == 1.0 and found["in_time"] is True


def test_failures_cost_time(tmp_path: Path) -> None:
    calm, found = predicted(tmp_path).to_json()["budget"], predicted(
        tmp_path, ", mtbf_per_gpu: 800 h, checkpoint_every: 1 h").to_json()["budget"]
    # a checkpoint is fp32 weights and two fp32 moments, written by the one node that holds them
    result = predicted(tmp_path)
    write_s = 12 * result.detail.lowered.architecture.parameters / result.scenario.cluster.topology.host.nvme_write
    assert found["checkpoint_s"] == pytest.approx(write_s)
    assert found["checkpoint_every_s"] == 3600
    assert 0 < found["goodput"] < 1
    assert found["days"] == pytest.approx(calm["days"] / found["goodput"])


def test_small_shares_have_no_exponents_and_a_restart_that_is_not_given_is_said(tmp_path: Path) -> None:
    text = as_text(predicted(tmp_path, ", mtbf_per_gpu: 50000 h"))
    assert "restarts under 0.001%" in text and "e-" not in text and "no budget.restart is given" in text
    assert "no budget.restart" not in as_text(predicted(tmp_path, ", mtbf_per_gpu: 50000 h, restart: 10 min"))


def test_a_short_run_of_images_is_told_in_minutes_samples_and_kilowatt_hours(tmp_path: Path) -> None:
    file = tmp_path / "images.yaml"
    file.write_text("""
name: images
cluster: {topology: dgx-a100-40g}
model: {preset: resnet-50}
training: {micro_batch: 256, global_batch: 2048, precision: amp-fp16, optimizer: sgd-momentum}
parallel: {strategy: ddp}
budget: {tokens: 100000000}
""", encoding="utf-8")
    text = as_text(sim.run(file))
    assert "100 M samples in 48,829 steps" in text  # of 2,048
    assert " min · " in text and " kWh of the GPUs alone" in text and "0.0" not in text.split("whole run")[1][:120]


def test_a_run_that_never_ends_has_no_length(tmp_path: Path) -> None:
    found = predicted(tmp_path, ", mtbf_per_gpu: 1 s, checkpoint_every: 100 h").to_json()["budget"]
    assert found["goodput"] == 0.0 and found["in_time"] is False
    assert found["days"] is None and found["gpu_hours"] is None and found["cost"] is None


@pytest.mark.parametrize(("parallel", "moe", "nodes"), [
    ({"strategy": "ddp"}, {}, 1), ({"strategy": "ddp", "tensor": 8}, {}, 1),
    ({"strategy": "ddp", "pipeline": 4}, {}, 4),  # a stage a node: the pipeline is the outermost dimension
    ({"strategy": "ddp", "pipeline": 2, "tensor": 2}, {}, 2), ({"strategy": "fsdp", "sharding_factor": 8}, {}, 1),
    ({"strategy": "fsdp", "sharding_factor": 16}, {}, 2), ({"strategy": "fsdp"}, {}, 4),
    ({"strategy": "ddp", "expert": 32}, {"moe": {"experts": 64, "top_k": 2}}, 4),
    ({"strategy": "ddp", "expert": 8}, {"moe": {"experts": 64, "top_k": 2}}, 1)])
def test_nodes_that_hold_one_set_of_states(parallel: dict[str, Any], moe: dict[str, Any], nodes: int) -> None:
    """Four nodes of eight GPUs: tensor and data ranks are neighbours, stages lie on nodes of their own."""
    assert writing_nodes(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 4},
        "model": {"kind": "decoder", "layers": 4, "hidden": 64, "heads": 8, "vocab": 128} | moe,
        "training": {"micro_batch": 1, "micro_steps": 4, "sequence": 64}, "parallel": parallel})) == nodes


@pytest.mark.parametrize(("optimizer", "most"), [
    ("adamw", 12.0), ("sgd", 4.0), ("adafactor", 4.3), ("adamw-8bit", 8.0)])
def test_a_checkpoint_holds_the_states_that_the_optimizer_keeps(optimizer: str, most: float) -> None:
    """Bytes per parameter: fp32 weights and two fp32 moments, none, rows' and columns' means, two of a byte (tables in
    fp32)."""
    asked = resolve({
        "name": "x", "cluster": {"topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "layers": 4, "hidden": 512, "heads": 8, "vocab": 512, "positions": "rotary"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 64, "optimizer": optimizer}})
    each = checkpoint_bytes(asked, lower(asked)) / lower(asked).architecture.parameters
    assert 0.7 * most <= each <= most
