"""Sends and all-to-alls: what NCCL's grouped sends to peers cost, and kernels that write into their peers' memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from sim.network.fabric.routes import Loads, exchange_loads, shift_loads
from sim.network.fabric.topology import facts
from sim.network.nccl.candidate import OPENS, WIRE, Ahead, Candidate
from sim.network.nccl.site import Pushing, Site
from sim.network.nccl.tuner import Judgement

_US, _GB = 1e-6, 1e9
_INFINITE = float("inf")
#: Bytes of a channel's part of a send up to which it goes in LL (nccl src/enqueue.cc, NCCL_P2P_LL_THRESHOLD).
_P2P_LL_BYTES = 16384
#: Protocols of sends; over a network LL has no buffers (nccl src/transport/net.cc, NCCL_ALLOC_P2P_NET_LL_BUFFERS).
_SENT = ("LL", "Simple")
#: Of a channel's Simple buffer (nccl src/init.cc, DEFAULT_BUFFSIZE).
_BUFFER_BYTES = 1 << 22
#: Peers that the warps of one channel serve at once (nccl src/include/device.h, NCCL_MAX_DEV_WORK_P2P_PER_BATCH).
_PEERS_AT_ONCE = 8
#: A part of a send with a channel of its own is at least this share of its chunk (nccl src/enqueue.cc, addP2pToPlan:
#: minPartSize inside a node); a chunk in LL: an eighth of its buffer.
_PARTS, _LL_CHUNK = 8, 1 << 16
#: Releases from and before which NCCL took LL for `_P2P_LL_BYTES` times as many channels as a peer can have, and cut
#: such sends by LL's chunks; earlier and later ones count channels by Simple's chunks and then ask how large a part is
#: (addP2pToPlan disassembled: 2.21.5 compares a part with the threshold, 2.22.3 and 2.28.9 a send with it times the
#: most channels, 2.29.2, 2.29.3 and 2.30.7 with it times those counted).
_FIRST_LL = (2, 22), (2, 29)
#: A chunk of a send inside a node over NVLink and over PCIe (nccl src/init.cc, NCCL_P2P_NVL_CHUNKSIZE, _PCI_CHUNKSIZE).
_SEND_CHUNK = {"nvlink": 1 << 19, "pcie": 1 << 17}


def sends(kind: str, site: Site) -> Iterator[Candidate]:
    """All ways to serve sends (`send`, `recv`, `send_recv`) or an `all_to_all` on `site`."""
    if kind != "all_to_all":
        yield from (_send(site, protocol) for protocol in (_SENT if site.place.nodes == 1 else _SENT[1:]))
    elif site.one_sided is not None:
        yield _pushed(site, site.one_sided)
    else:
        exchange = _inside if site.place.nodes == 1 else _exchange
        yield from (exchange(site, protocol) for protocol in _SENT)


def _send(site: Site, protocol: str) -> Candidate:
    place, near = site.place, site.place.nodes == 1
    figures = site.figures
    hop = site.step_us(protocol) if near else figures[f"p2p_net_us.{site.fabric}"] + site.fabric_us()
    cap = site.inside_bps("one_way" if place.size == 2 else "one") if near else _INFINITE
    loads, channels = shift_loads(place, site.speeds.p2p), site.pair_channels()
    found = _direct(site, protocol, site.base_us(protocol) + hop, loads, cap, channels, 1, _most_ll(site, channels))
    # One way a link carries more than at a ring's rate, by which its capacity is counted.
    alone = min(1.0, site.inside_bps() / cap) if near and place.size == 2 else 1.0
    ahead = Ahead(hop * _US, channels * _BUFFER_BYTES, channels * site.channel_bps("Simple"))
    return replace(found, factor=found.factor * alone, copies=(0.0, 0.0) if near else _copies(site, 1, 1),
                   opens_bytes=_least_part(site, protocol == "LL") if near else found.opens_bytes,
                   ahead=ahead if near and (site.reads() or protocol == "LL") else None)


def _exchange(site: Site, protocol: str) -> Candidate:
    """Grouped sends to every other rank where nodes are several: those of the node at once, as far as channels have
    warps for them (nccl src/device/sendrecv.h; src/enqueue.cc, ncclAddWorkBatchToPlan); beside them those behind the
    NICs, one after another as the proxy comes to them, which starts when the kernel does, in Simple whatever those of
    the node take."""
    place, figures = site.place, site.figures
    remote = place.size - place.per_node
    rounds = -(-(place.per_node - 1) // (_PEERS_AT_ONCE * site.channel_count()))
    peer_us = figures[f"p2p_net_us.{site.fabric}"]
    latency = max(site.base_us("Simple") + rounds * site.step_us(protocol),
                  site.fabric_us() + max(site.base_us("Simple") + peer_us, remote * peer_us))
    share = (place.per_node - 1) / place.size
    cap = site.inside_bps("all") / share if share > 0 else _INFINITE
    found = _direct(site, protocol, latency, exchange_loads(place, site.speeds.p2p), cap,
                    site.channel_count(), place.size, _P2P_LL_BYTES)
    copies = _copies(site, remote, place.size)
    return replace(found, factor=1.0, cap_bps=cap, opens_bytes=OPENS["Simple"], copies=copies)


def _inside(site: Site, protocol: str) -> Candidate:
    """Grouped sends to every other rank of a node, all at once: every peer has its share of the channels (nccl
    src/enqueue.cc, scheduleP2pTasksToPlan) and opens one for each `_least_part` of its bytes.

    Half of a block's warps send, the other half receive (src/device/sendrecv.h). In Simple a receiver copies a chunk
    out of its buffer when all of it has come, so the last one, or the only one, is copied after all has been sent; by
    then at the block's whole rate. In LL it reads what comes as it comes. A call ends when the last of all peers has
    come to it, which takes a step more with every doubling of them (measured; why so much is inferred).
    """
    place, low = site.place, protocol == "LL"
    own = site.shared_channels()
    blocks = min(place.size * own, site.exchange_channels())
    latency = (site.base_us("LL") if low else site.own("exchange_us")) + math.log2(place.size) * site.step_us("LL")
    latency += (place.size - 2) // (_PEERS_AT_ONCE * blocks) * site.step_us(protocol)
    channel_bps = (site.channel_bps("LL") if low else site.pass_bps() if site.wide() else _INFINITE) / 2
    found = _direct(site, protocol, latency, exchange_loads(place, site.speeds.p2p),
                    site.inside_bps("all") * place.size / (place.size - 1), blocks, place.size, _most_ll(site, own))
    return replace(
        found, cap_bps=min(found.cap_bps, blocks * channel_bps), channel_bps=channel_bps,
        opens_bytes=_least_part(site, low), least_channels=min(place.size, blocks), last_bps=site.pass_bps(),
        last_bytes=0.0 if low else place.size * own / blocks * _SEND_CHUNK[site.intra_link()])


def _by_ll(site: Site) -> bool:
    """Whether a send's protocol is chosen before its channels are counted."""
    return _FIRST_LL[0] <= site.version < _FIRST_LL[1]


