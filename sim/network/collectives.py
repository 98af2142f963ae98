"""What a collective costs: the ways NCCL could serve it, the latency of each and its load on every link.

NCCL chooses by its own estimates (`tuner.py`); what the choice then takes is modelled here from links and measured
measured figures: time = base + steps x step + ramp(size) + size / rate, the rate that of the channels a call opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log2, sqrt

from sim.network.fair_share import LinkId
from sim.network.routes import Loads, exchange_loads, multicast_loads, ring_loads, shift_loads, tree_loads
from sim.network.site import PROTOCOLS, Site
from sim.network.tuner import Judgement, judge

_US = 1e-6
_GB = 1e9
#: Bytes on the wire per byte of payload: LL 8 of 16, LL128 120 of 128 (nccl src/include/device.h).
_WIRE = {"LL": 2.0, "LL128": 128 / 120, "Simple": 1.0}
#: Bytes of a call from which another channel is opened: bytes a thread x threads (nccl src/graph/tuning.cc,
#: threadThresholds; src/enqueue.cc). A ring in LL multiplies them by its ranks.
_OPENS = {"LL": 8 * 512, "LL128": 8 * 640, "Simple": 64 * 512}
#: Bytes of a send up to which it goes in LL (nccl src/enqueue.cc, NCCL_P2P_LL_THRESHOLD).
_P2P_LL_BYTES = 16384
#: Protocols of sends; over a network LL has no buffers (nccl src/transport/net.cc, NCCL_ALLOC_P2P_NET_LL_BUFFERS).
_SENT = ("LL", "Simple")
#: Compute capability (times ten) of GPUs from which nothing is flushed.
_UNFLUSHED = 90
#: Slots of a connection's buffer (NCCL_STEPS, nccl src/include/device.h).
_SLOTS = 8
#: Of a channel's Simple buffer (nccl src/init.cc, DEFAULT_BUFFSIZE).
_BUFFER_BYTES = 1 << 22
#: Bytes per rank and channel from which a Simple step is two slices, hence two messages (nccl: least slice 32 KiB).
_TWO_SLICES = 65536
#: Bytes of a message from which libfabric providers take a rendezvous (fi_cxi: 16 KiB receive buffers for two).
_EAGER_BYTES = 8192
#: A full chunk of a Simple ring, two slices of it: 4 of the 8 steps of a 4 MiB buffer; and the least slice, a 32nd of a
#: full one (nccl src/include/collectives.h, ALLREDUCE_CHUNKSTEPS; src/init.cc, DEFAULT_BUFFSIZE; prims_simple.h).
_CHUNK_BYTES, _LEAST_SLICE = 1 << 21, 1 << 15
_INFINITE = float("inf")
#: SMs of a one-sided all-to-all (megatron-core 0.14.0 to 0.16.0 transformer_config.py: moe_deepep_num_sms 20,
#: moe_hybridep_num_sms 16; Megatron-Bridge 0.6.0 perf_recipes/_common.py: 32 for the latter).
_PUSHING_SMS = 20


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
class Slices:
    """How a Simple ring passes chunks on: each in two slices, so that one is sent while the next is awaited.

    A rank works through its slices one after another, and a chunk cannot start before its predecessor's has arrived: of
    both cycles the slower one sets the pace (the largest cycle mean of a max-plus system). Full chunks repeat.

    Attributes:
        steps: of the ring; cells: ranks x channels, which share the call's bytes.
        overhead_s: of a rank per slice: waiting, flags, fences; step_s: from a slice's start at one rank to that at the
            next, beyond its bytes, as a mean over the ring's edges.
        crossing: share of edges whose slices pass a NIC's buffers, which holds them once more.
    """

    steps: int
    cells: float
    overhead_s: float
    step_s: float
    crossing: float

    def beyond_s(self, size_bytes: float, moving_s: float) -> float:
        """Time of a call beyond the `moving_s` of its bytes, seconds."""
        chunk = size_bytes / self.cells
        rounds = self.steps * max(1.0, chunk / _CHUNK_BYTES)
        slices = min(2.0, max(1.0, chunk / _LEAST_SLICE))
        slice_s = moving_s / rounds / slices
        return rounds * max(slices * self.overhead_s, self.step_s + (1.0 + self.crossing - slices) * slice_s)


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far a sender is ahead of its receiver: it is through when what it sends lies in its buffers.

    Attributes:
        last_s: from the sender's last flag to the receiver's; buffer_bytes, copy_bps: of the sender's channels.
    """

    last_s: float
    buffer_bytes: float
    copy_bps: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """An (algorithm, protocol) that could serve a call, before the size is known.

    Attributes:
        judged: NCCL's estimate of it, None where there is no choice.
        latency_s: base and steps of the smallest call; ramp_s: most the pipeline's filling adds; ramp_bytes: size from
            which it adds it all.
        opens_bytes: a call opens one channel per so many bytes; channel_bps: what one moves, in bytes of the call.
        slices: of a Simple ring; first_bytes: of a call, what one channel's threads take at once, within the steps;
            ahead: of a lone send whose receiver fetches it.
        floors: least time over a fabric whose edges pass one message at a time, as (from this size on, seconds),
            largest size first.
        loads: per byte of the call; factor: multiplies every load; cap_bps; channels; hbm: as in `Coflow`.
    """

    algorithm: str
    protocol: str
    judged: Judgement | None
    latency_s: float
    ramp_s: float
    ramp_bytes: float
    opens_bytes: float
    channel_bps: float
    floors: tuple[tuple[float, float], ...]
    loads: Loads
    factor: float
    cap_bps: float
    channels: int
    hbm: float
    slices: Slices | None = None
    first_bytes: float = 0.0
    ahead: Ahead | None = None

    def open_channels(self, size_bytes: float) -> int:
        """Channels a call opens, hence SMs it holds."""
        return min(self.channels, max(1, int(size_bytes / self.opens_bytes)))

    def latency_at(self, size_bytes: float, rate_bps: float) -> float:
        """Time of a call beyond its bytes at `rate_bps`, seconds.

        Chunks of a pipeline grow with the call until they are full, so its filling costs X (1 - (1 - r)^2) with
        r = sqrt(size / ramp_bytes): the square-root law of optimal chunks below, constant above. While channels are
        still closed the others move all bytes.
        """
        r = min(1.0, sqrt(size_bytes / self.ramp_bytes))
        moving = size_bytes / rate_bps
        time = self.latency_s + self.ramp_s * r * (2.0 - r)
        if self.slices:
            time += self.slices.beyond_s(size_bytes, moving)
        opened = max(1.0, size_bytes / self.opens_bytes)
        each = size_bytes / min(opened, self.channels)
        time += max(0.0, max(0.0, each - self.first_bytes) / self.channel_bps - moving)
        for least, floor in self.floors:
            if size_bytes >= least:
                time = max(time, floor - moving)
                break
        return max(time, 0.0)

    def sender_s(self, size_bytes: float, rate_bps: float) -> float:
        """Time of the sender's own kernel, seconds; that of the call where it is no lone send."""
        whole = self.latency_at(size_bytes, rate_bps) + size_bytes / rate_bps
        if self.ahead is None:
            return whole
        beyond = max(0.0, size_bytes - self.ahead.buffer_bytes) / rate_bps
        filled = min(size_bytes, self.ahead.buffer_bytes) / self.ahead.copy_bps
        return min(whole, self.latency_s - self.ahead.last_s + filled + beyond)

    def rate(self, capacity: Callable[[LinkId], float]) -> float:
        """Rate alone, bytes/s of the call's size."""
        rate = self.cap_bps
        for link, load in self.loads:
            if load > 0:
                rate = min(rate, capacity(link) / (load * self.factor))
        return rate


