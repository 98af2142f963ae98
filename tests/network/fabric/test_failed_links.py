"""Links at part of their speed and links that are gone, against counts on paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.errors import UserError
from sim.network import Network, Topology

NODE = {"name": "n", "gpu": "a100-80g-sxm", "gpus_per_node": 8,
        "intra": {"kind": "nvswitch", "link": "nvlink3", "links_per_gpu": 12},
        "inter": {"kind": "fat-tree", "fabric": "infiniband", "nics_per_node": 8, "gbps_per_nic": 200,
                  "rail_optimized": True, "nodes_per_leaf": 2}}


def network(*degraded: dict[str, Any], nodes: int = 4, **inter: Any) -> Network:
    plain = {**NODE, "inter": {**NODE["inter"], **inter}, "degraded": list(degraded)}  # type: ignore[dict-item]
    return Network(Topology.from_mapping(plain), nodes, 8)


def rate(net: Network, ranks: list[list[int]], kind: str = "all_reduce") -> float:
    flow = net.coflow(kind, 2**30, np.array(ranks))
    return min(net.capacity(link) / load for link, load in zip(flow.links, flow.loads, strict=True) if load)


def load(net: Network, ranks: list[list[int]], link: tuple[str, int]) -> float:
    flow = net.coflow("all_reduce", 2**30, np.array(ranks))
    return dict(zip(flow.links, flow.loads, strict=True)).get(link, 0.0)


ALL = [list(range(32))]
RAIL3 = [[3, 11, 19, 27]]


def test_a_nic_at_half_speed_halves_the_rail_that_uses_it() -> None:
    half = network({"link": "nic", "index": 3, "share": 0.5})
    assert rate(half, RAIL3) == pytest.approx(rate(network(), RAIL3) / 2)
    assert rate(half, [[2, 10, 18, 26]]) == pytest.approx(rate(network(), [[2, 10, 18, 26]]))


def test_a_failed_nic_leaves_seven_for_a_node() -> None:
    failed = network({"link": "nic", "index": 3, "share": 0})
    # a ring over all 32 ranks passes one unit through the NICs of a node: 1/8 on each, 1/7 where one is gone
    assert load(failed, ALL, ("nic_out", 0)) == pytest.approx(load(network(), ALL, ("nic_out", 0)) * 8 / 7)
    assert load(failed, ALL, ("nic_out", 8)) == pytest.approx(load(network(), ALL, ("nic_out", 8)))
    assert load(failed, ALL, ("nic_out", 3)) == 0.0


def test_traffic_of_a_failed_nic_goes_over_its_neighbour() -> None:
    failed = network({"link": "nic", "index": 3, "share": 0})
    assert load(failed, RAIL3, ("nic_out", 3)) == 0.0
    assert load(failed, RAIL3, ("nic_out", 4)) == load(network(), RAIL3, ("nic_out", 3)) > 0
    both = [[3, 11, 19, 27], [4, 12, 20, 28]]
    assert load(failed, both, ("nic_out", 4)) == pytest.approx(2 * load(network(), both, ("nic_out", 3)))


def test_a_failed_leaf_moves_its_rail_to_the_next() -> None:
    # two nodes below a leaf: leaf 3 is rail 3 of nodes 0 and 1
    failed = network({"link": "leaf", "index": 3, "share": 0})
    assert load(failed, RAIL3, ("nic_out", 3)) == load(failed, RAIL3, ("nic_out", 11)) == 0.0
    assert load(failed, RAIL3, ("nic_out", 4)) > 0 and load(failed, RAIL3, ("nic_out", 19)) > 0


@pytest.mark.parametrize(("degraded", "inter", "says"), [
    ([{"link": "gpu", "index": 5, "share": 0}], {}, "gpu link 5 has failed"),
    ([{"link": "nic", "index": 1, "share": 0}], {"nics_per_node": 1}, "node 1 has no other way"),
    ([{"link": "nic", "index": i, "share": 0} for i in range(8)], {}, "node 0 has no other way"),
    ([{"link": "leaf", "index": 1, "share": 0}], {"rail_optimized": False}, "cuts off the 2 nodes"),
    ([{"link": "nic", "index": 32, "share": 0.5}], {}, "nic link 32 does not exist"),
])
def test_what_has_no_other_route_says_so(degraded: list[dict[str, Any]], inter: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        network(*degraded, **inter)


def test_links_of_watched_ranks_stay_in_the_loads() -> None:
    many = [[3, 11], [4, 12], [5, 13]]
    assert ("nic_out", 5) not in network().coflow("all_reduce", 2**30, np.array(many)).links
    watched = network().watching(np.array([5]))
    assert ("nic_out", 5) in watched.coflow("all_reduce", 2**30, np.array(many)).links
