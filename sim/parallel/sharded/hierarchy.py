"""MiCS's gathers in two steps (`mics_hierarchical_params_gather`): among GPUs of one number in the nodes of a shard
group, then inside every node: as many bytes between nodes as round one ring, in fewer hops.

Source: deepspeed 0.14.4 runtime/zero/mics.py, `_hierarchical_all_gather_params`, mics_utils.py,
`create_mics_comm_groups`; Zhang et al., VLDB 2022, section 3.3. What the first step brings lies side by side and is
copied to its places in the whole parameter, by way of a clone. The second step is one group call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.parallel.compute import traffic_kernel
from sim.parallel.step import Plan, blocks, collective
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES

#: Stream of gathers (`sim.parallel.sharded.zero3.STREAMS`).
GATHER = 1
#: Communicators: nodes of a shard group, and its GPUs of one node.
NODES, NODE = "shard_across", "shard_inside"


def in_two_steps(plan: Plan, section: SectionBuilder, label: Label, numels: Sequence[int], dtype: str,
                 waits: Sequence[int], joins: Sequence[int]) -> int:
    """Gather of parameters of `numels` elements in one call each way; returns the last task."""
    inside, host_s = plan.groups[NODE].shape[1], plan.stack.host_collective_s
    whole = sum(numels)
    part, width = -(-whole // inside), DTYPE_BYTES[dtype]
    clone = ("shards of all nodes", blocks(width * part), "buffers")
    call = collective(plan, "all_gather", width * part, dtype, NODES)
    task = section.collective(GATHER, call, host_s, label, waits, joins)
    copy = traffic_kernel("shards to their places", dtype, part, 2 * width * part)
    section.allocate(*clone, GATHER)
    task = section.kernels(GATHER, plan.compute.own((replace(copy, launches=len(numels)),) * 2), label, (task,))
    section.free(*clone, GATHER)
    views = len(numels) * plan.groups[NODES].shape[1]
    call = collective(plan, "all_gather", width * whole, dtype, NODE)
    return section.collective(GATHER, call, host_s + 2 * views * plan.stack.host_view_s, label, (task,))
