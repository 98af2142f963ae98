"""A cluster as a template with multiplicities: one node, one leaf switch, how many of each; never a graph of all GPUs.

Source of the field names: the scenario's `topology` mapping. Nominal speeds come from `links.yaml`, the shares of them
that are reached from `figures.yaml` or the topology's own `links`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.catalog import table
from sim.errors import Fault, UserError
from sim.network.figures import Figures

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
        peers: GPUs without NVLink reach one another over PCIe; else through the host.
        through_host: they do not, and it is known which share a PCIe switch: what goes between them takes its uplink.
        tray: GPUs of one host where NVLink joins several hosts; 0 = a node is one host.
    """

    kind: str
    link: str
    links_per_gpu: int
    matrix: tuple[tuple[int, ...], ...]
    gpus_per_switch: int
    pcie: str
    peers: bool = True
    through_host: bool = False
    tray: int = 0

    def islands(self) -> bool:
        """Whether NVLink joins some GPUs of a node but not all of them: bridged pairs."""
        reached, found = {0}, [0]
        while found and self.matrix:
            row = self.matrix[found.pop()]
            found += (near := [i for i, count in enumerate(row) if count and i not in reached])
            reached.update(near)
        return len(reached) < len(self.matrix)


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
        figures: measured figures of links and protocols, the topology's own `links` first.
        degraded: ((link kind, index), share of its capacity left) of links that are slower than their like; 0 = failed.
    """

    name: str
    generation: str
    gpus_per_node: int
    nodes: int
    intra: Intra
    inter: Inter
    figures: Figures = field(default_factory=Figures)
    degraded: tuple[tuple[tuple[str, int], float], ...] = ()

    @property
    def multicasts(self) -> bool:
        """Whether its switches add and spread (NVLink SHARP): those of Hopper and later."""
        return self.intra.kind == "nvswitch" and float(facts()["generations"][self.generation]["nvls"]) > 0

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Topology:
        """Build from a topology file's mapping; absent or None fields get the defaults described in the attributes."""
        gpus_per_node = int(mapping.get("gpus_per_node") or 1)
        host = mapping.get("host") or {}
        return cls(
            name=str(mapping.get("name") or ""), generation=generation_of(mapping.get("gpu")),
            gpus_per_node=gpus_per_node, nodes=int(mapping.get("nodes") or 1),
            intra=_intra(mapping.get("intra") or {}, gpus_per_node, str(host.get("pcie") or "gen4x16"),
                         mapping.get("gpu")),
            inter=_inter(mapping.get("inter") or {}, generation_of(mapping.get("gpu"))),
            figures=Figures(mapping.get("links")),
            degraded=_degraded(mapping.get("degraded") or ()))


#: Kinds of links a `degraded` entry may name; each is slowed in both directions (see `routes`).
_DEGRADABLE = ("gpu", "nic", "leaf", "pcie")


def _degraded(entries: Sequence[Mapping[str, Any]]) -> tuple[tuple[tuple[str, int], float], ...]:
    """Slow links: each entry {link: gpu|nic|leaf|pcie, index: number, share: of its capacity left, in [0, 1]}."""
    found = []
    for i, entry in enumerate(entries):
        kind, share, where = str(entry.get("link")), float(entry.get("share", 1.0)), f"cluster.topology.degraded[{i}]"
        if kind not in _DEGRADABLE:
            raise UserError(Fault(f"link must be one of {', '.join(_DEGRADABLE)}, not {kind!r}", where))
        if not 0 <= share <= 1:
            raise UserError(Fault(f"share must be from 0 (failed) to 1, not {share}", where))
        found += [((f"{kind}_{way}", int(entry.get("index", 0))), share) for way in ("out", "in")]
    return tuple(found)


def generation_of(gpu: Any) -> str:
    """GPU generation (key of `generations`) from a catalogue name or an inline GPU mapping; the default if unknown."""
    if isinstance(gpu, Mapping):
        if gpu.get("arch") in facts()["generations"]:
            return str(gpu["arch"])
        gpu = gpu.get("like") or gpu.get("name") or ""
    text = str(gpu).lower()
    for name, generation in facts()["generations"].items():
        if any(text.startswith(prefix) for prefix in generation["gpus"]):
            return str(name)
    return str(facts()["default_generation"])


def _pcie_key(text: str) -> str:
    return text if text in facts()["pcie"] else "gen4x16"


def _called(gpu: Any) -> str:
    """A topology's GPU by its name in the catalogue."""
    if isinstance(gpu, Mapping):
        gpu = gpu.get("like") or gpu.get("name") or ""
    return str(gpu).lower()


def _intra(m: Mapping[str, Any], gpus: int, host_pcie: str, gpu: Any) -> Intra:
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
    copies = _called(gpu) not in facts()["peerless"] if m.get("peer_copies") is None else bool(m["peer_copies"])
    peers = kind != "pcie" or copies
    return Intra(kind=kind, link=str(m.get("link") or ("nvlink3" if kind.startswith("nv") else "")),
                 links_per_gpu=per_gpu, matrix=matrix, gpus_per_switch=int(m.get("gpus_per_switch") or gpus),
                 pcie=_pcie_key(pcie), peers=peers, through_host=not peers and bool(m.get("gpus_per_switch")),
                 tray=int(facts()["trays"].get(_called(gpu), 0)) if kind == "nvswitch" else 0)


