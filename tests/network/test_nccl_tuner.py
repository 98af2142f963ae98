"""NCCL's own estimate of its algorithms, by hand, on a machine of round numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sim.network.tuner import judge

GB = 1e9


def site(nodes: int = 2, per_node: int = 8, inside: float = 200 * GB, net: float = 100 * GB) -> Any:
    """A place of `nodes` x `per_node` ranks whose tables never limit anything."""
    place = SimpleNamespace(size=nodes * per_node, nodes=nodes, per_node=per_node)
    return SimpleNamespace(place=place, version=(2, 30), intra_link=lambda: "nvlink", plugin_us=lambda: 0.0,
                           tuner_inside_bps=lambda: inside, tuner_net_bps=lambda: net,
                           searched_channels=lambda: 16, searched_multicast=lambda: 16, table=lambda name: 1000.0)


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
    simple, short, long = (judge("all_gather", "Ring", name, site()).rate_bps for name in ("Simple", "LL", "LL128"))
    assert (short / simple, long / simple) == (pytest.approx(0.5), pytest.approx(0.92))


def test_a_tree_goes_up_and_down() -> None:
    """0.92 of the bus, 0.85 of it for a tree, half for both ways."""
    found = judge("all_reduce", "Tree", "Simple", site())
    assert found.rate_bps == pytest.approx(100 * GB * 0.92 * 0.85 / 2)
    assert judge("all_reduce", "Tree", "LL128", site()).rate_bps == pytest.approx(found.rate_bps * 120 / 128)
    deeper = judge("all_reduce", "Tree", "Simple", site(nodes=16))
    ring, longer = (judge("all_reduce", "Ring", "Simple", site(nodes=nodes)).latency_us for nodes in (2, 16))
    assert 1 < deeper.latency_us / found.latency_us < longer / ring  # log2 of the nodes against their number
