"""NCCL's own judgement of a call: what it thinks each algorithm and protocol would take, by which it chooses.

Source: NCCL 2.29.7 src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime, restated, and the tables of earlier
releases (`tuner.yaml`). Its figures are those of `links.yaml` and `tuner.yaml`, not what the machine really does: a
choice that NCCL gets wrong is wrong here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from sim.catalog import table
from sim.network.nccl.site import PROTOCOLS, Site

_GB = 1e9
_INFINITE = float("inf")
#: Release from which NCCL estimates (src/graph/tuning.cc).
_TUNED = (2, 5)
#: Release from which a hop between nodes of one GPU each counts as a tree's (N29; not in R13).
_NEW_BASE = (2, 18)
#: Release from which the network plugin's latency counts (ncclNetProperties_t of its sixth version; not in R13).
_PLUGIN = (2, 14)


@dataclass(frozen=True, slots=True)
class Judgement:
    """NCCL's estimate: time(S) = latency x plateau(S) + S / (rate x correction(S)).

    Attributes:
        latency_us, rate_bps: of the algorithm and protocol; rate in bytes of the call per second.
        correction: tree's bandwidth by log2(bytes / 64), () for others.
        plateau, plateau_bytes: what multiplies the latency from that size on (Simple rings between nodes).
    """

    latency_us: float
    rate_bps: float
    correction: tuple[float, ...] = ()
    plateau: float = 1.0
    plateau_bytes: float = float("inf")

    def time_us(self, size_bytes: float) -> float:
        """NCCL's estimate for a call of `size_bytes`, us; without end at no rate (one channel of NVLink SHARP)."""
        rate = self.rate_bps
        if rate <= 0.0:
            return float("inf")
        if self.correction and size_bytes >= 64:
            index = int(log2(size_bytes / 64))
            rate *= self.correction[index] if index < len(self.correction) else 1.0
        latency = self.latency_us * (self.plateau if size_bytes >= self.plateau_bytes else 1.0)
        return latency + size_bytes / rate * 1e6


def judge(kind: str, algorithm: str, protocol: str, site: Site) -> Judgement:
    """NCCL's estimate of serving `kind` by an algorithm (Ring, Tree, NVLS, NVLSTree) and protocol."""
    if site.version < _TUNED:
        return _before(kind, algorithm, protocol, site)
    if algorithm == "Ring":
        return _ring(kind, protocol, site)
    if algorithm == "Tree":
        return _tree(protocol, site)
    return _multicast(site)


def _before(kind: str, algorithm: str, protocol: str, site: Site) -> Judgement:
    """Before the tuner: trees up to a threshold (`tree_until`), LL up to so many bytes of every thread, then Simple.

    The estimates are ranks, which end where a threshold does.
    """
    if algorithm not in ("Ring", "Tree") or protocol == "LL128":
        return Judgement(_INFINITE, 1.0)
    told = table("network/tuner.yaml")["before"]
    tree, several = algorithm == "Tree", site.place.nodes > 1
    each = told["ll_bytes"]["volta" if site.capability() >= 70 else "old"][1 if several else 0]
    shares = told["ll_tree"] if tree else 1 if kind in ("broadcast", "reduce") else site.place.size
    most = site.searched_channels() * told["ll_threads"] * each * shares if protocol == "LL" else _INFINITE
    if tree:
        most = min(most, tree_until(site))
    rank = (1.0 if protocol == "LL" else 2.0) + (0.0 if tree else 2.0)
    return Judgement(rank, _INFINITE, (), _INFINITE, most + 1.0)


def tree_until(site: Site) -> float:
    """Bytes up to which NCCL before the tuner takes trees: where their latency no longer outweighs their rate."""
    told, place = table("network/tuner.yaml")["before"], site.place
    ring_us = told["ring_us"] * (place.size - 1)
    tree_us = told["tree_us"][0] * (place.per_node - 1) + told["tree_us"][1] * int(log2(place.nodes))
    if place.nodes == 1 or tree_us >= ring_us:
        return 0.0
    ring, tree = told["pcie"]
    if site.intra_link() == "nvlink":
        ring = site.searched_channels() * told["ring"]
        tree = ring * told["tree_share"] * (2 if place.nodes == 2 else 1)
    return _INFINITE if tree > ring else tree * ring / (ring - tree) * (ring_us - tree_us) * 1e3


def _hops(site: Site, protocol: str, shape: str) -> tuple[float, float]:
    """Latency of a hop inside a node and between nodes as NCCL counts them, us."""
    at = PROTOCOLS.index(protocol)
    simple = protocol == "Simple"
    inside = float(site.era(site.intra_link())[shape][at])
    if site.place.nodes > 1:
        if protocol == "LL":
            inside *= float(site.era("ll_hop"))
        if shape == "ring":
            inside = max(inside, float(site.era("overhead")[site.cpu()]) * (3 if simple else 1))
    exposed = site.place.per_node == 1 and site.version >= _NEW_BASE
    outside = float(site.era("net")["tree" if exposed else shape][at])
    plugin = site.plugin_us() if site.version >= _PLUGIN else 0.0
    return inside, outside + plugin * (2 if simple else 1)


