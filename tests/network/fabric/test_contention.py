"""Shared links by hand: groups side by side, leaves, rails, PCIe switches, hashing, a slow link."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.network import Network, Topology, fair_share
from sim.network.fabric.hashing import collision_loss, expected_most
from sim.network.figures import Figures

GIB = 1 << 30
SIMPLE = {"algorithm": "Ring", "protocol": "Simple"}
F = Figures()
NIC = 25e9 * F["fabric_share.infiniband"]
Machines = dict[str, dict[str, Any]]


def machine(machines: Machines, name: str = "dgx-a100", **inter: Any) -> dict[str, Any]:
    return {**machines[name], "inter": {**machines[name]["inter"], **inter}}


def network(mapping: dict[str, Any], nodes: int, **more: Any) -> Network:
    return Network(Topology.from_mapping(mapping), nodes, 8, nccl=SIMPLE, **more)


def row(*ranks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([ranks], dtype=np.int64)


def test_two_groups_share_a_rail_only_when_they_meet_on_it(machines: Machines) -> None:
    """All-gathers over GPU 0 and GPU 1 of two nodes: each has its rail of 8 NICs; with one NIC a node they halve it."""
    for nics, share in ((8, 1.0), (1, 0.5)):
        net = network(machine(machines, nics_per_node=nics), 2)
        flows = [net.coflow("all_gather", GIB, row(i, 8 + i)) for i in (0, 1)]
        assert fair_share(flows, net.capacity) == pytest.approx([NIC * share / 0.5] * 2)


def test_a_small_group_beside_a_large_one(machines: Machines) -> None:
    """On one NIC a ring of 16 ranks (15/16 a byte) and one of 2 (1/2 a byte) get rates by channels: 2 and 2 here."""
    net = network(machine(machines, nics_per_node=1), 2)
    large, small = net.coflow("all_gather", GIB, np.arange(16).reshape(1, -1)), net.coflow("all_gather", GIB, row(0, 8))
    assert large.weight == small.weight == 2
    assert fair_share([large, small], net.capacity) == pytest.approx([NIC / (15 / 16 + 1 / 2)] * 2)


def test_oversubscription_counts_only_across_leaves(machines: Machines) -> None:
    """Leaves of 2 nodes, 4:1: a ring over 4 nodes leaves a leaf once with a node's worth, a quarter of 16 NICs' speed
    is four NICs: half of what the 8 NICs of a node carry."""
    net = network(machine(machines, nodes_per_leaf=2, oversubscription=4.0, rail_optimized=False), 4)
    across = net.coflow("all_gather", GIB, np.arange(32).reshape(1, -1))
    assert fair_share([across], net.capacity) == pytest.approx([4 * NIC / (31 / 32)])
    within = net.coflow("all_gather", GIB, np.arange(16).reshape(1, -1))
    assert fair_share([within], net.capacity) == pytest.approx([8 * NIC / (15 / 16)])


def test_rails_keep_groups_apart(machines: Machines) -> None:
    """Leaves of 2 nodes, 2:1, groups of one GPU per node on four nodes. A rail's leaf has 2 NICs' ports and 1 uplink;
    with rails each group has one to itself, without them the eight of a leaf are for whoever needs them."""
    for rails in (True, False):
        net = network(machine(machines, nodes_per_leaf=2, oversubscription=2.0, rail_optimized=rails), 4)
        flow = net.coflow("all_gather", GIB, row(0, 8, 16, 24))
        leaf = 1 if rails else 8
        assert net.capacity(("leaf_out", 0)) == pytest.approx(leaf * NIC)
        assert fair_share([flow], net.capacity) == pytest.approx([NIC / 0.75])
    crowd = np.arange(32).reshape(4, 8).T.copy()
    assert fair_share([net.coflow("all_gather", GIB, crowd)], net.capacity) == pytest.approx([NIC / 0.75])


def test_nic_behind_another_pcie_switch(machines: Machines) -> None:
    """PCIe node, two switches of 4, one 400 Gb/s NIC below the first. An all-gather over GPUs 4 of two nodes crosses
    both uplinks once (12.5 GB/s each); one over GPUs 0 none. Each sends half a byte per byte."""
    inter = {"kind": "fat-tree", "fabric": "infiniband", "nics_per_node": 1, "gbps_per_nic": 400}
    net = network({**machines["pcie"], "inter": inter}, 2)
    bridge = 12.5e9
    far, near = net.coflow("all_gather", GIB, row(4, 12)), net.coflow("all_gather", GIB, row(0, 8))
    assert {link for link in far.links if link[0].startswith("pcie")} == {
        (f"pcie_{way}", i) for way in ("out", "in") for i in (0, 1, 2, 3)}
    assert not any(link[0].startswith("pcie") for link in near.links)
    assert fair_share([far], net.capacity) == pytest.approx([bridge / 0.5])
    inside = net.coflow("all_gather", GIB, row(4, 0))  # crosses the same uplinks inside the node
    assert fair_share([far, inside], net.capacity)[0] < bridge / 0.5 * 0.8


def test_send_to_a_nic_behind_another_pcie_switch(machines: Machines) -> None:
    """As above, a pipeline's transfer: GPU 4 of one node to GPU 4 of the next crosses both uplinks on either side."""
    inter = {"kind": "fat-tree", "fabric": "infiniband", "nics_per_node": 1, "gbps_per_nic": 400}
    net = network({**machines["pcie"], "inter": inter}, 2)
    far, near = (net.coflow("send", GIB, row(a, a + 8)) for a in (4, 0))
    assert {link for link in far.links if link[0].startswith("pcie")} == {
        ("pcie_out", 0), ("pcie_out", 1), ("pcie_in", 2), ("pcie_in", 3)}
    assert not any(kind.startswith("pcie") for kind, _ in near.links)
    assert fair_share([far], net.capacity) == pytest.approx([12.5e9])


