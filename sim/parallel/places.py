"""Ranks of one stage that lie differently: where stages do not end with nodes, some of a stage's ranks reach the next
stage or their replicas inside a node and some across, and a stage is not one class of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from sim.network.topology import Topology, speeds
from sim.parallel.layout import Layout, Ranks, equitable_classes
from sim.scenario.schema import Scenario

#: Classes that are simulated at most on this account: beyond it all instances of a group move in lockstep, at the pace
#: of the one that lies worst.
MOST_CLASSES = 128


def place_colours(scenario: Scenario, layout: Layout, groups: Mapping[str, Ranks]) -> Ranks | None:
    """A colour per rank of a pipeline, shape (ranks,): equal where all groups lie alike on nodes and NICs, and so do
    those of the ranks they meet there. None where every stage is alike.

    Args:
        groups: of all ranks by name, shape (instances, members).
    """
    depth, per_node = layout.sizes["pipeline"], scenario.cluster.gpus_per_node
    if depth == 1 or scenario.cluster.nodes == 1 or aligned(scenario, layout):
        return None
    rows = layout.group("pipeline")
    together = {**groups, "pipeline": rows, "node": np.arange(layout.ranks).reshape(-1, per_node)}
    topology = Topology.from_mapping(scenario.cluster.template())
    nics = speeds(topology).nic_groups
    if nics and not per_node % nics:
        together["nic"] = np.arange(layout.ranks).reshape(-1, per_node // nics)
    stage = layout.coordinate("pipeline")
    colours = stage * (1 + layout.ranks)
    for ranks in (*groups.values(), rows):
        colours = _joined(colours, _pattern(ranks // per_node, ranks is rows), ranks)
    found = equitable_classes(colours, together)
    count = int(found.max()) + 1
    return None if count == depth or count > MOST_CLASSES else found


def aligned(scenario: Scenario, layout: Layout) -> bool:
    """Whether every block of neighbouring ranks either fills whole nodes or divides one, so that the ranks of a stage
    lie alike."""
    per_node = scenario.cluster.gpus_per_node
    return all(per_node % block == 0 or block % per_node == 0 for block in _blocks(scenario, layout))


def _blocks(scenario: Scenario, layout: Layout) -> Iterator[int]:
    """Sizes of blocks of neighbours: of each dimension with those inside it, and of parts of the data dimension."""
    parallel, inner = scenario.parallel, 1
    for name in layout.order:
        if name == "data":
            yield from (inner * part for part in (parallel.sharding_factor, parallel.expert) if part)
        inner *= layout.sizes[name]
        yield inner


def _pattern(nodes: Ranks, ordered: bool) -> Ranks:
    """How the members of each group lie, one number per member: who is on one node with whom, in order (`ordered`), or
    how many are on its node and on the others'."""
    if ordered:
        first = (nodes[:, :, None] == nodes[:, None, :]).argmax(axis=2)
        _, kind = np.unique(first, axis=0, return_inverse=True)
        return np.repeat(kind.reshape(-1, 1), nodes.shape[1], axis=1)
    order = np.argsort(nodes, axis=1, kind="stable")
    lined = np.take_along_axis(nodes, order, axis=1)
    edge = np.ones(lined.shape, dtype=bool)
    edge[:, 1:] = lined[:, 1:] != lined[:, :-1]
    run = np.cumsum(edge.ravel()) - 1
    local = np.empty_like(nodes)
    np.put_along_axis(local, order, np.bincount(run)[run].reshape(nodes.shape), axis=1)
    _, kind = np.unique(np.sort(local, axis=1), axis=0, return_inverse=True)
    found: Ranks = kind.reshape(-1, 1) * (1 + nodes.shape[1]) + local
    return found


def _joined(colours: Ranks, of_members: Ranks, ranks: Ranks) -> Ranks:
    """Colours with those of a kind of groups."""
    column = np.zeros(colours.shape, dtype=np.int64)
    column[ranks] = of_members
    _, found = np.unique(np.stack((colours, column), axis=1), axis=0, return_inverse=True)
    joined: Ranks = found.reshape(-1)
    return joined
