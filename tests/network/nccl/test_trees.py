"""Trees pass chunks on whole: how large they are, what their way costs, and what hops between nodes are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.network import Network, Topology
from sim.network.figures import Figures
from sim.network.nccl.candidate import Candidate, Chunks

KIB, MIB = 1 << 10, 1 << 20
F = Figures()
NIC = 25e9 * F["fabric_share.infiniband"]
Machines = dict[str, dict[str, Any]]


def options(mapping: dict[str, Any], kind: str, nodes: int, **nccl: Any) -> tuple[Candidate, float]:
    """The one way that the forced choices leave, and its rate."""
    net = Network(Topology.from_mapping(mapping), nodes, 8, nccl=nccl)
    (found,) = net.options(kind, net.placement(np.arange(8 * nodes, dtype=np.int64)[None, :]))
    return found


def test_one_chunk_goes_its_whole_way() -> None:
    """100 bytes in one chunk, 1 s a byte on its way of which 0.1 s at the slowest rank count as moving: 90 s more."""
    chunks = Chunks(512.0, (), 1, 1.0, 0.1, 3.0, 0.0)
    assert chunks.beyond_s(100.0, 10.0) == pytest.approx(90.0)


@pytest.mark.parametrize(("turn_s", "each_s"), [(0.0, 3.0), (60.0, 8.8)])
def test_later_chunks_follow_at_the_pace_of_a_rank_or_of_its_slots(turn_s: float, each_s: float) -> None:
    """Four chunks of 512 bytes that move in 51.2 s each: the first is 512 s on its way, each other costs its rank 3 s
    beside the 51.2 s of its bytes, or waits for a slot until 60 s are over."""
    chunks = Chunks(512.0, (), 1, 1.0, 0.1, 3.0, turn_s)
    assert chunks.beyond_s(2048.0, 4 * 51.2) == pytest.approx(512.0 - 51.2 + 3 * each_s)


@pytest.mark.parametrize(("share", "chunk"), [
    (32 * MIB, 512 * KIB), (32 * MIB - 1, 256 * KIB), (16 * MIB - 1, 128 * KIB), (4 * MIB - 1, 64 * KIB),
    (512 * KIB - 1, 32 * KIB), (20 * KIB, 20 * KIB)])
def test_chunks_of_few_are_halved_before_2_20(machines: Machines, share: int, chunk: int) -> None:
    """Two nodes of eight are 8 deep: 64 chunks of more than 128 KiB, 32 of more than 64 KiB, 8 of more than 32 KiB."""
    old, new = (options(machines["dgx-a100"], "all_reduce", 2, algorithm="Tree", protocol="Simple", version=version)
                for version in ("2.18.3", "2.20.5"))
    assert old[0].chunks and new[0].chunks
    assert old[0].chunks.chunk_bytes(share) == chunk
    assert new[0].chunks.chunk_bytes(share) == min(share, 512 * KIB)


def test_a_tree_of_two_nodes_by_hand(machines: Machines) -> None:
    """One channel, one chunk of 32 KiB: 14 steps and 2 hops, each a pass of a thread block at half of the 24 GB/s that
    it moves up and down together, and twice over a NIC."""
    way, rate = options(machines["dgx-a100"], "all_reduce", 2, algorithm="Tree", protocol="Simple", channels=1)
    hop_us = F["hop_us.Simple"] + F["fabric_us.infiniband"] + F["flush_us.verbs"]
    expected = F["base_us.Simple.ampere"] + 14 * F["step_us.nvlink.Simple.read"] + 2 * hop_us
    expected += (32 << 10) * (16 / 12e9 + 2 / NIC) * 1e6
    assert (way.latency_at(32 << 10, rate) + (32 << 10) / rate) * 1e6 == pytest.approx(expected)


def test_ll_waits_for_the_proxy_between_nodes_alone(machines: Machines) -> None:
    """4 KiB on one channel of two A100 nodes: 14 steps, 2 hops; AMD's proxies look through 22.5 / 16 GB/s."""
    way, rate = options(machines["dgx-a100"], "all_reduce", 2, algorithm="Tree", protocol="LL", channels=1)
    hop_us = F["hop_us.LL"] * F["tree_hop.all"] + F["fabric_us.infiniband"]
    expected = F["base_us.LL.ampere"] + 14 * F["step_us.nvlink.LL.ampere"] + 2 * hop_us
    expected += 4096 * 2 * (16 / 22.5e9 + 2 / NIC) * 1e6
    assert (way.latency_at(4096, rate) + 4096 / rate) * 1e6 == pytest.approx(expected)


