"""What a step is bound by: where the next 10% would help most, also where collectives and kernels hide each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_scenarios import small

import sim
from sim.report.numbers.bounding import Step, estimates, felt
from sim.report.numbers.breakdown import Breakdown
from sim.report.terminal.render import as_text
from sim.scenario import resolve

SHIPPED = sorted(Path("scenarios").glob("*.yaml"))
#: Kernels of several kinds, a host that is behind, what is kept outside, collectives that kernels hide behind.
TOLD = {"gpt2-large-ddp": "memory_bandwidth", "resnet-50-ddp": "memory_bandwidth", "t0-3b-lora": "host",
        "llama3-8b-offload": "communication", "gpt3-13b-zero3": "compute", "llama2-7b-qlora": "compute",
        "inference-llama2-7b": "host", "inference-32b-40gb": "memory_bandwidth"}
HOST_BOUND = {
    "name": "eager experts", "cluster": {"topology": "mi300x-8"}, "model": {"preset": "gpt-oss-20b"},
    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 4096, "precision": "fsdp-bf16", "recompute": "full",
                 "finetune": {"method": "lora", "rank": 16, "targets": ["query", "key", "value", "projection"]}},
    "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2025, "modules": "transformers"}}


def sharded(gbps: float) -> sim.Result:
    """FSDP on two nodes of H100 whose collectives take about as long as the kernels they hide behind."""
    return sim.run(resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "nodes": 2, "inter_gbps_per_node": gbps},
        "model": {"kind": "decoder", "layers": 4, "hidden": 4096, "heads": 32, "vocab": 1024},
        "training": {"micro_batch": 4, "global_batch": 64, "sequence": 4096, "precision": "fsdp-bf16"},
        "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2025}}))


def estimated(result: sim.Result) -> dict[str, float]:
    """Shares of the step that 10% more of each would save, as estimated."""
    detail = result.detail
    step = Step(detail.lowered.job, detail.machine, detail.timeline, detail.critical)
    return {name: seconds / result.step_time_s for name, seconds in estimates(result.breakdown, step)[0].items()}


@pytest.mark.parametrize(("gbps", "name"), [(40, "communication"), (100, "communication"), (150, "compute")])
def test_the_bound_is_where_ten_percent_more_would_help_most(gbps: float, name: str) -> None:
    one = sharded(gbps)
    told, parts = one.bound, one.breakdown
    assert parts.exposed_s < parts.compute["gemm"] or gbps == 40  # by what is exposed the kernels would bound it
    one.ask_sensitivity()
    assert told == one.bound == name


@pytest.mark.parametrize(("name", "bound"), TOLD.items())
def test_the_bound_is_the_same_with_sensitivity_and_without(name: str, bound: str) -> None:
    one = sim.run(f"scenarios/{name}.yaml")
    told = one.bound
    one.ask_sensitivity()
    assert told == one.bound == bound


@pytest.mark.whole
@pytest.mark.parametrize("path", [p for p in SHIPPED if p.stem not in TOLD], ids=lambda path: path.stem)
def test_so_it_is_of_every_scenario(path: Path) -> None:
    one = sim.run(path)
    told = one.bound
    one.ask_sensitivity()
    assert told == one.bound


def test_what_kernels_and_the_host_would_save_is_foreseen() -> None:
    one = sim.run("scenarios/gpt2-large-ddp.yaml")
    guess, found = estimated(one), one.ask_sensitivity()
    assert guess["compute"] == pytest.approx(-found["tensor_cores"], abs=5e-4)
    assert guess["memory_bandwidth"] == pytest.approx(-found["memory_bandwidth"], abs=5e-4)
    one = sim.run("scenarios/t0-3b-lora.yaml")  # the device is idle for 13% of a step of which the host paces half
    guess, found = estimated(one), one.ask_sensitivity()
    assert guess["host"] == pytest.approx(-found["host"], abs=2e-3) and guess["host"] > 0.04
    assert one.breakdown.host < 0.2 * one.step_time_s


@pytest.mark.parametrize("sets", [{}, {"cluster.nodes": 2}])
def test_gathers_that_a_late_host_issues_late_are_no_exposed_communication(sets: dict[str, Any]) -> None:
    """An infinitely fast network saves as much as the exposed share says: the rest of the wait is the host's."""
    one = sim.run(resolve(HOST_BOUND, "t", sets))
    assert one.bound == "host"
    assert one.breakdown.host > 0.15 * one.step_time_s
    assert one.breakdown.exposed_s / one.step_time_s == pytest.approx(1 - 1 / one.slowdown, abs=0.02)


def test_waiting_for_the_host_is_offload_unless_collectives_cost_more() -> None:
    compute = dict.fromkeys(("gemm", "attention", "memory_bound", "optimizer"), 1.0)
    waits = Breakdown(compute, {"all_gather": {"shard": 3.0}}, offload=4.0)
    assert felt("communication", waits, {}) == "offload" and felt("compute", waits, {}) == "compute"
    waits.contention = 2.0
    assert felt("communication", waits, {}) == "communication"


def test_of_the_host_it_is_said_what_is_waited_for() -> None:
    parts = Breakdown({"gemm": 1.0}, host=3.0)
    assert felt("host", parts, {"host": 1.0, "data": 0.5, "allocator": 1.5}) == "allocator"
    assert felt("host", parts, {"host": 0.0, "data": 3.0, "allocator": 0.0}) == "data"
    assert felt("host", parts, {"host": 3.0, "data": 0.0, "allocator": 0.0}) == "host"


def test_a_report_names_the_reading_of_data() -> None:
    one = sim.run(small(1024, 1, "amp-bf16", "ddp", **{"training.sample_bytes": 1e12}))
    assert "bound by reading training data" in as_text(one)
    one.ask_sensitivity()
    assert one.bound == "host"
