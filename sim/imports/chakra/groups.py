"""Process groups of a trace, and the degrees of the layout that their names tell.

Sources: torch.distributed (device_mesh.py names a mesh's groups `mesh_` and the dimension's name; the observer writes
`## process_group:init ##`); torchtitan distributed/parallel_dims.py (names of dimensions); Megatron core
parallel_state.py (`group_desc`, recalled); accelerate parallelism_config.py (names of dimensions).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sim.errors import Fault, UserError
from sim.imports.chakra.files import Trace
from sim.imports.chakra.nodes import Node, readable

_INIT = "## process_group:init ##"
#: What a group's description is called -> the axis it goes along; the first that fits.
_AXES = tuple((re.compile(pattern, re.I), axis) for pattern, axis in (
    (r"^(default_pg|default|world)$", "world"),
    (r"EXPERT_TENSOR_PARALLEL|^mesh_e?tp_?ep|etp$", "expert tensor"),
    (r"EXPERT_MODEL_PARALLEL_GROUP|^mesh_ep$|^ep$|^expert_parallel", "expert"),
    (r"EXPERT|^mesh_(dp_)?e?fsdp_?ep|efsdp|dp_mod_ep", ""),
    (r"^TENSOR_MODEL_PARALLEL_GROUP$|^mesh_tp$|^tp$|^tensor_(model_)?parallel$", "tensor"),
    (r"^PIPELINE_MODEL_PARALLEL_GROUP$|^mesh_pp$|^pp$|^pipe(line)?$", "pipeline"),
    (r"^CONTEXT_PARALLEL_GROUP$|^mesh_(cp|sp)$|^cp$|^ulysses", "context"),
    (r"^mesh_dp_replicate$|^mesh_ddp$", "replicate"),
    (r"^mesh_(dp_shard|fsdp)$", "shard"),
    (r"^mesh_(dp_)?shard_cp$|^mesh_dp_shard_cp$", "shards"),
    (r"^DATA_PARALLEL_GROUP$|^mesh_dp$|^dp$|^mesh_batch$", "data"),
))


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that the rank is in; `ranks` is empty where it is of all."""

    name: str
    about: str
    size: int
    ranks: tuple[int, ...] = ()
    node: str = _INIT

    @property
    def axis(self) -> str:
        """What it goes along by its description, "" if that tells nothing."""
        return next((axis for pattern, axis in _AXES if pattern.search(self.about)), "")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective call.

    Attributes:
        node: PyTorch's operator; kind: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, send, reduce.
        dtype: on the wire; elements: of the larger buffer; over: larger over smaller buffer, 0 where both are alike.
        group: its group's name, "" if unknown.
    """

    node: Node
    kind: str
    dtype: str
    elements: int
    over: int
    group: str = ""


def groups_of(trace: Trace) -> list[Group]:
    """The groups a trace tells of: by its list of them, and by each collective that NCCL recorded."""
    found: dict[str, Group] = {}
    for node in trace.nodes:
        for group in _listed(node) if node.name == _INIT else _recorded(node):
            kept = found.get(group.name)
            if kept is None or (not kept.about and group.about):
                found[group.name] = group
    return list(found.values())


def world_of(groups: list[Group]) -> Group | None:
    """The group of all ranks, None if nothing tells of one."""
    named = [group for group in groups if group.axis == "world"]
    everyone = [group for group in groups if not group.ranks and group.node == _INIT]
    return next(iter(named or everyone), None)


def degrees(trace: Trace, groups: list[Group]) -> dict[str, Group]:
    """Axis -> a group that goes along it. Raises UserError where two groups of an axis are of different sizes."""
    found: dict[str, Group] = {}
    for group in groups:
        axis = group.axis
        if axis and axis in found and found[axis].size != group.size:
            raise UserError(Fault(f"has groups '{found[axis].about}' of {found[axis].size} and '{group.about}' of "
                                  f"{group.size} ranks", group.node, trace.file))
        if axis:
            found.setdefault(axis, group)
    return found


_KINDS = (("all-reduce", ("allreduce_", "allreduce_coalesced_")),
          ("all-gather", ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_",
                          "allgather_coalesced_")),
          ("reduce-scatter", ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")),
          ("all-to-all", ("alltoall_base_", "alltoall_")), ("broadcast", ("broadcast_",)), ("reduce", ("reduce_",)),
          ("send", ("send", "recv_")))
_KIND = {f"c10d::{name}": kind for kind, names in _KINDS for name in names}


def collectives(trace: Trace) -> list[Collective]:
    """Every call of a collective, in order."""
    found: list[Collective] = []
    last: dict[str, int] = {}
    for node in trace.nodes:
        kind = _KIND.get(node.name)
        if kind is not None and node.name not in node.above:
            sizes = [sum(_elements(one) for one in node.sizes(index)) for index in range(2)]
            large, small = max(sizes), min(sizes)
            one = Collective(node, kind, node.dtype(0) or node.dtype(1), large, large // small if small else 0)
            last[node.name] = len(found)
            found.append(one)
        elif node.name == "record_param_comms":
            caller = next((name for name in reversed(node.above) if name in last), "")
            for group in _recorded(node) if caller else ():
                at = last[caller]
                found[at] = replace(found[at], group=group.name)
    return found


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _listed(node: Node) -> Iterator[Group]:
    """The observer's list of groups: JSON in a text."""
    text = node.value(0)
    try:
        rows = json.loads(text) if isinstance(text, str) else []
    except (ValueError, RecursionError):
        return
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, Mapping) or not isinstance(row.get("pg_name"), str):
            continue
        ranks = row.get("ranks")
        listed = tuple(one for one in ranks if isinstance(one, int)) if isinstance(ranks, list) else ()
        size = row.get("group_size", len(listed))
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            yield Group(readable(row["pg_name"])[:80], readable(str(row.get("pg_desc") or ""))[:80], size, listed)


def _recorded(node: Node) -> Iterator[Group]:
    """What NCCL's record of a call says of its group (torch/csrc/distributed/c10d/ParamCommsUtils.hpp)."""
    if node.name != "record_param_comms":
        return
    name, about, size = (node.attrs.get(key) for key in ("pg_name", "pg_desc", "pg_size"))
    pair = next((one for one in node.values if isinstance(one, list) and len(one) == 2
                 and all(isinstance(part, str) for part in one)), None)
    if pair is not None:
        name, about = name or pair[0], about or pair[1]
    try:
        count = int(size) if isinstance(size, int | str) and not isinstance(size, bool) else 0
    except ValueError:
        count = 0
    if isinstance(name, str) and name and 0 < count < 10**7:
        yield Group(readable(name)[:80], readable(str(about or ""))[:80], count, (), node.name)
