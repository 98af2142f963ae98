"""What a collective costs: the algorithm and protocol NCCL would take, its latency, and its load on every link.

Cost model: NCCL's own (src/graph/tuning.cc, ncclTopoTuneModel), with loads on real links in the place of its bandwidth
guesses. For each algorithm and protocol that may serve the call, time = latency + ramp + bytes / rate; the least wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, log2, sqrt

from sim.network.fair_share import LinkId
from sim.network.routes import Loads, Placement, exchange_loads, multicast_loads, ring_loads, shift_loads, tree_loads
from sim.network.topology import Speeds, Topology, facts

_US = 1e-6
_GB = 1e9
PROTOCOLS = ("LL", "LL128", "Simple")
#: Bytes on the wire per byte of payload: LL 8 of 16, LL128 120 of 128 (nccl src/include/device.h).
_WIRE = {"LL": 2.0, "LL128": 128 / 120, "Simple": 1.0}
#: One channel's thread block is worth opening per this many bytes: 64 B x 512 threads (nccl thread threshold, Simple).
_BYTES_PER_CHANNEL = 64 * 512
#: Channels of one send/recv pair (nccl opens at least 2 per NIC or NVLink peer; powers of two).
_P2P_CHANNELS = 4
#: Slots of a connection's buffer (NCCL_STEPS, nccl src/include/device.h).
_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Coflow:
    """One operation of one instance as the engine sees it.

    Attributes:
        latency_s: time before and after bytes move at the rate: launch, steps and hops, pipeline ramp.
        size_bytes: work to move.
        links, loads: bytes over each link per byte of `size_bytes`, all instances in lockstep.
        cap_bps: limit from channels, protocol and rings, bytes/s of `size_bytes`.
        channels: SMs held.
        hbm_bytes_per_byte: device-memory traffic per byte of `size_bytes` on each GPU.
        weight: share in max-min (channels x queue pairs).
        algorithm, protocol: as NCCL names them.
    """

    latency_s: float
    size_bytes: float
    links: tuple[LinkId, ...]
    loads: tuple[float, ...]
    cap_bps: float
    channels: int
    hbm_bytes_per_byte: float
    weight: float
    algorithm: str
    protocol: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """An (algorithm, protocol) that could serve a call, before the size is known.

    Attributes:
        latency_s: fixed; ramp_s: most the pipeline's filling can add; ramp_bytes: size from which it adds it all.
        loads: per byte of the call; factor: multiplies every load; cap_bps; channels; hbm: as in `Coflow`.
    """

    algorithm: str
    protocol: str
    latency_s: float
    ramp_s: float
    ramp_bytes: float
    loads: Loads
    factor: float
    cap_bps: float
    channels: int
    hbm: float
    correction: tuple[float, ...] = ()

    def latency_at(self, size_bytes: float, rate_bps: float) -> float:
        """Latency, ramp and what a tree's correction costs at `rate_bps` alone, seconds.

        Chunks of a pipeline grow with the call until they are full, so its filling costs X (1 - (1 - r)^2) with
        r = sqrt(size / ramp_bytes): the square-root law of optimal chunks below, constant above.
        """
        r = min(1.0, sqrt(size_bytes / self.ramp_bytes))
        time = self.latency_s + self.ramp_s * r * (2.0 - r)
        if self.correction:
            time += size_bytes / rate_bps * (1.0 / interpolate(self.correction, log2(max(size_bytes, 64) / 64)) - 1.0)
        return time

    def rate(self, capacity: Callable[[LinkId], float]) -> float:
        """Rate alone, bytes/s of the call's size."""
        rate = self.cap_bps
        for link, load in self.loads:
            if load > 0:
                rate = min(rate, capacity(link) / (load * self.factor))
        return rate


