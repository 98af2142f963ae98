"""The facts of each data-parallel stack: how buckets fill, what is copied, what is split (see `Reduction`)."""

from __future__ import annotations

from sim.parallel.data.bucketed import Reduction, sums_wide
from sim.parallel.data.buckets import Bucket, Routed, apart, fill, fill_before
from sim.parallel.step import Plan
from sim.work import DTYPE_BYTES

MIB = 2**20
#: PyTorch `reducer.hpp`: kDefaultFirstBucketBytes.
FIRST_BUCKET_BYTES = MIB
#: DeepSpeed `config.py`: reduce_bucket_size and allgather_bucket_size, elements.
DEEPSPEED_BUCKET = 500_000_000
#: Megatron-LM `distributed_data_parallel.py`: bucket_size = max(40e6, 1e6 * data-parallel size), parameters.
MEGATRON_BUCKET, MEGATRON_BUCKET_PER_RANK = 40_000_000, 1_000_000


def _spread(plan: Plan) -> bool:
    """Whether routed experts are spread over ranks."""
    return "expert_data" in plan.groups


def ddp(plan: Plan, sharded_optimizer: bool) -> Reduction:
    """PyTorch DDP; with `sharded_optimizer` ZeroRedundancyOptimizer on top (ZeRO-1 of PyTorch).

    Without `gradient_as_bucket_view` a gradient is scaled into its bucket (read, write) and copied back after
    backward (read, write), and the buckets are a second copy of all gradients. With it the division is in place.
    """
    parallel, precision = plan.scenario.parallel, plan.scenario.training.precision
    width, wire = DTYPE_BYTES[precision.gradients], DTYPE_BYTES[precision.reduce]
    view = parallel.gradient_as_bucket_view
    limit = parallel.bucket_mb * MIB / wire
    buckets = apart(lambda routed, group: fill(
        plan.architecture, limit if routed else FIRST_BUCKET_BYTES / wire, limit, routed, group), _spread(plan))
    wrapped = plan.replicas > 1 or parallel.strategy == "ddp"
    return Reduction(
        buckets=buckets, kind="all_reduce", shards=plan.replicas if sharded_optimizer else 1,
        gradient_shards=1, copy_in=width + wire, copy_out=0.0 if view else width + wire,
        buffer_bytes=plan.architecture.parameters * wire if wrapped else 0.0, transient=False,
        gather_elements=plan.architecture.parameters if sharded_optimizer else 0, resident_gradients=False,
        views=view and wrapped)


def deepspeed(plan: Plan, stage: int) -> Reduction:
    """DeepSpeed ZeRO-1 and 2: contiguous buffers of `reduce_bucket_size` elements, two when reduction overlaps.

    A bucket's slices are reduced to their owners one by one, or the bucket to all ranks, by release
    (`runtime/zero/stage_1_and_2.py`, average_tensor); gradients summed in fp32 beside bf16 parameters always to all
    (`runtime/pipe/engine.py`, _bf16_reduce_grads). Either fills the buckets alike.
    """
    parameters, precision = plan.architecture.parameters, plan.scenario.training.precision
    width = DTYPE_BYTES[precision.reduce]
    buffers = 2 if plan.scenario.parallel.overlap else 1
    return Reduction(
        buckets=apart(lambda routed, group: fill_before(plan.architecture, DEEPSPEED_BUCKET, routed, group),
                      _spread(plan)),
        kind="all_reduce" if sums_wide(plan, stage == 2) else plan.stack.partition_reduction,
        shards=plan.replicas, gradient_shards=plan.replicas if stage == 2 else 1,
        copy_in=DTYPE_BYTES[precision.gradients] + width, copy_out=0.0,
        buffer_bytes=buffers * min(DEEPSPEED_BUCKET, parameters) * width, transient=True,
        gather_elements=DEEPSPEED_BUCKET, resident_gradients=False)


def megatron(plan: Plan, distributed_optimizer: bool) -> Reduction:
    """Megatron: gradients accumulate straight into one buffer, reduced in place; one bucket if not overlapped."""
    ranks = plan.replicas
    limit = max(MEGATRON_BUCKET, MEGATRON_BUCKET_PER_RANK * ranks)

    def whole(routed: Routed, group: str) -> list[Bucket]:
        buckets = fill(plan.architecture, limit, limit, routed, group)
        if plan.scenario.parallel.overlap or not buckets:
            return buckets
        numel = sum(bucket.numel for bucket in buckets)
        return [Bucket(numel, buckets[-1].position, buckets[-1].operator, group)]
    buckets = apart(whole, _spread(plan))
    return Reduction(
        buckets=buckets, kind="reduce_scatter" if distributed_optimizer else "all_reduce",
        shards=ranks if distributed_optimizer else 1, gradient_shards=1, copy_in=0.0, copy_out=0.0, buffer_bytes=0.0,
        transient=False, gather_elements=limit if distributed_optimizer else 0, resident_gradients=True)
