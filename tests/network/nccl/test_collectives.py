"""Coflows: ring times by hand, placement, conservation of bytes, folded against unfolded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.network import Coflow, Network, Topology, fair_share
from sim.network.figures import Figures
from sim.network.nccl.candidate import WHOLE_SLICE, Slices
from sim.network.nccl.site import Site
from sim.network.network import release

GIB = 1 << 30
SIMPLE = {"algorithm": "Ring", "protocol": "Simple"}
F = Figures()
#: What a rail of the test machines carries: 200 Gb/s of InfiniBand.
NIC = 25e9 * F["fabric_share.infiniband"]
Machines = dict[str, dict[str, Any]]


def network(mapping: dict[str, Any], nodes: int = 1, gpus: int = 8, **more: Any) -> Network:
    return Network(Topology.from_mapping(mapping), nodes, gpus, **more)


def row(*ranks: int) -> npt.NDArray[np.int64]:
    return np.array([ranks], dtype=np.int64)


def world(n: int) -> npt.NDArray[np.int64]:
    return np.arange(n, dtype=np.int64)[None, :]


def rate(flow: Coflow, net: Network) -> float:
    return fair_share([flow], net.capacity)[0]


def total(flow: Coflow, kind: str) -> float:
    return sum(load for link, load in zip(flow.links, flow.loads, strict=True) if link[0] == kind)


@pytest.mark.parametrize(("kind", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_ring_on_one_switch(machines: Machines, kind: str, passes: int) -> None:
    """8 A100 on NVSwitch: 12 links of 25 GB/s nominal carry passes x 7/8 of the buffer; passes x 7 steps."""
    net = network(machines["dgx-a100"], nccl=SIMPLE)
    flow = net.coflow(kind, 8 * GIB, world(8))
    bus = 300e9 * F["link_share.nvlink3"]
    assert rate(flow, net) == pytest.approx(bus / (passes * 7 / 8))
    slices = passes * 7 * 8 * GIB / (8 * 24) / (1 << 20)  # of 1 MiB, which 24 channels of each rank pass on
    slice_us = F["slice_us.read"]
    last_us = GIB / (24 * F["pass_gbps.ampere"] * 1e3)  # of its own eighth, by 24 blocks, when all has been sent
    assert flow.latency_s * 1e6 == pytest.approx(F["base_us.Simple.ampere"] + slices * slice_us + last_us)
    assert set(flow.links) == {(f"gpu_{way}", i) for way in ("out", "in") for i in range(8)}


def test_ring_across_nodes(machines: Machines) -> None:
    """Two nodes: 15/16 of the buffer leaves each node over 8 NICs; 7/8 of that stays on NVLink; of a chunk's 15 edges
    two cross."""
    net = network(machines["dgx-a100"], nodes=2, nccl=SIMPLE)
    flow = net.coflow("all_gather", 64 * GIB, world(16))
    loads = dict(zip(flow.links, flow.loads, strict=True))
    assert loads["nic_out", 0] == pytest.approx(15 / 16 / 8)
    assert loads["gpu_out", 0] == pytest.approx(15 / 16 * 7 / 8)
    assert rate(flow, net) == pytest.approx(8 * NIC / (15 / 16))
    small = net.coflow("all_gather", 16 << 10, world(16))  # one slice of 64 bytes a step: nothing to overlap
    hop_us = F["hop_us.Simple"] + F["fabric_us.infiniband"] + F["flush_us.verbs"]
    expected = F["base_us.Simple.ampere"] + 13 * F["step_us.nvlink.Simple.read"] + 2 * hop_us
    assert small.latency_s * 1e6 == pytest.approx(expected, rel=0.01)


def test_a_lone_send_is_faster_than_one_that_also_receives(machines: Machines) -> None:
    """Two GPUs, one way, against eight that pass on in a circle: the same start, less of the links. Two channels a
    link make 24, hence 32."""
    net = network(machines["dgx-a100"])
    circle = F["link_share.nvlink3"] * F["send_share.one"]
    for ranks, share in ((2, F["one_way_share.all"]), (8, circle)):
        flow = net.coflow("send", 64 * GIB, world(ranks))
        assert rate(flow, net) == pytest.approx(300e9 * share)
        start_us = F["base_us.Simple.ampere"] + F["step_us.nvlink.Simple.read"]
        assert flow.latency_s * 1e6 == pytest.approx(start_us)
        assert flow.channels == (16 if ranks == 2 else 32)
    assert F["one_way_share.all"] > F["link_share.nvlink3"] > circle


def slingshot(machines: Machines, **inter: Any) -> dict[str, Any]:
    return {**machines["dgx-a100"], "inter": {**machines["dgx-a100"]["inter"], "fabric": "slingshot", **inter}}


def test_remote_peers_of_an_exchange_come_one_after_another(machines: Machines) -> None:
    """Two nodes of eight, Slingshot: the proxy comes to eight remote peers while the kernel starts and serves the seven
    of its node; each message of 256 bytes is sent as it lies in the GPU."""
    net = network(slingshot(machines), nodes=2)
    remote_us = F["fabric_us.slingshot"] + 8 * F["p2p_net_us.slingshot"]
    assert remote_us > F["base_us.Simple.ampere"] + F["p2p_net_us.slingshot"]
    flow = net.coflow("all_to_all", 16 * 256, world(16))
    moving_us = flow.size_bytes / rate(flow, net) * 1e6
    assert flow.latency_s * 1e6 == pytest.approx(remote_us, rel=0.02) and moving_us < 0.25


def test_slingshot_copies_what_it_writes_into_its_command_queue(machines: Machines) -> None:
    """Up to 192 bytes to a peer, for each of eight remote ones; a lone send likewise; InfiniBand copies nothing."""
    net = network(slingshot(machines), nodes=2)
    for kind, ranks, sends in (("all_to_all", world(16), 8), ("send", np.array([[0, 8]]), 1)):
        parts = ranks.size if sends > 1 else 1
        small, large = (net.coflow(kind, size * parts, ranks).latency_s for size in (192, 193))
        assert (small - large) * 1e6 == pytest.approx(sends * F["copy_us.slingshot"], rel=1e-3)
    ib = network(machines["dgx-a100"], nodes=2)
    assert ib.coflow("all_to_all", 16 * 192, world(16)).latency_s == pytest.approx(
        ib.coflow("all_to_all", 16 * 193, world(16)).latency_s, rel=1e-3)


def test_a_tuner_of_the_plugin_counts_with_its_own_latency(machines: Machines) -> None:
    """AWS's, on H100 alone: 20 us where the plugin reports 75, so NVLSTree comes earlier; before NCCL 2.19 there is
    none, and A100 keep 75."""
    efa = {**machines["dgx-a100"]["inter"], "fabric": "efa"}

    def plugin_us(gpu: str, version: str) -> float:
        net = network({**machines["dgx-a100"], "gpu": gpu, "inter": efa}, nodes=2)
        return Site(net.topology, net.speeds, net.placement(world(16)), F, net.speeds,
                    version=release({"version": version})).plugin_us()

    assert plugin_us("h100-sxm", "2.20.3+cuda12.2") == 20
    assert plugin_us("h100-sxm", "2.18") == plugin_us("a100-80g-sxm", "2.27") == 75


def test_slices_overlap_once_they_outlast_a_step() -> None:
    """Two slices a chunk: while one is awaited the other moves. 4 ranks, 2 channels, 6 steps of 10 us, 4 us a slice."""
    ring = Slices(6, 8.0, 4e-6, 10e-6, 0.0)
    size = 8 << 20  # chunks of 1 MiB, slices of half
    for slice_us, step_us in ((1.0, 10.0 + 1.0), (2.0, 10.0 + 2.0), (6.0, 2 * (6.0 + 4.0)), (50.0, 2 * 54.0)):
        moving_us = 6 * 2 * slice_us
        assert moving_us + ring.beyond_s(size, moving_us * 1e-6) * 1e6 == pytest.approx(6 * step_us)
    assert ring.beyond_s(8 * size, 1.0) == pytest.approx(6 * 4 * 2 * 4e-6)  # chunks of 2 MiB, four times over
    assert ring.beyond_s(8 << 10, 0.0) == pytest.approx(6 * 10e-6)  # one slice a step: nothing overlaps


def test_whole_slices_do_not_overlap() -> None:
    """NCCL 2.4: a chunk of 1 MiB is one slice, which moves whole (100 us) before the step's 10 us; 2 MiB are two."""
    ring = Slices(6, 8.0, 4e-6, 10e-6, 0.0, least_bytes=WHOLE_SLICE)
    assert 6 * 100e-6 + ring.beyond_s(8 << 20, 6 * 100e-6) == pytest.approx(6 * (100e-6 + 10e-6))
    halves = Slices(6, 8.0, 4e-6, 10e-6, 0.0)
    assert ring.beyond_s(16 << 20, 6 * 200e-6) == pytest.approx(halves.beyond_s(16 << 20, 6 * 200e-6))


