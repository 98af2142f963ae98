"""An all-to-all inside a node: by which protocol, over how many channels and how long, as NCCL's releases cut it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.network import Coflow, Network, Topology, fair_share
from sim.network.figures import Figures

KIB, GIB = 1 << 10, 1 << 30
F = Figures()
Machines = dict[str, dict[str, Any]]


def flow_of(mapping: dict[str, Any], size: int, ranks: int = 8, kind: str = "all_to_all", **nccl: Any) -> Coflow:
    net = Network(Topology.from_mapping(mapping), 1, mapping["gpus_per_node"], nccl=nccl)
    return net.coflow(kind, size, np.arange(ranks, dtype=np.int64)[None, :])


def taken_us(mapping: dict[str, Any], size: int, ranks: int, **nccl: Any) -> float:
    net = Network(Topology.from_mapping(mapping), 1, mapping["gpus_per_node"], nccl=nccl)
    flow = net.coflow("all_to_all", size, np.arange(ranks, dtype=np.int64)[None, :])
    return 1e6 * (flow.latency_s + size / fair_share([flow], net.capacity)[0])


@pytest.mark.parametrize(("version", "most"), [
    ("2.21.5", 16), ("2.22.3", 512), ("2.28.9", 512), ("2.29.2", 16), ("2.30.7", 16)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_releases_differ_in_how_much_goes_in_ll(machines: Machines, version: str, most: int, ranks: int) -> None:
    """16 KiB to a peer, from 2.22 to 2.28 as much for each of the 32 channels that it could have: steps of
    AIConfigurator's tables of 2.23, 2.27, 2.28 and 2.29."""
    low, high = (flow_of(machines["dgx-h100"], size, ranks, version=version)
                 for size in (ranks * most * KIB, ranks * most * KIB + ranks))
    assert (low.protocol, high.protocol) == ("LL", "Simple")
    assert flow_of(machines["dgx-h100"], most * KIB, ranks, "send", version=version).protocol == "LL"


@pytest.mark.parametrize("version", ["2.21.5", "2.27.3", "2.30.7"])
def test_over_pcie_two_channels_of_ll_hold_32_kib(machines: Machines, version: str) -> None:
    protocols = [flow_of(machines["pcie"], 2 * size * KIB, 2, version=version).protocol for size in (32, 33)]
    assert protocols == ["LL", "Simple"]


@pytest.mark.parametrize(("version", "size", "channels"), [
    ("2.30", 1, 8), ("2.30", 512, 8), ("2.30", 1024, 16), ("2.30", 2048, 32), ("2.30", 1 << 20, 32),
    ("2.27", 64, 8), ("2.27", 128, 16), ("2.27", 1024, 32), ("2.27", 8192, 32)])
def test_a_peers_channels_open_by_its_bytes(machines: Machines, version: str, size: int, channels: int) -> None:
    """Eight H100: one channel for each peer, another for each 64 KiB to it (8 KiB in LL until 2.28), four at most."""
    assert flow_of(machines["dgx-h100"], size * KIB, version=version).channels == channels


def test_a_chunk_is_copied_when_all_of_it_has_come(machines: Machines) -> None:
    """Two A100: from 64 KiB to 1 MiB each of up to 16 channels for the peer sends 64 KiB by half of its block and then
    copies them by all of it; 64 MiB are four chunks a channel, the last of which is copied."""
    half, whole = F["pass_gbps.ampere"] / 2 * 1e3, F["pass_gbps.ampere"] * 1e3
    start = F["exchange_us.ampere"] + F["step_us.nvlink.LL.ampere"]
    for size in (64 * KIB, 256 * KIB, 1024 * KIB):
        assert taken_us(machines["dgx-a100"], 2 * size, 2) == pytest.approx(start + 65536 / half + 65536 / whole)
    four = start + (1 << 21) / half + (1 << 19) / whole
    assert taken_us(machines["dgx-a100"], 64 << 20, 2) == pytest.approx(four)


def test_half_a_block_sends_in_ll_too(machines: Machines) -> None:
    """Eight A100, NCCL 2.27: 512 KiB to each, 128 KiB by each of four channels, at half of what one moves in a ring."""
    start = F["base_us.LL.ampere"] + 3 * F["step_us.nvlink.LL.ampere"]
    expected = start + (1 << 17) / (F["ll_channel_gbps.ampere"] / 2 * 1e3)
    assert taken_us(machines["dgx-a100"], 8 << 19, 8, version="2.27") == pytest.approx(expected)


def test_links_bound_eight_gpus(machines: Machines) -> None:
    """Eight A100: links are slower than half of 32 blocks; four chunks of 512 KiB to each peer remain to be copied."""
    links = 300e3 * F["link_share.nvlink3"] * F["send_share.all"] * 8 / 7
    start, whole = F["exchange_us.ampere"] + 3 * F["step_us.nvlink.LL.ampere"], F["pass_gbps.ampere"] * 1e3
    sent = max(GIB / links, GIB / 32 / (whole / 2))
    assert taken_us(machines["dgx-a100"], GIB, 8) == pytest.approx(start + sent + (1 << 19) / whole)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_odd_groups_share_channels_by_halves(machines: Machines, ranks: int) -> None:
    """Three of a DGX H100's GPUs get 8 of 32 channels each, five to seven 4."""
    assert flow_of(machines["dgx-h100"], GIB, ranks).channels == ranks * (8 if ranks == 3 else 4)
