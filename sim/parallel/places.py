"""Ranks that lie differently: where groups or stages do not end with nodes, some ranks reach their peers, the next
stage or their replicas inside a node and some across, and ranks of one program are not one class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sim.network.fabric.rings import ring_count
from sim.network.fabric.topology import Topology, speeds
from sim.parallel.layout import REPLICAS, Layout, Ranks, equitable_classes
from sim.scenario.fields.schema import Scenario

#: Dimensions whose collectives stand between a layer's own kernels.
CUTS = ("tensor", "context", "context_heads", "context_ring", "expert")
#: Classes that are simulated at most on this account: beyond it all instances of a group move in lockstep, at the pace
#: of the one that lies worst.
MOST_CLASSES = 128


def place_colours(scenario: Scenario, layout: Layout, groups: Mapping[str, Ranks]) -> Ranks | None:
    """A colour per rank, shape (ranks,): equal where all groups lie alike on nodes and NICs, and so do those of the
    ranks they meet there. None where every rank, or every stage of a pipeline, is alike.

    Args:
        groups: of all ranks by name, shape (instances, members).
    """
    depth, per_node = layout.sizes["pipeline"], scenario.cluster.gpus_per_node
    if scenario.cluster.nodes == 1 or aligned(scenario, layout):
        return None
    topology = _topology(scenario)
    stages = layout.group("pipeline")
    every = np.arange(layout.ranks)
    together = {**groups, "pipeline": stages, "node": every.reshape(-1, per_node)}
    colours = layout.coordinate("pipeline") * (1 + layout.ranks)
    for shared in _sharing(topology):
        if per_node % shared or topology.intra.kind == "pcie":  # NICs sit below some switches and not below others
            colours = colours + every % per_node // shared * (1 + colours.max())
        else:
            together[f"sharing {shared}"] = every.reshape(-1, shared)
    for ranks in (*groups.values(), *([stages] if depth > 1 else [])):
        colours = _joined(colours, _pattern(ranks // per_node, ranks is stages), ranks)
        if topology.intra.kind == "nvlink-mesh":
            colours = _joined(colours, _rings(ranks, per_node, topology), ranks)
    found = equitable_classes(colours, together)
    count = int(found.max()) + 1
    return None if count == depth or count > MOST_CLASSES else found


def aligned(scenario: Scenario, layout: Layout) -> bool:
    """Whether every block of neighbouring ranks either fills whole nodes or divides one, and the GPUs of a node share
    NICs and PCIe switches evenly, so that the ranks of a stage lie alike."""
    per_node = scenario.cluster.gpus_per_node
    fits = all(block and (per_node % block == 0 or block % per_node == 0) for block in _blocks(scenario, layout))
    return fits and _even(scenario)


def _even(scenario: Scenario) -> bool:
    """Whether the GPUs a job takes of a node are joined like each other: all of them are, or what shares a NIC or a
    PCIe switch is taken whole and no mesh is cut."""
    topology, per_node = scenario.cluster.topology, scenario.cluster.gpus_per_node
    if per_node in (1, topology.gpus_per_node):
        return True
    return topology.intra.kind != "nvlink-mesh" and not any(
        per_node % shared for shared in _sharing(_topology(scenario)))


def expert_dimensions(scenario: Scenario) -> Sequence[str]:
    """Dimensions whose ranks share experts out among them, as one."""
    return REPLICAS if scenario.expert_tensor == scenario.parallel.tensor else ("tensor", *REPLICAS)


def meets_others(scenario: Scenario, groups: Mapping[str, Ranks]) -> bool:
    """Whether collectives that cut a layer share links with other traffic: NICs where a group leaves its node, or PCIe.
    Such a job is written out task by task, so that the sharing is simulated."""
    return any(len(ranks) > 1 or any(other.shape[1] > 1 for n, other in groups.items() if n != name)
               for name, ranks in groups.items() if name in CUTS and _on_shared_links(scenario, ranks))


def _on_shared_links(scenario: Scenario, ranks: Ranks) -> bool:
    """Whether a kind of groups uses NICs or PCIe: it does in a mesh too, where no ring of NVLink joins a group."""
    node = ranks // scenario.cluster.gpus_per_node
    if ranks.shape[1] < 2:
        return False
    if bool((node != node[:, :1]).any()) or scenario.cluster.topology.intra.kind == "pcie":
        return True
    mesh = scenario.cluster.topology.intra.kind == "nvlink-mesh"
    return mesh and not _rings(ranks, scenario.cluster.gpus_per_node, _topology(scenario)).all()


def _topology(scenario: Scenario) -> Topology:
    return Topology.from_mapping(scenario.cluster.template())


def _blocks(scenario: Scenario, layout: Layout) -> Iterator[int]:
    """Sizes of blocks of neighbours: of each dimension with those inside it, and of parts of several taken as one."""
    parallel, inner = scenario.parallel, 1
    for name in layout.order:
        inner *= layout.sizes[name]
        yield inner
    for part in (parallel.sharding_factor, parallel.reshard_after_forward):
        if part and not isinstance(part, bool):
            yield _block(layout, REPLICAS, part)
    yield _block(layout, ("context",), scenario.head_ranks)
    yield _block(layout, expert_dimensions(scenario), parallel.expert)


def _block(layout: Layout, names: Sequence[str], size: int) -> int:
    """The block of neighbours around `size` successive ranks of dimensions taken as one (`Layout.group`); 0 where such
    parts begin in the middle of a row of neighbours and go on in the next."""
    rows: list[tuple[int, int]] = []  # (distance of successive ranks, length) while no other dimension comes between
    inner = 1
    for name in layout.order:
        own = layout.sizes[name]
        if name in names and own > 1:
            if rows and rows[-1][0] * rows[-1][1] == inner:
                rows[-1] = (rows[-1][0], rows[-1][1] * own)
            else:
                rows.append((inner, own))
        inner *= own
    for distance, length in rows:
        if size <= length:
            return 0 if length % size else distance * size
        if size % length:
            return 0
        size //= length
    return 1


def _sharing(topology: Topology) -> list[int]:
    """How many neighbouring GPUs of a node share a NIC, and a PCIe switch, where several do."""
    nics = speeds(topology).nic_groups
    found = [topology.gpus_per_node // nics] if nics and topology.gpus_per_node % nics == 0 else []
    if topology.intra.kind == "pcie":
        found.append(topology.intra.gpus_per_switch)
    return [shared for shared in dict.fromkeys(found) if shared > 1]


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


def _rings(ranks: Ranks, per_node: int, topology: Topology) -> Ranks:
    """Rings of NVLink through each group's GPUs of one node of a mesh, one number per member."""
    node, slot = ranks // per_node, ranks % per_node
    masks = ((node[:, :, None] == node[:, None, :]) << slot[:, None, :]).sum(axis=2)
    sets, which = np.unique(masks, return_inverse=True)
    counts = [ring_count(topology.intra.matrix, tuple(i for i in range(per_node) if int(mask) >> i & 1))
              for mask in sets]
    found: Ranks = np.array(counts, dtype=np.int64)[which].reshape(ranks.shape)
    return found