def test_two_gpus_end_with_a_pass_that_their_link_waits_for(machines: Machines) -> None:
    """Two A100: half of a gather is sent, the other half copied: 24 blocks take as long for it as at any size."""
    bare = network(machines["dgx-a100"], nccl=SIMPLE)
    fast = network({**machines["dgx-a100"], "links": {"pass_gbps.ampere": 1e6}}, nccl=SIMPLE)
    for size in (1 << 20, GIB):
        more, less = (net.coflow("all_gather", size, world(2)).latency_s for net in (bare, fast))
        assert more - less == pytest.approx(size / 2 / (24 * F["pass_gbps.ampere"] * 1e9), rel=1e-3)
    across = [net.coflow("all_gather", GIB, world(16)).latency_s for net in (
        network(machines["dgx-a100"], nodes=2, nccl=SIMPLE),
        network({**machines["dgx-a100"], "links": {"pass_gbps.ampere": 1e6}}, nodes=2, nccl=SIMPLE))]
    assert across[0] == across[1]  # a NIC is slower than its blocks


def test_blocks_bound_what_two_gpus_exchange(machines: Machines) -> None:
    """16 channels for the one peer, half of each block's warps send: less than the links carry; of eight GPUs more."""
    net = network(machines["dgx-a100"])
    two, eight = (net.coflow("all_to_all", GIB, world(n)) for n in (2, 8))
    assert rate(two, net) == pytest.approx(32 * F["pass_gbps.ampere"] / 2 * 1e9)
    links = 300e9 * F["link_share.nvlink3"] * F["send_share.all"]
    assert rate(eight, net) == pytest.approx(min(links / (7 / 8), 32 * F["pass_gbps.ampere"] / 2 * 1e9))


