"""Collectives inside layers, alone on the links: what they take at least, whatever else runs."""

from __future__ import annotations

from typing import Any

from sim.parallel.layout import Layout
from sim.parallel.lower import cut_groups
from sim.scenario import Scenario


class Alone:
    """Collectives inside layers, alone on the links, among the ranks of the first pipeline stage."""

    def __init__(self, layout: Layout, scenario: Scenario, network: Any, known: dict[Any, float], key: Any) -> None:
        self.layout, self.scenario, self.network, self.known, self.key = layout, scenario, network, known, key

    def alone_s(self, group: str, call: Any) -> float:
        """Seconds of a call on the communicator named `group`."""
        key = (self.key, group, call.kind, call.size_bytes, call.dtype)
        if key not in self.known:
            ranks = cut_groups(self.scenario, self.layout)[group]
            coordinate = self.layout.coordinate("pipeline")
            own = ranks[coordinate[ranks[:, 0]] == 0]
            per = self.scenario.cluster.gpus_per_node
            width = self.layout.ranks // self.layout.sizes["pipeline"]
            if width % per and per % width:
                own = own[:1]  # stages begin anywhere within a node: fewer neighbours than the first has are possible
            coflow = self.network.coflow(call.kind, call.size_bytes, own, call.dtype)
            bps = coflow.cap_bps
            for link, load in zip(coflow.links, coflow.loads, strict=True):
                if load > 0:
                    bps = min(bps, self.network.capacity(link) / load)
            self.known[key] = coflow.latency_s + (coflow.size_bytes / bps if coflow.size_bytes else 0.0)
        return self.known[key]
