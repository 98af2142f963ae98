"""What a rank's GPU holds beside tensors: the CUDA context, NCCL's buffers of every communicator, cuBLAS workspaces."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sim.hardware import gpu
from sim.hardware.outside import Outside, outside
from sim.network.buffers import buffer_bytes
from sim.network.topology import Speeds, Topology, speeds
from sim.parallel.layout import Layout, Ranks
from sim.scenario.cluster import Cluster
from sim.scenario.schema import Scenario
from sim.software import Stack

#: Templates and speeds of the last clusters, by the cluster's id and the cluster itself, which keeps the id its own.
_TEMPLATES: dict[int, tuple[Cluster, Topology, Speeds]] = {}
_MOST_TEMPLATES = 16


def beside(scenario: Scenario, stack: Stack, layout: Layout, groups: Mapping[str, Ranks], peers: int) -> Outside:
    """Context, communicators and workspaces of a rank.

    Args:
        groups: its communicators by name, shape (instances, members).
        peers: pipeline stages it exchanges tensors with, each pair a communicator.
    """
    cluster = scenario.cluster
    topology, links = _template(cluster)
    nccl = scenario.software.nccl.model_dump()

    def held(ranks: Ranks, alone: int = 0) -> int:
        row = np.asarray(ranks)
        spare = topology.gpus_per_node - cluster.gpus_per_node
        return buffer_bytes(topology, links, row + row // cluster.gpus_per_node * spare, nccl, alone)

    total = 0
    for name, ranks in groups.items():
        exchanges = name == "expert" and not stack.dispatch_once
        total += held(ranks[0], ranks.shape[1] - 1 if exchanges else 0)
    if peers:
        total += peers * held(layout.group("pipeline")[0, :2], 1)
    return outside(gpu(cluster.topology.gpu).compute_capability, stack.kernel_loading, total)


def _template(cluster: Cluster) -> tuple[Topology, Speeds]:
    known = _TEMPLATES.get(id(cluster))
    if known is None:
        if len(_TEMPLATES) >= _MOST_TEMPLATES:
            _TEMPLATES.pop(next(iter(_TEMPLATES)))
        topology = Topology.from_mapping(cluster.template())
        links = speeds(topology, cluster.intra_gbps_per_gpu, cluster.inter_gbps_per_node)
        known = _TEMPLATES[id(cluster)] = (cluster, topology, links)
    return known[1], known[2]
