"""The network of a machine: coflows of collectives and capacities of links, the room's front door."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.errors import Fault, UserError
from sim.network.fabric.fair_share import LinkId, fair_share
from sim.network.fabric.routes import Placement, place
from sim.network.fabric.topology import Topology, speeds, staged_channels
from sim.network.fabric.trouble import check_links, detours, links_of
from sim.network.jitter import rendezvous_s
from sim.network.nccl.candidate import Candidate, Coflow, build
from sim.network.nccl.collectives import candidates
from sim.network.nccl.site import TODAY, Pushing, Site

__all__ = ["Coflow", "LinkId", "Network", "fair_share"]


class Network:
    """Links of `nodes` x `gpus_per_node` GPUs and what collectives cost on them.

    Args:
        topology: the template; `nodes` and `gpus_per_node` override its counts (the first GPUs of each node are used).
        intra_gbps_per_gpu, inter_gbps_per_node: nominal Gb/s, one direction, in the place of the topology's.
        jitter_s: standard deviation of a rank's arrival; a collective of n ranks waits for the expected latest.
        nccl: forced choices: `algorithm` (Ring, Tree, NVLS ...), `protocol` (LL, LL128, Simple), `channels`; `version`.
        one_sided: the one-sided kernels (DeepEP) that all-to-alls are, if they are not NCCL's grouped sends.
        peer_sums: whose kernels small all-reduces are, a table of `sums.yaml` (`nccl.peer_sums`); "" = NCCL's.

    Raises:
        UserError: several nodes but no link between them.
    """

    def __init__(self, topology: Topology, nodes: int, gpus_per_node: int, intra_gbps_per_gpu: float | None = None,
                 inter_gbps_per_node: float | None = None, nccl: Mapping[str, Any] | None = None,
                 jitter_s: float = 0.0, one_sided: Pushing | None = None, peer_sums: str = "") -> None:
        self.topology = topology
        self.jitter_s = jitter_s
        self.one_sided, self.peer_sums = one_sided, peer_sums
        self.nodes = nodes
        self.gpus_per_node = gpus_per_node
        self._nominal = (intra_gbps_per_gpu, inter_gbps_per_node)
        self.speeds = speeds(topology, *self._nominal)
        self.nccl = {k: v for k, v in (nccl or {}).items() if v is not None}
        if nodes > 1 and self.speeds.nic <= 0:
            raise UserError(Fault(
                f"topology '{topology.name}' has no link between nodes, but {nodes} nodes are asked for",
                field="cluster.topology.inter", hint="give inter.nics_per_node and inter.gbps_per_nic"))
        self._scale = (1.0, 1.0, 1.0)
        self._degraded = dict(topology.degraded)
        check_links(topology, self.speeds, nodes)
        self._detours = detours(topology, self.speeds, nodes)
        self._keep: tuple[LinkId, ...] = ()
        self._placements: dict[tuple[tuple[int, ...], bytes], Placement] = {}
        self._seen: dict[int, tuple[npt.NDArray[np.int64], Placement]] = {}
        self._candidates: dict[tuple[str, int], list[tuple[Candidate, float]]] = {}
        self._coflows: dict[tuple[str, int, int], Coflow] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take the topology's figures anew: a fit changes them between predictions."""
        inside, outside, _ = self._scale
        s = speeds(self.topology, *self._nominal)
        self.speeds = s = replace(s, gpu=s.gpu * inside, link=s.link * inside, pcie=s.pcie * inside,
                                  uplink=s.uplink * inside, nic=s.nic * outside, stage=s.stage * outside,
                                  host=s.host * outside, leaf=s.leaf * outside)
        self._judged = speeds(self.topology)
        self._capacity = {"gpu": s.gpu, "root": s.pcie, "pcie": s.uplink, "nic": s.nic, "leaf": s.leaf, "host": s.host,
                          "copies": s.host}
        self._candidates.clear()
        self._coflows.clear()

    def scaled(self, intra: float = 1.0, inter: float = 1.0, latency: float = 1.0) -> Network:
        """The same network with so many times the bandwidth of links inside nodes and between them, and so many times
        the latency of every collective (ranks' jitter is no property of the network). NCCL's choices stay."""
        other = copy.copy(self)
        other._scale = (intra, inter, latency)
        other._placements, other._seen, other._candidates, other._coflows = {}, {}, {}, {}
        other.refresh()
        return other

    def watching(self, ranks: npt.NDArray[np.int64]) -> Network:
        """The same network for a job whose ranks are not all alike: the links of `ranks`, one of each class, always
        stand in the loads, so that what meets on them is seen for every class."""
        other = copy.copy(self)
        node = ranks // self.gpus_per_node
        physical = ranks + node * (self.topology.gpus_per_node - self.gpus_per_node)
        other._keep = links_of(physical, self.topology, self.speeds, self._detours)
        other._placements, other._seen, other._candidates, other._coflows = {}, {}, {}, {}
        return other

    def capacity(self, link: LinkId) -> float:
        """Bytes/s of a link, one direction."""
        whole = self._capacity[link[0].partition("_")[0]]
        return whole * self._degraded.get(link, 1.0) if self._degraded else whole

    def _own(self, where: Placement) -> Callable[[LinkId], float]:
        """What a communicator that lies at `where` gets of a link if no other uses it: messages staged through the
        host take its own channels only."""
        if not self.speeds.stage:
            return self.capacity
        channels = staged_channels(int(where.groups.max()), where.per_node)
        return lambda link: min(self.capacity(link), channels * self.speeds.stage if link[0].startswith("host")
                                else float("inf"))

    def coflow(self, kind: str, size_bytes: int, ranks: npt.NDArray[np.int64], dtype: str = "bf16") -> Coflow:
        """Cost of one operation of one instance while all given instances run it in lockstep.

        Args:
            kind: a name of `sim.work.COLLECTIVES` (or `send_recv`, every rank to the next).
            size_bytes: the full buffer (see `sim.work`).
            ranks: global ranks, shape (instances, size). For send and recv of two ranks the first sends.
            dtype: element type; NCCL's choice does not depend on it.
        """
        del dtype
        where = self.placement(ranks)
        key = (kind, size_bytes, id(where))
        if key not in self._coflows:
            self._coflows[key] = self._choose(kind, size_bytes, where)
        return self._coflows[key]

    def placement(self, ranks: npt.NDArray[np.int64]) -> Placement:
        """Where the communicator lies (memoised; `ranks` must not be changed afterwards)."""
        seen = self._seen.get(id(ranks))
        if seen is not None:
            return seen[1]
        key = (ranks.shape, ranks.tobytes())
        if key not in self._placements:
            node = ranks // self.gpus_per_node
            physical = ranks + node * (self.topology.gpus_per_node - self.gpus_per_node)
            self._placements[key] = place(physical, self.topology, self.speeds, self._detours,
                                          self._keep)
        self._seen[id(ranks)] = (ranks, self._placements[key])  # holding the array keeps its id from being reused
        return self._placements[key]

    def _choose(self, kind: str, size_bytes: int, where: Placement) -> Coflow:
        if where.size < 2:
            return Coflow(0.0, float(size_bytes), (), (), float("inf"), 0, 0.0, 1.0, "none", "none")
        best, rate = choose(self.options(kind, where), size_bytes)
        flow = build(best, size_bytes, rate)
        if self.speeds.stage:
            flow = replace(flow, cap_bps=min(flow.cap_bps, rate))
        latency_s = flow.latency_s * self._scale[2]
        if self.jitter_s:
            latency_s += rendezvous_s(where.size, self.jitter_s)
        return flow if latency_s == flow.latency_s else replace(flow, latency_s=latency_s)

    def options(self, kind: str, where: Placement) -> list[tuple[Candidate, float]]:
        """Candidates with the rate each reaches on the machine by one instance alone, blind to the others, bytes/s."""
        key = (kind, id(where))
        if key not in self._candidates:
            self._candidates[key] = self._options(kind, where)
        return self._candidates[key]

    def _options(self, kind: str, where: Placement) -> list[tuple[Candidate, float]]:
        found = self._allowed(kind, where)
        if where.instances == 1:
            return [(c, c.rate(self._own(where))) for c in found]
        one = where.ranks[where.widest * where.size:(where.widest + 1) * where.size].reshape(1, -1)
        lone = place(one, self.topology, self.speeds, self._detours, self._keep)
        alone = self._allowed(kind, lone)
        own = self._own(lone)
        rates = {(c.algorithm, c.protocol): c.rate(own) for c in alone}
        judged = {(c.algorithm, c.protocol): c.judged for c in alone}
        return [(replace(c, judged=judged.get((c.algorithm, c.protocol), c.judged)),
                 rates.get((c.algorithm, c.protocol), c.cap_bps)) for c in found]

    def _allowed(self, kind: str, where: Placement) -> list[Candidate]:
        channels = self.nccl.get("channels")
        site = Site(self.topology, self.speeds, where, self.topology.figures, self._judged,
                    int(channels) if channels else None, release(self.nccl), self.one_sided, self.peer_sums)
        return allowed(kind, site, self.nccl)


def allowed(kind: str, site: Site, nccl: Mapping[str, Any]) -> list[Candidate]:
    """Ways to serve `kind` on `site` that the forced choices `nccl` leave (see `Network`); all if they leave none."""
    found = list(candidates(kind, site))
    for field in ("algorithm", "protocol"):
        wanted = str(nccl.get(field) or "").lower()
        found = [c for c in found if getattr(c, field).lower() == wanted] or found
    return found


def release(nccl: Mapping[str, Any]) -> tuple[int, ...]:
    """NCCL's (major, minor, patch if told) of its `version`, that of today where it is not told."""
    told = re.match(r"\s*v?(\d+)\.(\d+)(?:\.(\d+))?", str(nccl.get("version") or ""))
    return tuple(int(part) for part in told.groups() if part is not None) if told else TODAY


def choose(options: Sequence[tuple[Candidate, float]], size_bytes: int) -> tuple[Candidate, float]:
    """What NCCL would take for a call of `size_bytes`: the least by its own estimate."""
    if len(options) == 1:
        return options[0]
    return min(options, key=lambda option: option[0].judged.time_us(size_bytes) if option[0].judged else 0.0)