def interpolate(values: tuple[float, ...], at: float) -> float:
    """Linear between the entries of `values`, constant beyond the last."""
    low = min(int(at), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * min(1.0, at - low)


@dataclass(frozen=True, slots=True)
class Site:
    """What the candidates of one communicator need to know: where it lies, and on what."""

    topology: Topology
    speeds: Speeds
    place: Placement
    channels: int | None = None
    version: tuple[int, ...] = (2, 30)

    @property
    def column(self) -> int:
        """Column of the tuner's tables: 1, 2 or more nodes."""
        return min(self.place.nodes, 3) - 1

    def generation(self) -> dict[str, object]:
        """Row of `generations` in links.yaml."""
        row: dict[str, object] = facts()["generations"][self.topology.generation]
        return row

    def figure(self, name: str) -> float:
        """A tuner figure of this generation, by node count where it is a list."""
        value = self.generation()[name]
        return float(value[self.column]) if isinstance(value, list) else float(value)  # type: ignore[arg-type]

    def intra_link(self) -> str:
        """`nvlink` or `pcie`: what joins the group's GPUs inside a node."""
        return "pcie" if self.topology.intra.kind in ("pcie", "none") or self.place.rings == 0 else "nvlink"

    def inside_bps(self, one_peer: bool = False) -> float:
        """What one GPU can send to its peers (or to one alone), bytes/s: its rings in a mesh, all links on a switch."""
        if self.intra_link() == "pcie":
            return self.speeds.pcie
        alone = self.speeds.pair if one_peer or self.place.per_node == 2 else 1.0
        return alone * (self.speeds.link * self.place.rings if self.place.rings > 0 else self.speeds.gpu)


def candidates(kind: str, site: Site) -> Iterator[Candidate]:
    """All ways to serve `kind` (a name of `sim.work.COLLECTIVES`) on `site`."""
    if kind in ("send", "recv", "send_recv"):
        yield _send(site)
    elif kind == "all_to_all":
        yield _exchange(site)
    else:
        for protocol in PROTOCOLS:
            if protocol != "LL128" or _ll128(site):
                yield _ring(kind, site, protocol)
                if kind == "all_reduce" and site.place.nodes > 1:
                    yield _tree(site, protocol)
        if kind == "all_reduce" and _nvls(site):
            yield _multicast(site)


def _ll128(site: Site) -> bool:
    fabric = facts()["fabrics"][site.topology.inter.fabric]
    return site.intra_link() == "nvlink" and (site.place.nodes == 1 or bool(fabric["ll128"]))


def _nvls(site: Site) -> bool:
    """NVLink SHARP: Hopper and later behind a switch, NCCL 2.17 on (release notes)."""
    return (site.topology.intra.kind == "nvswitch" and site.figure("nvls") > 0 and site.place.per_node > 2
            and site.version >= (2, 17))


def _us(name: str, protocol: str) -> float:
    return float(facts()["latency_us"][name][PROTOCOLS.index(protocol)])


def _plugin_us(site: Site) -> float:
    """What the network plugin adds to a hop between nodes, us."""
    value = facts()["fabrics"][site.topology.inter.fabric]["nic_latency_us"]
    return float(value[site.topology.generation] if isinstance(value, dict) else value)


def _hop_us(site: Site, protocol: str, shape: str) -> tuple[float, float]:
    """Latency of a hop inside a node and between nodes, us."""
    inside = _us(f"{site.intra_link()}_{shape}", protocol) * site.figure("step")
    if site.place.nodes > 1 and shape == "ring":
        inside = max(inside, float(facts()["latency_us"]["net_overhead"]) * (3 if protocol == "Simple" else 1))
    return inside, _us(f"net_{shape}", protocol) + _plugin_us(site) * (2 if protocol == "Simple" else 1)


def _message_us(site: Site, protocol: str, steps: int) -> float:
    """Least time of a ring of `steps` over a fabric whose edges pass one message at a time, us.

    The first `NCCL_STEPS` messages fill the buffer's slots without waiting; Simple needs a flush for each.
    """
    if site.place.nodes == 1:
        return 0.0
    each = float(facts()["fabrics"][site.topology.inter.fabric]["message_us"])
    return max(0, steps - _SLOTS) * each * (2 if protocol == "Simple" else 1)


def channel_count(site: Site) -> int:
    """Channels of a large call: the generation's inside a node; two per NIC group's NIC between nodes, within that."""
    if site.channels is not None:
        return site.channels
    most = int(site.figure("channels"))
    if site.place.nodes == 1:
        return max(1, min(most, 2 * site.place.rings)) if site.place.rings > 0 else most
    inter = site.topology.inter
    nics = inter.nics_per_node * int(site.place.groups.max()) / site.speeds.nic_groups
    return max(2, min(most, int(2 * nics)))


def _ring(kind: str, site: Site, protocol: str) -> Candidate:
    n, nodes = site.place.size, site.place.nodes
    passes = 2 if kind == "all_reduce" else 1
    rooted = kind in ("broadcast", "reduce")
    steps = passes * (n - 1)
    volume = 1.0 if rooted else steps / n
    hops = passes * (nodes - 1)
    inside, outside = _hop_us(site, protocol, "ring")
    latency = _us("base_ring", protocol) + max(
        (steps - hops) * inside + hops * outside, _message_us(site, protocol, steps))
    channels = channel_count(site)
    cap = site.inside_bps() if site.place.per_node > 1 else float("inf")
    if site.place.nodes > 1 and site.place.per_node > 1:
        cap *= site.place.per_node / (site.place.per_node - 1)
    if protocol == "LL":
        cap = min(cap / 2, site.figure("ll") * _GB)
    elif protocol == "LL128":
        cap = min(cap * 0.92, channels * site.figure("ring_ll128") * _GB)
    return _candidate(site, "Ring", protocol, latency, ring_loads(site.place), volume, cap / volume, channels,
                      3 * volume)


def _tree(site: Site, protocol: str) -> Candidate:
    """Double binary tree over nodes, a chain inside each; NCCL rates it below a ring, even on two nodes."""
    place = site.place
    inside, outside = _hop_us(site, protocol, "tree")
    latency = _us("base_tree", protocol) + 2 * ((place.per_node - 1) * inside + log2(place.nodes) * outside)
    channels = channel_count(site)
    share = float(facts()["efficiency"]["tree"])
    cap = channels * site.figure("tree") * _GB / 2
    if protocol == "LL":
        cap = min(cap / 3.8, site.figure("ll") * _GB / 2)
    elif protocol == "LL128":
        cap = min(cap * 120 / 128, channels * site.figure("tree_ll128") * _GB / 2)
    correction = tuple(float(x) for x in facts()["tree_correction"][protocol])
    return _candidate(site, "Tree", protocol, latency, tree_loads(place, 2.0, 2.0 / share), 1.0, cap, channels, 6.0,
                      correction)


def _multicast(site: Site) -> Candidate:
    """NVLink SHARP inside the nodes; between nodes a double binary tree (NVLSTree): two nodes cross once."""
    place = site.place
    table = facts()["latency_us"]
    outside = 0.0 if place.nodes == 1 else 1.0 if place.nodes == 2 else 2.0
    latency = _us("base_ring", "Simple") + float(table["nvls"])
    efficiency = site.figure("nvls")
    if place.nodes > 1:
        latency += 2 * log2(place.nodes) * (float(table["nvls_net"]) + 2 * _plugin_us(site))
        efficiency *= float(facts()["efficiency"]["nvls_tree"])
    cap = site.speeds.gpu * efficiency / (1 + 1 / place.per_node)
    channels = site.channels or int(site.figure("nvls_channels"))
    return _candidate(site, "NVLS" if place.nodes == 1 else "NVLSTree", "Simple", latency,
                      multicast_loads(place, outside), 1.0, cap, channels, 2.0 + 2.0 / place.per_node)


def _send(site: Site) -> Candidate:
    near = site.place.nodes == 1
    table = facts()["latency_us"]
    hop = float(table["p2p_peer"]) if near else float(table["p2p_net_peer"]) + _plugin_us(site)
    cap = site.inside_bps(one_peer=True) if near else float("inf")
    loads = shift_loads(site.place, site.speeds.p2p)
    return _candidate(site, "P2P", "Simple", _us("base_ring", "LL") + hop, loads, 1.0, cap, _P2P_CHANNELS, 3.0)


def _exchange(site: Site) -> Candidate:
    place = site.place
    table = facts()["latency_us"]
    remote = place.size - place.per_node
    latency = (_us("base_ring", "Simple") + (_plugin_us(site) if remote else 0.0)
               + (place.per_node - 1) * float(table["p2p_peer"]) + remote * float(table["p2p_net_peer"]))
    share = (place.per_node - 1) / place.size
    cap = site.inside_bps() / share if share > 0 else float("inf")
    return _candidate(site, "P2P", "Simple", latency, exchange_loads(place, site.speeds.p2p), 1.0, cap,
                      channel_count(site), 3.0)


def _candidate(site: Site, algorithm: str, protocol: str, latency_us: float, loads: Loads, volume: float,
               cap_bps: float, channels: int, hbm: float, correction: tuple[float, ...] = ()) -> Candidate:
    wire = _WIRE[protocol] if algorithm in ("Ring", "Tree") else 1.0
    ramp = facts()["ramp"]
    name = {"Ring": "ring", "Tree": "tree", "P2P": "p2p"}.get(algorithm, "nvls")
    ramp_us = latency_us * float(ramp[name]) if protocol == "Simple" else 0.0
    return Candidate(algorithm, protocol, latency_us * _US, ramp_us * _US, channels * float(ramp["bytes_per_channel"]),
                     loads, volume * wire, cap_bps, channels, hbm, correction)


def build(choice: Candidate, size_bytes: int, alone_bps: float) -> Coflow:
    """The coflow of a call of `size_bytes` served by `choice`, which alone runs at `alone_bps`."""
    channels = min(choice.channels, max(1, ceil(size_bytes / _BYTES_PER_CHANNEL)))
    return Coflow(
        latency_s=choice.latency_at(size_bytes, alone_bps), size_bytes=float(size_bytes),
        links=tuple(link for link, _ in choice.loads), loads=tuple(load * choice.factor for _, load in choice.loads),
        cap_bps=choice.cap_bps, channels=channels, hbm_bytes_per_byte=choice.hbm, weight=float(choice.channels),
        algorithm=choice.algorithm, protocol=choice.protocol)
