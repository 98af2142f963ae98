"""Where a communicator lies on the machine, and what one byte of an operation puts on each link.

Everything is numpy over *all* instances' ranks; no loop over ranks. A rank is global: node = rank // gpus_per_node.
Link kinds: `gpu_out`, `gpu_in` (index = rank), `nic_out`, `nic_in` (index = node * NIC groups + group), `leaf_out`,
`leaf_in` (index = leaf * rails + rail), `pcie_out`, `pcie_in` (what PCIe switches below different CPUs exchange), and
`root_out`, `root_in` (uplink of a PCIe switch whose GPUs reach one another through the host alone), one-way.
In a node of PCIe alone a GPU's slot also carries what it sends to its NIC, and so does the uplink when the NIC sits
below another switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sim.network.fabric.fair_share import LinkId
from sim.network.fabric.hashing import collision_loss
from sim.network.fabric.rings import ring_count
from sim.network.fabric.topology import Speeds, Topology

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
#: Links and the bytes each carries per byte of the operation.
Loads = tuple[tuple[LinkId, float], ...]

#: A single instance keeps every link it uses up to this many; above (and for many instances in lockstep) each kind of
#: link is represented, for each distinct load, by its lowest-numbered one. Job layouts repeat from node to node, so
#: operations that meet on one node meet on the lowest they share.
EXACT_LINKS = 160
#: Connections of one send/recv pair between nodes (nccl opens at least 2 per NIC).
_PAIR_FLOWS = 2.0
#: Digits to which two loads count as equal, relative to the largest.
_DIGITS = 9


@dataclass(slots=True)
class Placement:
    """How `instances` groups of `size` ranks lie on the nodes. Arrays have one entry per rank, flattened.

    Attributes:
        nodes: nodes spanned by the most spread instance; widest: that instance's row.
        per_node: most ranks any instance has on one node.
        leaves: leaf switches spanned by the most spread instance.
        local: ranks of the same instance on the rank's node; sharing: ranks of the same instance on its NIC group;
            groups: NIC groups the instance uses on the node; on_leaf, on_switch: ranks of the instance under the
            rank's leaf and PCIe switch.
        switches: whether some instance spans PCIe switches of one node.
        rings: NVLink rings through the instance's GPUs in a node (least over distinct sets; 0 = must take PCIe);
            -1 when a switch makes the question moot.
        to_nic: PCIe switch above each rank's NIC where GPUs reach it over PCIe they share with their peers, else empty;
            slot_shared: whether what goes there takes the links that also lead to the node's peers.
        uplinks: of one leaf switch where flows are hashed onto them, 0 where they are spread.
        through_host: whether what goes between a node's GPUs takes the uplinks of their PCIe switches.
        staged: whether what leaves a node is copied through its host's memory.
        keep: links that must stay in the loads because they are not like their kind: degraded, or of a simulated rank
            among several classes.
        loads: memoised loads by pattern.
    """

    ranks: Ints
    instances: int
    size: int
    nodes: int
    widest: int
    per_node: int
    leaves: int
    node: Ints
    nic: Ints
    leaf: Ints
    local: Ints
    sharing: Ints
    groups: Ints
    on_leaf: Ints
    switch: Ints
    on_switch: Ints
    switches: bool
    rings: int
    to_nic: Ints
    slot_shared: bool
    uplinks: int
    through_host: bool
    staged: bool
    keep: tuple[LinkId, ...]
    loads: dict[str, Loads] = field(default_factory=dict)


def place(ranks: Ints, topology: Topology, speeds: Speeds, detours: Mapping[int, int] | None = None,
          keep: Sequence[LinkId] = ()) -> Placement:
    """Placement of a communicator.

    Args:
        ranks: shape (instances, size).
        detours: failed NIC groups, and the one of the same node that carries the traffic of each.
        keep: links that must stay in the loads beside the degraded ones.
    """
    instances, size = ranks.shape
    flat = np.ascontiguousarray(ranks, dtype=np.int64).ravel()
    per_node, groups = topology.gpus_per_node, speeds.nic_groups
    node = flat // per_node
    slot = flat - node * per_node
    nic = node * groups + slot * groups // per_node
    for failed, instead in (detours or {}).items():
        nic[nic == failed] = instead
    inter = topology.inter
    rails = groups if inter.rail_optimized else 1
    leaf = node // inter.nodes_per_leaf * rails + (nic % groups if inter.rail_optimized else 0)
    row = np.repeat(np.arange(instances, dtype=np.int64), size)
    wide = int(flat.max()) + 1 if flat.size else 1
    local, nodes_of, _ = _together(row, node, wide, instances)
    sharing, _, nic_first = _together(row, nic, wide * max(groups, 1), instances)
    on_leaf, leaves_of, _ = _together(row, node // inter.nodes_per_leaf, wide, instances)
    rings = _rings(topology, row, node, slot, local)
    pcie, far = topology.intra.kind == "pcie", int(nodes_of.max()) > 1
    over_pcie, behind = pcie or rings == 0, far and (pcie or topology.intra.islands())
    switch = flat // topology.intra.gpus_per_switch if over_pcie or behind else node
    on_switch, _, _ = _together(row, switch if over_pcie else node, wide, instances)
    groups_used = _sum_by(row * wide + node, nic_first)
    nic_slot = nic % groups * per_node // groups if behind else np.empty(0, dtype=np.int64)
    to_nic = (node * per_node + nic_slot) // topology.intra.gpus_per_switch if behind else nic_slot
    return Placement(
        ranks=flat, instances=instances, size=size, nodes=int(nodes_of.max()), widest=int(nodes_of.argmax()),
        per_node=int(local.max()), leaves=int(leaves_of.max()), node=node, nic=nic, leaf=leaf, local=local,
        sharing=sharing, groups=groups_used, on_leaf=on_leaf, switch=switch, on_switch=on_switch,
        switches=bool(np.any(on_switch < local)) or bool(behind and np.any(to_nic != switch)),
        rings=rings, to_nic=to_nic, slot_shared=pcie and far,
        uplinks=speeds.leaf_uplinks if inter.routing == "ecmp" else 0,
        through_host=topology.intra.through_host, staged=speeds.stage > 0,
        keep=(*(link for link, _ in topology.degraded), *keep))


def _runs(key: Ints) -> tuple[Ints, Ints]:
    """Number of the group (equal keys) each entry belongs to, and the first entry of each group."""
    ordered = bool(np.all(key[1:] >= key[:-1]))
    order = None if ordered else np.argsort(key, kind="stable")
    sorted_key = key if order is None else key[order]
    edge = np.empty(key.size, dtype=bool)
    edge[0] = True
    np.not_equal(sorted_key[1:], sorted_key[:-1], out=edge[1:])
    group = np.cumsum(edge) - 1
    first = np.flatnonzero(edge)
    if order is None:
        return group, first
    inverse = np.empty(key.size, dtype=np.int64)
    inverse[order] = group
    return inverse, order[first]


def _together(row: Ints, where: Ints, wide: int, instances: int) -> tuple[Ints, Ints, Ints]:
    """For each rank: ranks of its instance at the same place; places of each instance; 1 at each place's first rank."""
    group, first = _runs(row * wide + where)
    mark = np.zeros(row.size, dtype=np.int64)
    mark[first] = 1
    return np.bincount(group)[group], np.bincount(row[first], minlength=instances), mark