@given(st.floats(1e3, 1e10), st.floats(1e-7, 1e-2), st.floats(1.0, 3.0))
@settings(max_examples=50)
def test_slices_cost_no_less_on_slower_links(size: float, moving_s: float, slower: float) -> None:
    ring = Slices(14, 192.0, 2e-6, 9e-6, 0.1)
    before, after = (t + ring.beyond_s(size, t) for t in (moving_s, slower * moving_s))
    assert after >= before - 1e-12


def test_messages_bound_a_ring_of_hundreds(machines: Machines) -> None:
    """256 nodes on Slingshot: all but the 8 messages in flight wait their turn, so 1023 steps take 1015 messages."""
    inter = {**machines["dgx-a100"]["inter"], "fabric": "slingshot", "rail_optimized": False, "nics_per_node": 2}
    net = network({**machines["dgx-a100"], "inter": inter}, nodes=128, nccl={"algorithm": "Ring", "protocol": "LL"})
    flow = net.coflow("all_gather", 16384, world(1024))
    assert flow.latency_s + 16384 / rate(flow, net) == pytest.approx(1015 * F["message_us.slingshot"] * 1e-6)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize(("kind", "passes"), [("all_gather", 1), ("all_reduce", 2)])
def test_bytes_are_conserved(machines: Machines, kind: str, passes: int, nodes: int) -> None:
    """A ring of n ranks moves passes x (n-1)/n x size over each of its n edges, inside nodes or between them."""
    n = 8 * nodes
    net = network(machines["dgx-a100"], nodes=nodes, nccl=SIMPLE)
    flow = net.coflow(kind, GIB, world(n))
    for way in ("out", "in"):
        assert total(flow, f"gpu_{way}") + total(flow, f"nic_{way}") == pytest.approx(passes * (n - 1))