def reads_gpus(fabric: str, generation: str) -> bool:
    """Whether cards of a fabric read and write memory of a generation's GPUs (GPUDirect RDMA)."""
    rdma: bool | dict[str, bool] = facts()["fabrics"][fabric]["rdma"]
    return rdma[generation] if isinstance(rdma, dict) else rdma


def _inter(m: Mapping[str, Any], generation: str) -> Inter:
    fabric = str(m.get("fabric") or "infiniband")
    fabric = fabric if fabric in facts()["fabrics"] else "ethernet"
    rdma = m.get("gpu_direct_rdma")
    return Inter(
        kind=str(m.get("kind") or "none"), fabric=fabric, nics_per_node=int(m.get("nics_per_node") or 1),
        gbps_per_nic=float(m.get("gbps_per_nic") or 0.0), rail_optimized=bool(m.get("rail_optimized") or False),
        oversubscription=float(m.get("oversubscription") or 1.0), nodes_per_leaf=int(m.get("nodes_per_leaf") or 16),
        rdma=reads_gpus(fabric, generation) if rdma is None else bool(rdma),
        routing=str(m.get("routing") or "adaptive"))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Capacities in bytes/s, one direction, of each kind of link of a topology.

    Attributes:
        gpu: one GPU's fast intra-node egress (NVLink, or its PCIe slot).
        link: one NVLink of a mesh (0 elsewhere).
        pcie: one GPU's PCIe slot; uplink: what a PCIe switch exchanges with GPUs and NICs below the other CPU.
        nic: one NIC group (the NICs nearest to one GPU; all NICs when GPUs outnumber them).
        stage: what one channel of a communicator moves where messages are staged through the host, 0 elsewhere;
            host: what all channels of a node move together there, in and out: one stream each way per NIC (that both
            ways share it is inferred from published pipeline steps on Omni-Path, the rate of a stream is measured).
        nic_groups: NIC groups of a node; nic_nominal: the nominal speed of one.
        leaf: uplinks of one leaf switch (of one rail when rail-optimised); leaf_uplinks: how many they are.
        p2p: share of `nic` that grouped send/recv reaches.
    """

    gpu: float
    link: float
    pcie: float
    uplink: float
    nic: float
    stage: float
    host: float
    nic_groups: int
    nic_nominal: float
    leaf: float
    leaf_uplinks: int
    p2p: float


def speeds(topology: Topology, intra_gbps_per_gpu: float | None = None,
           inter_gbps_per_node: float | None = None) -> Speeds:
    """Capacities of `topology`; the overrides are nominal Gb/s per direction and keep the link's efficiency. In a node
    of PCIe alone the link inside a node is a GPU's slot; what its CPUs exchange (`uplink`) stays."""
    intra, inter, figures = topology.intra, topology.inter, topology.figures
    slot = facts()["pcie"][intra.pcie]
    slot_share = figures[f"pcie_share.{intra.pcie}"]
    nominal_slot = float(slot["nominal"]) * _GB
    row = facts()["links"].get(intra.link) if intra.kind in ("nvswitch", "nvlink-mesh") else None
    used, share = (row, figures[f"link_share.{intra.link}"]) if row else (slot, slot_share)
    count = intra.links_per_gpu if row else 1
    nominal_link = float(used["nominal"]) * _GB
    if intra_gbps_per_gpu is not None:
        nominal_link = intra_gbps_per_gpu / _BITS * _GB / max(1, count)  # a mesh of one GPU has no links
        nominal_slot = nominal_slot if row else nominal_link
    nominal = inter.nics_per_node * inter.gbps_per_nic if inter_gbps_per_node is None else inter_gbps_per_node
    node = nominal / _BITS * _GB * figures[f"fabric_share.{inter.fabric}"]
    stage = 0.0 if inter.rdma else figures["stage_gbps.all"] * _GB
    groups = min(inter.nics_per_node, topology.gpus_per_node)
    rails = groups if inter.rail_optimized else 1
    return Speeds(
        gpu=nominal_link * share * count, link=nominal_link * share if row else 0.0,
        pcie=nominal_slot * slot_share, uplink=float(slot["bridge"]) * _GB,
        nic=node / groups, stage=stage, host=2 * max(2, inter.nics_per_node) * stage,
        nic_groups=groups,
        nic_nominal=nominal / _BITS * _GB / groups, leaf=node * inter.nodes_per_leaf / inter.oversubscription / rails,
        leaf_uplinks=max(1, round(inter.nodes_per_leaf * inter.nics_per_node / inter.oversubscription / rails)),
        p2p=figures[f"exchange_share.{inter.fabric}"])


def staged_channels(nics: int, gpus: int) -> int:
    """Channels NCCL opens without GPUDirect RDMA: one per NIC, a NIC shared by k GPUs counting 1/k; two at least.

    Args:
        nics: of a node that a communicator reaches; gpus: of a node that belong to it.

    Source: channel counts in NCCL logs of Jean Zay (4 NICs: 4 channels with 4 V100, 2 with 8 A100).
    """
    return max(2, nics * min(nics, gpus) // gpus)
