"""Memory of DeepSpeed's contiguous gradients: what stands beside the buckets they are copied into.

Source: deepspeed 0.14.4 runtime/zero/stage_1_and_2.py, run on a driver that does nothing (tests/driver): backward
(`ipg_buffer`: one tensor of reduce_bucket_size, or two, in every backward, however small the model),
allreduce_bucket (`flatten`: a bucket whose slices belong to several ranks is copied once more and summed there),
copy_grads_in_partition (`grads_in_partition`: every gradient of which a rank keeps some, whole, in one tensor, when
the first bucket with one of them has been reduced; in a further micro-step a second one, until both are added up). The
last is so in 0.5.10 to 0.16.9 (read), the second where buckets are summed on all ranks (`partition_reduction`).
"""

from __future__ import annotations

from sim.model.architecture import Architecture
from sim.parallel.data.buckets import Bucket
from sim.parallel.step import COMPUTE, MicroStep, Plan
from sim.program import SectionBuilder
from sim.work import DTYPE_BYTES

_PART, _FURTHER = "gradient partition", "further gradient partition"


class Contiguous:
    """Of one job.

    Args:
        buckets: in launch order.
        stream: that reduces beside the kernels, if reduction overlaps.
        copies: whether a bucket of several ranks is copied where it is summed.
        keeps: whether gradients stay on the device.
    """

    def __init__(self, plan: Plan, buckets: list[Bucket], stream: int, *, copies: bool, keeps: bool) -> None:
        self._stream = stream if plan.scenario.parallel.overlap else COMPUTE
        self._wire = DTYPE_BYTES[plan.scenario.training.precision.reduce]
        share = max(1, plan.share(True))
        whole = share if plan.routed else first_whole(plan.architecture, share)
        self._part = round(whole * DTYPE_BYTES[plan.scenario.training.precision.gradients]) if keeps else 0
        self._copied: set[int] = set()
        self._first = len(buckets) - 1
        end = sum(bucket.numel for bucket in buckets)
        for number, bucket in enumerate(buckets):
            begin = end - bucket.numel
            if copies and begin // share != (end - 1) // share:
                self._copied.add(id(bucket))
            if begin < whole:
                self._first = min(self._first, number)
            end = begin
        self._opening = buckets[self._first] if buckets else None
        self._further, self._every = False, bool(plan.micro_steps) and plan.micro_steps[0].reduce

    def summed(self, section: SectionBuilder, bucket: Bucket, begins: bool) -> None:
        """The copy of a bucket in which it is summed comes or goes."""
        if id(bucket) in self._copied:
            change = section.allocate if begins else section.free
            change("summed bucket", round(bucket.numel * self._wire), "buffers", self._stream)

    def reduced(self, section: SectionBuilder, bucket: Bucket, micro: MicroStep | None) -> None:
        """A bucket has been reduced; what is kept of further micro-steps' is added up, where they reduce too."""
        if bucket is self._opening and self._part:
            self._further = self._every and micro is not None and not micro.first
            section.allocate(_FURTHER if self._further else _PART, self._part, "gradients", self._stream)

    def over(self, section: SectionBuilder) -> None:
        """A backward is through."""
        if self._further:
            section.free(_FURTHER, self._part, "gradients", self._stream)
            self._further = False

    def updated(self, section: SectionBuilder) -> None:
        """The optimizer has used the gradients."""
        if self._part:
            section.free(_PART, self._part, "gradients", self._stream)


def first_whole(architecture: Architecture, share: int) -> int:
    """Elements of all gradients of which the first rank keeps some."""
    total = 0
    for numel in (p.numel for layer in architecture.stack for p in layer.parameters):
        if total >= share:
            break
        total += numel
    return total