def test_all_to_all_bytes(machines: Machines) -> None:
    """Every rank sends 1/n of its buffer to each peer: 7/16 inside, 8/16 over its NIC at less than a ring's rate."""
    net = network(machines["dgx-a100"], nodes=2)
    loads = dict.fromkeys(("gpu_out", "nic_out"), 0.0)
    flow = net.coflow("all_to_all", GIB, world(16))
    for link, load in zip(flow.links, flow.loads, strict=True):
        if link[0] in loads:
            loads[link[0]] += load
    assert loads["gpu_out"] == pytest.approx(16 * 7 / 16)
    assert loads["nic_out"] * F["exchange_share.infiniband"] == pytest.approx(16 * 8 / 16)


def test_replicas_share_a_nodes_nics(machines: Machines) -> None:
    """8 groups of one GPU per node: with 8 NICs each has its own; with 2 NICs four groups share one."""
    groups = np.arange(32, dtype=np.int64).reshape(4, 8).T.copy()
    own = network(machines["dgx-a100"], nodes=4, nccl=SIMPLE)
    assert rate(own.coflow("all_gather", GIB, groups), own) == pytest.approx(NIC / 0.75)
    mapping = {**machines["dgx-a100"], "inter": {**machines["dgx-a100"]["inter"], "nics_per_node": 2}}
    shared = network(mapping, nodes=4, nccl=SIMPLE)
    assert rate(shared.coflow("all_gather", GIB, groups), shared) == pytest.approx(NIC / 4 / 0.75)
    alone = shared.coflow("all_gather", GIB, groups[:1])
    assert rate(alone, shared) == pytest.approx(NIC / 0.75)


def test_group_of_one_gpu_per_node_takes_its_rail(machines: Machines) -> None:
    """Rail-optimised: GPU 3 of each node uses NIC 3 alone and, across leaves, only the leaf of its rail."""
    mapping = {**machines["dgx-a100"], "inter": {**machines["dgx-a100"]["inter"], "nodes_per_leaf": 2}}
    flow = network(mapping, nodes=4).coflow("all_reduce", GIB, row(3, 11, 19, 27))
    assert {link for link in flow.links if link[0] == "nic_out"} == {("nic_out", 8 * node + 3) for node in range(4)}
    assert {link for link in flow.links if link[0] == "leaf_out"} == {("leaf_out", 3), ("leaf_out", 8 + 3)}
    mixed = {**mapping, "inter": {**mapping["inter"], "rail_optimized": False}}
    flow = network(mixed, nodes=4).coflow("all_reduce", GIB, row(3, 11, 19, 27))
    assert {link for link in flow.links if link[0] == "leaf_out"} == {("leaf_out", 0), ("leaf_out", 1)}


