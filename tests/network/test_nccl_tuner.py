"""NCCL's own estimate of its algorithms, by hand, on a machine of round numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sim.network.search import Graph
from sim.network.site import Site
from sim.network.tuner import judge

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
    ((2, 16), 14 * 28 + 2 * 28, 8.4 + 26 * 3.4 + 4 * 9.6), ((2, 18), 14 * 4 + 2 * 14, 8.4 + 28 * 3.4 + 2 * 14),
    ((2, 21), 14 * 28 + 2 * 28, 8.4 + 28 * 3.4 + 2 * 14), ((2, 27), 8.4 + 14 * 4 + 2 * 14, 8.4 + 28 * 3.4 + 2 * 14)])
def test_releases_count_with_tables_of_their_own(version: tuple[int, int], tree_us: float, ring_us: float) -> None:
    """Two nodes of eight, Simple: trees take 14 hops inside and 2 between, rings 28 and 2, before 2.18 26 and 4."""
    where = site(version=version)
    assert judge("all_reduce", "Tree", "Simple", where).latency_us == pytest.approx(tree_us)
    assert judge("all_reduce", "Ring", "Simple", where).latency_us == pytest.approx(ring_us)


def test_before_the_tuner_rings_took_ll_by_threads() -> None:
    """NCCL 2.4: 8 bytes for each of 512 threads, 32 channels and 16 ranks; no tree."""
    where = site(version=(2, 4))
    limit = 8 * 512 * 32 * 16
    low, simple, tree = (judge("all_reduce", *way, where) for way in (("Ring", "LL"), ("Ring", "Simple"),
                                                                      ("Tree", "Simple")))
    assert low.time_us(limit) < simple.time_us(limit) < low.time_us(limit + 1) < tree.time_us(1)
