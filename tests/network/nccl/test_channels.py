"""Channels: how many a call opens, what one of them carries, how many NCCL finds by kind of link, a user's limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.network import Coflow, Network, Topology, fair_share
from sim.network.fabric.topology import facts
from sim.network.figures import Figures
from sim.network.nccl.candidate import Candidate

GIB = 1 << 30
F = Figures()
Machines = dict[str, dict[str, Any]]


def flow_of(mapping: dict[str, Any], kind: str, size: int, nodes: int = 1, ranks: int = 8,
            **nccl: Any) -> tuple[Coflow, float]:
    """A call over the first ranks, and the rate it runs at alone, bytes/s."""
    net = Network(Topology.from_mapping(mapping), nodes, mapping["gpus_per_node"], nccl=nccl)
    flow = net.coflow(kind, size, np.arange(ranks, dtype=np.int64)[None, :])
    return flow, fair_share([flow], net.capacity)[0]


def way(channels: int, opens: float, channel_bps: float) -> Candidate:
    return Candidate("Ring", "LL", None, 10e-6, 0.0, 1.0, opens, channel_bps, (), (), 1.0, 1e9, channels, 0.0)


def test_channels_open_one_by_one() -> None:
    """One channel per 4 KiB: 2 KiB go through one, 16 KiB through four in the time one needs for 4 KiB, all beyond 32
    KiB through eight, whose sum is the rate itself."""
    ring, rate = way(8, 4096.0, 1e9), 8e9
    for size, one in ((2048, 2048), (16384, 4096), (32768, 4096)):
        assert ring.latency_at(size, rate) + size / rate == pytest.approx(10e-6 + one / 1e9)
    assert ring.latency_at(1 << 20, rate) == pytest.approx(10e-6)
    assert [ring.open_channels(size) for size in (1, 4096, 8191, 8192, 1 << 20)] == [1, 1, 1, 2, 8]


def test_some_channels_open_at_any_size() -> None:
    """An all-to-all of four: 2 KiB go in parts of 512 bytes, and what each channel's receiver has last, up to 1 KiB, is
    copied at 2 GB/s when all has been sent."""
    sends, rate = replace(way(8, 4096.0, 1e9), least_channels=4, last_bytes=1024.0, last_bps=2e9), 8e9
    for size, one in ((2048, 512), (16384, 4096), (65536, 8192)):
        taken = sends.latency_at(size, rate) + size / rate
        assert taken == pytest.approx(10e-6 + one / 1e9 + min(one, 1024) / 2e9)
    assert [sends.open_channels(size) for size in (1, 16384, 20480, 1 << 20)] == [4, 4, 5, 8]


def test_a_slow_link_hides_closed_channels() -> None:
    """Where the wire is slower than one channel it decides at every size."""
    assert way(8, 4096.0, 1e9).latency_at(8192, 0.5e9) == pytest.approx(10e-6)


@pytest.mark.parametrize(("size", "protocol", "channels"), [
    (70_000, "LL", 2), (4096, "LL", 1), (40_000, "LL128", 7), (70_000, "Simple", 2), (1 << 20, "Simple", 24)])
def test_small_calls_hold_few_sms(machines: Machines, size: int, protocol: str, channels: int) -> None:
    """8 ranks: LL opens a channel per full 8 B x 512 threads x 8 ranks, LL128 8 B x 640, Simple 64 B x 512."""
    flow, _ = flow_of(machines["dgx-a100"], "all_gather", size, algorithm="Ring", protocol=protocol)
    assert flow.channels == channels


@pytest.mark.parametrize(("machine", "gbps"), [("dgx-a100", 24.0), ("dgx-h100", 38.7)])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_one_channel_is_one_thread_block(machines: Machines, machine: str, gbps: float, kind: str) -> None:
    """Forced to one, then two, channels: bus bandwidth of one block each, whatever the links could carry."""
    volume = (2 if kind == "all_reduce" else 1) * 7 / 8
    for channels in (1, 2):
        forced = {"algorithm": "Ring", "protocol": "Simple", "channels": channels}
        flow, rate = flow_of(machines[machine], kind, GIB, **forced)
        assert rate * volume == pytest.approx(channels * gbps * 1e9)
        assert flow.channels == channels


def test_a_channel_of_a_mesh_has_one_link(machines: Machines) -> None:
    """DGX-1V: a ring passes pairs with a single link, which carries less than a block moves."""
    _, rate = flow_of(machines["dgx-1v"], "all_gather", GIB, channels=1, protocol="Simple")
    assert rate * 7 / 8 == pytest.approx(25e9 * F["link_share.nvlink2"])


def test_a_channel_crosses_by_one_nic(machines: Machines) -> None:
    """Two nodes with 100 Gb/s NICs: one ring leaves a node over one of them."""
    inter = {**machines["dgx-a100"]["inter"], "gbps_per_nic": 100}
    _, rate = flow_of({**machines["dgx-a100"], "inter": inter}, "all_gather", GIB, 2, 16, channels=1, protocol="Simple")
    assert rate * 15 / 16 == pytest.approx(12.5e9 * F["fabric_share.infiniband"])


@pytest.mark.parametrize("machine", ["dgx-a100", "dgx-h100", "dgx-1v", "pcie"])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all", "send"])
def test_nccls_own_channels_limit_no_large_call(machines: Machines, machine: str, kind: str) -> None:
    """What NCCL opens by itself fills the links: twice the blocks change nothing."""
    mapping = machines[machine]
    _, rate = flow_of(mapping, kind, GIB, protocol="Simple", algorithm="Ring")
    row = facts()["generations"][Topology.from_mapping(mapping).generation]
    before, row["channel"] = row["channel"], 2 * row["channel"]
    try:
        assert flow_of(mapping, kind, GIB, protocol="Simple", algorithm="Ring")[1] == pytest.approx(rate)
    finally:
        row["channel"] = before


def test_more_channels_are_never_slower(machines: Machines) -> None:
    for kind in ("all_reduce", "all_gather", "all_to_all", "send"):
        for nodes in (1, 2):
            rates = [flow_of(machines["dgx-h100"], kind, GIB, nodes, 8 * nodes, channels=n)[1] for n in (1, 2, 4, 16)]
            assert rates == sorted(rates)


def test_a_limit_does_not_change_what_nccl_judges_by(machines: Machines) -> None:
    """NCCL cuts channels after its search: with one channel NVLink SHARP is still its choice on H100."""
    flow, _ = flow_of(machines["dgx-h100"], "all_reduce", GIB, channels=1)
    assert (flow.algorithm, flow.channels) == ("NVLS", 1)


def test_rings_over_pcie_have_two_channels(machines: Machines) -> None:
    flow, _ = flow_of(machines["pcie"], "all_reduce", GIB)
    assert flow.channels == 2


@pytest.mark.parametrize(("machine", "nodes", "ranks", "channels"), [
    ("dgx-a100", 1, 2, 16), ("dgx-a100", 1, 8, 32), ("dgx-h100", 1, 2, 16),
    ("dgx-1v", 1, 2, 2), ("pcie", 1, 2, 2),
    ("dgx-a100", 2, 16, 2), ("dgx-h100", 2, 16, 4), ("dgx-1v", 2, 16, 2)])
def test_channels_of_a_send(machines: Machines, machine: str, nodes: int, ranks: int, channels: int) -> None:
    """Two a link, as a power of two up to 32, half of them between two ranks alone; between nodes one per 14 GB/s of
    the NIC, two at least."""
    flow, _ = flow_of(machines[machine], "send", GIB, nodes, ranks)
    assert flow.channels == channels


def test_small_sends_inside_a_node_go_in_ll(machines: Machines) -> None:
    """Up to 16 KiB to a peer; a group of eight shares its bytes among eight."""
    mapping = machines["dgx-a100"]
    protocols = [flow_of(mapping, "send", size, ranks=2)[0].protocol for size in (16384, 16385)]
    assert protocols == ["LL", "Simple"]
    protocols = [flow_of(mapping, "all_to_all", size)[0].protocol for size in (8 * 16384, 8 * 16384 + 8)]
    assert protocols == ["LL", "Simple"]
    assert flow_of(mapping, "send", 1024, 2, 16)[0].protocol == "Simple"
    start_us = F["base_us.LL.ampere"] + F["step_us.nvlink.LL.ampere"]
    flow, _ = flow_of(mapping, "send", 4, ranks=2)
    assert flow.latency_s * 1e6 == pytest.approx(start_us, rel=0.01)


@pytest.mark.parametrize("machine", ["dgx-a100", "dgx-h100"])
def test_half_a_block_sends_to_all(machines: Machines, machine: str) -> None:
    """An all-to-all over one channel, then two: the other half of its warps receives, and an eighth stays at home."""
    own = F[f"pass_gbps.{'ampere' if machine == 'dgx-a100' else 'hopper'}"]
    for channels in (1, 2):
        _, rate = flow_of(machines[machine], "all_to_all", GIB, channels=channels)
        assert rate == pytest.approx(channels * own / 2 * 1e9)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_a_block_of_ll_also_works_in_its_last_pass(machines: Machines, kind: str) -> None:
    """Two A100: half of a gather, all of an all-reduce is sent, and half of the call more is read when all has come."""
    _, rate = flow_of(machines["dgx-a100"], kind, GIB, ranks=2, algorithm="Ring", protocol="LL")
    work = (1 if kind == "all_gather" else 2) / 2 + 1 / 2
    assert rate == pytest.approx(24 * F["ll_channel_gbps.ampere"] / work * 1e9)


@pytest.mark.parametrize(("ranks", "lower", "upper"), [(4, 4, 6), (7, 8, 12), (8, 12, 16)])
def test_old_nccl_leaves_ll128_where_it_was_measured_to(machines: Machines, ranks: int, lower: int, upper: int) -> None:
    """DGX-1V, NCCL 2.10: vTrain's tables bend between these sizes (MiB), where Simple takes over from LL128."""
    last = flow_of(machines["dgx-1v"], "all_reduce", lower << 20, ranks=ranks, version="2.10")[0]
    first = flow_of(machines["dgx-1v"], "all_reduce", upper << 20, ranks=ranks, version="2.10")[0]
    assert (last.protocol, first.protocol) == ("LL128", "Simple")


