"""What a collective costs: the ways NCCL could serve it, the latency of each and its load on every link.

NCCL chooses by its own estimates (`tuner.py`); what the choice then takes is modelled here from links and measured
figures: time = base + steps x step + what slices or chunks add + size / rate, that of the channels a call opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from sim.network.fabric.routes import multicast_loads, ring_loads, tree_loads
from sim.network.fabric.topology import staged_channels
from sim.network.nccl.candidate import LEAST_SLICE, OPENS, WHOLE_SLICE, WIRE, Candidate, Chunks, Slices
from sim.network.nccl.peer_sums import able, peer_sums
from sim.network.nccl.sends import sends
from sim.network.nccl.site import PROTOCOLS, Site
from sim.network.nccl.tuner import judge

_US = 1e-6
_GB = 1e9
#: Compute capability (times ten) of GPUs from which nothing is flushed.
_UNFLUSHED = 90
#: Messages of a connection on the way at once: slots of its buffer (NCCL_STEPS, nccl src/include/device.h), of which a
#: slice of a Simple ring takes two (ALLREDUCE_SLICESTEPS, src/include/collectives.h).
_SLOTS, _SLICE_SLOTS = 8, 2
#: Bytes per rank and channel from which a Simple step is two slices, hence two messages (nccl: least slice 32 KiB).
_TWO_SLICES = 65536
#: Bytes of a message from which libfabric providers take a rendezvous (fi_cxi: 16 KiB receive buffers for two).
_EAGER_BYTES = 8192
#: Release from which a tree's chunks in Simple stay whole: nccl src/enqueue.cc's compares with 32, 64 and 128 KiB stand
#: one set more in the binaries of 2.18.3 and 2.19.3 than in those of 2.20.5 and later; RCCL 5.4.3 has them, N29 not.
_WHOLE_CHUNKS = (2, 20)
#: Release from which a block takes a tree up and down at once; before, a channel carries all data up, then all down
#: (one group of threads has barriers in ncclAllReduceTree_sum_f32 of 2.4.2 and 2.5.6, two in that of 2.7.8).
_BOTH_WAYS = (2, 7)
#: Release from which a chunk is cut into slices before it is full (`WHOLE_SLICE`).
_HALF_SLICES = (2, 5)
#: Full chunks of trees: one of the 8 steps of each protocol's buffer (src/init.cc, computeBuffSizes), in LL half flags;
#: of NVLSTree, from four nodes on half of it (NVLS_CHUNKSIZE, NVLSTREE_MAX_CHUNKSIZE).
_TREE_CHUNKS = {"LL": 32768.0, "LL128": 576000.0, "Simple": 524288.0}
_MULTICAST_CHUNK = 131072.0
_INFINITE = float("inf")


def candidates(kind: str, site: Site) -> Iterator[Candidate]:
    """All ways to serve `kind` (a name of `sim.work.COLLECTIVES`) on `site`."""
    if kind in ("send", "recv", "send_recv", "all_to_all"):
        yield from sends(kind, site)
    else:
        for protocol in PROTOCOLS:
            if protocol != "LL128" or site.ll128():
                yield _ring(kind, site, protocol)
                if kind == "all_reduce" and site.place.nodes > 1:
                    yield _tree(site, protocol)
        if kind == "all_reduce" and site.multicast():
            yield _multicast(site)
        if kind == "all_reduce" and site.peer_sums and able(site):
            yield from peer_sums(site)


def _outside_us(site: Site, protocol: str, tree: bool = False) -> float:
    """One hop of a ring or tree between nodes, us. In Simple what arrives is flushed into GPUs before Hopper by a read
    of the NIC's own from the GPU beside it, which does not cross the fabric (nccl src/graph/paths.cc,
    ncclTopoNeedFlush; src/transport/net_ib/p2p.cc, ncclIbIflush); what goes through the host needs none."""
    own = site.figures[f"hop_us.{protocol}"] * (site.figures["tree_hop.all"] if tree and protocol != "Simple" else 1.0)
    flushed = protocol == "Simple" and site.capability() < _UNFLUSHED and not site.speeds.stage
    return own + site.fabric_us() + (site.figures[f"flush_us.{site.transport()}"] if flushed else 0.0)


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
        channel_bps = min(channel_bps, site.speeds.nic / WIRE[protocol])
    return min(cap_bps, site.channel_count() * channel_bps)


def _messages(site: Site, protocol: str, steps: int, opens_bytes: float) -> tuple[tuple[float, float], ...]:
    """Least time of a ring of `steps` over a fabric whose NICs pass one message at a time: `Candidate.floors`.

    The proxy beside a NIC serves its channels in turn (nccl src/proxy.cc, progressOps), of which a call opens one per
    `opens_bytes`. The first messages fill a buffer's slots without waiting: eight in LL, four slices in Simple. Where a
    plugin passes them to libfabric, messages beyond its eager limit take a rendezvous, as all of Simple do; NCCL's own
    transports write into announced addresses whatever the size (src/transport/net_ib/p2p.cc). A Simple step of
    `_TWO_SLICES` is two.
    """
    if site.place.nodes == 1:
        return ()
    figures, nics, channels = site.figures, int(site.place.groups.max()), site.channel_count()
    small_s = figures[f"message_us.{site.fabric}"] * _US
    slow_s = small_s * (max(1.0, figures["rendezvous.all"]) if site.transport() == "libfabric" else 1.0)
    cells, most = site.place.size * channels, -(-channels // nics)
    if protocol == "Simple":
        slots = _SLOTS // _SLICE_SLOTS
        each = max(0, steps - slots) * slow_s
        full = float(_TWO_SLICES * cells), most * max(0, 2 * steps - slots) * slow_s
    else:
        waiting = max(0, steps - _SLOTS)
        each, full = waiting * small_s, (_EAGER_BYTES / WIRE[protocol] * cells, most * waiting * slow_s)
    opened = [(opens_bytes * (1 + nics * (beside - 1)) if beside > 1 else 0.0, beside * each)
              for beside in range(most, 0, -1)]
    return full, *opened


def _ring(kind: str, site: Site, protocol: str) -> Candidate:
    n, nodes = site.place.size, site.place.nodes
    passes = 2 if kind == "all_reduce" else 1
    steps = passes * (n - 1)
    rooted = kind in ("broadcast", "reduce")
    volume = 1.0 if rooted else steps / n
    # Round a ring the slowest chunk crosses between nodes once for each of them and pass; from a root, to all others.
    hops = 0 if nodes == 1 else min(steps, passes * nodes - rooted)
    channels = site.channel_count()
    walk = (steps - hops) * site.step_us(protocol) + hops * _outside_us(site, protocol)
    cap = _INFINITE
    if site.place.per_node > 1:
        cap = site.inside_bps()
        if nodes > 1:
            cap *= site.place.per_node / (site.place.per_node - 1)
    cap = _protocol_cap(site, protocol, cap)
    slices = None
    if protocol == "Simple" and not rooted:
        least, each_us = LEAST_SLICE if site.version >= _HALF_SLICES else WHOLE_SLICE, walk / steps
        last_s = 1 / (n * channels * site.pass_bps()) if nodes == 1 and site.wide() else 0.0
        slices = Slices(steps, n * channels, _pace_s(site, protocol), each_us * _US, hops / steps, last_s, least)
        walk = 0.0
    opens_bytes = float(OPENS[protocol] * (n if protocol == "LL" else 1))
    # A block also works in the pass that follows its last send, which in Simple counts beside (`Slices.last_s`).
    work = volume + 1 / n if protocol != "Simple" and not rooted else volume
    channel_bps = site.channel_bps(protocol) / work
    return Candidate(
        "Ring", protocol, judge(kind, "Ring", protocol, site), (site.base_us(protocol) + walk) * _US,
        0.0, 1.0, opens_bytes, channel_bps,
        () if rooted else _messages(site, protocol, steps, opens_bytes), ring_loads(site.place, channels),
        volume * WIRE[protocol], min(cap / volume, channels * channel_bps), channels, 3 * volume, slices,
        OPENS[protocol] * n if protocol == "LL" else 0.0)


def _tree(site: Site, protocol: str) -> Candidate:
    """Double binary tree over nodes, a chain inside each."""
    place, figures = site.place, site.figures
    outside = _outside_us(site, protocol, tree=True)
    walk = 2 * ((place.per_node - 1) * site.step_us(protocol) + log2(place.nodes) * outside)
    channels = site.channel_count()
    cap = site.inside_bps() if place.per_node > 1 else _INFINITE
    channel_bps = site.channel_bps(protocol, "tree") / 2
    # One tree goes up where the other comes down: half of a NIC's channels are on the way at once.
    own_s = 1 / (site.proxied_ll_bps() if protocol == "LL" else channel_bps)
    path_s = 2 * log2(place.nodes) * (own_s + WIRE[protocol] * _crossing_s(site, channels / 2))
    if protocol == "Simple":
        path_s += 2 * (place.per_node - 1) * max(own_s, channels / cap)
    chunks = Chunks(_TREE_CHUNKS[protocol], _halvings(site, protocol), 1, path_s, own_s, _pace_s(site, protocol),
                    outside * _US / _SLOTS)
    crossing = 1.0 if place.nodes == 2 else 2.0
    cap = _protocol_cap(site, protocol, cap, "tree") / 2
    if site.speeds.stage and site.version < _BOTH_WAYS:  # half of the channels' streams are at work each way
        streams = staged_channels(int(place.groups.max()), place.per_node) / 2
        cap = min(cap, streams * site.speeds.stage / (crossing * WIRE[protocol]))
    return Candidate(
        "Tree", protocol, judge("all_reduce", "Tree", protocol, site), (site.base_us(protocol) + walk) * _US,
        0.0, 1.0, OPENS[protocol], channel_bps, (),
        tree_loads(place, 2.0, crossing / figures["tree_share.all"], channels),
        WIRE[protocol], cap, channels, 6.0, chunks=chunks)


def _halvings(site: Site, protocol: str) -> tuple[tuple[float, float], ...]:
    """Where a tree's chunks are halved (`Chunks`; nccl src/enqueue.cc, calcCollChunking)."""
    place, levels = site.place, int(log2(site.place.nodes))
    if protocol == "LL128":
        steps = (1 + levels + 0.1 * place.per_node) / place.per_node
        return (64 * steps, 131072.0), (16 * steps, 32768.0)
    if protocol == "LL" or site.version >= _WHOLE_CHUNKS:
        return ()
    depth = float(place.per_node - 1 + levels)
    return (8 * depth, 131072.0), (4 * depth, 65536.0), (depth, 32768.0)