def test_whole_chunks_cost_the_same_from_four_full_ones_on(machines: Machines) -> None:
    """From 2.20 on what the way of a chunk adds no longer grows once every channel has a full one."""
    way, rate = options(machines["dgx-a100"], "all_reduce", 16, algorithm="Tree", protocol="Simple", version="2.21")
    beyond = [way.latency_at(size, rate) for size in (64 * MIB, 1024 * MIB)]
    assert beyond[0] == pytest.approx(beyond[1])
    assert way.chunks is not None
    assert beyond[0] > way.latency_s + 0.5 * 512 * KIB * way.chunks.path_s


@pytest.mark.parametrize("machine", ["dgx-a100", "dgx-h100"])
@pytest.mark.parametrize("nodes", [2, 4, 16])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1 << 10, 1 << 32), more=st.floats(1.0, 4.0))
def test_more_bytes_never_take_less_time(machines: Machines, machine: str, nodes: int, size: int, more: float) -> None:
    """By one way, where chunks are not halved, or only where that makes larger ones."""
    ways = [("Tree", "Simple"), ("Tree", "LL"), ("Ring", "Simple"), ("Ring", "LL")]
    for algorithm, protocol in [*ways, ("NVLSTree", "Simple")] if machine == "dgx-h100" else ways:
        way, rate = options(machines[machine], "all_reduce", nodes, algorithm=algorithm, protocol=protocol)
        small, large = (way.latency_at(s, rate) + s / rate for s in (size, int(size * more)))
        assert large >= small * (1 - 1e-9)


@pytest.mark.parametrize(("fabric", "factor"), [("infiniband", 1.0), ("roce", 1.0), ("slingshot", F["rendezvous.all"])])
def test_a_nic_passes_the_messages_of_its_channels_in_turn(machines: Machines, fabric: str, factor: float) -> None:
    """64 nodes of 8 NICs and 16 channels: from the ninth channel on two share one. Beyond 8 KiB on the wire, 4 KiB of
    each of 512 ranks and 16 channels, libfabric alone takes a rendezvous."""
    mapping = {**machines["dgx-a100"], "inter": {**machines["dgx-a100"]["inter"], "fabric": fabric}}
    way, _ = options(mapping, "all_gather", 64, algorithm="Ring", protocol="LL")
    assert way.channels == 16
    one_s = (511 - 8) * F[f"message_us.{fabric}"] * 1e-6
    expected = [(4096 * 512 * 16, 2 * factor * one_s), (4096 * 512 * 9, 2 * one_s), (0, one_s)]
    assert way.floors == tuple((size, pytest.approx(time)) for size, time in expected)


def test_full_slices_are_two_messages_a_step(machines: Machines) -> None:
    """Simple: 16 channels open one per 32 KiB; from 64 KiB of each rank and channel on a step is two. A slice takes two
    of the eight slots, so four messages are on the way before one is waited for."""
    way, _ = options(machines["dgx-a100"], "all_gather", 64, algorithm="Ring", protocol="Simple")
    each_s = F["message_us.infiniband"] * 1e-6
    one_s, two_s = (511 - 4) * each_s, (2 * 511 - 4) * each_s
    expected = [(65536 * 512 * 16, 2 * two_s), (32768 * 9, 2 * one_s), (0, one_s)]
    assert way.floors == tuple((size, pytest.approx(time)) for size, time in expected)


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_an_edge_from_a_root_passes_each_chunk_once(machines: Machines, kind: str) -> None:
    """As many messages as the call has chunks, not one a step: none waits for another of a small call."""
    for protocol in ("LL", "Simple"):
        way, _ = options(machines["dgx-a100"], kind, 64, algorithm="Ring", protocol=protocol)
        assert way.floors == ()


def test_hopper_and_staged_messages_are_not_flushed(machines: Machines) -> None:
    """A broadcast's chain of two nodes crosses once."""
    def hop_us(mapping: dict[str, Any], step_us: float, base: str = "ampere") -> float:
        way, _ = options(mapping, "broadcast", 2, algorithm="Ring", protocol="Simple")
        return way.latency_s * 1e6 - F[f"base_us.Simple.{base}"] - 14 * step_us

    read, write = F["step_us.nvlink.Simple.read"], F["step_us.nvlink.Simple.write"]
    inter = machines["dgx-a100"]["inter"]
    plain = F["hop_us.Simple"] + F["fabric_us.infiniband"]
    assert hop_us(machines["dgx-a100"], read) == pytest.approx(plain + F["flush_us.verbs"])
    assert hop_us(machines["dgx-h100"], write, "hopper") == pytest.approx(plain)
    staged = {**machines["dgx-a100"], "inter": {**inter, "gpu_direct_rdma": False}}
    assert hop_us(staged, read) == pytest.approx(plain)
