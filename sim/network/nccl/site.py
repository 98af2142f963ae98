"""What the ways to serve a call need to know of one communicator: where it lies, on what, with which figures."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from sim.catalog import table
from sim.network.fabric.routes import Placement
from sim.network.fabric.topology import Speeds, Topology, facts
from sim.network.figures import Figures
from sim.network.nccl.search import Graph, compute_channels, era, search, speeds

PROTOCOLS = ("LL", "LL128", "Simple")
_GB = 1e9
_INFINITE = float("inf")
#: Compute capability (times ten) of GPUs that read over NVLink.
_READING = 80
#: NCCL's release, (major, minor), wherever a cluster or a table does not tell its own.
TODAY = (2, 30)
#: Release from which a plugin may bring a tuner (ncclTunerPlugin_v2; a log of AWS's beside NCCL 2.20.3).
_TUNER_PLUGIN = (2, 19)
#: Links to one peer from which a pair of GPUs no longer fills them all; the one or two of a V100 it does.
_WIDE_PAIR = 4
#: Compute capability (times ten) of GPUs whose writes over NVLink take as a step of theirs what Blackwell's do.
_BLACKWELL = 100
#: Channels of a send over PCIe (ncclTopoGetNchannels, src/graph/paths.cc).
_PCIE_CHANNELS = 2
#: Most channels of a send (NCCL logs of 8 A100 and 8 H100: "32 p2p channels per peer"; unverified), and what NCCL
#: counts per channel of a NIC's speed, GB/s (ncclTopoGetNchannels).
_PAIR_CHANNELS, _NIC_PER_CHANNEL = 32, 14


@dataclass(frozen=True, slots=True)
class Pushing:
    """Kernels that write tokens into their peers' memory: `kernel`, a key of `one_sided` in links.yaml, the experts
    `top_k` each token is for, and a token's bytes."""

    kernel: str
    top_k: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Site:
    """One communicator on one machine.

    Attributes:
        judged: speeds NCCL judges by: the topology's own, whatever bandwidth the user puts in their place. So a what-if
            of faster links keeps the choices and can never come out slower.
        channels: forced by the user, None for NCCL's own count.
        version: NCCL's, (major, minor) and patch if told.
        one_sided: what all-to-alls are where they are not NCCL's grouped sends.
        peer_sums: whose kernels small all-reduces are where NVLink joins all, a table of `sums.yaml`; "" = NCCL's.
    """

    topology: Topology
    speeds: Speeds
    place: Placement
    figures: Figures
    judged: Speeds
    channels: int | None = None
    version: tuple[int, ...] = TODAY
    one_sided: Pushing | None = None
    peer_sums: str = ""

    @property
    def fabric(self) -> str:
        """Key of `fabrics` in links.yaml."""
        return self.topology.inter.fabric

    def table(self, name: str) -> float:
        """A figure of NCCL's tuner for this GPU generation, by node count (1, 2, more) where it is a list; that of the
        release where it had another (`tables` of tuner.yaml)."""
        generation = self.topology.generation
        value: Any = self.era("tables").get(name, {}).get(generation, facts()["generations"][generation][name])
        return float(value[min(self.place.nodes, 3) - 1] if isinstance(value, list) else value)

    def own(self, name: str) -> float:
        """A measured figure of this GPU generation."""
        return self.figures[f"{name}.{self.topology.generation}"]

    def plugin_us(self) -> float:
        """NIC latency the network plugin reports to NCCL, us; where the plugin brings a tuner, what that counts with
        (it is given NCCL's place, and taken to differ in this figure alone)."""
        fabric = facts()["fabrics"][self.fabric]
        own = fabric.get("tuner_us", {}) if self.version >= _TUNER_PLUGIN else {}
        if self.topology.generation in own:
            return float(own[self.topology.generation])
        value = fabric["plugin_us"]
        return float(value[self.topology.generation] if isinstance(value, dict) else value)

    def transport(self) -> str:
        """What carries messages between nodes: `libfabric`, which matches them with receives, or `verbs`, which write
        where a receive has been announced: NCCL's own transports, and AWS's plugin from Hopper on."""
        value = facts()["fabrics"][self.fabric].get("transport", "verbs")
        return str(value.get(self.topology.generation, "verbs") if isinstance(value, dict) else value)

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
            peer: of sends, to `one` peer (while receiving), `one_way`, or to `all` of a node; "" otherwise.
        """
        if self.intra_link() == "pcie":
            return self.speeds.pcie
        rings = self.place.rings
        whole = self.speeds.link * rings if rings > 0 else self.speeds.gpu
        if not peer or not self.wide() or (peer == "all" and rings > 0):
            return whole
        if peer == "one_way":
            return whole * self.figures["one_way_share.all"] / self.figures[f"link_share.{self.topology.intra.link}"]
        return whole * self.figures[f"send_share.{peer}"]

    def wide(self) -> bool:
        """Whether a GPU has so many links to a peer that its thread blocks are busy all the while."""
        return self.intra_link() == "nvlink" and not 0 <= self.place.rings < _WIDE_PAIR

    def step_us(self, protocol: str) -> float:
        """One step between GPUs of a node, us."""
        if self.intra_link() == "pcie":
            return self.figures[f"step_us.pcie.{protocol}"]
        return self.figures[f"step_us.nvlink.Simple.{self._way()}"] if protocol == "Simple" else self.own(
            f"step_us.nvlink.{protocol}")

    def slice_us(self) -> float:
        """What a rank spends on a slice or chunk in Simple beside its bytes, us."""
        return self.figures[f"slice_us.{'pcie' if self.intra_link() == 'pcie' else self._way()}"]

    def _way(self) -> str:
        """How a GPU of the node hands slices to the next in Simple: the member of figures that are told by it."""
        return "read" if self.reads() else "blackwell" if self.capability() >= _BLACKWELL else "write"

    def base_us(self, protocol: str) -> float:
        """Launch and first synchronisation of a collective, us."""
        return self.own(f"base_us.{protocol}")

    def pass_bps(self) -> float:
        """What one channel's thread block copies or sums within its GPU's memory, bytes/s."""
        return self.own("pass_gbps") * _GB

    def era(self, name: str) -> Any:
        """A figure of the tuner of NCCL's release (`tuner.yaml`, `eras`)."""
        return era(name, self.version)

    def cpu(self) -> str:
        """Whose processors the nodes have, by which NCCL judges: `intel` or `amd`."""
        said = facts()["fabrics"][self.fabric].get("cpu") if self.topology.inter.kind != "none" else None
        said = said.get(self.topology.generation) if isinstance(said, dict) else said
        return str(said or facts()["generations"][self.topology.generation]["cpu"])

    def _tuner_inside(self) -> tuple[float, float]:
        """All links of a GPU inside its node, and those to one peer, as NCCL counts them, GB/s."""
        if self.place.per_node == 1:
            return _INFINITE, _INFINITE
        intra = self.topology.intra
        if self.intra_link() == "pcie":
            slot = facts()["pcie"][intra.pcie]
            least = min(float(slot["tuner"]), float(slot["cpus"])) if self.place.switches else float(slot["tuner"])
            if self.place.through_host:  # every edge of a ring takes the uplink of its GPUs' switch
                least = min(least, float(slot["tuner"]) / int(self.place.on_switch.max()))
            return least, least
        link, rings = self.era("link").get(intra.link, self.judged.gpu / intra.links_per_gpu / _GB), self.place.rings
        if rings < 0:
            return link * intra.links_per_gpu, link * intra.links_per_gpu
        pair = rings if self.place.size == 2 else min(count for row in intra.matrix for count in row if count)
        return link * rings, link * pair

    def graph(self) -> Graph:
        """Channels and speeds that NCCL's search finds for the group's rings and trees."""
        inside, path = self._tuner_inside()
        several = self.place.nodes > 1
        nics = int(self.place.groups.max()) if several else 0
        nic = 0.0
        if several:
            slot = float(facts()["pcie"][self.topology.intra.pcie]["tuner"])
            nic, path = min(self.judged.nic_nominal / _GB, slot), min(path, slot)
        return search(speeds(self.capability(), several, self.version), inside, path, nics, nic, self.capability())

    def capability(self) -> int:
        """Compute capability of the GPUs times ten."""
        return int(facts()["generations"][self.topology.generation]["capability"])

    def reads(self) -> bool:
        """Whether GPUs of a node read from one another in Simple instead of writing: those of compute capability 8.0
        over NVLink do (nccl src/graph/paths.cc, ncclTopoCheckP2p)."""
        return self.capability() == _READING and self.intra_link() == "nvlink"

    def channel_count(self) -> int:
        """Channels of a large call."""
        return self.channels or self.searched_channels()

    def searched_channels(self) -> int:
        """Channels NCCL's search ends with. A limit of the user's cuts them afterwards (src/graph/connect.cc)."""
        return compute_channels(self.graph(), self.place.nodes > 1, self.capability())

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

    def proxied_ll_bps(self) -> float:
        """Payload of one channel's LL that a proxy looks through before it sends it, bytes/s: what NCCL grants LL on
        two nodes by their processors (`cpu_ll` of tuner.yaml) over 16 channels."""
        return float(table("network/tuner.yaml")["cpu_ll"][self.cpu()][0]) / 16 * _GB

    def multicast_channels(self) -> int:
        """Channels of NVLink SHARP."""
        return self.channels or max(2, int(self.table("nvls_channels")))

    def multicast_graph(self) -> tuple[int, float, float]:
        """NVLink SHARP as the search finds it: heads, GB/s of each inside a node and between nodes.

        Each head's channel crosses every GPU's links once and the head's own twice (ncclTopoSearchTryNvls); what it may
        carry between nodes is then raised, as far as twice that.
        """
        inside, _ = self._tuner_inside()
        several = self.place.nodes > 1
        heads = min(self.place.per_node, int(self.place.groups.max())) if several else self.place.per_node
        nic = self.judged.nic_nominal / _GB if several else _INFINITE
        tried = [bw for bw in speeds(self.capability(), several, self.version) if bw <= nic]
        bw = next((x for x in tried if x * (heads + 1) <= inside + 1e-6), tried[-1])
        return heads, bw, next((x for x in reversed(tried) if x >= 2 * bw), tried[0])

    def peer_channels(self) -> int:
        """Most channels to one peer: two per link to it, or one per 14 GB/s of the NIC and two at least; a power of two
        (nccl src/graph/paths.cc, ncclTopoComputeP2pChannels)."""
        if self.place.nodes > 1:
            wanted = max(2, ceil(self.judged.nic_nominal / (_NIC_PER_CHANNEL * _GB)))
        elif self.intra_link() == "pcie":
            wanted = _PCIE_CHANNELS
        else:
            wanted = 2 * (self.place.rings if self.place.rings > 0 else self.topology.intra.links_per_gpu)
        return min(_PAIR_CHANNELS, power_of_two(wanted))

    def pair_channels(self) -> int:
        """Channels of one send: all that a peer can have, on one node half of all for each of two ranks until a
        channel's part exceeds 16 MiB (RCCL 5.4.3 src/enqueue.cc, scheduleP2pTasksToPlan)."""
        found = self.peer_channels()
        if self.place.nodes == 1 and self.place.size == 2:
            found = max(2, min(found, power_of_two(self.searched_channels())) // 2)
        return min(found, self.channels or found)

    def exchange_channels(self) -> int:
        """Channels of an all-to-all inside a node, among which the peers are dealt out (p2pnChannels)."""
        return power_of_two(self.channel_count())

    def shared_channels(self) -> int:
        """Of these, each rank's, its own part included: halved until there are enough (scheduleP2pTasksToPlan)."""
        found = self.peer_channels()
        while found > 1 and found * self.place.size > self.exchange_channels():
            found //= 2
        return found

    def ll128(self) -> bool:
        """Whether LL128 may serve: NVLink inside, and a fabric that keeps 128-byte stores whole."""
        crossing = self.place.nodes == 1 or bool(facts()["fabrics"][self.fabric]["ll128"])
        return self.intra_link() == "nvlink" and crossing and self.version >= (2, 5)

    def multicast(self) -> bool:
        """NVLink SHARP: Hopper and later behind a switch, NCCL 2.17 on (release notes)."""
        return self.topology.multicasts and self.place.per_node > 2 and self.version >= (2, 17)


def power_of_two(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << (count - 1).bit_length()
