"""What a cluster of the user's own leaves out is said, and nothing of the catalogue's."""

from __future__ import annotations

from typing import Any

import pytest

from sim.api import run
from sim.report.warned.unsaid import unsaid_host, unsaid_network
from sim.scenario import Scenario, resolve
from sim.scenario.dump import dump
from sim.scenario.named.topologies import topology_names

FULL = {"kind": "fat-tree", "fabric": "roce", "nics_per_node": 8, "gbps_per_nic": 400}


def on(topology: Any, nodes: int = 2, offload: str = "none", **cluster: Any) -> Scenario:
    return resolve({
        "name": "t", "cluster": {"topology": topology, "nodes": nodes, **cluster}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "parallel": {"strategy": "zero3", "offload": {"optimizer": offload}}, "software": {"framework": "deepspeed"}})


def node(inter: dict[str, Any] | None = None, **host: Any) -> dict[str, Any]:
    return {"gpu": "h100-80g-sxm", "gpus_per_node": 8, "intra": {"kind": "nvswitch"},
            "inter": FULL if inter is None else inter, **({"host": host} if host else {})}


def test_cards_that_a_topology_does_not_speak_of_are_said() -> None:
    said = run(on(node({"kind": "fat-tree"}))).warnings
    assert ("network: infiniband as fabric, nics_per_node 1 and gbps_per_nic 100 are assumed: the topology does not "
            "say (cluster.topology.inter)") in said
    one = {key: value for key, value in FULL.items() if key != "nics_per_node"}
    assert unsaid_network(on(node(one)))[0].startswith("network: nics_per_node 1 is assumed")
    assert unsaid_network(on(node(one), nodes=1)) == unsaid_network(on(node())) == []


def test_a_speed_given_for_the_whole_node_is_no_cards() -> None:
    found = unsaid_network(on(node({"kind": "fat-tree"}), inter_gbps_per_node=800))
    assert found[0].startswith("network: infiniband as fabric and nics_per_node 1 are assumed")


@pytest.mark.parametrize(("offload", "host", "said"), [
    ("cpu", {}, "1,000 GB of host memory a node"), ("cpu", {"memory": "2 TB"}, ""), ("none", {}, ""),
    ("nvme", {}, "disks that read 12 GB/s and disks that write 6 GB/s a node"),
    ("nvme", {"nvme_read": "25 GB/s"}, "memory: disks that write 6 GB/s a node")])
def test_a_host_that_a_topology_does_not_speak_of_is_said_where_it_holds_something(
        offload: str, host: dict[str, Any], said: str) -> None:
    found = unsaid_host(on(node(**host), offload=offload))
    assert bool(found) == bool(said) and said in "".join(found)


@pytest.mark.parametrize("name", topology_names())
def test_the_catalogue_says_everything(name: str) -> None:
    for offload in ("cpu", "nvme"):
        nodes = 1 if name.startswith("single-") else 2
        s = on(name, nodes, offload)
        assert unsaid_network(s) == unsaid_host(s) == []


def test_a_resolved_scenario_says_everything() -> None:
    again = resolve(dump(on(node({"kind": "fat-tree"}), offload="cpu")))
    assert unsaid_network(again) == unsaid_host(again) == []