def _sum_by(key: Ints, values: Ints) -> Ints:
    group, _ = _runs(key)
    return np.bincount(group, weights=values)[group].astype(np.int64)


def _rings(topology: Topology, row: Ints, node: Ints, slot: Ints, local: Ints) -> int:
    """Least number of NVLink rings over the distinct sets of GPUs that instances occupy in a node."""
    if topology.intra.kind != "nvlink-mesh" or topology.gpus_per_node > 62 or int(local.max()) < 2:
        return -1
    inverse, _ = _runs(row * (int(node.max()) + 1) + node)
    masks = np.zeros(int(inverse.max()) + 1, dtype=np.int64)
    np.bitwise_or.at(masks, inverse, np.int64(1) << slot)
    least = []
    for mask in np.unique(masks):
        gpus = tuple(i for i in range(topology.gpus_per_node) if int(mask) >> i & 1)
        if len(gpus) > 1:
            least.append(ring_count(topology.intra.matrix, gpus))
    return min(least, default=-1)


def compress(kind: str, index: Ints, load: Floats, exact: bool, keep: tuple[int, ...] = ()) -> list[
        tuple[LinkId, float]]:
    """Sum `load` per link, keep all loaded links (`exact`) or the lowest-numbered of each distinct load and `keep`."""
    low = int(index.min()) if index.size else 0
    total: Floats = np.bincount(index - low, weights=load).astype(np.float64)
    return _representatives(kind, low, total, exact, keep)


