"""Small sums by kernels that read their peers' memory: what they take, and where they are taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.catalog import table
from sim.network import Coflow, Network, Topology, fair_share
from sim.network.figures import Figures

F = Figures()


def network(name: str, gpus: int = 8, nodes: int = 1, peer_sums: bool = True) -> Network:
    return Network(Topology.from_mapping(table(f"../topologies/{name}.yaml")), nodes, gpus, peer_sums=peer_sums)


def flow(net: Network, size: int, ranks: int, instances: int = 1) -> Coflow:
    return net.coflow("all_reduce", size, np.arange(ranks * instances, dtype=np.int64).reshape(instances, ranks))


def taken_s(net: Network, size: int, ranks: int) -> float:
    one = flow(net, size, ranks)
    return one.latency_s + one.size_bytes / fair_share([one], net.capacity)[0]


def test_by_hand() -> None:
    net = network("dgx-a100-80g")
    start, trip = F["peer_start_us.ampere"], F["peer_trip_us.ampere"]
    rate, peer = net.speeds.gpu, F["peer_gbps.ampere"] * 1e9
    one, two = 65536, 1 << 20
    assert taken_s(net, one, 8) == pytest.approx(start * 1e-6 + 7 * one / rate)
    slices_s = 7 / 8 * two * (1 / rate + 1 / min(rate, peer))
    assert taken_s(net, two, 8) == pytest.approx((start + 7 * trip) * 1e-6 + slices_s)
    assert taken_s(net, one, 2) == pytest.approx(start * 1e-6 + one / min(rate, peer))


@pytest.mark.parametrize(("ranks", "size", "algorithm"), [
    (8, (256 << 10) - 2, "OneShot"), (8, 256 << 10, "TwoShot"), (4, 256 << 10, "OneShot"), (4, 512 << 10, "TwoShot"),
    (6, 512 << 10, "TwoShot"), (2, 8 << 20, "OneShot"), (8, 8 << 20, "TwoShot"), (8, (8 << 20) + 2, "Ring")])
def test_the_size_decides(ranks: int, size: int, algorithm: str) -> None:
    assert flow(network("dgx-a100-80g"), size, ranks).algorithm == algorithm


@pytest.mark.parametrize(("name", "gpus", "nodes", "ranks"), [
    ("pcie-8x-a10", 8, 1, 8), ("dgx-1v-32g", 8, 1, 8), ("dgx-a100-80g", 8, 2, 16), ("dgx-2", 16, 1, 16)])
def test_elsewhere_nccl_serves(name: str, gpus: int, nodes: int, ranks: int) -> None:
    """PCIe; a mesh that does not join every pair; several nodes; more GPUs than the kernels are made for."""
    own, plain = (flow(network(name, gpus, nodes, asked), 8192, ranks) for asked in (True, False))
    assert own == plain and own.algorithm in ("Ring", "Tree")


def test_an_odd_number_of_gpus_is_nccl_s() -> None:
    """vLLM's kernels are made for 2, 4, 6 and 8."""
    algorithms = [flow(network("dgx-a100-80g"), 8192, ranks).algorithm for ranks in (5, 6, 7, 8)]
    assert [one == "OneShot" for one in algorithms] == [False, True, False, True]


def test_a_mesh_that_joins_every_pair_will_do() -> None:
    assert flow(network("dgx-1v-32g", 4), 8192, 4).algorithm == "OneShot"


def test_replicas_on_one_node_do_not_meet() -> None:
    net = network("dgx-a100-80g")
    alone, beside = flow(net, 65536, 4), flow(net, 65536, 4, instances=2)
    assert replace(beside, links=alone.links, loads=alone.loads) == alone
    assert fair_share([beside], net.capacity)[0] == pytest.approx(fair_share([alone], net.capacity)[0])


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(9, 22), st.sampled_from(["dgx-a100-80g", "dgx-h100", "hgx-b200"]))
def test_more_bytes_take_longer_and_other_collectives_are_as_they_were(ranks: int, log: int, name: str) -> None:
    own, plain = network(name), network(name, peer_sums=False)
    if log not in (17, 18):  # past one shot's limit the bytes of two are fewer
        assert taken_s(own, 1 << log, ranks) <= taken_s(own, 1 << log + 1, ranks)
    group = np.arange(ranks, dtype=np.int64)[None, :]
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert own.coflow(kind, 1 << log, group) == plain.coflow(kind, 1 << log, group)
