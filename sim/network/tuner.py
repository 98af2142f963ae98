"""NCCL's own judgement of a call: what it thinks each algorithm and protocol would take, by which it chooses.

Source: NCCL 2.29.7 src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime, restated, and the tables of earlier
releases (`tuner.yaml`). Its figures are those of `links.yaml` and `tuner.yaml`, not what the machine really does: a
choice that NCCL gets wrong is wrong here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from sim.catalog import table
from sim.network.site import PROTOCOLS, Site

_GB = 1e9
_INFINITE = float("inf")
#: Release from which NCCL estimates (src/graph/tuning.cc); before, LL up to so many bytes of each of so many threads.
_TUNED = (2, 5)
_LL_THREAD_BYTES, _LL_THREADS = 8, 512
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
        return _before(algorithm, protocol, site)
    if algorithm == "Ring":
        return _ring(kind, protocol, site)
    if algorithm == "Tree":
        return _tree(protocol, site)
    return _multicast(site)


def _before(algorithm: str, protocol: str, site: Site) -> Judgement:
    """Before the tuner: rings, in LL up to `_LL_THREAD_BYTES` for every thread, channel and rank (recalled)."""
    if algorithm != "Ring" or protocol == "LL128":
        return Judgement(_INFINITE, 1.0)
    least = site.searched_channels() * _LL_THREADS * site.place.size * _LL_THREAD_BYTES
    return Judgement(1.0, _INFINITE, (), 3.0, least + 1.0) if protocol == "LL" else Judgement(2.0, _INFINITE)


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
    counted = nodes + int(site.era("ring_hops")) if kind == "all_reduce" else nodes - 1
    hops = 0 if nodes == 1 else passes * counted
    inside, outside = _hops(site, protocol, "ring")
    graph = site.graph()
    bus = graph.channels * (graph.inside if nodes <= 2 else graph.between) * _GB
    bus = min(bus, float(site.era("ceiling").get(site.topology.generation, _INFINITE)) * _GB)
    if protocol == "LL":
        gathers = nodes == 1 and kind not in ("all_reduce", "reduce")
        bus = min(bus * float(site.era("ll_ring")[1 if gathers else 0]), _most_ll(site) * _GB)
    elif protocol == "LL128":
        bus = min(bus * 0.92, graph.channels * site.table("ring_ll128") * _GB)
    latency = float(site.era("base")["ring"][PROTOCOLS.index(protocol)]) + (steps - hops) * inside + hops * outside
    rate = bus if rooted else bus * n / steps
    if protocol == "Simple" and kind == "all_reduce" and nodes > 1:
        plateau = site.era("plateau")[0 if site.capability() < 80 else 1]
        least = site.era("plateau_bytes")
        cells = n * (site.searched_channels() if "cell" in least else 1)
        return Judgement(latency, rate, (), float(plateau), float(*least.values()) * cells)
    return Judgement(latency, rate)


def _most_ll(site: Site) -> float:
    """What NCCL grants LL at most, GB/s: by the GPU on one node, by the CPU on several."""
    if site.place.nodes > 1:
        return float(table("network/tuner.yaml")["cpu_ll"][site.cpu()][min(site.place.nodes, 3) - 2])
    return float(site.era("hopper_ll")) if site.topology.generation == "hopper" else site.table("ll")


def _tree(protocol: str, site: Site) -> Judgement:
    inside, outside = _hops(site, protocol, "tree")
    graph, nodes = site.graph(), site.place.nodes
    bus = graph.channels * (graph.tree_inside if nodes <= 2 else graph.between) * _GB
    bus = min(bus, float(site.era("ceiling").get(site.topology.generation, _INFINITE)) * _GB)
    bus = min(bus * 0.92, graph.channels * site.table("tree") * _GB)
    if protocol == "LL":
        bus = min(bus / 3.8, _most_ll(site) * _GB)
    elif protocol == "LL128":
        bus = min(bus * 120 / 128, graph.channels * site.table("tree_ll128") * _GB)
    if site.place.per_node == 1:  # the one pattern that a node of one GPU has
        bus *= float(site.era("split_tree"))
    latency = float(site.era("base")["tree"][PROTOCOLS.index(protocol)]) + 2 * (
        (site.place.per_node - 1) * inside + int(log2(max(2, nodes))) * outside)
    correction = tuple(float(x) for x in table("network/tuner.yaml")["tree_correction"][protocol])
    return Judgement(latency, bus / 2, correction)


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