def _ring(kind: str, protocol: str, site: Site) -> Judgement:
    n, nodes = site.place.size, site.place.nodes
    rooted = kind in ("broadcast", "reduce")
    passes = 2 if kind == "all_reduce" else 1
    steps = passes * (n - 1)
    shift = site.era("ring_hops")
    counted = nodes + int(shift) if shift != "all" and kind == "all_reduce" else nodes - 1
    hops = 0 if nodes == 1 else steps if shift == "all" else passes * counted
    inside, outside = _hops(site, protocol, "ring")
    graph = site.graph()
    bus = graph.channels * (graph.inside if nodes <= 2 else graph.between) * _GB
    bus = min(bus, float(site.era("ceiling").get(site.topology.generation, _INFINITE)) * _GB)
    if protocol == "LL":
        gathers = nodes == 1 and kind not in ("all_reduce", "reduce")
        bus = min(bus * float(site.era("ll_ring")[1 if gathers else 0]), _most_ll(site) * _GB)
    elif protocol == "LL128":
        share = site.era("ll128_ring")[1 if nodes > 1 and site.place.per_node == 1 else 0]
        bus = min(bus * float(share), _most_ll128(kind, graph.channels, site.table("ring_ll128"), site))
    latency = float(site.era("base")["ring"][PROTOCOLS.index(protocol)]) + (steps - hops) * inside + hops * outside
    rate = bus if rooted else bus * n / steps
    if protocol == "Simple" and kind == "all_reduce" and nodes > 1:
        plateau = site.era("plateau")[0 if site.capability() < 80 else 1]
        least = site.era("plateau_bytes")
        cells = n * (site.searched_channels() if "cell" in least else 1)
        return Judgement(latency, rate, (), float(plateau), float(*least.values()) * cells)
    return Judgement(latency, rate)


def _most_ll(site: Site) -> float:
    """What NCCL grants LL at most, GB/s: by the GPU on one node, by the CPU on several; without end before 2.8."""
    if not site.era("ll_bounded"):
        return _INFINITE
    if site.place.nodes > 1:
        return float(table("network/tuner.yaml")["cpu_ll"][site.cpu()][min(site.place.nodes, 3) - 2])
    return float(site.era("hopper_ll")) if site.topology.generation == "hopper" else site.table("ll")


def _most_ll128(shape: str, channels: int, usual: float, site: Site) -> float:
    """What NCCL grants LL128 at most, bytes/s, for a ring's operation or `tree`; `usual` GB/s a channel later."""
    whole = site.era("ll128_most").get(shape)
    return float(whole or channels * site.era("ll128_channel").get(shape, usual)) * _GB


def _tree(protocol: str, site: Site) -> Judgement:
    inside, outside = _hops(site, protocol, "tree")
    graph, nodes = site.graph(), site.place.nodes
    bus = graph.channels * (graph.tree_inside if nodes <= 2 else graph.between) * _GB
    bus = min(bus, float(site.era("ceiling").get(site.topology.generation, _INFINITE)) * _GB)
    bus = min(bus * float(site.era("tree_share")), _most_tree(protocol, graph.channels, site) * _GB)
    if protocol == "LL":
        bus = min(bus * float(site.era("ll_tree")), _most_ll(site) * _GB)
    elif protocol == "LL128":
        share = site.era("ll128_tree")[0 if nodes == 1 else 1]
        bus = min(bus * float(share), _most_ll128("tree", graph.channels, site.table("tree_ll128"), site))
    if site.place.per_node == 1:  # the one pattern that a node of one GPU has
        bus *= float(site.era("split_tree"))
    latency = float(site.era("base")["tree"][PROTOCOLS.index(protocol)]) + 2 * (
        (site.place.per_node - 1) * inside + int(log2(max(2, nodes))) * outside)
    row = site.era("correction").get(protocol) or table("network/tuner.yaml")["tree_correction"][protocol]
    return Judgement(latency, bus / 2, tuple(float(x) for x in row))


def _most_tree(protocol: str, channels: int, site: Site) -> float:
    """What NCCL grants a tree at most, GB/s: until 2.7 in all, then by channel."""
    at, generation = min(site.place.nodes, 3) - 1, site.topology.generation
    whole = site.era("tree_most")
    if whole:
        own = site.era("tree_most_ll128").get(generation) if protocol == "LL128" else None
        return float((own or whole)[at])
    channel = site.era("tree_channel").get(generation)
    return channels * float(channel[at] if channel else site.table("tree"))


def _multicast(site: Site) -> Judgement:
    nodes, n = site.place.nodes, site.place.size
    channels, inside, between = site.multicast_graph()
    latency = float(site.era("nvls"))
    rate = 2 * inside * site.table("nvls") * (channels - 1) / channels
    if nodes == 1:
        return Judgement(latency, channels * min(rate, between) * _GB * n / (2 * (n - 1)))
    latency += 2 * int(log2(nodes)) * (float(site.era("nvls_tree")) + 2 * site.plugin_us())
    rate = min(rate, between * (2 if nodes == 2 else 1), site.table("nvls_tree"))
    return Judgement(latency, channels * rate * _GB * n / (2 * (n - 1)))