def test_the_first_pass_of_lls_threads_is_in_its_steps() -> None:
    """8 ranks, channels of 32 KiB a pass: 24 of them take what one takes, twice as much a pass more."""
    ring = replace(way(24, 32768.0, 4e9), first_bytes=32768.0)
    for size in (32768, 24 * 32768):
        assert ring.latency_at(size, 1e15) == pytest.approx(10e-6, rel=1e-3)
    assert ring.latency_at(48 * 32768, 1e15) == pytest.approx(10e-6 + 32768 / 4e9, rel=1e-3)


def test_a_sender_is_through_when_its_buffers_hold_all(machines: Machines) -> None:
    """Two A100, which read from one another: 16 channels copy 16 MiB into their 64 MiB of buffers at 24 GB/s each."""
    net = Network(Topology.from_mapping(machines["dgx-a100"]), 1, 8)
    ranks = np.arange(2, dtype=np.int64)[None, :]
    way_, rate = next((c, r) for c, r in net.options("send", net.placement(ranks)) if c.protocol == "Simple")
    size = 16 << 20
    assert way_.sender_s(size, rate) == pytest.approx(F["base_us.Simple.ampere"] * 1e-6 + size / (16 * 24e9))
    beyond = way_.sender_s(128 << 20, rate) - way_.sender_s(64 << 20, rate)
    assert beyond == pytest.approx((64 << 20) / rate)
    assert way_.sender_s(size, rate) < way_.latency_at(size, rate) + size / rate
