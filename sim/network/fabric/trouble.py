"""Links that are slower than their like, or gone: whether they exist, what goes around them, whom they touch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sim.errors import Fault, UserError
from sim.network.fabric.fair_share import LinkId
from sim.network.fabric.topology import Speeds, Topology

Ints = npt.NDArray[np.int64]

_FIELD = "cluster.degraded"


def check_links(topology: Topology, speeds: Speeds, nodes: int) -> None:
    """A slow link that the cluster does not have would slow nothing and say nothing.

    Raises:
        UserError: no such link.
    """
    inter, per_node = topology.inter, topology.gpus_per_node
    rails = speeds.nic_groups if inter.rail_optimized else 1
    links = {"gpu": nodes * per_node, "nic": nodes * speeds.nic_groups,
             "leaf": -(-nodes // inter.nodes_per_leaf) * rails,
             "pcie": nodes * -(-per_node // topology.intra.gpus_per_switch)}
    for (kind, index), _ in topology.degraded:
        name = kind.partition("_")[0]
        if not 0 <= index < links[name]:
            raise UserError(Fault(f"{name} link {index} does not exist: {nodes} nodes have {links[name]}, counted from "
                                  "0", field=_FIELD))


def detours(topology: Topology, speeds: Speeds, nodes: int) -> dict[int, int]:
    """Failed NIC groups, each with the next working one of its node, which carries its traffic as well.

    A failed leaf of a rail-optimised fabric takes the NICs of its rail with it, below that leaf; GPUs reach the NICs of
    another rail over NVLink (NCCL 2.12, PXN). NCCL builds its rings and trees over the NICs it finds when the job
    starts; that a job is started again after the failure is taken for granted.

    Raises:
        UserError: a failed link without an alternative.
    """
    inter, groups = topology.inter, speeds.nic_groups
    lost: dict[int, str] = {}
    for (kind, index), share in topology.degraded:
        name, _, way = kind.partition("_")
        if share > 0 or way == "in":
            continue
        if name in ("gpu", "pcie"):
            raise UserError(Fault(f"{name} link {index} has failed and there is no other route to what is behind it",
                                  field=_FIELD, hint="leave the node out of the job, or give the share that is left"))
        if nodes == 1:
            continue
        if name == "nic":
            lost[index] = f"nic link {index}"
        elif not inter.rail_optimized:
            if -(-nodes // inter.nodes_per_leaf) > 1:
                raise UserError(Fault(
                    f"leaf link {index} has failed, which cuts off the {inter.nodes_per_leaf} nodes below it: the "
                    "fabric is not rail-optimised and they have no other leaf", field=_FIELD,
                    hint="leave these nodes out of the job, or give the share of up-links that is left"))
        else:
            pod, rail = divmod(index, groups)
            first = pod * inter.nodes_per_leaf
            lost |= {node * groups + rail: f"leaf link {index}"
                     for node in range(first, min(nodes, first + inter.nodes_per_leaf))}
    found = {}
    for nic, why in lost.items():
        node, own = divmod(nic, groups)
        others = [node * groups + (own + step) % groups for step in range(1, groups)]
        working = [other for other in others if other not in lost]
        if not working:
            raise UserError(Fault(f"{why} has failed and node {node} has no other way to the network", field=_FIELD,
                                  hint="leave the node out of the job, or give the share that is left"))
        found[nic] = working[0]
    return found


def link_colours(topology: Topology, speeds: Speeds, nodes: int, gpus_per_node: int) -> Ints | None:
    """Ranks told apart by the trouble on the links they use, shape (ranks,); None where all links are alike.

    Ranks of one colour have the same shares left of their GPU's link, PCIe switch, NIC and leaf.
    """
    if not topology.degraded:
        return None
    rank = np.arange(nodes * gpus_per_node, dtype=np.int64)
    gpu = rank // gpus_per_node * topology.gpus_per_node + rank % gpus_per_node
    around = detours(topology, speeds, nodes)
    places = _places(gpu, topology, speeds, around)
    at_home = _places(gpu, topology, speeds, {})["nic"]
    columns = {name: np.ones(rank.size) for name in places}
    for (kind, index), share in topology.degraded:
        name = kind.partition("_")[0]
        columns[name][places[name] == index] = share
    doubled = np.isin(places["nic"], list(around.values())) + (places["nic"] != at_home)  # a NIC that serves two
    _, colours = np.unique(np.column_stack([*columns.values(), doubled]), axis=0, return_inverse=True)
    return colours.reshape(-1).astype(np.int64) if colours.any() else None


def links_of(gpus: Ints, topology: Topology, speeds: Speeds, around: Mapping[int, int]) -> tuple[LinkId, ...]:
    """The links that some GPUs use, both ways, each once.

    Args:
        gpus: counted over whole nodes.
        around: see `detours`.
    """
    places = _places(gpus, topology, speeds, around)
    return tuple((f"{name}_{way}", int(index)) for name, column in places.items() for way in ("out", "in")
                 for index in np.unique(column))


def _places(gpus: Ints, topology: Topology, speeds: Speeds, around: Mapping[int, int]) -> dict[str, Ints]:
    """Link of each kind that each GPU uses (numbered as in `routes`)."""
    per_node, groups, inter = topology.gpus_per_node, speeds.nic_groups, topology.inter
    node, slot = gpus // per_node, gpus % per_node
    nic = node * groups + slot * groups // per_node
    for failed, instead in around.items():
        nic[nic == failed] = instead
    rails = groups if inter.rail_optimized else 1
    leaf = node // inter.nodes_per_leaf * rails + (nic % groups if inter.rail_optimized else 0)
    return {"gpu": gpus, "nic": nic, "leaf": leaf, "pcie": gpus // topology.intra.gpus_per_switch,
            "root": gpus // topology.intra.gpus_per_switch, "host": gpus // per_node}
