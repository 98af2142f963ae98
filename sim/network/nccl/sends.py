"""Sends and all-to-alls: what NCCL's grouped sends to peers cost, and kernels that write into their peers' memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from sim.network.fabric.routes import Loads, exchange_loads, shift_loads
from sim.network.fabric.topology import facts
from sim.network.nccl.candidate import OPENS, WIRE, Ahead, Candidate
from sim.network.nccl.site import Pushing, Site, power_of_two
from sim.network.nccl.tuner import Judgement

_US, _GB = 1e-6, 1e9
_INFINITE = float("inf")
#: Bytes of a send up to which it goes in LL (nccl src/enqueue.cc, NCCL_P2P_LL_THRESHOLD).
_P2P_LL_BYTES = 16384
#: Protocols of sends; over a network LL has no buffers (nccl src/transport/net.cc, NCCL_ALLOC_P2P_NET_LL_BUFFERS).
_SENT = ("LL", "Simple")
#: Of a channel's Simple buffer (nccl src/init.cc, DEFAULT_BUFFSIZE).
_BUFFER_BYTES = 1 << 22
#: Peers that the warps of one channel serve at once (nccl src/include/device.h, NCCL_MAX_DEV_WORK_P2P_PER_BATCH).
_PEERS_AT_ONCE = 8
#: A chunk of a send inside a node over NVLink and over PCIe (nccl src/init.cc, NCCL_P2P_NVL_CHUNKSIZE, _PCI_CHUNKSIZE).
_SEND_CHUNK = {"nvlink": 1 << 19, "pcie": 1 << 17}


def sends(kind: str, site: Site) -> Iterator[Candidate]:
    """All ways to serve sends (`send`, `recv`, `send_recv`) or an `all_to_all` on `site`."""
    if kind != "all_to_all":
        yield from (_send(site, protocol) for protocol in (_SENT if site.place.nodes == 1 else _SENT[1:]))
    elif site.one_sided is not None:
        yield _pushed(site, site.one_sided)
    else:
        yield from (_exchange(site, protocol) for protocol in _SENT)


def _send(site: Site, protocol: str) -> Candidate:
    place, near = site.place, site.place.nodes == 1
    figures = site.figures
    hop = site.step_us(protocol) if near else figures[f"p2p_net_us.{site.fabric}"] + site.fabric_us()
    cap = site.inside_bps("one_way" if place.size == 2 else "one") if near else _INFINITE
    loads, channels = shift_loads(place, site.speeds.p2p), site.pair_channels()
    found = _direct(site, protocol, site.base_us(protocol) + hop, loads, cap, channels, 1)
    # One way a link carries more than at a ring's rate, by which its capacity is counted.
    alone = min(1.0, site.inside_bps() / cap) if near and place.size == 2 else 1.0
    ahead = Ahead(hop * _US, channels * _BUFFER_BYTES, channels * site.channel_bps("Simple"))
    return replace(found, factor=found.factor * alone, copies=(0.0, 0.0) if near else _copies(site, 1, 1),
                   ahead=ahead if near and (site.reads() or protocol == "LL") else None)


def _exchange(site: Site, protocol: str) -> Candidate:
    """Grouped sends to every other rank: those of the node at once, as far as channels have warps for them, in LL in
    steps as of a ring, in Simple with a start of their own (nccl src/device/sendrecv.h; src/enqueue.cc,
    ncclAddWorkBatchToPlan); beside them those behind the NICs, one after another as the proxy comes to them, which
    starts when the kernel does, in Simple whatever those of the node take. Inside one node every peer has its share of
    the channels (src/enqueue.cc, scheduleP2pTasksToPlan), each a chunk behind."""
    place, figures = site.place, site.figures
    remote = place.size - place.per_node
    rounds = -(-(place.per_node - 1) // (_PEERS_AT_ONCE * site.channel_count()))
    crossing = "Simple" if remote else protocol
    latency = site.base_us(crossing) + rounds * site.step_us(protocol)
    if remote:
        peer_us = figures[f"p2p_net_us.{site.fabric}"]
        latency = max(latency, site.fabric_us() + max(site.base_us("Simple") + peer_us, remote * peer_us))
    elif protocol == "Simple":
        latency = figures["exchange_us.all"] + (rounds - 1) * site.step_us(protocol)
    share = (place.per_node - 1) / place.size
    cap = site.inside_bps("all") / share if share > 0 else _INFINITE
    found = _direct(site, protocol, latency, exchange_loads(place, site.speeds.p2p), cap,
                    site.channel_count(), place.size)
    if not remote:
        each = min(site.pair_channels(), max(1, power_of_two(site.channel_count()) // place.size))
        # half of a block's warps send, its own rank's part included, the others receive
        blocks_bps = min(place.size * each, power_of_two(site.channel_count())) * site.pass_bps() / 2
        most_bps = blocks_bps / WIRE[protocol] if site.wide() else _INFINITE
        return replace(found, cap_bps=min(found.cap_bps, most_bps), last_bps=blocks_bps,
                       last_bytes=float(place.size * each * _SEND_CHUNK[site.intra_link()]))
    copies = _copies(site, remote, place.size)
    return replace(found, factor=1.0, cap_bps=cap, opens_bytes=OPENS[crossing], copies=copies)


def _copies(site: Site, sends: int, parts: int) -> tuple[float, float]:
    """What `sends` of the least messages take more, where the fabric's provider writes their bytes into its command
    queue and must copy them out of the GPU first: up to which size of a call of `parts`, seconds.

    Source: libfabric 2.1.0 prov/cxi/src/cxip_msg.c, cxip_send_eager_idc, cxip_send_buf_init. What goes in LL lies in
    host memory.
    """
    least = float(facts()["fabrics"][site.fabric].get("copied_bytes", 0))
    return least * parts, sends * site.figures[f"copy_us.{site.fabric}"] * _US if least else 0.0


def _pushed(site: Site, kernels: Pushing) -> Candidate:
    """An all-to-all whose kernels write tokens into their peers' memory (DeepEP, HybridEP).

    All peers are served beside one another, by thread blocks and NIC queues of their own, so what grouped sends pay per
    peer is not paid. Its latency is one step in which ranks tell each other their counts and one in which the last
    token's flag arrives, or what was measured (`start_us`, and `double_us` more with every doubling of the nodes). The
    rate is the links', and of kernels that were measured what their thread blocks get through: a token is read and
    written once, and copied to each GPU it goes to, which costs its bytes and a start of its own (so few bytes and few
    copies are not proportionally faster), and between nodes once more to and from the NIC.
    """
    place, crosses = site.place, site.place.nodes > 1
    figures = facts()["one_sided"][kernels.kernel]
    if "start_us" in figures:
        latency = figures["start_us"] + figures["double_us"] * math.log2(place.nodes)
    else:
        step = site.figures[f"p2p_net_us.{site.fabric}"] + site.fabric_us() if crosses else site.step_us("LL")
        latency = site.base_us("Simple") + 2 * step
    share = (place.per_node - 1) / place.size
    cap = site.inside_bps() / share if share > 0 else _INFINITE
    if "gpu_copy" in figures:
        copy_s = figures["copy_us"] * _US / kernels.token_bytes + 1.0 / (figures["gpu_copy"] * _GB)
        token_s = 1.0 / (figures["token"] * _GB) + _spread(place.size, kernels.top_k) * copy_s
        sent = _spread(place.nodes if crosses else place.size, kernels.top_k)  # times that a token is counted
        sm_s = token_s / sent + (1.0 / (figures["node_copy"] * _GB) if crosses else 0.0)
        cap = min(cap, figures["sms"] / sm_s)
    return Candidate(
        "one-sided", "Simple", None, latency * _US, 0.0, 1.0, 1.0, _INFINITE, (),
        exchange_loads(place, figures.get("nic_share", site.speeds.p2p)), 1.0, cap, figures["sms"], 3.0)


def _spread(places: int, top_k: int) -> float:
    """Of so many places with as many experts each, those that hold one of a token's `top_k`, drawn evenly."""
    return places * (1.0 - (1.0 - 1.0 / places) ** top_k)


def _direct(site: Site, protocol: str, latency_us: float, loads: Loads, cap_bps: float, channels: int,
            peers: int) -> Candidate:
    """A group of sends that takes `latency_us` beside its bytes.

    NCCL's rule: messages of up to `_P2P_LL_BYTES` to a peer go in LL; the `peers` share the call's bytes.
    """
    low = protocol == "LL"
    rule = Judgement(1.0, _INFINITE, (), 3.0, _P2P_LL_BYTES * peers + 1.0) if low else Judgement(2.0, _INFINITE)
    moved = (peers - 1) / peers if peers > 1 else 1.0
    cap_bps = min(cap_bps, channels * site.channel_bps("Simple") / moved) / WIRE[protocol]
    return Candidate(
        "P2P", protocol, rule, latency_us * _US, 0.0, 1.0, OPENS[protocol],
        site.channel_bps(protocol) if low else _INFINITE, (), loads, WIRE[protocol], cap_bps, channels, 3.0)
