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


def network(name: str, gpus: int = 8, nodes: int = 1, peer_sums: str = "vllm") -> Network:
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


def test_pushed_by_hand() -> None:
    """A start, each further peer's store, and the tensor once to every peer at the stores' share of the links."""
    net = network("hgx-b200", peer_sums="trtllm")
    start = F["push_start_us.blackwell"] + 7 * F["push_peer_us.blackwell"]
    pushed_s = 7 * 262144 / (net.speeds.gpu * F["push_share.blackwell"])
    assert taken_s(net, 262144, 8) == pytest.approx(start * 1e-6 + pushed_s)


def test_two_shots_that_spread_by_hand() -> None:
    """SGLang: a slice of each peer's tensor is read, its sum written to all; behind it a fence and flags."""
    net, size = network("dgx-h100", peer_sums="sglang"), 1 << 20
    start = F["peer_start_us.hopper"] + 2 * F["peer_trip_us.hopper"]
    moved_s = 3 / 4 * size / net.speeds.gpu * (1 + 1 / F["push_share.hopper"])
    assert flow(net, size, 4).algorithm == "SpreadTwoShot"
    assert taken_s(net, size, 4) == pytest.approx(start * 1e-6 + moved_s)


def test_two_shots_over_a_buffer_by_hand() -> None:
    """TensorRT-LLM: the same kernel copies in and out, reads slices and writes their sums."""
    net, size = network("hgx-b200", peer_sums="trtllm"), 4 << 20
    start = F["peer_start_us.blackwell"] + 5 * F["peer_trip_us.blackwell"]
    moved_s = 7 / 8 * size / net.speeds.gpu * (1 + 1 / F["push_share.blackwell"])
    copied_s = 4 * size / (F["staged_gbps.blackwell"] * 1e9)
    assert taken_s(net, size, 8) == pytest.approx(start * 1e-6 + moved_s + copied_s)


def test_multicast_between_copies_by_hand() -> None:
    """vLLM's symmetric memory: copies around it; the switch adds up (a slice comes in, all goes out) and spreads."""
    net, size = network("dgx-h100", peer_sums="vllm_symmetric"), 4 << 20
    start = F["peer_start_us.hopper"] + 2 * F["peer_trip_us.hopper"] + 2 * F["staged_us.hopper"]
    switched_s = size * 9 / 8 / (net.speeds.gpu * F["nvls_share.hopper"])
    copied_s = 4 * size / (F["staged_gbps.hopper"] * 1e9)
    assert flow(net, size, 8).algorithm == "CopiedMulticast"
    assert taken_s(net, size, 8) == pytest.approx(start * 1e-6 + switched_s + copied_s)


def test_multicast_stores_across_trays_by_hand() -> None:
    """The switch spreads what a rank stores: all tensors in one shot; in two the slices first, then their sums."""
    net = network("gb300-nvl72", peer_sums="trtllm_large")
    start, size = F["push_start_us.blackwell"] * 1e-6, 1 << 20
    assert taken_s(net, 65536, 8) == pytest.approx(start + 8 * 65536 / net.speeds.gpu)
    second_s = F["peer_trip_us.blackwell"] / 2 * 1e-6
    assert taken_s(net, size, 8) == pytest.approx(start + second_s + (7 / 8 + 1) * size / net.speeds.gpu)


@pytest.mark.parametrize(("kernel", "ranks", "size", "way"), [
    ("vllm", 4, 8192, "OneShot"), ("vllm", 8, 8192, ""), ("sglang", 4, 8192, "PushedOneShot"), ("sglang", 8, 8192, ""),
    ("trtllm", 8, 8192, ""), ("trtllm_large", 4, 8192, "PushedOneShot"), ("trtllm_large", 8, 131074, "SwitchedTwoShot"),
    ("trtllm_large", 16, 65536, "SwitchedOneShot"), ("trtllm_large", 32, 8192, ""),
    ("vllm_symmetric", 8, 8192, "CopiedMulticast"), ("vllm_fused_symmetric", 8, 8192, "SwitchedOneShot")])
def test_handles_end_at_a_tray(kernel: str, ranks: int, size: int, way: str) -> None:
    """A rack's host has four GPUs: across hosts multicast alone serves, where an engine has it; else NCCL."""
    found = flow(network("gb200-nvl72", max(ranks, 4), peer_sums=kernel), size, ranks)
    assert (found.algorithm if found.protocol == "peers" else "") == way