def _crossing_s(site: Site, channels: float) -> float:
    """Time of a byte of every channel's chunk between nodes, with `channels` of a node on the way at once and as many
    children as a node has, seconds."""
    place, speeds = site.place, site.speeds
    children = 1 if place.nodes == 2 else 2
    alone = children * max(1.0, channels / int(place.groups.max())) / speeds.nic
    return max(alone, 1 / speeds.stage) if speeds.stage else alone


def _pace_s(site: Site, protocol: str) -> float:
    """What a rank spends on a slice or chunk of Simple beside its bytes, seconds; in LL nothing is waited for."""
    return site.slice_us() * _US if protocol == "Simple" else 0.0


def _multicast(site: Site) -> Candidate:
    """NVLink SHARP inside the nodes; between nodes a double binary tree (NVLSTree): two nodes cross once."""
    place, figures = site.place, site.figures
    one = place.nodes == 1
    walk, ramp = site.own("nvls_us"), figures["ramp.nvls"] * site.own("nvls_us")
    name = "NVLS" if one else "NVLSTree"
    channels = site.multicast_channels()
    channel_bps = site.table("nvls_tree") * _GB / 2
    inside_bps = site.speeds.gpu * site.own("nvls_share") / (1 + 1 / place.per_node)
    chunks = None
    if not one:
        hops, heads = 2 * log2(place.nodes), int(place.groups.max())
        outside = _outside_us(site, "Simple")
        walk += hops * outside
        inside_bps *= figures["nvls_tree_share.all"]
        own_s = 2 / site.channel_bps("Simple")
        path_s = heads * channels / inside_bps + hops * (own_s + _crossing_s(site, channels * heads / 2))
        most = _MULTICAST_CHUNK / (1 if place.nodes < 4 else 2)
        chunks = Chunks(most, ((4.0, 65536.0), (1.0, 32768.0)), heads, path_s, own_s, _pace_s(site, "Simple"),
                        outside * _US / _SLOTS)
    return Candidate(
        name, "Simple", judge("all_reduce", name, "Simple", site), (site.base_us("Simple") + walk) * _US, ramp * _US,
        figures["ramp_bytes.nvls"] * channels, 1.0, channel_bps, (),
        multicast_loads(place, 0.0 if one else 1.0 if place.nodes == 2 else 2.0, channels), 1.0,
        min(inside_bps, channels * channel_bps), channels, 2.0 + 2.0 / place.per_node, chunks=chunks)