def candidates(kind: str, site: Site) -> Iterator[Candidate]:
    """All ways to serve `kind` (a name of `sim.work.COLLECTIVES`) on `site`."""
    if kind in ("send", "recv", "send_recv"):
        yield from (_send(site, protocol) for protocol in (_SENT if site.place.nodes == 1 else _SENT[1:]))
    elif kind == "all_to_all" and site.one_sided:
        yield _pushed(site)
    elif kind == "all_to_all":
        yield from (_exchange(site, protocol) for protocol in _SENT)
    else:
        for protocol in PROTOCOLS:
            if protocol != "LL128" or site.ll128():
                yield _ring(kind, site, protocol)
                if kind == "all_reduce" and site.place.nodes > 1:
                    yield _tree(site, protocol)
        if kind == "all_reduce" and site.multicast():
            yield _multicast(site)


def _inside_us(site: Site, protocol: str) -> float:
    """One step between GPUs of a node, us."""
    if site.intra_link() == "pcie":
        return site.figures[f"step_us.pcie.{protocol}"]
    if protocol == "Simple":
        return site.figures["step_us.nvlink.read.all" if site.reads() else "step_us.nvlink.Simple.write"]
    return site.own(f"step_us.nvlink.{protocol}")


def _outside_us(site: Site, protocol: str) -> float:
    """One hop of a ring between nodes, us. In Simple what arrives is flushed into GPUs before Hopper by a read of its
    own (nccl src/graph/paths.cc, ncclTopoNeedFlush), so the fabric counts twice, as it does for NCCL's tuner."""
    flushed = protocol == "Simple" and site.capability() < _UNFLUSHED
    return site.figures[f"hop_us.{protocol}"] + site.fabric_us() * (2 if flushed else 1)


