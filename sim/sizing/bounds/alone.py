"""Collectives alone on the links: what they take at least, whatever else runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.parallel.layout import Layout
from sim.parallel.lower import cut_groups
from sim.parallel.places import aligned
from sim.scenario import Scenario

Floats = npt.NDArray[np.float64]


class Alone:
    """Collectives alone on the links of one cluster, remembered.

    Args:
        network: of the cluster, with the jitter of its ranks.
    """

    def __init__(self, network: Any) -> None:
        self.network = network
        self._known: dict[Any, float] = {}
        self._groups: dict[Any, Any] = {}

    def group_s(self, layout: Layout, scenario: Scenario, group: str, kind: str, size_bytes: int) -> float:
        """Seconds of a collective on the communicator named `group`, of the pipeline stage where it is fastest."""
        where = _where(layout, scenario, group)
        key = (where, kind, size_bytes)
        if key not in self._known:
            self._known[key] = min(self.seconds(kind, size_bytes, ranks)
                                   for ranks in self._stages(where, layout, scenario, group))
        return self._known[key]

    def _stages(self, where: Any, layout: Layout, scenario: Scenario, group: str) -> list[npt.NDArray[np.int64]]:
        if where not in self._groups:
            self._groups[where] = _of_stages(layout, scenario, group)
            first = self.network.coflow("all_gather", 1 << 30, self._groups[where][0])
            whole = (layout.ranks // layout.sizes["pipeline"] % scenario.cluster.gpus_per_node == 0
                     and aligned(scenario, layout))
            if whole and not any(link[0].startswith("leaf") for link in first.links):
                self._groups[where] = self._groups[where][:1]  # stages of whole nodes are all alike
        found: list[npt.NDArray[np.int64]] = self._groups[where]
        return found

    def group(self, layout: Layout, scenario: Scenario, name: Any,
              make: Callable[[], npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """Ranks of groups that `make` lists, remembered by name."""
        key = (*layout.sizes.values(), scenario.cluster.nodes, name)
        if key not in self._groups:
            self._groups[key] = make()
        found: npt.NDArray[np.int64] = self._groups[key]
        return found

    def taken(self, kind: str, size_bytes: float, ranks: npt.NDArray[np.int64]) -> tuple[int, float]:
        """SMs and memory bandwidth that a collective holds on every rank while it runs alone."""
        coflow = self.network.coflow(kind, size_bytes, ranks)
        seconds = self.seconds(kind, size_bytes, ranks)
        return coflow.channels, coflow.hbm_bytes_per_byte * coflow.size_bytes / seconds if seconds else 0.0

    def seconds(self, kind: str, size_bytes: float, ranks: npt.NDArray[np.int64]) -> float:
        """Seconds of a collective of all given instances; shape (instances, members)."""
        coflow = self.network.coflow(kind, size_bytes, ranks)
        bps = coflow.cap_bps
        for link, load in zip(coflow.links, coflow.loads, strict=True):
            if load > 0:
                bps = min(bps, self.network.capacity(link) / load)
        return float(coflow.latency_s + (coflow.size_bytes / bps if coflow.size_bytes else 0.0))

    def moved_s(self, layout: Layout, scenario: Scenario, group: str, kind: str, size_bytes: float) -> float:
        """Seconds in which collectives that move so much together are through at best, into however many they are cut
        and whatever NCCL chooses: at the rate of its fastest choice, without latencies."""
        where = _where(layout, scenario, group)
        key = (where, kind, "rate")
        if key not in self._known:
            self._known[key] = 1.0 / max(self.fastest_bps(kind, ranks)
                                         for ranks in self._stages(where, layout, scenario, group))
        return self._known[key] * size_bytes

    def fastest_bps(self, kind: str, ranks: npt.NDArray[np.int64]) -> float:
        """Bytes per second of the fastest of NCCL's choices for a collective on these ranks, inf for one rank."""
        place = self.network.placement(ranks)
        if place.size < 2:
            return math.inf
        return float(max(
            min([choice.cap_bps, *(self.network.capacity(link) / (load * choice.factor)
                                   for link, load in choice.loads if load > 0)])
            for choice, _ in self.network.options(kind, place)))

    def hops_s(self, layout: Layout, scenario: Scenario, size_bytes: int) -> Floats:
        """Seconds of a transfer from each pipeline rank to the next, the last to the first: shape (ranks,). Of
        replicas that lie differently it is the nearest's."""
        depth, alike = layout.sizes["pipeline"], aligned(scenario, layout)
        key = (tuple(layout.sizes.values()), "hops", size_bytes)
        if key not in self._groups:
            pairs = [layout.moved("pipeline", rank, (rank + 1) % depth) for rank in range(depth)]
            self._groups[key] = np.array([
                self.seconds("send", size_bytes, own) if alike else
                min(self.seconds("send", size_bytes, one) for one in _distinct(own, scenario.cluster.gpus_per_node))
                for own in pairs])
        found: Floats = self._groups[key]
        return found


def _where(layout: Layout, scenario: Scenario, group: str) -> tuple[Any, ...]:
    """What decides where the ranks of a group lie."""
    return (*layout.sizes.values(), scenario.cluster.nodes, scenario.parallel.expert, scenario.expert_tensor, group)


def _of_stages(layout: Layout, scenario: Scenario, group: str) -> list[npt.NDArray[np.int64]]:
    """Groups of every pipeline stage, shape (instances, members) each."""
    ranks = cut_groups(scenario, layout)[group]
    coordinate = layout.coordinate("pipeline")[ranks[:, 0]]
    own = [np.ascontiguousarray(ranks[coordinate == stage]) for stage in range(layout.sizes["pipeline"])]
    per = scenario.cluster.gpus_per_node
    width = layout.ranks // layout.sizes["pipeline"]
    if layout.sizes["pipeline"] > 1 and not aligned(scenario, layout):
        return [one for of_stage in own for one in _distinct(of_stage, per)]  # some have fewer neighbours
    return own[:per // width] if width < per else own  # nodes are alike


def _distinct(ranks: npt.NDArray[np.int64], per_node: int) -> list[npt.NDArray[np.int64]]:
    """Groups of every kind, one of each: those that lie alike within nodes are of one kind. Shape (1, members) each."""
    _, first = np.unique(ranks - ranks[:, :1] // per_node * per_node, axis=0, return_index=True)
    return [np.ascontiguousarray(ranks[i:i + 1]) for i in first.tolist()]
