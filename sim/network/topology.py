"""A cluster as a template with multiplicities: one node, one leaf switch, how many of each; never a graph of all GPUs.

Source of the field names: the scenario's `topology` mapping. All figures come from `links.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.catalog import table

_GB = 1e9
_BITS = 8.0


def facts() -> dict[str, Any]:
    """The catalogue `links.yaml` (read once)."""
    return table("network/links.yaml")


@dataclass(frozen=True, slots=True)
class Intra:
    """Links inside a node.

    Attributes:
        kind: nvswitch, nvlink-mesh, pcie or none.
        link: key of `links` in links.yaml, "" where there is no NVLink.
        links_per_gpu: links of one GPU into the switch or, in a mesh, of its best connected GPU.
        matrix: links between each pair of GPUs of a mesh, () otherwise.
        gpus_per_switch: GPUs behind one PCIe switch.
        pcie: key of `pcie` in links.yaml.
    """

    kind: str
    link: str
    links_per_gpu: int
    matrix: tuple[tuple[int, ...], ...]
    gpus_per_switch: int
    pcie: str


@dataclass(frozen=True, slots=True)
class Inter:
    """Links between nodes: the NICs of a node and the fabric they reach (kinds and fabrics as in the scenario)."""

    kind: str
    fabric: str
    nics_per_node: int
    gbps_per_nic: float
    rail_optimized: bool
    oversubscription: float
    nodes_per_leaf: int
    rdma: bool
    routing: str


@dataclass(frozen=True, slots=True)
class Topology:
    """A cluster's template.

    Attributes:
        name: as the file says.
        generation: key of `generations` in links.yaml; it chooses NCCL's tuner tables.
        gpus_per_node, nodes: multiplicities.
    """

    name: str
    generation: str
    gpus_per_node: int
    nodes: int
    intra: Intra
    inter: Inter

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Topology:
        """Build from a topology file's mapping; absent or None fields get the defaults described in the attributes."""
        gpus_per_node = int(mapping.get("gpus_per_node") or 1)
        host = mapping.get("host") or {}
        return cls(
            name=str(mapping.get("name") or ""), generation=generation_of(mapping.get("gpu")),
            gpus_per_node=gpus_per_node, nodes=int(mapping.get("nodes") or 1),
            intra=_intra(mapping.get("intra") or {}, gpus_per_node, str(host.get("pcie") or "gen4x16")),
            inter=_inter(mapping.get("inter") or {}))


def generation_of(gpu: Any) -> str:
    """GPU generation (key of `generations`) from a catalogue name or an inline GPU mapping; the default if unknown."""
    if isinstance(gpu, Mapping):
        if gpu.get("arch") in facts()["generations"]:
            return str(gpu["arch"])
        gpu = gpu.get("name") or gpu.get("like") or ""
    text = str(gpu).lower()
    for name, generation in facts()["generations"].items():
        if any(text.startswith(prefix) for prefix in generation["gpus"]):
            return str(name)
    return str(facts()["default_generation"])


def _pcie_key(text: str) -> str:
    return text if text in facts()["pcie"] else "gen4x16"


def _intra(m: Mapping[str, Any], gpus: int, host_pcie: str) -> Intra:
    kind = str(m.get("kind") or "none")
    matrix: tuple[tuple[int, ...], ...] = ()
    if kind == "nvlink-mesh":
        if m.get("matrix"):
            matrix = tuple(tuple(int(x) for x in row) for row in m["matrix"])
        else:
            per_pair = int(m.get("links_per_pair") or 1)
            matrix = tuple(tuple(0 if i == j else per_pair for j in range(gpus)) for i in range(gpus))
    per_gpu = max((sum(row) for row in matrix), default=int(m.get("links_per_gpu") or 1))
    gen = m.get("gen")
    pcie = host_pcie if gen is None else f"gen{gen}x16" if str(gen).isdigit() else str(gen)
    return Intra(kind=kind, link=str(m.get("link") or ("nvlink3" if kind.startswith("nv") else "")),
                 links_per_gpu=per_gpu, matrix=matrix, gpus_per_switch=int(m.get("gpus_per_switch") or gpus),
                 pcie=_pcie_key(pcie))


