"""The clusters that come with the product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.errors import UserError
from sim.hardware import host_share
from sim.network import Topology
from sim.scenario import Scenario, resolve
from sim.scenario.named.gpus import gpu_names
from sim.scenario.named.topologies import find_topology, topology_names

NAMED = [
    "dgx-1v-16g",
    "dgx-1v-32g",
    "dgx-2",
    "p3dn",
    "jean-zay-v100-32g",
    "dgx-a100-40g",
    "dgx-a100-80g",
    "hgx-a100-40g-1600",
    "hgx-a100-80g-1600",
    "hgx-a100-80g-800",
    "p4d",
    "p4de",
    "jean-zay-a100-80g",
    "polaris",
    "perlmutter",
    "a100-80g-pcie",
    "mi300x-8",
    "jean-zay-v100-16g",
    "a3-high",
    "a3-mega",
    "dgx-h100",
    "p5",
    "hgx-h100-3200",
    "hgx-h200",
    "hgx-b200",
    "gb200-nvl72",
]
#: Clusters beyond the spec's list: newer cloud instances, and machines that research groups apply for. Gb/s of a node.
BEYOND = {"p5e": 3200, "p5en": 3200, "p6-b200": 3200, "a3-ultra": 3200, "a4": 3200,
          "juwels-booster": 800, "leonardo": 400, "alps": 800, "jupiter": 800}
#: Gb/s between nodes, from the spec's own list.
GBPS_PER_NODE = {
    "dgx-1v-32g": 400,
    "p3dn": 100,
    "jean-zay-v100-32g": 400,
    "dgx-a100-80g": 1600,
    "hgx-a100-80g-1600": 1600,
    "hgx-a100-80g-800": 800,
    "p4d": 400,
    "p4de": 400,
    "jean-zay-a100-80g": 400,
    "dgx-h100": 3200,
    "p5": 3200,
}


def on(topology: Any, base: Path | str = ".", **cluster: Any) -> Scenario:
    return resolve(
        {
            "name": "t",
            "cluster": {"topology": topology, **cluster},
            "model": {"preset": "gpt2"},
            "training": {"micro_batch": 1, "global_batch": 7200, "sequence": 512},
        },
        base=base,
    )


@pytest.mark.parametrize("name", topology_names())
def test_every_topology_resolves_with_sources_and_all_figures(name: str) -> None:
    t = on(name).cluster.topology
    assert t.name == name and t.source and t.gpu in gpu_names()
    assert t.host.memory > 6e10 and t.host.pcie and t.intra.link
    if t.gpus_per_node > 1:
        assert t.intra.kind != "none" and t.inter.kind != "none"


def test_names_of_the_spec_are_all_there() -> None:
    assert set(NAMED) | {f"single-{gpu}" for gpu in gpu_names()} <= set(topology_names())
    for name, gbps in (GBPS_PER_NODE | BEYOND).items():
        inter = on(name).cluster.topology.inter
        assert inter.nics_per_node * inter.gbps_per_nic == gbps


def test_dgx1_is_the_hybrid_cube_mesh() -> None:
    matrix = on("dgx-1v-32g").cluster.topology.intra.matrix
    assert matrix is not None and all(sum(row) == 6 for row in matrix)
    quads = ({0, 1, 2, 3}, {4, 5, 6, 7})
    for quad in quads:
        assert all(matrix[i][j] > 0 for i in quad for j in quad if i != j)
    assert sorted((i, j) for i in quads[0] for j in quads[1] if matrix[i][j]) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_path_is_relative_to_the_scenario_and_inline_mapping_works(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "name: mine\ngpu: A100-SXM4-80GB\ngpus_per_node: 4\nintra: {kind: nvswitch}\n"
        "inter: {kind: fat-tree, gbps_per_nic: 25 GB/s}\n"
    )
    t = on("mine.yaml", tmp_path, nodes=3).cluster
    assert (t.nodes, t.gpus_per_node, t.topology.gpu) == (3, 4, "a100-80g-sxm")
    assert (t.topology.intra.link, t.topology.intra.links_per_gpu, t.topology.inter.gbps_per_nic) == (
        "nvlink3",
        12,
        200.0,
    )
    inline = on({"gpu": "t4", "gpus_per_node": 2}).cluster.topology
    assert (inline.intra.kind, inline.intra.link, inline.intra.gen, inline.inter.kind) == ("pcie", "gen3x16", 3, "none")


def test_links_per_pair_follows_from_links_per_gpu() -> None:
    t = on({"gpu": "v100-16g-sxm", "gpus_per_node": 4, "intra": {"kind": "nvlink-mesh"}}).cluster.topology
    assert (t.intra.link, t.intra.links_per_gpu, t.intra.links_per_pair) == ("nvlink2", 6, 2)
    amd = on({"gpu": "mi300x", "gpus_per_node": 8, "intra": {"kind": "nvlink-mesh"}}).cluster.topology
    assert (amd.intra.link, amd.intra.links_per_pair) == ("xgmi", 1)


def test_inline_gpu_overrides_figures_of_the_gpu_it_is_like() -> None:
    gpu = {"like": "H100", "memory": "96 GB", "tflops": {"bf16": 800}}
    c = on({"gpu": gpu, "gpus_per_node": 2}, gpu={"memory_bandwidth": "4 TB/s"}).cluster
    assert c.topology.gpu == "h100-80g-sxm" and c.gpu is not None
    assert (c.gpu.memory, c.gpu.memory_bandwidth, c.gpu.tflops) == (96e9, 4e12, {"bf16": 800})


@pytest.mark.parametrize(("intra", "field", "said"), [
    ({"kind": "nvlink-mesh", "link": "gen4x16"}, "link", "kind nvlink-mesh needs links of the GPUs' own"),
    ({"kind": "nvswitch", "link": "none"}, "link", "kind nvswitch needs links of the GPUs' own"),
    ({"kind": "pcie", "link": "nvlink3"}, "link", "link nvlink3 joins no GPUs of kind pcie"),
    ({"kind": "pcie", "link": "gen3x16", "gen": 4}, "gen", "gen 4 and link gen3x16 contradict each other"),
    ({"kind": "nvlink-mesh", "links_per_gpu": 6, "links_per_pair": 3}, "links_per_pair",
     "3 links to each of 3 other GPUs are 9, and links_per_gpu is 6")])
def test_links_that_contradict_each_other_are_refused(intra: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(UserError) as found:
        on({"gpu": "a100-40g-sxm", "gpus_per_node": 4, "intra": intra})
    (fault,) = found.value.faults
    assert fault.field == f"cluster.topology.intra.{field}" and said in fault.message


def test_a_generation_of_pcie_is_said_either_way() -> None:
    said = [on({"gpu": "a40", "gpus_per_node": 4, "intra": {"kind": "pcie", **way}}).cluster.topology.intra
            for way in ({"link": "gen3x16"}, {"gen": 3}, {"link": "gen3x16", "gen": 3})]
    assert {(intra.link, intra.gen) for intra in said} == {("gen3x16", 3)}
    assert on({"gpu": "gb200", "gpus_per_node": 2}).cluster.topology.intra.link == "nvlink-c2c"


@pytest.mark.parametrize(("gpu", "intra", "host", "links"), [
    ("a40", {"gen": 3}, {}, ("gen3x16", "gen3x16")), ("a40", {"link": "gen3x16"}, {}, ("gen3x16", "gen3x16")),
    ("a40", {}, {"pcie": "gen3x16"}, ("gen3x16", "gen3x16")), ("a40", {}, {}, ("gen4x16", "gen4x16")),
    ("a40", {"gen": 4}, {"pcie": "gen3x16"}, ("gen4x16", "gen3x16")),
    ("a100-80g-sxm", {"kind": "nvswitch", "gen": 3}, {}, ("nvlink3", "gen3x16")),
    ("gh200", {"kind": "nvlink-mesh", "gen": 4}, {}, ("nvlink4", "nvlink-c2c"))])
def test_slots_are_of_one_generation_whether_said_of_gpus_or_of_the_host(
        gpu: str, intra: dict[str, Any], host: dict[str, Any], links: tuple[str, str]) -> None:
    topology = on({"gpu": gpu, "gpus_per_node": 4, "intra": {"kind": "pcie", **intra}, "host": host}).cluster.topology
    assert (topology.intra.link, topology.host.pcie) == links


@pytest.mark.parametrize(("topology", "gpu", "said"), [
    ("", "like: t4", "is empty (a topology needs at least gpu and gpus_per_node)"),
    ("{gpu: card.yaml, gpus_per_node: 2}", "- t4", "holds a list where a mapping of fields was expected (a GPU's pro"),
])
def test_what_a_file_lacks_is_said_of_its_own_kind(tmp_path: Path, topology: str, gpu: str, said: str) -> None:
    (tmp_path / "mine.yaml").write_text(topology, encoding="utf-8")
    (tmp_path / "card.yaml").write_text(gpu, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        on("mine.yaml", tmp_path)
    assert said in str(caught.value.faults[0])


#: What clusters of the catalogue have and their kind does not lead to expect: without the field they are others.
PARTICULAR: dict[str, set[str]] = {
    "intra.gpus_per_switch": {"jean-zay-v100-16g", "jean-zay-v100-32g"},   # four V100 in two pairs
    "inter.gpu_direct_rdma": set(),
    "inter.routing": {   # assumed of clusters of PCIe cards, whatever their fabric, and of the first EFA
        "p3dn", "pcie-8x-a10g", "pcie-8x-l40s", "pcie-8x-a10", "pcie-8x-a100-40g-pcie", "pcie-8x-a100-80g-pcie",
        "pcie-8x-a40", "pcie-8x-h100-80g-pcie", "pcie-8x-h100-94g-nvl", "pcie-8x-l40", "pcie-8x-rtx-6000-ada",
        "pcie-8x-rtx-a6000", "pcie-8x-rtx-pro-6000", "pcie-8x-v100-16g-pcie", "pcie-8x-v100-32g-pcie"}}


@pytest.mark.parametrize("field", PARTICULAR)
def test_a_topology_that_leaves_out_a_field_has_what_the_catalogue_writes(field: str) -> None:
    differing = set()
    section, name = field.split(".")
    for topology in topology_names():
        told = find_topology(topology, Path()).data
        if name not in told[section]:
            continue
        less = {**told, section: {key: value for key, value in told[section].items() if key != name}}
        found = [on(one).cluster for one in (told, less)]
        ways = [(Topology.from_mapping(one.template()).inter,
                 host_share(one.topology.host, one.topology.gpus_per_node, one.topology.intra.gpus_per_switch or 1))
                for one in found]
        if ways[0] != ways[1]:
            differing.add(topology)
    assert differing == PARTICULAR[field]


def test_a_catalogues_topology_that_is_called_as_a_file_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file .the catalogue's is called by its name: dgx-h100"):
        on("topologies/dgx-h100.yaml", tmp_path)


@pytest.mark.parametrize(("share", "said"), [(85, "(write 0.85)"), (1.1, ""), (850, "at most 2")])
def test_shares_of_links_are_no_percentages(share: float, said: str, tmp_path: Path) -> None:
    told = {**find_topology("dgx-h100", tmp_path).data, "links": {"link_share.nvlink4": share}}
    if not said:
        assert on(told, tmp_path).cluster.topology.links == {"link_share.nvlink4": share}
        return
    with pytest.raises(UserError) as caught:
        on(told, tmp_path)
    assert said in str(caught.value.faults[0])
