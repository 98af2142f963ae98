"""NCCL's own estimate of its algorithms, by hand, on a machine of round numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sim.catalog import table
from sim.network import Network, Topology
from sim.network.fabric.topology import facts
from sim.network.nccl.search import Graph
from sim.network.nccl.site import Site
from sim.network.nccl.tuner import judge, tree_until

GB = 1e9


def site(nodes: int = 2, per_node: int = 8, inside: float = 200 * GB, net: float = 100 * GB,
         version: tuple[int, int] = (2, 30)) -> Any:
    """A place of `nodes` x `per_node` ranks whose tables never limit anything: 16 channels share `inside` or `net`."""
    place = SimpleNamespace(size=nodes * per_node, nodes=nodes, per_node=per_node)
    bus = inside if nodes == 1 else net if per_node == 1 else min(inside, net)
    graph = Graph(16, bus / GB / 16, bus / GB / 16, bus / GB / 16)
    found = SimpleNamespace(
        place=place, version=version, intra_link=lambda: "nvlink", plugin_us=lambda: 0.0, cpu=lambda: "intel",
        topology=SimpleNamespace(generation="ampere"), capability=lambda: 80, graph=lambda: graph,
        searched_channels=lambda: 32, table=lambda name: 1000.0)
    found.era = lambda name: 10.0 if name == "hopper_ll" else {} if name == "ceiling" else Site.era(found, name)
    return found


@pytest.mark.parametrize(("where", "bus_gbps"), [
    (site(), 100), (site(net=400 * GB), 200), (site(nodes=1), 200), (site(nodes=8, per_node=1), 100)],
    ids=["the NICs limit", "NVLink limits", "one node", "one rank a node"])
def test_a_ring_is_as_fast_as_its_slowest_part(where: Any, bus_gbps: float) -> None:
    """All-gather over n ranks moves (n - 1) / n of the buffer on the bus, all-reduce twice that."""
    n = where.place.size
    assert judge("all_gather", "Ring", "Simple", where).rate_bps == pytest.approx(bus_gbps * GB * n / (n - 1))
    assert judge("all_reduce", "Ring", "Simple", where).rate_bps == pytest.approx(bus_gbps * GB * n / (2 * (n - 1)))
    assert judge("broadcast", "Ring", "Simple", where).rate_bps == pytest.approx(bus_gbps * GB)


def test_protocols_cost_bandwidth() -> None:
    """LL sends a flag with each 4 bytes (half), LL128 with each 120 (the ring's 0.92 is NCCL's own figure)."""
    one = site(nodes=1)
    simple, short, long = (judge("all_gather", "Ring", name, one).rate_bps for name in ("Simple", "LL", "LL128"))
    assert (short / simple, long / simple) == (pytest.approx(0.5), pytest.approx(0.92))


@pytest.mark.parametrize(("version", "protocols"), [
    ("2.27.5", ["LL", "LL128", "LL128"]), ("2.29.2", ["LL", "LL", "LL128"]), ("2.29.7", ["LL", "LL128", "LL128"])])
def test_blackwell_rings_had_less_of_ll128_in_one_release(version: str, protocols: list[str]) -> None:
    """Eight B200, 4, 8 and 16 MiB: 34.5 GB/s a channel in 2.29.2's table, 40 before and after. AIConfigurator's sweeps
    in int8, which NVLink SHARP does not add, bend so."""
    topology = Topology.from_mapping(table("../topologies/hgx-b200.yaml"))
    net = Network(topology, 1, 8, nccl={"version": version, "algorithm": "Ring"})
    ranks = np.arange(8, dtype=np.int64)[None, :]
    assert [net.coflow("all_reduce", size << 20, ranks).protocol for size in (4, 8, 16)] == protocols


def test_a_tree_goes_up_and_down() -> None:
    """0.92 of the bus, half for both ways; where a node is one GPU, 0.85 of it for the only pattern there is."""
    found = judge("all_reduce", "Tree", "Simple", site())
    assert found.rate_bps == pytest.approx(100 * GB * 0.92 / 2)
    assert judge("all_reduce", "Tree", "LL128", site()).rate_bps == pytest.approx(found.rate_bps * 120 / 128)
    alone = judge("all_reduce", "Tree", "Simple", site(nodes=8, per_node=1))
    assert alone.rate_bps == pytest.approx(found.rate_bps * 0.85)
    deeper = judge("all_reduce", "Tree", "Simple", site(nodes=16))
    ring, longer = (judge("all_reduce", "Ring", "Simple", site(nodes=nodes)).latency_us for nodes in (2, 16))
    assert 1 < deeper.latency_us / found.latency_us < longer / ring  # log2 of the nodes against their number


@pytest.mark.parametrize(("version", "tree_us", "ring_us"), [
    ((2, 5), 14 * 28 + 2 * 50, 8.4 + 30 * 6.6), ((2, 7), 14 * 28 + 2 * 50, 8.4 + 28 * 3.4 + 2 * 9.6),
    ((2, 10), 14 * 28 + 2 * 28, 8.4 + 28 * 3.4 + 2 * 9.6), ((2, 12), 14 * 28 + 2 * 28, 8.4 + 26 * 3.4 + 4 * 28),
    ((2, 16), 14 * 28 + 2 * 28, 8.4 + 26 * 3.4 + 4 * 9.6), ((2, 18), 14 * 4 + 2 * 14, 8.4 + 28 * 3.4 + 2 * 14),
    ((2, 21), 14 * 28 + 2 * 28, 8.4 + 28 * 3.4 + 2 * 14), ((2, 27), 8.4 + 14 * 4 + 2 * 14, 8.4 + 28 * 3.4 + 2 * 14)])
def test_releases_count_with_tables_of_their_own(version: tuple[int, int], tree_us: float, ring_us: float) -> None:
    """Two nodes of eight, Simple: trees take 14 hops inside and 2 between, rings 28 and 2, from 2.12 to 2.17 26 and 4,
    in 2.5 thirty between. 2.5, 2.7, 2.10 and 2.12: what the binaries' own tuning functions returned."""
    where = site(version=version)
    assert judge("all_reduce", "Tree", "Simple", where).latency_us == pytest.approx(tree_us)
    assert judge("all_reduce", "Ring", "Simple", where).latency_us == pytest.approx(ring_us)