def test_bridged_pairs_reach_a_nic_of_the_other_switch_over_the_cpus(machines: Machines) -> None:
    """Pairs 0-1 ... 6-7 on NVLink, two switches of 4, one NIC below the first: what GPUs 4 to 7 send leaves over both
    uplinks, what a pair does among itself takes none; a mesh that joins all GPUs lets them leave beside the NIC."""
    pairs = [[12 if i // 2 == j // 2 and i != j else 0 for j in range(8)] for i in range(8)]
    inter = {"kind": "fat-tree", "fabric": "infiniband", "nics_per_node": 1, "gbps_per_nic": 400}
    bridged = {**machines["pcie"], "inter": inter, "intra": {
        "kind": "nvlink-mesh", "link": "nvlink3", "matrix": pairs, "gpus_per_switch": 4, "gen": 4}}
    net = network(bridged, 2)
    far, near, inside = (net.coflow("all_gather", GIB, row(*ranks)) for ranks in ((4, 12), (0, 8), (4, 5)))
    assert {link for link in far.links if link[0].startswith("pcie")} == {
        (f"pcie_{way}", i) for way in ("out", "in") for i in (0, 1, 2, 3)}
    assert not any(kind.startswith("pcie") for flow in (near, inside) for kind, _ in flow.links)
    assert fair_share([far], net.capacity) == pytest.approx([12.5e9 / 0.5])
    joined = [[1 if i != j else 0 for j in range(8)] for i in range(8)]
    whole = network({**bridged, "intra": {**bridged["intra"], "matrix": joined}}, 2)
    assert not any(kind.startswith("pcie") for kind, _ in whole.coflow("all_gather", GIB, row(4, 12)).links)


def test_degraded_nic_slows_the_ring_that_uses_it(machines: Machines) -> None:
    """NIC 3 of node 1 at a quarter: the ring over all NICs moves at four times that NIC's part; rail 2 is untouched."""
    slow = {**machines["dgx-a100"], "degraded": [{"link": "nic", "index": 8 + 3, "share": 0.25}]}
    net = network(slow, 4)
    ring = net.coflow("all_gather", GIB, np.arange(32).reshape(1, -1))
    assert fair_share([ring], net.capacity) == pytest.approx([8 * NIC / 4 / (31 / 32)])
    assert fair_share([net.coflow("all_gather", GIB, row(2, 10))], net.capacity) == pytest.approx([NIC / 0.5])
    assert fair_share([net.coflow("all_gather", GIB, row(3, 11))], net.capacity) == pytest.approx([NIC / 4 / 0.5])


def test_degraded_link_is_kept_at_scale(machines: Machines) -> None:
    """Among 2,048 nodes in lockstep the representative links include the slow one."""
    slow = {**machines["dgx-a100"], "degraded": [{"link": "nic", "index": 8 * 1500 + 5, "share": 0.5}]}
    net = network(slow, 2048)
    flow = net.coflow("all_gather", GIB, np.arange(16384).reshape(1, -1))
    assert ("nic_out", 8 * 1500 + 5) in flow.links
    assert fair_share([flow], net.capacity) == pytest.approx([8 * NIC / 2 / (16383 / 16384)])


@pytest.mark.parametrize("entry", [{"link": "fan", "index": 0}, {"link": "nic", "share": -0.1}])
def test_degraded_entries_are_checked(machines: Machines, entry: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="degraded"):
        Topology.from_mapping({**machines["dgx-a100"], "degraded": [entry]})


def test_hashing_loses_what_the_fullest_uplink_says(machines: Machines) -> None:
    """Leaves of 2 nodes, 2:1, so 8 uplinks; a ring over 4 nodes leaves each leaf in 16 flows. Spread evenly the 8
    uplinks carry a node's 8 NICs; hashed, the fullest holds E[max] of 16 in 8 instead of 2."""
    base = {"nodes_per_leaf": 2, "oversubscription": 2.0, "rail_optimized": False}
    ranks = np.arange(32).reshape(1, -1)
    even, hashed = (network(machine(machines, routing=r, **base), 4) for r in ("adaptive", "ecmp"))
    rates = [fair_share([net.coflow("all_gather", GIB, ranks)], net.capacity)[0] for net in (even, hashed)]
    assert rates[0] == pytest.approx(8 * NIC / (31 / 32))
    assert rates[1] == pytest.approx(rates[0] * 2 / expected_most(16, 8))


def test_expected_most_by_hand() -> None:
    """One flow is alone; two on 8 uplinks meet with probability 1/8; thousands are even."""
    assert expected_most(1, 8) == 1.0
    assert expected_most(2, 8) == pytest.approx(9 / 8, rel=0.07)
    assert expected_most(8, 8) == pytest.approx(2.6, rel=0.02)  # simulated: 2.594
    assert expected_most(256, 128) == pytest.approx(6.46, rel=0.02)  # simulated: 6.463
    assert collision_loss(10**6, 8) == pytest.approx(1.0, abs=0.01)


@settings(max_examples=25, deadline=None)
@given(flows=st.integers(1, 5000), uplinks=st.integers(1, 512))
def test_collisions_only_lose(flows: int, uplinks: int) -> None:
    assert collision_loss(flows, uplinks) >= 1.0 - 1e-12
    assert flows / uplinks - 1e-9 <= expected_most(flows, uplinks) <= flows


@pytest.mark.parametrize(("link", "index"), [("gpu", 16), ("nic", 16), ("leaf", 8), ("gpu", -1)])
def test_a_degraded_link_that_does_not_exist_is_refused(link: str, index: int) -> None:
    mapping = {"name": "two nodes", "gpu": "a100-80g-sxm", "gpus_per_node": 8, "nodes": 2,
               "intra": {"kind": "nvswitch", "link": "nvlink3", "links_per_gpu": 12},
               "inter": {"kind": "fat-tree", "fabric": "infiniband", "nics_per_node": 8, "gbps_per_nic": 200,
                         "rail_optimized": True, "nodes_per_leaf": 16},
               "degraded": [{"link": link, "index": index, "share": 0.5}]}
    with pytest.raises(UserError, match="does not exist"):
        Network(Topology.from_mapping(mapping), 2, 8)
