"""NCCL's own judgement of a call: what it thinks each algorithm and protocol would take, by which it chooses.

Source: NVIDIA/nccl src/graph/tuning.cc @5067397, ncclTopoTuneModel and ncclTopoGetAlgoTime, restated. Its figures are
those of `links.yaml`, not what the machine really does: a choice that NCCL gets wrong is wrong here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from sim.network.site import PROTOCOLS, Site
from sim.network.topology import facts

_GB = 1e9
#: NCCL from which its estimates start at today's base latencies (unverified).
_NEW_BASE = (2, 12)


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
        """NCCL's estimate for a call of `size_bytes`, us."""
        rate = self.rate_bps
        if self.correction:
            index = int(log2(max(size_bytes, 64) / 64))
            rate *= self.correction[index] if index < len(self.correction) else 1.0
        latency = self.latency_us * (self.plateau if size_bytes >= self.plateau_bytes else 1.0)
        return latency + size_bytes / rate * 1e6


def judge(kind: str, algorithm: str, protocol: str, site: Site) -> Judgement:
    """NCCL's estimate of serving `kind` by an algorithm (Ring, Tree, NVLS, NVLSTree) and protocol."""
    if algorithm == "Ring":
        return _ring(kind, protocol, site)
    if algorithm == "Tree":
        return _tree(protocol, site)
    return _multicast(site)


def _us(name: str, protocol: str) -> float:
    return float(facts()["tuner_us"][name][PROTOCOLS.index(protocol)])


def _hops(site: Site, protocol: str, shape: str) -> tuple[float, float]:
    """Latency of a hop inside a node and between nodes as NCCL counts them, us."""
    inside = _us(f"{site.intra_link()}_{shape}", protocol)
    simple = protocol == "Simple"
    if site.place.nodes > 1:
        inside = max(inside, float(facts()["tuner_us"]["net_overhead"]) * (3 if simple else 1))
    net = "tree" if shape == "tree" or site.place.per_node == 1 else "ring"
    return inside, _us(f"net_{net}", protocol) + site.plugin_us() * (2 if simple else 1)


def _bus_bps(site: Site) -> float:
    """Channels x speed of the rings NCCL's search would find: NVLink or PCIe inside a node, the NICs between nodes."""
    inside = site.tuner_inside_bps()
    if site.place.nodes == 1:
        return inside
    net = site.tuner_net_bps()
    return min(net, inside) if site.place.per_node > 1 else net


def _ring(kind: str, protocol: str, site: Site) -> Judgement:
    n, nodes = site.place.size, site.place.nodes
    rooted = kind in ("broadcast", "reduce")
    passes = 2 if kind == "all_reduce" else 1
    steps = passes * (n - 1)
    hops = passes * (nodes - 1)
    inside, outside = _hops(site, protocol, "ring")
    bus, channels = _bus_bps(site), site.searched_channels()
    if protocol == "LL":
        bus = min(bus / 2, site.table("ll") * _GB)
    elif protocol == "LL128":
        bus = min(bus * 0.92, channels * site.table("ring_ll128") * _GB)
    base = "base_ring" if site.version >= _NEW_BASE else "base_ring_old"
    latency = _us(base, protocol) + (steps - hops) * inside + hops * outside
    rate = bus if rooted else bus * n / steps
    if protocol == "Simple" and kind == "all_reduce" and nodes > 1:
        return Judgement(latency, rate, (), site.table("plateau"), 64.0 * channels * n)
    return Judgement(latency, rate)


def _tree(protocol: str, site: Site) -> Judgement:
    inside, outside = _hops(site, protocol, "tree")
    channels = site.searched_channels()
    bus = min(_bus_bps(site) * 0.92, channels * site.table("tree") * _GB)
    if protocol == "LL":
        bus = min(bus / 3.8, site.table("ll") * _GB)
    elif protocol == "LL128":
        bus = min(bus * 120 / 128, channels * site.table("tree_ll128") * _GB)
    latency = _us("base_tree", protocol) + 2 * (
        (site.place.per_node - 1) * inside + log2(max(2, site.place.nodes)) * outside)
    correction = tuple(float(x) for x in facts()["tree_correction"][protocol])
    return Judgement(latency, bus * 0.85 / 2, correction)


def _multicast(site: Site) -> Judgement:
    nodes, n = site.place.nodes, site.place.size
    channels = site.searched_multicast()
    latency = float(facts()["tuner_us"]["nvls"])
    bus = 2 * site.tuner_inside_bps() * site.table("nvls") * (channels - 1) / channels
    if nodes == 1:
        return Judgement(latency, bus * n / (2 * (n - 1)))
    latency += 2 * log2(nodes) * (float(facts()["tuner_us"]["nvls_net"]) + site.plugin_us())
    net = site.tuner_net_bps() * (2 if nodes == 2 else 1)
    return Judgement(latency, min(bus, net, channels * site.table("nvls_tree") * _GB) / 2)