def _representatives(kind: str, low: int, total: Floats, exact: bool, keep: tuple[int, ...]) -> list[
        tuple[LinkId, float]]:
    if exact:
        used = np.flatnonzero(total)
    else:
        values, used = np.unique(np.round(total / max(float(total.max()), 1e-300), _DIGITS), return_index=True)
        used = used[values > 0]
        special = [i - low for i in keep if 0 <= i - low < total.size and total[i - low] > 0]
        if special:
            used = np.union1d(used, np.array(special, dtype=np.int64))
    return [((kind, int(i) + low), float(total[i])) for i in used]


#: One kind of link of a pattern: kind, link of each rank, load, and flows each rank adds (leaf uplinks only).
Part = tuple[str, Ints, Floats, Floats | None]


def _assemble(p: Placement, parts: list[Part]) -> Loads:
    """Links and loads of a pattern; see `EXACT_LINKS`."""
    if p.instances == 1 and p.size <= EXACT_LINKS:
        found = _compressed(p, parts, True)
        if len(found) <= EXACT_LINKS:
            return tuple(found)
    return tuple(_compressed(p, parts, False))


def _compressed(p: Placement, parts: list[Part], exact: bool) -> list[tuple[LinkId, float]]:
    found: dict[LinkId, float] = {}
    for kind, index, load, flows in parts:
        keep = tuple(number for name, number in p.keep if name == kind)
        if flows is None or not p.uplinks:
            links = compress(kind, index, load, exact, keep)
        else:
            links = _hashed(p.uplinks, kind, index, load, flows, exact, keep)
        for link, value in links:
            found[link] = found.get(link, 0.0) + value
    return list(found.items())


def _hashed(uplinks: int, kind: str, index: Ints, load: Floats, flows: Floats, exact: bool,
            keep: tuple[int, ...]) -> list[tuple[LinkId, float]]:
    """Leaf loads times what hashing the flows loses: the fullest uplink decides, its share counts for all."""
    low = int(index.min()) if index.size else 0
    total = np.bincount(index - low, weights=load)
    count = np.rint(np.bincount(index - low, weights=flows)).astype(np.int64)
    values, inverse = np.unique(count, return_inverse=True)
    loss = np.array([collision_loss(int(v), uplinks) for v in values])
    return _representatives(kind, low, total * loss[inverse], exact, keep)


def ring_loads(p: Placement, channels: int = 1) -> Loads:
    """One unit of data passed along every edge of the rings of all instances, in `channels` flows between nodes.

    On several nodes each ring leaves a node once, at a different GPU for each ring, so of a node's g GPUs each sends
    (g-1)/g inside and the node's NICs share one unit.
    """
    inside = np.where(p.nodes == 1, np.where(p.local > 1, 1.0, 0.0), (p.local - 1) / p.local)
    return _symmetric(p, f"ring {channels}", inside, 1.0, channels)


def tree_loads(p: Placement, inside: float, outside: float, channels: int = 1) -> Loads:
    """Per GPU `inside` x (g-1)/g units to its node's peers and `outside` units out of and into every node."""
    return _symmetric(p, f"tree {inside} {outside} {channels}", inside * (p.local - 1) / p.local, outside, channels)


def multicast_loads(p: Placement, outside: float, channels: int = 1) -> Loads:
    """NVLink SHARP: each GPU sends its data once to be summed by the switch and its share of the result: 1 + 1/g."""
    return _symmetric(p, f"nvls {outside} {channels}", 1.0 + 1.0 / p.local, outside, channels)


