"""What NCCL keeps on a GPU for one communicator: the buffers of its connections, channel by channel.

A connection has a buffer per protocol. Between GPUs that reach each other's memory all of them lie on the devices,
between nodes on the device where the NIC reads it (GPUDirect RDMA) and in pinned host memory where it does not. Sizes
and conditions: nccl 2.29.7 src/init.cc (computeBuffSizes), src/transport/p2p.cc (p2pSendSetup, p2pRecvSetup),
src/transport/net.cc (sendProxyConnect, recvProxyConnect, sharedNetBuffersInit), src/transport/nvls.cc
(ncclNvlsBufferSetup); the same in 2.13 (rccl 5.4.3) but for NVLink SHARP. Which connections there are: rings and trees
of every channel (ncclTransportRingConnect, ncclTransportTreeConnect), sends when they are first made. From NCCL 2.22
on an algorithm is connected when a call first takes it (src/init.cc, runtimeConn; src/group.cc, ncclCollPreconnect;
NCCL_RUNTIME_CONNECT, 1 in the binary of 2.22.3 and not in that of 2.21.5), if memory comes from cuMem, as it does where
the driver can (NCCL_CUMEM_ENABLE, -2 in both).

Checks: 12 channels give 144 MiB to a pair and 288 to four GPUs; nccl#964 measured 544 and 688 MB with the context, the
same 400 beside both. Sends of all to all on eight H100 with their rings give 3,264 MiB; nccl#1685 measured 3.28 GB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.network.fabric.routes import place
from sim.network.fabric.topology import Speeds, Topology, staged_channels
from sim.network.nccl.candidate import Candidate
from sim.network.nccl.site import Site, power_of_two
from sim.network.network import allowed, choose, release

_MIB = 2**20
#: Buffers of one connection: LL 8 lines x 512 threads x 8 steps x 16 B, LL128 120 elements x 640 threads x 8 steps x
#: 8 B, Simple 4 MiB; each side is rounded up to pages of 2 MiB. Whichever side has Simple's (the sender's where NVLink
#: reads, the receiver's where it writes), a rank has as much for sending to one peer and receiving from one.
_INSIDE_BYTES = 12 * _MIB
#: Between nodes with GPUDirect RDMA: LL128 and Simple of the sender, all three of the receiver.
_CROSSING_BYTES = 20 * _MIB
#: Sends between nodes share one buffer per channel each way, 16 steps of 128 KiB (NCCL_SHARED_STEPS,
#: P2P_NET_CHUNKSIZE).
_SHARED_BYTES = 2 * 2 * _MIB
#: NVLink SHARP: per channel and rank of the node that is a head, 8 steps of 128 KiB up and as many down.
_MULTICAST_BYTES = 2 * _MIB
#: Release from which an algorithm is connected when it is first taken.
_LAZY = (2, 22)


class Connections:
    """One communicator, and what it holds on one of its ranks.

    Args:
        ranks: of the communicator, shape (size,); physical, as `topology` counts GPUs per node.
        nccl: a user's choices (as for `Network`), and NCCL's `version`.
    """

    def __init__(self, topology: Topology, speeds: Speeds, ranks: npt.NDArray[np.int64],
                 nccl: Mapping[str, Any]) -> None:
        self.size, self.nccl = int(ranks.size), nccl
        self._options: dict[str, list[tuple[Candidate, float]]] = {}  # by kind of collective
        if self.size > 1:
            self.where = where = place(ranks.reshape(1, -1), topology, speeds)
            self.site = Site(topology, speeds, where, topology.figures, speeds, nccl.get("channels"), release(nccl))

    def held_bytes(self, peers: int = 0, calls: Iterable[tuple[str, int]] | None = None) -> int:
        """Device memory, the mean over ranks.

        Args:
            peers: ranks of the communicator that this one sends to and receives from one by one.
            calls: its collectives as (a name of `sim.work.COLLECTIVES`, bytes of the full buffer); None: any.
        """
        if self.size < 2:
            return 0
        site, nodes, own = self.site, self.where.nodes, self.where.per_node
        staged = nodes > 1 and self.where.staged
        channels = staged_channels(int(self.where.groups.max()), own) if staged else site.channel_count()
        taken = None if calls is None or site.version < _LAZY else self._taken(calls)
        ring, tree, multicast = (taken is None or any(name in taken for name in names)
                                 for names in (("Ring",), ("Tree",), ("NVLS", "NVLSTree")))
        held = channels * _neighbours(self.size, nodes, own, ring, tree) * _INSIDE_BYTES
        if nodes > 1 and not staged:
            held += channels * _across(nodes, own, ring, tree) * _CROSSING_BYTES
        if site.multicast() and multicast:
            held += site.multicast_channels() * own * _MULTICAST_BYTES
        if peers:
            held += min(peers, own - 1) * site.pair_channels() * _INSIDE_BYTES
            if nodes > 1 and not staged:
                held += power_of_two(channels) * _SHARED_BYTES
        return round(held)

    def _taken(self, calls: Iterable[tuple[str, int]]) -> set[str]:
        """Algorithms that NCCL takes for any of the calls."""
        return {choose(self._ways(kind), size)[0].algorithm for kind, size in calls}

    def _ways(self, kind: str) -> list[tuple[Candidate, float]]:
        if kind not in self._options:
            self._options[kind] = [(way, 0.0) for way in allowed(kind, self.site, self.nccl)]
        return self._options[kind]


def _neighbours(size: int, nodes: int, own: int, ring: bool, tree: bool) -> float:
    """Peers of the node that a rank is connected to both ways, per channel: the ring's, and the tree's, a chain through
    the node that runs both ways along the ring."""
    if nodes == 1:
        if size == 2:
            return float(ring or tree)
        return (2 * size - 1) / size if ring and tree else ring * 1.0 + tree * 2 * (size - 1) / size
    return (2 if tree else int(ring)) * (own - 1) / own


def _across(nodes: int, own: int, ring: bool, tree: bool) -> float:
    """Connections both ways to other nodes per channel, shared by a node's ranks: the ring's one, and the mean of a
    double tree's, which of two nodes is one edge, between the same ranks as the ring's where they have one each."""
    trees = 2.0 - 2.0 / nodes
    if nodes == 2 and own == 1:
        return float(ring or tree)
    return (ring * 1.0 + tree * trees) / own
