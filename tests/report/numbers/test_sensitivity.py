"""What 10% more of each resource does: directions, limits, and that nothing is left changed."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.hardware import Device, gpu
from sim.hardware.whatif import scaled
from sim.report.numbers.more import MORE, RESOURCES, with_faster_host
from sim.report.numbers.sensitivity import bound_by
from sim.scenario import resolve
from sim.work import Kernel

MODEL = {"kind": "decoder", "layers": 4, "hidden": 1024, "heads": 16, "vocab": 32000}


def result(nodes: int = 1, topology: str = "dgx-a100-80g", hidden: int = 1024, micro_batch: int = 4,
           **parallel: Any) -> sim.Result:
    per_node = 1 if topology.startswith("single") else 8
    return sim.run(resolve({
        "name": "t", "cluster": {"topology": topology, "nodes": nodes}, "model": MODEL | {"hidden": hidden},
        "training": {"micro_batch": micro_batch, "global_batch": micro_batch * per_node * nodes, "sequence": 1024,
                     "precision": "fsdp-bf16"},
        "parallel": parallel, "software": {"framework": "pytorch", "year": 2025}}))


def test_one_gpu_feels_no_links() -> None:
    found = result(topology="single-a100-80g-sxm", strategy="none").ask_sensitivity()
    assert tuple(found) == RESOURCES
    assert found["intra_node"] == found["network"] == found["latency"] == 0
    assert -0.1 < found["tensor_cores"] < 0
    assert -0.1 < found["memory_bandwidth"] < 0
    assert 1 / MORE - 1 <= sum(found.values()) <= 0  # no more than everything being faster


def test_across_nodes_the_network_matters_and_latency_costs() -> None:
    one = result(nodes=4, topology="p3dn", micro_batch=1, hidden=4096, strategy="fsdp")
    before = one.step_time_s
    found = one.ask_sensitivity()
    assert found["network"] < -0.01
    assert found["latency"] > 0
    assert all(found[name] <= 1e-9 for name in RESOURCES if name != "latency")
    assert one.bound == "communication"
    again = result(nodes=4, topology="p3dn", micro_batch=1, hidden=4096, strategy="fsdp")
    assert again.step_time_s == before and again.ask_sensitivity() == found
    assert one.to_json()["sensitivity"] == found
    assert "sensitivity" not in result().to_json()


def test_a_small_model_is_bound_by_its_host() -> None:
    one = result(topology="single-h200", hidden=128, micro_batch=1, strategy="none")
    found = one.ask_sensitivity()
    assert found["host"] < -0.05
    assert one.bound == "host"


def test_every_bound_can_win() -> None:
    none = dict.fromkeys(RESOURCES, 0.0)
    for name, changes, bubble in [
            ("compute", {"tensor_cores": -0.05}, 0.1), ("memory_bandwidth", {"memory_bandwidth": -0.05}, 0.1),
            ("communication", {"intra_node": -0.01, "network": -0.01, "latency": 0.02}, 0.1),
            ("host", {"host": -0.05}, 0.1), ("pipeline", {"tensor_cores": -0.05}, 0.9)]:
        assert bound_by(none | changes, (1 - 1 / MORE) * bubble) == name
    assert bound_by(none | {"offload": -0.05}, 0.0) == "communication"
    assert bound_by(none, 0.0, waits=0.05) == "host" and bound_by(none, 0.0, paging=0.05) == "communication"


@pytest.mark.parametrize("name", ["a100-80g-sxm", "h100-80g-sxm", "v100-32g-sxm"])
def test_more_peak_speeds_up_products_by_as_much_at_the_same_clock(name: str) -> None:
    dtype = "fp16"
    product = Kernel("gemm", dtype, (1, 16384, 16384, 16384), "tn", 2.0 * 16384**3, 3 * 2.0 * 16384**2, "gemm")
    copy = Kernel("elementwise", dtype, (2**28,), "copy", 0.0, 4.0 * 2**28, "memory_bound")
    device = Device(gpu(name))
    before = device.times([product, copy])
    faster = scaled(device, arithmetic=MORE).times([product, copy])
    wider = scaled(device, memory_bandwidth=MORE).times([product, copy])
    assert before[0] / faster[0] == pytest.approx(MORE, rel=0.02)
    assert faster[1] == before[1]
    assert before[1] / wider[1] == pytest.approx(MORE, rel=0.02)


def test_a_scaled_network_scales_what_it_should() -> None:
    network = result(nodes=2, strategy="fsdp").detail.machine.network
    assert network is not None
    link = network.coflow("all_gather", 10**8, result(nodes=2, strategy="fsdp").detail.lowered.job.communicators[0]
                          .ranks).links
    more = network.scaled(1.0, 2.0, 1.0)
    doubled = {kind: more.capacity((kind, i)) / network.capacity((kind, i)) for kind, i in link}
    assert {round(v, 9) for k, v in doubled.items() if k.startswith("nic")} == {2.0}
    assert {round(v, 9) for k, v in doubled.items() if k.startswith("gpu")} <= {1.0}


def test_a_faster_host_is_faster_everywhere() -> None:
    job = result(strategy="ddp").detail.lowered.job
    other = with_faster_host(job, 2.0)
    for one, two in zip(job.programs, other.programs, strict=True):
        assert [s.host_s for s in two.sections] == [[t / 2 for t in s.host_s] for s in one.sections]
        assert [s.host_s for s in two.segments] == [tuple(t / 2 for t in s.host_s) for s in one.segments]


def test_an_optimizer_on_the_cpu_is_offload_and_no_launching() -> None:
    """And what the allocator's retries add to a step is no resource's."""
    one = sim.run("scenarios/gpt3-13b-zero-offload.yaml")
    assert one.waits["allocator"] > 0.01 * one.step_time_s
    found = one.ask_sensitivity()
    assert found["offload"] < -0.05 and found["intra_node"] == pytest.approx(0.0, abs=1e-3)
    assert found["host"] == pytest.approx(0.0, abs=1e-3)
    assert one.bound == "communication"