def _symmetric(p: Placement, key: str, inside: Floats, outside: float, channels: int) -> Loads:
    """A pattern in which every link carries as much in as out; `channels` flows leave each leaf an instance spans."""
    if key not in p.loads:
        parts: list[Part] = []
        out = outside / p.local if p.nodes > 1 else np.zeros(p.ranks.size)
        for way in ("out", "in"):
            slot = inside + out if p.slot_shared else inside
            parts.append((f"gpu_{way}", p.ranks, slot, None))
            if p.through_host:
                parts.append((f"root_{way}", p.switch, inside, None))
            if p.switches:
                crossing = np.where(p.on_switch < p.local, inside / p.on_switch, 0.0)
                parts.append((f"pcie_{way}", p.switch, crossing, None))
                parts += _to_nic(p, way, out)
            if p.nodes > 1:
                parts += _to_fabric(p, way, slice(None), outside / (p.groups * p.sharing), outside / p.local)
            if p.leaves > 1:
                parts.append((f"leaf_{way}", p.leaf, outside / p.on_leaf, channels / p.on_leaf))
        p.loads[key] = _assemble(p, parts)
    return p.loads[key]


def _to_nic(p: Placement, way: str, out: Floats, which: Ints | slice = slice(None)) -> list[Part]:
    """Uplinks on the way from a GPU to a NIC below another PCIe switch: its own, and the NIC's."""
    if not p.to_nic.size:
        return []
    own, other = p.switch[which], p.to_nic[which]
    crossing = np.where(other != own, out, 0.0)
    return [(f"pcie_{way}", own, crossing, None), (f"pcie_{way}", other, crossing, None)]


def _to_fabric(p: Placement, way: str, which: Ints | slice, nic: Floats, host: Floats) -> list[Part]:
    """What a node's ranks send or receive over its NICs, and through the host's memory where it is staged there: each
    way as far as the call's channels carry, both ways together as far as the host does."""
    parts: list[Part] = [(f"nic_{way}", p.nic[which], nic, None)]
    node = p.node[which]
    return [*parts, (f"host_{way}", node, host, None), ("copies", node, host, None)] if p.staged else parts


def exchange_loads(p: Placement, nic_share: float) -> Loads:
    """All-to-all: one unit per rank spread evenly over all ranks; `nic_share` inflates NICs that p2p uses less well."""
    key = f"exchange {nic_share}"
    if key not in p.loads:
        inside = (p.local - 1) / p.size
        outside = (p.size - p.local) / p.size / nic_share
        far = (p.size - p.on_leaf) / p.size
        out = (p.size - p.local) / p.size
        parts: list[Part] = []
        for way in ("out", "in"):
            parts.append((f"gpu_{way}", p.ranks, inside + out if p.slot_shared else inside, None))
            if p.through_host:
                parts.append((f"root_{way}", p.switch, inside, None))
            if p.switches:
                parts.append((f"pcie_{way}", p.switch, (p.local - p.on_switch) / p.size, None))
                parts += _to_nic(p, way, out)
            if p.nodes > 1:
                parts += _to_fabric(p, way, slice(None), outside, out)
            if p.leaves > 1:
                parts.append((f"leaf_{way}", p.leaf, far, (p.size - p.on_leaf).astype(np.float64)))
        p.loads[key] = _assemble(p, parts)
    return p.loads[key]


def shift_loads(p: Placement, nic_share: float) -> Loads:
    """Send/recv: of two ranks the first sends one unit to the second; of more, each to the next (as nccl-tests)."""
    key = f"shift {nic_share}"
    if key not in p.loads:
        grid = np.arange(p.ranks.size).reshape(p.instances, p.size)
        source = grid[:, 0] if p.size == 2 else grid.ravel()
        target = grid[:, 1] if p.size == 2 else np.roll(grid, -1, axis=1).ravel()
        near = p.node[source] == p.node[target]
        inside, outside = near.astype(np.float64), (~near).astype(np.float64)
        far = outside * (p.leaf[source] != p.leaf[target])
        parts: list[Part] = []
        for way, end in (("out", source), ("in", target)):
            parts.append((f"gpu_{way}", p.ranks[end], inside + outside if p.slot_shared else inside, None))
            if p.through_host:
                parts.append((f"root_{way}", p.switch[end], inside, None))
            if p.switches:
                parts.append((f"pcie_{way}", p.switch[end], inside * (p.switch[source] != p.switch[target]), None))
                parts += _to_nic(p, way, outside, end)
            if p.nodes > 1:
                parts += _to_fabric(p, way, end, outside / nic_share, outside)
                parts.append((f"leaf_{way}", p.leaf[end], far, far * _PAIR_FLOWS))
        p.loads[key] = _assemble(p, parts)
    return p.loads[key]