def _protocol_cap(site: Site, protocol: str, cap_bps: float, shape: str = "ring") -> float:
    """Payload rate of a ring's edge in `protocol`, bytes/s: that of Simple over its links, and its channels'."""
    if protocol == "LL":
        cap_bps /= 2
        if site.place.nodes > 1:
            cap_bps = min(cap_bps, site.channel_count() * site.own("ll_net_channel_gbps") * _GB)
    elif protocol == "LL128":
        cap_bps *= site.own("ll128_share")
    channel_bps = site.channel_bps(protocol, shape)
    if site.place.nodes > 1:  # a channel crosses by one NIC of a node
        channel_bps = min(channel_bps, site.speeds.nic / _WIRE[protocol])
    return min(cap_bps, site.channel_count() * channel_bps)


def _messages(site: Site, protocol: str, steps: int) -> tuple[tuple[float, float], ...]:
    """Least time of a ring of `steps` over a fabric whose edges pass one message at a time: `Candidate.floors`.

    The first `NCCL_STEPS` messages fill the buffer's slots without waiting. Messages beyond the fabric's eager limit
    take a rendezvous, as all of Simple do; a Simple step of more than `_TWO_SLICES` is two of them.
    """
    if site.place.nodes == 1:
        return ()
    figures = site.figures
    small = max(0, steps - _SLOTS) * figures[f"message_us.{site.fabric}"] * _US
    slow = small * max(1.0, figures["rendezvous.all"])
    cells = site.place.size * site.channel_count()
    if protocol == "Simple":
        return (_TWO_SLICES * cells, 2 * slow), (0.0, slow)
    return (_EAGER_BYTES / _WIRE[protocol] * cells, slow), (0.0, small)


