"""What the ways to serve a call need to know of one communicator: where it lies, on what, with which figures."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from sim.network.figures import Figures
from sim.network.routes import Placement
from sim.network.topology import Speeds, Topology, facts

PROTOCOLS = ("LL", "LL128", "Simple")
_GB = 1e9
#: Links to one peer from which a pair of GPUs no longer fills them all (pair_share); the one or two of a V100 it does.
_WIDE_PAIR = 4
#: Channels of a ring over PCIe: the search finds one at the slot's speed (nccl src/graph/search.cc) and doubles it
#: (ncclTopoPostset, src/graph/connect.cc).
_PCIE_CHANNELS = 2
#: Most channels of a send (NCCL logs of 8 A100 and 8 H100: "32 p2p channels per peer"; unverified), and what NCCL
#: counts per channel of a NIC's speed, GB/s (ncclTopoGetNchannels).
_PAIR_CHANNELS, _NIC_PER_CHANNEL = 32, 14


@dataclass(frozen=True, slots=True)
class Site:
    """One communicator on one machine.

    Attributes:
        judged: speeds NCCL judges by: the topology's own, whatever bandwidth the user puts in their place. So a what-if
            of faster links keeps the choices and can never come out slower.
        channels: forced by the user, None for NCCL's own count.
        version: NCCL's, (major, minor).
        one_sided: all-to-alls are kernels that write into their peers' memory, not NCCL's grouped sends.
    """

    topology: Topology
    speeds: Speeds
    place: Placement
    figures: Figures
    judged: Speeds
    channels: int | None = None
    version: tuple[int, ...] = (2, 30)
    one_sided: bool = False

    @property
    def fabric(self) -> str:
        """Key of `fabrics` in links.yaml."""
        return self.topology.inter.fabric

    def table(self, name: str) -> float:
        """A figure of NCCL's tuner for this GPU generation, by node count (1, 2, more) where it is a list."""
        value: Any = facts()["generations"][self.topology.generation][name]
        return float(value[min(self.place.nodes, 3) - 1] if isinstance(value, list) else value)

    def own(self, name: str) -> float:
        """A measured figure of this GPU generation."""
        return self.figures[f"{name}.{self.topology.generation}"]

    def plugin_us(self) -> float:
        """NIC latency the network plugin reports to NCCL, us."""
        value = facts()["fabrics"][self.fabric]["plugin_us"]
        return float(value[self.topology.generation] if isinstance(value, dict) else value)

    def fabric_us(self) -> float:
        """What the fabric really adds to a hop between nodes, us."""
        member = f"efa.{self.topology.generation}" if self.fabric == "efa" else self.fabric
        return self.figures[f"fabric_us.{member}"]

    def intra_link(self) -> str:
        """`nvlink` or `pcie`: what joins the group's GPUs inside a node."""
        return "pcie" if self.topology.intra.kind in ("pcie", "none") or self.place.rings == 0 else "nvlink"

    def inside_bps(self, peer: str = "") -> float:
        """What one GPU can send to its peers in Simple, bytes/s: its rings in a mesh, all its links on a switch.

        Args:
            peer: where only one peer is written to, `ring`, `send` (while receiving) or `one_way`; "" otherwise.
        """
        if self.intra_link() == "pcie":
            return self.speeds.pcie
        rings = self.place.rings
        whole = self.speeds.link * rings if rings > 0 else self.speeds.gpu
        if not peer or 0 <= rings < _WIDE_PAIR:
            return whole
        if peer == "one_way":
            return whole * self.figures["one_way_share.all"] / self.figures[f"link_share.{self.topology.intra.link}"]
        return whole * self.figures[f"pair_share.{peer}"]

    def tuner_inside_bps(self) -> float:
        """The same as NCCL's graph search counts it."""
        speeds = self.judged
        if self.intra_link() == "pcie":
            return speeds.pcie * speeds.tuner_pcie
        rings = self.place.rings
        return (speeds.link * rings if rings > 0 else speeds.gpu) * speeds.tuner_link

    def tuner_net_bps(self) -> float:
        """What the NICs of the group's GPUs in a node carry, as NCCL's graph search counts it, bytes/s."""
        groups = int(self.place.groups.max())
        return self.judged.nic_nominal * groups * float(facts()["tuner_net_share"])

    def channel_count(self) -> int:
        """Channels of a large call."""
        return self.channels or self.searched_channels()

    def searched_channels(self) -> int:
        """Channels NCCL's search finds, by which it judges: the generation's inside a node; two per NIC between nodes,
        within that. A limit of the user's cuts them afterwards (nccl src/graph/connect.cc)."""
        most = int(self.table("channels"))
        if self.place.nodes == 1:
            if self.intra_link() == "pcie":
                return _PCIE_CHANNELS
            return max(1, min(most, 2 * self.place.rings)) if self.place.rings > 0 else most
        nics = self.topology.inter.nics_per_node * int(self.place.groups.max()) / self.speeds.nic_groups
        return max(2, min(most, int(2 * nics)))

    def channel_bps(self, protocol: str, shape: str = "ring") -> float:
        """Most payload one channel of a ring or tree moves in `protocol`, one thread block, bytes/s.

        In LL measured; in LL128 and Simple what NCCL's tuner counts at most (perChMax* of src/graph/tuning.cc), in
        Simple that of a tree on one node, whose block passes as much up as down.
        """
        if protocol == "LL":
            return self.own("ll_channel_gbps") * _GB
        block_bps = self.table(f"{shape}_ll128" if protocol == "LL128" else "channel") * _GB
        if self.place.rings > 0:  # in a mesh a channel has the links of one pair, at some edge of its ring the fewest
            fewest = min(count for row in self.topology.intra.matrix for count in row if count)
            block_bps = min(block_bps, fewest * self.speeds.link)
        return block_bps

    def multicast_channels(self) -> int:
        """Channels of NVLink SHARP."""
        return self.channels or self.searched_multicast()

    def searched_multicast(self) -> int:
        """Channels of NVLink SHARP by which NCCL judges."""
        return max(2, int(self.table("nvls_channels")))

    def pair_channels(self) -> int:
        """Channels of one send: two per link to the peer, or one per 14 GB/s of the NIC and two at least; a power of
        two (nccl src/graph/paths.cc, ncclTopoComputeP2pChannels)."""
        if self.place.nodes > 1:
            wanted = max(2, ceil(self.judged.nic_nominal / (_NIC_PER_CHANNEL * _GB)))
        elif self.intra_link() == "pcie":
            wanted = _PCIE_CHANNELS
        else:
            wanted = 2 * (self.place.rings if self.place.rings > 0 else self.topology.intra.links_per_gpu)
        found = min(_PAIR_CHANNELS, 1 << (wanted - 1).bit_length())
        return min(found, self.channels or found)

    def ll128(self) -> bool:
        """Whether LL128 may serve: NVLink inside, and a fabric that keeps 128-byte stores whole."""
        crossing = self.place.nodes == 1 or bool(facts()["fabrics"][self.fabric]["ll128"])
        return self.intra_link() == "nvlink" and crossing and self.version >= (2, 5)

    def multicast(self) -> bool:
        """NVLink SHARP: Hopper and later behind a switch, NCCL 2.17 on (release notes)."""
        return (self.topology.intra.kind == "nvswitch" and self.table("nvls") > 0 and self.place.per_node > 2
                and self.version >= (2, 17))