def test_oversubscribed_leaf_slows_what_crosses_it(machines: Machines) -> None:
    """Leaves of 2 nodes, 8:1: all-to-all over 4 nodes sends half of everything through an eighth of the NICs' speed."""
    inter = {**machines["dgx-a100"]["inter"], "nodes_per_leaf": 2, "oversubscription": 8.0, "rail_optimized": False}
    net = network({**machines["dgx-a100"], "inter": inter}, nodes=4)
    flow = net.coflow("all_to_all", GIB, world(32))
    node_bps = 8 * NIC
    assert rate(flow, net) == pytest.approx(2 * node_bps / 8 / (16 * 0.5))
    inside = net.coflow("all_to_all", GIB, world(16))
    assert rate(inside, net) > 2 * rate(flow, net)


def test_pcie_switch_uplink_is_shared(machines: Machines) -> None:
    """Two all-gathers that both straddle the two PCIe switches share what the CPUs pass on (12.5 GB/s); within
    one switch they do not."""
    net = network(machines["pcie"], nccl=SIMPLE)
    slot = 31e9 * F["pcie_share.gen4x16"]
    across = np.array([[0, 4], [1, 5]], dtype=np.int64)
    within = np.array([[0, 1], [2, 3]], dtype=np.int64)
    assert rate(net.coflow("all_gather", GIB, across), net) == pytest.approx(12.5e9 / 2 / 0.5)
    assert rate(net.coflow("all_gather", GIB, within), net) == pytest.approx(slot / 0.5)


LAYOUTS = {
    "nodes": lambda n: np.arange(n).reshape(-1, 8), "pairs": lambda n: np.arange(n).reshape(-1, 2),
    "rails": lambda n: np.arange(n).reshape(-1, 8).T, "halves": lambda n: np.arange(n).reshape(-1, 2, 8)
    .transpose(0, 2, 1).reshape(-1, 2), "two nodes": lambda n: np.arange(n).reshape(-1, 16),
    "shifted rails": lambda n: np.arange(n).reshape(2, -1).T,
}