def _ring(kind: str, site: Site, protocol: str) -> Candidate:
    n, nodes = site.place.size, site.place.nodes
    passes = 2 if kind == "all_reduce" else 1
    steps = passes * (n - 1)
    volume = 1.0 if kind in ("broadcast", "reduce") else steps / n
    hops = passes * (nodes - 1)
    figures, channels = site.figures, site.channel_count()
    walk = (steps - hops) * _inside_us(site, protocol) + hops * _outside_us(site, protocol)
    cap = _INFINITE
    if site.place.per_node > 1:
        cap = site.inside_bps("ring" if n == 2 else "")
        if nodes > 1:
            cap *= site.place.per_node / (site.place.per_node - 1)
    cap = _protocol_cap(site, protocol, cap)
    slices = None
    if protocol == "Simple" and kind not in ("broadcast", "reduce"):
        overhead = figures["slice_share.all"] * _inside_us(site, protocol) * _US
        slices, walk = Slices(steps, n * channels, overhead, walk / steps * _US, hops / steps), 0.0
    return Candidate(
        "Ring", protocol, judge(kind, "Ring", protocol, site), (figures[f"base_us.{protocol}"] + walk) * _US,
        0.0, 1.0, _OPENS[protocol] * (n if protocol == "LL" else 1),
        site.channel_bps(protocol) / volume, _messages(site, protocol, steps),
        ring_loads(site.place, channels), volume * _WIRE[protocol], cap / volume, channels,
        3 * volume, slices, _OPENS[protocol] * n if protocol == "LL" else 0.0)


def _tree(site: Site, protocol: str) -> Candidate:
    """Double binary tree over nodes, a chain inside each."""
    place, figures = site.place, site.figures
    outside = 2 * log2(place.nodes) * _outside_us(site, protocol) * figures["tree_hop.all"]
    walk = 2 * (place.per_node - 1) * _inside_us(site, protocol) + outside
    channels = site.channel_count()
    cap = site.inside_bps("ring" if place.per_node == 2 else "") if place.per_node > 1 else _INFINITE
    return Candidate(
        "Tree", protocol, judge("all_reduce", "Tree", protocol, site), (figures[f"base_us.{protocol}"] + walk) * _US,
        outside * figures["ramp.tree"] * _US, figures["ramp_bytes.tree"] * channels, _OPENS[protocol],
        site.channel_bps(protocol, "tree") / 2, (),
        tree_loads(place, 2.0, (1.0 if place.nodes == 2 else 2.0) / figures["tree_share.all"], channels),
        _WIRE[protocol],
        _protocol_cap(site, protocol, cap, "tree") / 2, channels, 6.0)


def _multicast(site: Site) -> Candidate:
    """NVLink SHARP inside the nodes; between nodes a double binary tree (NVLSTree): two nodes cross once."""
    place, figures = site.place, site.figures
    one = place.nodes == 1
    walk, ramp = site.own("nvls_us"), figures["ramp.nvls"] * site.own("nvls_us")
    efficiency = site.own("nvls_share")
    if not one:
        outside = 2 * log2(place.nodes) * _outside_us(site, "Simple")
        walk, ramp = walk + outside, ramp + outside * figures["ramp.nvls_tree"]
        efficiency *= figures["nvls_tree_share.all"]
    name = "NVLS" if one else "NVLSTree"
    channels = site.multicast_channels()
    channel_bps = site.table("nvls_tree") * _GB / 2
    return Candidate(
        name, "Simple", judge("all_reduce", name, "Simple", site), (figures["base_us.Simple"] + walk) * _US, ramp * _US,
        figures["ramp_bytes.nvls"] * channels, 1.0, channel_bps, (),
        multicast_loads(place, 0.0 if one else 1.0 if place.nodes == 2 else 2.0, channels), 1.0,
        min(site.speeds.gpu * efficiency / (1 + 1 / place.per_node), channels * channel_bps), channels,
        2.0 + 2.0 / place.per_node)


def _send(site: Site, protocol: str) -> Candidate:
    place, near = site.place, site.place.nodes == 1
    figures = site.figures
    hop = _inside_us(site, protocol) if near else figures[f"p2p_net_us.{site.fabric}"] + site.fabric_us()
    cap = site.inside_bps("one_way" if place.size == 2 else "send") if near else _INFINITE
    loads, channels = shift_loads(place, site.speeds.p2p), site.pair_channels()
    found = _direct(site, protocol, figures[f"base_us.{protocol}"] + hop, loads, cap, channels, 1)
    # One way a link carries more than at a ring's rate, by which its capacity is counted.
    alone = min(1.0, site.inside_bps() / cap) if near and place.size == 2 else 1.0
    ahead = Ahead(hop * _US, channels * _BUFFER_BYTES, channels * site.channel_bps("Simple")) if near else None
    return replace(found, factor=found.factor * alone, ahead=ahead if site.reads() or protocol == "LL" else None)