def test_two_gpus_read_through_a_buffer_at_the_blocks_pace() -> None:
    net, size = network("hgx-b200", peer_sums="vllm_symmetric"), 4 << 20
    start = F["peer_start_us.blackwell"] + 2 * F["peer_trip_us.blackwell"] + 2 * F["staged_us.blackwell"]
    read_s = size / 2 / min(net.speeds.gpu, F["peer_gbps.blackwell"] * 1e9)
    spread_s = size / 2 / (net.speeds.gpu * F["push_share.blackwell"])
    copied_s = 4 * size / (F["staged_gbps.blackwell"] * 1e9)
    assert taken_s(net, size, 2) == pytest.approx(start * 1e-6 + read_s + spread_s + copied_s)


@pytest.mark.parametrize(("kernel", "name", "ranks", "ways"), [
    ("sglang", "hgx-b200", 2, {4 << 20: "PushedOneShot", 16 << 20: "WideOneShot", (16 << 20) + 2: ""}),
    ("sglang", "dgx-h100", 8, {160 << 10: "PushedOneShot", 16 << 20: "SpreadTwoShot", (16 << 20) + 2: ""}),
    ("sglang", "dgx-h100", 5, {256 << 10: "PushedOneShot", 512 << 10: "SpreadTwoShot"}),
    ("trtllm", "dgx-a100-80g", 8, {512 << 10: "PushedOneShot", 1 << 20: ""}),
    ("trtllm_large", "hgx-b200", 8, {2 << 20: "PushedOneShot", 16 << 20: "StagedTwoShot", 32 << 20: ""}),
    ("vllm_symmetric", "hgx-b200", 8, {128 << 10: "OneShot", 512 << 10: "TwoShot", 1 << 20: "CopiedMulticast"}),
    ("vllm_symmetric", "dgx-a100-80g", 8, {128 << 10: "OneShot", 8 << 20: "TwoShot"}),
    ("vllm_fused", "dgx-h100", 8, {512 << 10: "PushedOneShot", 8 << 20: "TwoShot", 9 << 20: ""}),
    ("vllm_fused_symmetric", "hgx-b200", 4, {4 << 20: "PushedOneShot", 32 << 20: "StagedTwoShot"})])
def test_engines_have_tables_of_their_own(kernel: str, name: str, ranks: int, ways: dict[int, str]) -> None:
    net = network(name, peer_sums=kernel)
    for size, way in ways.items():
        found = flow(net, size, ranks)
        assert (found.algorithm if found.protocol == "peers" else "") == way, size


@pytest.mark.parametrize("kernel", sorted(table("network/sums.yaml")))
def test_tables_go_up(kernel: str) -> None:
    """Every table says where it is from, and each way's bound is above the last one's."""
    rows = dict(table("network/sums.yaml")[kernel])
    assert rows.pop("source").split(":")[0] in ("read", "seen") and "other" in rows
    for by_ranks in rows.values():
        for bounds in by_ranks.values():
            assert list(bounds.values()) == sorted(bounds.values())


def test_without_multicast_nothing_goes_through_symmetric_memory() -> None:
    """V100 behind NVSwitch has no table of its own, and torch's symmetric memory asks for multicast."""
    assert flow(network("dgx-a100-80g", peer_sums="vllm_symmetric"), 16 << 20, 8).protocol != "peers"


@pytest.mark.parametrize(("ranks", "size", "algorithm"), [
    (8, (256 << 10) - 2, "OneShot"), (8, 256 << 10, "TwoShot"), (4, 256 << 10, "OneShot"), (4, 512 << 10, "TwoShot"),
    (6, 512 << 10, "TwoShot"), (2, 8 << 20, "OneShot"), (8, 8 << 20, "TwoShot"), (8, (8 << 20) + 2, "Ring")])
def test_the_size_decides(ranks: int, size: int, algorithm: str) -> None:
    assert flow(network("dgx-a100-80g"), size, ranks).algorithm == algorithm


@pytest.mark.parametrize(("name", "gpus", "nodes", "ranks"), [
    ("pcie-8x-a10", 8, 1, 8), ("dgx-1v-32g", 8, 1, 8), ("dgx-a100-80g", 8, 2, 16), ("dgx-2", 16, 1, 16)])
def test_elsewhere_nccl_serves(name: str, gpus: int, nodes: int, ranks: int) -> None:
    """PCIe; a mesh that does not join every pair; several nodes; more GPUs than the kernels are made for."""
    own, plain = (flow(network(name, gpus, nodes, asked), 8192, ranks) for asked in ("vllm", ""))
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
    own, plain = network(name), network(name, peer_sums="")
    if log not in (17, 18):  # past one shot's limit the bytes of two are fewer
        assert taken_s(own, 1 << log, ranks) <= taken_s(own, 1 << log + 1, ranks)
    group = np.arange(ranks, dtype=np.int64)[None, :]
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert own.coflow(kind, 1 << log, group) == plain.coflow(kind, 1 << log, group)
