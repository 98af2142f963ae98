"""Updated parameters of a split optimizer, gathered bucket by bucket: behind the optimizer, or beside the next forward.

Beside it, a module's pre-hook waits for the bucket of its parameters and sends the next one on its way, so the first is
exposed and each other has the one before it to hide behind. A pipeline rank does so when its first micro-batch arrives,
chunk by chunk. Chunks that take turns are gathered ahead of their turn instead: two of them before anything else, each
other as many forwards early as there are ranks before this one, so that all ranks gather at once.

Sources: megatron-core 0.8.0 optimizer/distrib_optimizer.py (_make_forward_pre_hook, _finish_param_sync_helper); 0.10.0
to 0.16.0 distributed/distributed_data_parallel.py (_make_forward_pre_hook, start_param_sync) and
param_and_grad_buffer.py (start_param_sync, finish_param_sync); pipeline_parallel/schedules.py (param_sync_func).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.model.architecture import Layer
from sim.parallel.compute import traffic_kernel
from sim.parallel.data.buckets import Bucket
from sim.parallel.step import COMPUTE, Plan, collective
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES

#: Stream of the collectives of data parallelism; those of chunks gathered ahead of their turn have two of their own,
#: because one's gather may begin before the other's has been waited for.
_NCCL, _TURNS = 1, 2


class Gathers:
    """The gathers of one rank.

    Args:
        buckets: in launch order, without those nobody else has parts of.
    """

    def __init__(self, plan: Plan, buckets: Sequence[Bucket]) -> None:
        self.plan = plan
        self.buckets = list(buckets)
        self.uses: dict[int, list[tuple[int, list[Bucket]]]] = {}
        self.after: dict[int, Bucket] = {}
        self.number = {id(bucket): number for number, bucket in enumerate(reversed(self.buckets))}
        self.started: dict[int, int] = {}
        last: dict[tuple[int, str], Bucket] = {}
        for bucket in reversed(self.buckets):
            operator = len(plan.architecture.stack[bucket.position].operators) - 1 - bucket.operator
            at = self.uses.setdefault(bucket.position, [])
            if not at or at[-1][0] != operator:
                at.append((operator, []))
            at[-1][1].append(bucket)
            before = last.get((bucket.chunk, bucket.group))
            if before is not None:
                self.after[id(before)] = bucket
            last[bucket.chunk, bucket.group] = bucket
        for at in self.uses.values():
            at.sort(key=lambda use: use[0])

    def behind(self, section: SectionBuilder, updated: int) -> None:
        """All of them behind the optimizer, whose task is `updated`; compute waits.

        Experts that are spread have an optimizer of their own, behind which everything may be gathered once more (fact
        `gathers_by_optimizer`).
        """
        twice = self.plan.stack.gathers_by_optimizer and self.plan.scenario.parallel.expert > 1
        for bucket in self.buckets * (2 if twice else 1):
            self._call(section, bucket, "optimizer", _NCCL, (updated,))
        _wait(self.plan, section)

    def forward(self, section: SectionBuilder, position: int, layer: Layer, label: Label) -> int:
        """The first forward of a layer behind an update, cut where parameters must be there; returns its last task."""
        uses = self.uses.get(position, [])
        parts = self.plan.compute.forward_parts(layer, tuple(operator for operator, _ in uses))
        task, waits = -1, list[int]()
        for number, part in enumerate(parts):
            if number:
                waits += [self._finish(section, bucket) for bucket in uses[number - 1][1]]
            if part >= 0:
                task, waits = section.kernels(COMPUTE, part, label, waits), []
        return task

    def begin(self) -> None:
        """A section in which nothing is on its way yet."""
        self.started.clear()

    def _finish(self, section: SectionBuilder, bucket: Bucket) -> int:
        """What waits for a bucket's parameters sends the next one's on their way."""
        task = self._start(section, bucket)
        after = self.after.get(id(bucket))
        if after is not None:
            self._start(section, after)
        return task

    def _start(self, section: SectionBuilder, bucket: Bucket) -> int:
        known = self.started.get(id(bucket))
        if known is None:
            known = self.started[id(bucket)] = self._call(section, bucket, "forward", _NCCL, ())
        return known

    def ahead(self, section: SectionBuilder, chunk: int) -> None:
        """The gathers of a chunk whose turn is to come, the last parameters first."""
        for bucket in self.buckets:
            if bucket.chunk == chunk:
                self._call(section, bucket, "forward", self.stream(chunk), ())

    @staticmethod
    def stream(chunk: int) -> int:
        """Stream on which a chunk that is gathered ahead of its turn is waited for."""
        return _TURNS + chunk % 2

    def _call(self, section: SectionBuilder, bucket: Bucket, phase: str, stream: int, waits: Sequence[int]) -> int:
        """One bucket's gather; NCCL's stream waits for all kernels in front of it."""
        precision = self.plan.scenario.training.precision
        size = ((bucket.numel - bucket.wide) * DTYPE_BYTES[precision.gather]
                + bucket.wide * DTYPE_BYTES[precision.parameters])
        call = collective(self.plan, "all_gather", size, precision.gather, self.plan.within(bucket.group))
        label = Label(f"parameters{self.number[id(bucket)]}", phase, "all_gather")
        return section.collective(stream, call, self.plan.stack.host_collective_s, label, waits,
                                  () if waits else (COMPUTE,))


def _wait(plan: Plan, section: SectionBuilder) -> None:
    """Compute waits for what was gathered."""
    touch = traffic_kernel("parameters ready", plan.scenario.training.precision.gather, 1, 1.0)
    section.kernels(COMPUTE, plan.compute.own((touch,)), Label("parameters", "optimizer", "wait"), joins=(_NCCL,))