def _exchange(site: Site, protocol: str) -> Candidate:
    """Grouped sends to every other rank: peers of a node one round after another, each a step as of a ring; beside them
    those behind the NICs, one after another, in Simple whatever those of the node take."""
    place, figures = site.place, site.figures
    remote = place.size - place.per_node
    peers = (place.per_node - 1) * _inside_us(site, protocol)
    crossing = "Simple" if remote else protocol
    if remote:
        peers = max(peers, site.fabric_us() + (remote - 1) * figures[f"p2p_net_us.{site.fabric}"])
    share = (place.per_node - 1) / place.size
    cap = site.inside_bps() / share if share > 0 else _INFINITE
    found = _direct(site, protocol, figures[f"base_us.{crossing}"] + peers, exchange_loads(place, site.speeds.p2p), cap,
                    site.channel_count(), place.size)
    return replace(found, factor=1.0, cap_bps=cap, opens_bytes=_OPENS[crossing]) if remote else found


def _pushed(site: Site) -> Candidate:
    """An all-to-all whose kernels write tokens into their peers' memory (DeepEP, HybridEP).

    All peers are served beside one another, by thread blocks and NIC queues of their own, so what grouped sends pay per
    peer is not paid: one step in which ranks tell each other their counts, one in which the last token's flag arrives.
    The rate is the links': README of github.com/deepseek-ai/DeepEP, normal kernels on H800, 153-158 of 160 GB/s over
    NVLink on 8 ranks, 43-58 of 50 GB/s over InfiniBand on 16 to 64 (recalled).
    """
    place, crosses = site.place, site.place.nodes > 1
    step = site.figures[f"p2p_net_us.{site.fabric}"] + site.fabric_us() if crosses else _inside_us(site, "LL")
    latency = site.figures["base_us.Simple"] + 2 * step
    share = (place.per_node - 1) / place.size
    cap = site.inside_bps() / share if share > 0 else _INFINITE
    return Candidate(
        "one-sided", "Simple", None, latency * _US, 0.0, 1.0, 1.0, _INFINITE, (),
        exchange_loads(place, site.speeds.p2p), 1.0, cap, _PUSHING_SMS, 3.0)


def _direct(site: Site, protocol: str, latency_us: float, loads: Loads, cap_bps: float, channels: int,
            peers: int) -> Candidate:
    """A group of sends that takes `latency_us` beside its bytes.

    NCCL's rule: messages of up to `_P2P_LL_BYTES` to a peer go in LL; the `peers` share the call's bytes.
    """
    low = protocol == "LL"
    rule = Judgement(1.0, _INFINITE, (), 3.0, _P2P_LL_BYTES * peers + 1.0) if low else Judgement(2.0, _INFINITE)
    moved = (peers - 1) / peers if peers > 1 else 1.0
    cap_bps = min(cap_bps, channels * site.channel_bps("Simple") / moved) / _WIRE[protocol]
    return Candidate(
        "P2P", protocol, rule, latency_us * _US, 0.0, 1.0, _OPENS[protocol],
        site.channel_bps(protocol) if low else _INFINITE, (), loads, _WIRE[protocol], cap_bps, channels, 3.0)


def build(choice: Candidate, size_bytes: int, alone_bps: float) -> Coflow:
    """The coflow of a call of `size_bytes` served by `choice`, which alone runs at `alone_bps`."""
    channels = choice.open_channels(size_bytes)
    return Coflow(
        latency_s=choice.latency_at(size_bytes, alone_bps), size_bytes=float(size_bytes),
        links=tuple(link for link, _ in choice.loads), loads=tuple(load * choice.factor for _, load in choice.loads),
        cap_bps=choice.cap_bps, channels=channels, hbm_bytes_per_byte=choice.hbm, weight=float(choice.channels),
        algorithm=choice.algorithm, protocol=choice.protocol)
