"""What a step is bound by: where the next 10% would help most, also where collectives and kernels hide each other."""

from __future__ import annotations

import pytest
from report_scenarios import small

import sim
from sim.report.numbers.bounding import bound, felt
from sim.report.numbers.breakdown import Breakdown
from sim.report.terminal.render import as_text
from sim.scenario import resolve


def sharded(gbps: float) -> sim.Result:
    """FSDP on two nodes of H100 whose collectives take about as long as the kernels they hide behind."""
    return sim.run(resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "nodes": 2, "inter_gbps_per_node": gbps},
        "model": {"kind": "decoder", "layers": 4, "hidden": 4096, "heads": 32, "vocab": 1024},
        "training": {"micro_batch": 4, "global_batch": 64, "sequence": 4096, "precision": "fsdp-bf16"},
        "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2025}}))


@pytest.mark.parametrize(("gbps", "name"), [(40, "communication"), (100, "communication"), (150, "compute")])
def test_the_bound_is_where_ten_percent_more_would_help_most(gbps: float, name: str) -> None:
    one = sharded(gbps)
    told, parts = one.bound, one.breakdown
    assert parts.exposed_s < parts.compute["gemm"] or gbps == 40  # by what is exposed the kernels would bound it
    one.ask_sensitivity()
    assert told == one.bound == name


def test_what_collectives_cost_kernels_is_the_collectives() -> None:
    compute = {"gemm": 5.0, "attention": 1.0, "memory_bound": 2.0, "optimizer": 0.0}
    exposed = {"all_gather": {"shard": 3.0}}
    assert bound(Breakdown(compute, exposed)) == "compute"
    assert bound(Breakdown(compute, exposed, contention=2.0)) == "communication"
    assert bound(Breakdown(compute, {}, offload=7.0)) == "communication"


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
    text = as_text(sim.run(small(1024, 1, "amp-bf16", "ddp", **{"training.sample_bytes": 1e12})))
    assert "bound by reading training data" in text