@pytest.mark.parametrize("machine", ["dgx-a100", "dgx-h100", "dgx-1v"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"])
def test_folded_equals_unfolded(machines: Machines, machine: str, layout: str, kind: str) -> None:
    """All instances at once through fair_share, links by number, take the same time as one that stands for all."""
    mapping = {**machines[machine], "inter": {**machines[machine]["inter"], "nodes_per_leaf": 2}}
    net = network(mapping, nodes=4)
    ranks = np.ascontiguousarray(LAYOUTS[layout](32), dtype=np.int64)
    if machine == "dgx-1v" and layout == "pairs":
        ranks = ranks[::2]  # the pairs joined by one link; the others have two
    for size in (4096, 1 << 22, 1 << 28):
        folded = net.coflow(kind, size, ranks)
        single = [net.coflow(kind, size, ranks[i:i + 1]) for i in range(len(ranks))]
        rates = fair_share(single, net.capacity)
        expected = folded.latency_s + size / rate(folded, net)
        times = [flow.latency_s + size / r for flow, r in zip(single, rates, strict=True)]
        assert times == pytest.approx([expected] * len(times), rel=1e-9)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"]),
       size=st.sampled_from([(1, 2), (1, 8), (2, 16), (4, 32)]),
       machine=st.sampled_from(["dgx-a100", "dgx-h100", "dgx-1v"]))
def test_never_faster_for_more_bytes(machines: Machines, kind: str, size: tuple[int, int], machine: str) -> None:
    """One way of serving a call never; where NCCL changes its choice, by at most half: two DGX-1V end a broadcast's LL,
    as slow between nodes as on p3dn, at 180 us for 97."""
    net = network(machines[machine], nodes=size[0])
    last, served = 0.0, ("", "")
    for exponent in np.arange(8, 34, 0.5):
        flow = net.coflow(kind, int(2 ** exponent), world(size[1]))
        time = flow.latency_s + flow.size_bytes / rate(flow, net)
        same = served == (flow.algorithm, flow.protocol)
        assert time >= last * (1 - 1e-12 if same else 0.5)
        last, served = time, (flow.algorithm, flow.protocol)


def test_choice_follows_size_and_place(machines: Machines) -> None:
    """H100 node: ring and LL for small calls, NVLS for large (switch between 1 and 32 MiB as measured on H200)."""
    net = network(machines["dgx-h100"])
    small, large = (net.coflow("all_reduce", size, world(8)) for size in (1 << 16, GIB))
    assert (small.algorithm, small.protocol) == ("Ring", "LL")
    assert (large.algorithm, large.protocol) == ("NVLS", "Simple")
    assert net.coflow("all_gather", GIB, world(8)).algorithm == "Ring"
    many = network(machines["dgx-a100"], nodes=64)
    assert many.coflow("all_reduce", 1 << 20, world(512)).algorithm == "Tree"
    old = network(machines["dgx-h100"], nccl={"version": "2.10.3"})
    assert old.coflow("all_reduce", GIB, world(8)).algorithm == "Ring"


def test_forced_choice_is_honoured(machines: Machines) -> None:
    net = network(machines["dgx-a100"], nodes=2, nccl={"algorithm": "tree", "protocol": "LL", "channels": 4})
    flow = net.coflow("all_reduce", GIB, world(16))
    assert (flow.algorithm, flow.protocol, flow.channels) == ("Tree", "LL", 4)


def test_overrides_scale_with_the_link(machines: Machines) -> None:
    """Nominal figures in Gb/s: 300 GB/s of NVLink is what the node has; half the NICs' speed halves the rate."""
    plain = network(machines["dgx-a100"], nodes=2, nccl=SIMPLE)
    same = network(machines["dgx-a100"], nodes=2, nccl=SIMPLE, intra_gbps_per_gpu=2400, inter_gbps_per_node=1600)
    half = network(machines["dgx-a100"], nodes=2, nccl=SIMPLE, inter_gbps_per_node=800)
    flows = [net.coflow("all_gather", GIB, world(16)) for net in (plain, same, half)]
    assert rate(flows[1], same) == pytest.approx(rate(flows[0], plain))
    assert rate(flows[2], half) == pytest.approx(rate(flows[0], plain) / 2)


def test_only_the_first_gpus_of_each_node(machines: Machines) -> None:
    """4 of 8 GPUs per node: 8 ranks are two nodes and reach only the NICs of their GPUs."""
    net = network(machines["dgx-a100"], nodes=2, gpus=4, nccl=SIMPLE)
    flow = net.coflow("all_gather", GIB, world(8))
    assert {i for kind, i in flow.links if kind == "nic_out"} == {0, 1, 2, 3, 8, 9, 10, 11}


def test_host_staged_transfers_are_slow(machines: Machines) -> None:
    """No GPUDirect: 4 GPUs with 4 Omni-Path NICs get 4 channels, 8 GPUs 2 (Jean Zay's logs; 10.6 and 5.07 GB/s)."""
    inter = {"kind": "fat-tree", "fabric": "omni-path", "nics_per_node": 4, "gbps_per_nic": 100}
    for gpus, channels in ((4, 4), (8, 2)):
        net = network({**machines["dgx-a100"], "gpus_per_node": gpus, "inter": inter}, nodes=4, gpus=gpus)
        n = 4 * gpus
        bus = rate(net.coflow("all_reduce", 4 * GIB, world(n)), net) * 2 * (n - 1) / n
        assert bus == pytest.approx(channels * F["stage_gbps.all"] * 1e9)


@pytest.mark.parametrize(("groups", "channels"), [(1, 2.0), (2, 2.0), (4, 1.0), (8, 0.5)])
def test_groups_of_one_gpu_per_node_share_what_the_host_stages(machines: Machines, groups: int,
                                                               channels: float) -> None:
    """A group of two ranks opens two channels whatever the node holds; all groups share one stream per NIC."""
    inter = {"kind": "fat-tree", "fabric": "omni-path", "nics_per_node": 4, "gbps_per_nic": 100}
    net = network({**machines["dgx-a100"], "inter": inter}, nodes=2)
    ranks = np.array([[4 * (i % 2) + i // 2, 8 + 4 * (i % 2) + i // 2] for i in range(groups)])
    flow = net.coflow("all_reduce", 4 * GIB, ranks)
    assert rate(flow, net) == pytest.approx(channels * F["stage_gbps.all"] * 1e9)


def test_what_the_host_stages_one_way_may_take_both_ways_share(machines: Machines) -> None:
    """Eight sends of one direction move twice what eight exchanges of both move each way."""
    inter = {"kind": "fat-tree", "fabric": "omni-path", "nics_per_node": 4, "gbps_per_nic": 100}
    net = network({**machines["dgx-a100"], "inter": inter}, nodes=2)
    pairs = np.array([[i, 8 + i] for i in range(8)])
    one_way = rate(net.coflow("send", GIB, pairs), net)
    both = rate(net.coflow("all_reduce", 4 * GIB, pairs), net)  # a ring of two moves its buffer once each way
    assert one_way == pytest.approx(2 * both, rel=0.02)


def test_nodes_without_a_link_are_refused(machines: Machines) -> None:
    with pytest.raises(UserError, match="no link between nodes"):
        network(machines["pcie"], nodes=2)


def test_group_of_one_costs_nothing(machines: Machines) -> None:
    flow = network(machines["dgx-a100"]).coflow("all_reduce", GIB, row(5))
    assert (flow.latency_s, flow.links, flow.channels) == (0.0, (), 0)


def test_links_do_not_grow_with_ranks(machines: Machines) -> None:
    """16,384 ranks are still a handful of links."""
    net = network(machines["dgx-a100"], nodes=2048)
    assert len(net.coflow("all_gather", GIB, world(16384)).links) <= 8


def test_uneven_groups_keep_their_busiest_link(machines: Machines) -> None:
    """Groups of 12 on nodes of 8: the NIC that carries most bounds all (lockstep)."""
    net = network(machines["dgx-a100"], nodes=3, nccl=SIMPLE)
    flow = net.coflow("all_gather", GIB, np.arange(24, dtype=np.int64).reshape(2, 12))
    loads: dict[str, list[float]] = defaultdict(list)
    for link, load in zip(flow.links, flow.loads, strict=True):
        loads[link[0]].append(load)
    assert max(loads["nic_out"]) == pytest.approx(11 / 12 / 4)
    assert rate(flow, net) == pytest.approx(NIC * 4 / (11 / 12))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["all_gather", "all_reduce", "all_to_all", "send"]), exponent=st.floats(8, 32),
       machine=st.sampled_from(["dgx-a100", "dgx-h100", "dgx-1v"]), faster=st.floats(1, 20),
       nodes=st.sampled_from([1, 4]))
def test_more_bandwidth_is_never_slower(machines: Machines, kind: str, exponent: float, machine: str, faster: float,
                                        nodes: int) -> None:
    times = []
    for factor in (1.0, faster):
        net = network(machines[machine], nodes, intra_gbps_per_gpu=1200 * factor, inter_gbps_per_node=400 * factor)
        flow = net.coflow(kind, int(2 ** exponent), world(8 * nodes))
        times.append(flow.latency_s + flow.size_bytes / rate(flow, net))
    assert times[1] <= times[0] * (1 + 1e-9)


@pytest.mark.parametrize(("told", "found"), [
    ("2.18.3", (2, 18, 3)), ("2.10.3+cuda11.3", (2, 10, 3)), ("v2.19", (2, 19)), ("2.26 (of the thread)", (2, 26)),
    ("newest", (2, 30)), (None, (2, 30))])
def test_a_release_is_read_off_whatever_names_it(told: str | None, found: tuple[int, ...]) -> None:
    assert release({"version": told}) == found
