"""ZeRO++'s second copy of the parameters, split within a group of neighbours (hpZ, `zero_hpz_partition_size`).

A parameter has two sets of shards: one over all ranks, which the optimizer updates, and a second one over a few
neighbours, normally a node. The second is copied out of the whole parameter where that is first let go of in a step
(`_partition_param_sec`) and dropped behind the optimizer (`_post_step`, `invalidate_secondary_tensor`). While it is
there every gather of the parameter is among the neighbours: recomputation and backward, and all gathers of the
micro-steps that follow. So one gather a step goes over all ranks, the first behind the optimizer. What is not trained
is in no group that is invalidated and keeps its second shards for good. What is gathered at once and has second shards
in part goes in two calls (`__all_gather_params_`).

Source: deepspeed 0.10.0, 0.12.6, 0.14.4, 0.19.8 runtime/zero/partition_parameters.py, partitioned_param_coordinator.py,
stage3.py, utils/groups.py (`_create_zero_param_parallel_group`: neighbours by global rank); Wang et al. 2023, arXiv
2306.10209, section 4.2. From 0.14 on the host waits for the copy's stream behind each of them. A fill with zeros in
front of the copy (0.19) is not counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from sim.parallel.compute import traffic_kernel
from sim.parallel.sharded.coordinator import Wanted
from sim.parallel.step import COMPUTE, Plan, blocks
from sim.program import Label, SectionBuilder

#: Communicator of the neighbours that share a second copy.
NEIGHBOURS = "reshard"


def neighbours(reshard: bool | int) -> int:
    """Ranks that share a second copy out among them, as `parallel.reshard_after_forward` says; 0 for none."""
    return 0 if isinstance(reshard, bool) or reshard < 2 else reshard


class Secondary:
    """Second shards of one job's parameters.

    Args:
        ranks: over which the first shards are split.
        dtype, width: of parameters as they are computed with, and its bytes.

    Attributes:
        ranks: neighbours that share a copy; 0 where there is none, and then nothing here does anything.
    """

    def __init__(self, plan: Plan, ranks: int, dtype: str, width: float) -> None:
        self.plan, self.all, self.dtype, self.width = plan, ranks, dtype, width
        self.ranks = int(plan.groups[NEIGHBOURS].shape[1]) if NEIGHBOURS in plan.groups else 0
        self.made: set[Hashable] = set()
        self.trained: dict[Hashable, int] = {}
        self.lasting: dict[Hashable, int] = {}

    def know(self, trained: Iterable[Wanted], frozen: Iterable[Wanted]) -> None:
        """All parameters that are ever let go of; those that are not trained have their second shards all along."""
        if self.ranks:
            self.trained, self.lasting = dict(trained), dict(frozen)
            size = sum(self.bytes(numel) for numel in self.lasting.values())
            self.plan.resident("secondary frozen parameters", size, "parameters")

    def begin(self, first: bool) -> None:
        """A micro-step begins; by the end of the first all second shards are there."""
        self.made = {*self.lasting, *(() if first else self.trained)}

    def elements(self, numel: int) -> int:
        """Of a second shard: parameters are padded to a multiple of all ranks."""
        return -(-numel // self.all) * self.all // self.ranks

    def bytes(self, numel: int) -> int:
        """Memory of a second shard."""
        return blocks(self.elements(numel) * self.width)

    def parted(self, wanted: Sequence[Wanted]) -> list[tuple[list[Wanted], str]]:
        """What is gathered among neighbours and what over all ranks, each with its communicator."""
        near = [w for w in wanted if w[0] in self.made]
        far = [w for w in wanted if w[0] not in self.made]
        return [(part, group) for part, group in ((near, NEIGHBOURS), (far, "shard")) if part]

    def keep(self, section: SectionBuilder, label: Label, wanted: Sequence[Wanted]) -> None:
        """Second shards of parameters that are let go of, where they have none yet."""
        if not self.ranks:
            return
        for name, numel in wanted:
            if name in self.made:
                continue
            self.made.add(name)
            section.allocate(f"secondary:{name}", self.bytes(numel), "parameters")
            self._copied(section, label, self.elements(numel), 1)

    def _copied(self, section: SectionBuilder, label: Label, elements: int, times: int) -> None:
        copy = traffic_kernel("secondary shard", self.dtype, elements, 2 * self.width * elements)
        task = section.kernels(COMPUTE, self.plan.compute.own((replace(copy, launches=times),)),
                               label._replace(name="secondary shard"))
        if self.plan.stack.secondary_waits:
            section.host(0.0, label._replace(name="secondary shard"), waits=(task,))

    def leave(self, section: SectionBuilder, resident: Sequence[int]) -> None:
        """The optimizer's step begins and lets go of every parameter, `resident` elements of those that were whole all
        along (`_partition_all_parameters`): these get second shards that nobody reads."""
        if self.ranks and resident:
            elements = sum(self.elements(numel) for numel in resident)
            self._copied(section, Label("optimizer", "optimizer", ""), elements, len(resident))

    def drop(self, section: SectionBuilder) -> None:
        """Parameters are updated: second shards are of the past."""
        if self.ranks:
            for name, numel in self.trained.items():
                section.free(f"secondary:{name}", self.bytes(numel), "parameters")
