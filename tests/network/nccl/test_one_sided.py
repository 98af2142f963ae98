"""All-to-alls that write into their peers' memory: what they take, beside NCCL's grouped sends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.network import Coflow, Network, Topology, fair_share
from sim.network.figures import Figures

F = Figures()
NVL72 = {"name": "nvl72", "gpu": "gb200", "gpus_per_node": 72, "nodes": 4,
         "intra": {"kind": "nvswitch", "link": "nvlink5", "links_per_gpu": 18},
         "inter": {"kind": "fat-tree", "fabric": "infiniband", "nics_per_node": 72, "gbps_per_nic": 400,
                   "rail_optimized": True, "oversubscription": 1.0, "nodes_per_leaf": 16}}


def network(nodes: int, gpus: int, one_sided: bool) -> Network:
    return Network(Topology.from_mapping(NVL72), nodes, gpus, one_sided=one_sided)


def world(n: int) -> npt.NDArray[np.int64]:
    return np.arange(n, dtype=np.int64)[None, :]


def taken_s(net: Network, size: int, ranks: int) -> float:
    flow: Coflow = net.coflow("all_to_all", size, world(ranks))
    return flow.latency_s + flow.size_bytes / fair_share([flow], net.capacity)[0]


def test_latency_does_not_grow_with_peers() -> None:
    """Two steps over NVLink, whatever their number; grouped sends have one start, and of 32 channels 4 a peer or the
    one there must be are a chunk of half a MiB behind, which half of the 32 blocks' warps copy."""
    size = 64 << 20
    few, many = (network(1, 72, True).coflow("all_to_all", size, world(n)).latency_s for n in (8, 64))
    assert few == many == pytest.approx((F["base_us.Simple.blackwell"] + 2 * F["step_us.nvlink.LL.blackwell"]) * 1e-6)
    for ranks, each in ((8, 4), (64, 1)):
        net = network(1, 72, False)
        flow = net.coflow("all_to_all", size, world(ranks))
        behind_s = ranks * each * (1 << 19) / (32 * F["pass_gbps.blackwell"] / 2 * 1e9)
        assert flow.latency_s == pytest.approx(F["exchange_us.all"] * 1e-6 + behind_s)


def test_between_nodes_a_step_is_a_hop() -> None:
    flow = network(4, 8, True).coflow("all_to_all", 64 << 20, world(32))
    hop = F["p2p_net_us.infiniband"] + F["fabric_us.infiniband"]
    assert flow.latency_s == pytest.approx((F["base_us.Simple.blackwell"] + 2 * hop) * 1e-6)
    assert (flow.algorithm, flow.channels) == ("one-sided", 20)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1 << 22, 1 << 30), ranks=st.sampled_from([4, 8, 16, 32, 64]))
def test_never_slower_than_grouped_sends_of_large_messages(size: int, ranks: int) -> None:
    one, grouped = (taken_s(network(1, 72, way), size, ranks) for way in (True, False))
    assert one <= grouped * (1 + 1e-9)
    assert one >= size * (ranks - 1) / ranks / 900e9  # NVLink 5: 18 links of 50 GB/s


def test_other_collectives_are_nccls() -> None:
    ways = [network(1, 8, way).coflow("all_gather", 1 << 26, world(8)) for way in (True, False)]
    assert ways[0] == ways[1]