def _inter(m: Mapping[str, Any]) -> Inter:
    fabric = str(m.get("fabric") or "infiniband")
    fabric = fabric if fabric in facts()["fabrics"] else "ethernet"
    rdma = m.get("gpu_direct_rdma")
    return Inter(
        kind=str(m.get("kind") or "none"), fabric=fabric, nics_per_node=int(m.get("nics_per_node") or 1),
        gbps_per_nic=float(m.get("gbps_per_nic") or 0.0), rail_optimized=bool(m.get("rail_optimized") or False),
        oversubscription=float(m.get("oversubscription") or 1.0), nodes_per_leaf=int(m.get("nodes_per_leaf") or 16),
        rdma=bool(facts()["fabrics"][fabric]["rdma"]) if rdma is None else bool(rdma),
        routing=str(m.get("routing") or "adaptive"))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Capacities in bytes/s, one direction, of each kind of link of a topology.

    Attributes:
        gpu: one GPU's fast intra-node egress (NVLink, or its PCIe slot).
        link: one NVLink of a mesh (0 elsewhere).
        pair: share of `gpu` that traffic with a single peer reaches, in (0, 1].
        pcie: one GPU's PCIe slot, and one PCIe switch's uplink.
        nic: one NIC group (the NICs nearest to one GPU; all NICs when GPUs outnumber them).
        nic_groups: NIC groups of a node.
        leaf: uplinks of one leaf switch (of one rail when rail-optimised).
        p2p: share of `nic` that grouped send/recv reaches, in (0, 1].
    """

    gpu: float
    link: float
    pair: float
    pcie: float
    nic: float
    nic_groups: int
    leaf: float
    p2p: float


def speeds(topology: Topology, intra_gbps_per_gpu: float | None = None,
           inter_gbps_per_node: float | None = None) -> Speeds:
    """Capacities of `topology`; the overrides are nominal Gb/s per direction and keep the link's efficiency."""
    intra, inter = topology.intra, topology.inter
    pcie = facts()["pcie"][intra.pcie]
    row = facts()["links"].get(intra.link) if intra.kind in ("nvswitch", "nvlink-mesh") else None
    per_link = float(row["achievable"]) * _GB if row else 0.0
    gpu = per_link * intra.links_per_gpu if row else float(pcie["achievable"]) * _GB
    if intra_gbps_per_gpu is not None:
        figures = row or pcie
        wanted = intra_gbps_per_gpu / _BITS * _GB * float(figures["achievable"]) / float(figures["nominal"])
        per_link, gpu = per_link * wanted / gpu, wanted
    fabric = facts()["fabrics"][inter.fabric]
    nominal = inter.nics_per_node * inter.gbps_per_nic if inter_gbps_per_node is None else inter_gbps_per_node
    node = nominal / _BITS * _GB * float(fabric["efficiency"])
    if not inter.rdma:
        node = min(node, staged_channels(topology) * float(facts()["staging"]["channel_gbps"]) * _GB)
    groups = min(inter.nics_per_node, topology.gpus_per_node)
    rails = groups if inter.rail_optimized else 1
    return Speeds(
        gpu=gpu, link=per_link, pair=float(row["pair"]) if row else 1.0, pcie=float(pcie["achievable"]) * _GB,
        nic=node / groups, nic_groups=groups, leaf=node * inter.nodes_per_leaf / inter.oversubscription / rails,
        p2p=float(fabric["p2p"]) / float(fabric["efficiency"]))


def staged_channels(topology: Topology) -> int:
    """Channels NCCL opens without GPUDirect RDMA: one per NIC, a NIC shared by k GPUs counting 1/k.

    Source: channel counts in NCCL logs of Jean Zay (4 NICs: 4 channels with 4 V100, 2 with 8 A100).
    """
    nics = topology.inter.nics_per_node
    return max(1, nics * min(nics, topology.gpus_per_node) // topology.gpus_per_node)
