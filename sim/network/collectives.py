"""What a collective costs: the ways NCCL could serve it, the latency of each and its load on every link.

NCCL chooses by its own estimates (`tuner.py`); what the choice then takes is modelled here from links and measured
figures: time = base + steps x step + ramp(size) + size / rate, the rate that of the channels a call opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from sim.network.candidate import OPENS, WIRE, Candidate, Slices
from sim.network.routes import multicast_loads, ring_loads, tree_loads
from sim.network.sends import sends
from sim.network.site import PROTOCOLS, Site
from sim.network.tuner import judge

_US = 1e-6
_GB = 1e9
#: Compute capability (times ten) of GPUs from which nothing is flushed.
_UNFLUSHED = 90
#: Slots of a connection's buffer (NCCL_STEPS, nccl src/include/device.h).
_SLOTS = 8
#: Bytes per rank and channel from which a Simple step is two slices, hence two messages (nccl: least slice 32 KiB).
_TWO_SLICES = 65536
#: Bytes of a message from which libfabric providers take a rendezvous (fi_cxi: 16 KiB receive buffers for two).
_EAGER_BYTES = 8192
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
        channel_bps = min(channel_bps, site.speeds.nic / WIRE[protocol])
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
    return (_EAGER_BYTES / WIRE[protocol] * cells, slow), (0.0, small)


def _ring(kind: str, site: Site, protocol: str) -> Candidate:
    n, nodes = site.place.size, site.place.nodes
    passes = 2 if kind == "all_reduce" else 1
    steps = passes * (n - 1)
    volume = 1.0 if kind in ("broadcast", "reduce") else steps / n
    hops = passes * (nodes - 1)
    figures, channels = site.figures, site.channel_count()
    walk = (steps - hops) * site.step_us(protocol) + hops * _outside_us(site, protocol)
    cap = _INFINITE
    if site.place.per_node > 1:
        cap = site.inside_bps("ring" if n == 2 else "")
        if nodes > 1:
            cap *= site.place.per_node / (site.place.per_node - 1)
    cap = _protocol_cap(site, protocol, cap)
    slices = None
    if protocol == "Simple" and kind not in ("broadcast", "reduce"):
        overhead = figures["slice_share.all"] * site.step_us(protocol) * _US
        slices, walk = Slices(steps, n * channels, overhead, walk / steps * _US, hops / steps), 0.0
    return Candidate(
        "Ring", protocol, judge(kind, "Ring", protocol, site), (figures[f"base_us.{protocol}"] + walk) * _US,
        0.0, 1.0, OPENS[protocol] * (n if protocol == "LL" else 1),
        site.channel_bps(protocol) / volume, _messages(site, protocol, steps),
        ring_loads(site.place, channels), volume * WIRE[protocol], cap / volume, channels,
        3 * volume, slices, OPENS[protocol] * n if protocol == "LL" else 0.0)


def _tree(site: Site, protocol: str) -> Candidate:
    """Double binary tree over nodes, a chain inside each."""
    place, figures = site.place, site.figures
    outside = 2 * log2(place.nodes) * _outside_us(site, protocol) * figures["tree_hop.all"]
    walk = 2 * (place.per_node - 1) * site.step_us(protocol) + outside
    channels = site.channel_count()
    cap = site.inside_bps("ring" if place.per_node == 2 else "") if place.per_node > 1 else _INFINITE
    return Candidate(
        "Tree", protocol, judge("all_reduce", "Tree", protocol, site), (figures[f"base_us.{protocol}"] + walk) * _US,
        outside * figures["ramp.tree"] * _US, figures["ramp_bytes.tree"] * channels, OPENS[protocol],
        site.channel_bps(protocol, "tree") / 2, (),
        tree_loads(place, 2.0, (1.0 if place.nodes == 2 else 2.0) / figures["tree_share.all"], channels),
        WIRE[protocol],
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
