"""What a rank's GPU holds beside tensors: the CUDA context, NCCL's buffers of every communicator, cuBLAS workspaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.hardware import gpu
from sim.hardware.outside import Outside, outside
from sim.network.buffers import Connections
from sim.network.fabric.topology import Topology, speeds
from sim.parallel.layout import Layout, Ranks
from sim.parallel.sharded.quantised import ACROSS, INSIDE
from sim.program import ProgramBuilder
from sim.scenario.fields.cluster import Cluster
from sim.scenario.fields.schema import Scenario
from sim.software import Stack

#: Name of what cuBLAS holds in the allocator's memory, in a Program's resident tensors.
WORKSPACES = "cuBLAS workspaces"


#: Collectives of a communicator: kind, bytes of the full buffer.
Calls = frozenset[tuple[str, int]]


class _Place:
    """A cluster's links, and communicators on them, by where their ranks lie from their first node on."""

    def __init__(self, cluster: Cluster) -> None:
        self.own = cluster.gpus_per_node
        self.topology = Topology.from_mapping(cluster.template())
        self.speeds = speeds(self.topology, cluster.intra_gbps_per_gpu, cluster.inter_gbps_per_node)
        self._known: dict[object, Connections] = {}

    def held(self, ranks: Ranks, nccl: Mapping[str, Any], alone: int, calls: Calls) -> int:
        """Bytes of a communicator of `ranks`, shape (members,), with `alone` peers of sends and these collectives."""
        own, spare = self.own, self.topology.gpus_per_node - self.own
        row = np.asarray(ranks) - int(ranks[0]) // own * own
        key = (row.tobytes(), *nccl.values())
        if key not in self._known:
            self._known[key] = Connections(self.topology, self.speeds, row + row // own * spare, nccl)
        return self._known[key].held_bytes(alone, calls)


#: Of the last clusters, by what they are: the scenarios of a sweep or a search share theirs.
_PLACES: dict[str, _Place] = {}
_MOST_PLACES = 16
_NONE: Calls = frozenset()
#: Kinds that are sends, whatever they are grouped to.
_SENDS = ("send", "recv", "all_to_all")


def residents(found: Outside) -> list[tuple[str, int, str]]:
    """What is beside tensors as rows of a Program's `resident`: cuBLAS's workspaces come from the allocator, once per
    handle and stream, and stay (PyTorch CublasHandlePool.cpp, getNewWorkspace)."""
    return [(WORKSPACES, found.workspace_bytes, "workspace"),
            ("CUDA context, NCCL", found.total_bytes - found.workspace_bytes, "context")]


def beside(scenario: Scenario, stack: Stack, layout: Layout, groups: Mapping[str, Ranks], peers: int,
           builders: Sequence[ProgramBuilder]) -> Outside:
    """Context, communicators and workspaces of a rank.

    Args:
        groups: its communicators by name, shape (instances, members).
        peers: pipeline stages it exchanges tensors with, each pair a communicator.
        builders: of its program, or of all whose calls it may make; written already.
    """
    place, nccl = _place(scenario.cluster), scenario.software.nccl.model_dump()
    nccl["version"] = nccl["version"] or stack.nccl_release
    total, calls = 0, _calls(builders)
    for name, ranks in groups.items():
        exchanges = _exchanges(name, scenario, stack)
        total += place.held(ranks[0], nccl, ranks.shape[1] - 1 if exchanges else 0, calls.get(name, _NONE))
    if peers:
        total += peers * place.held(layout.group("pipeline")[0, :2], nccl, 1, _NONE)
    return outside(gpu(scenario.cluster.topology.gpu).compute_capability, stack.kernel_loading, total)


def _exchanges(name: str, scenario: Scenario, stack: Stack) -> bool:
    """Whether every rank of a communicator sends to every other."""
    if name == "expert":
        return not stack.dispatch_once
    return name in (INSIDE, ACROSS, "context_heads") or (name == "context" and scenario.head_ranks > 1)


def _calls(builders: Sequence[ProgramBuilder]) -> dict[str, Calls]:
    """Collectives by communicator; sends connect their peers beside them."""
    found: dict[str, set[tuple[str, int]]] = {}
    for builder in builders:
        for call in builder.tables.collectives:
            if call.kind not in _SENDS and 0 <= call.communicator < len(builder.communicators):
                found.setdefault(builder.communicators[call.communicator], set()).add((call.kind, call.size_bytes))
    return {name: frozenset(calls) for name, calls in found.items()}


def _place(cluster: Cluster) -> _Place:
    key = cluster.model_dump_json()
    known = _PLACES.get(key)
    if known is None:
        if len(_PLACES) >= _MOST_PLACES:
            _PLACES.pop(next(iter(_PLACES)))
        known = _PLACES[key] = _Place(cluster)
    return known