@pytest.mark.parametrize(("version", "nodes", "tree", "ring"), [
    ((2, 5), 1, (30.0, 70.0, 90.0), (63.0, 100.0, 252.0)), ((2, 5), 4, (23.33, 54.44, 70.0), (63.0, 100.0, 252.0)),
    ((2, 7), 1, (28.95, 85.56, 110.0), (63.0, 200.4, 252.0)), ((2, 7), 2, (28.95, 100.65, 110.0), (63.0, 200.4, 252.0)),
    ((2, 8), 1, (39.0, 180.32, 231.84), (39.0, 202.8, 252.0)),
    ((2, 10), 1, (39.0, 180.32, 231.84), (39.0, 231.84, 252.0))])
def test_bandwidths_are_those_of_the_binaries(version: tuple[int, int], nodes: int, tree: tuple[float, ...],
                                              ring: tuple[float, ...]) -> None:
    """Volta, twelve channels of 21 GB/s: what ncclSetThresholds (2.5.6) and ncclTopoTuneModel (2.7.8, 2.8.3, 2.10.3) of
    NVIDIA's binaries returned for an all-reduce, GB/s of the bus."""
    where = site(nodes=nodes, version=version)
    where.topology.generation = "volta"
    where.graph = lambda: Graph(12, 21, 21, 21)
    most = facts()["generations"]["volta"]
    where.table = lambda name: float(most[name][min(nodes, 3) - 1] if isinstance(most[name], list) else most[name])
    n = where.place.size
    for protocol, tree_bus, ring_bus in zip(("LL", "LL128", "Simple"), tree, ring, strict=True):
        found, round_ = (judge("all_reduce", shape, protocol, where).rate_bps for shape in ("Tree", "Ring"))
        assert found / GB * 2 == pytest.approx(tree_bus, rel=1e-3)
        assert round_ / GB * 2 * (n - 1) / n == pytest.approx(ring_bus, rel=1e-3)


def test_before_the_tuner_rings_took_ll_by_threads() -> None:
    """NCCL 2.4 on one node: no tree; 64 bytes for each of 256 threads, 32 channels and 16 ranks."""
    where = site(nodes=1, per_node=16, version=(2, 4))
    limit = 64 * 256 * 32 * 16
    low, simple, tree = (judge("all_reduce", *way, where) for way in (("Ring", "LL"), ("Ring", "Simple"),
                                                                      ("Tree", "Simple")))
    assert low.time_us(limit) < simple.time_us(limit) < low.time_us(limit + 1) == tree.time_us(1)


def test_before_the_tuner_trees_had_a_threshold() -> None:
    """NCCL 2.4 with NVLink: on two nodes trees count as faster than rings (twice 0.75), on four of eight up to
    0.75 x 160 / 0.25 GB/s x (6 x 31 - 4 x 7 - 15 x 2) us, with their LL up to four times 128 bytes a thread."""
    assert tree_until(site(version=(2, 4))) == float("inf")
    assert tree_until(site(nodes=1, version=(2, 4))) == 0.0
    where = site(nodes=4, version=(2, 4))
    until = 0.75 * 160 / 0.25 * (6 * 31 - 4 * 7 - 15 * 2) * 1e3
    assert tree_until(where) == pytest.approx(until)
    tree, ring = judge("all_reduce", "Tree", "Simple", where), judge("all_reduce", "Ring", "Simple", where)
    low = judge("all_reduce", "Tree", "LL", where)
    assert tree.time_us(until) < ring.time_us(until) < tree.time_us(until + 2)
    limit = 4 * 128 * 256 * 32
    assert low.time_us(limit) < tree.time_us(limit) < low.time_us(limit + 1)