def _most_ll(site: Site, channels: int) -> int:
    """Bytes to a peer up to which a send inside a node goes in LL, where a peer has `channels` of the call."""
    if _by_ll(site):
        return _P2P_LL_BYTES * site.peer_channels()
    return _P2P_LL_BYTES * (channels if _least_part(site, low=False) <= _P2P_LL_BYTES else 1)


def _least_part(site: Site, low: bool) -> float:
    """Bytes of a send inside a node from which it opens another channel."""
    return (_LL_CHUNK if low and _by_ll(site) else _SEND_CHUNK[site.intra_link()]) / _PARTS


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
            peers: int, most_ll: int) -> Candidate:
    """A group of sends that takes `latency_us` beside its bytes.

    NCCL's rule: messages of up to `most_ll` to a peer go in LL; the `peers` share the call's bytes.
    """
    low = protocol == "LL"
    rule = Judgement(1.0, _INFINITE, (), 3.0, most_ll * peers + 1.0) if low else Judgement(2.0, _INFINITE)
    moved = (peers - 1) / peers if peers > 1 else 1.0
    cap_bps = min(cap_bps, channels * site.channel_bps("Simple") / moved) / WIRE[protocol]
    return Candidate(
        "P2P", protocol, rule, latency_us * _US, 0.0, 1.0, OPENS[protocol],
        site.channel_bps(protocol) if low else _INFINITE, (), loads, WIRE[protocol], cap_bps, channels, 3.0)
