"""How each data-parallel stack reduces gradients: how buckets fill, what is copied, what is split."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.parallel.data.buckets import Bucket, Chosen, Routed, apart, bucket_elements, fill, fill_before, joined
from sim.parallel.step import Plan, is_matrix, narrow_only
from sim.scenario.fields.schema import Scenario
from sim.software import Stack
from sim.work import DTYPE_BYTES

MIB = 2**20
#: PyTorch `reducer.hpp`: kDefaultFirstBucketBytes.
FIRST_BUCKET_BYTES = MIB
#: DeepSpeed `config.py`: reduce_bucket_size and allgather_bucket_size, elements.
DEEPSPEED_BUCKET = 500_000_000
#: Megatron-LM `distributed_data_parallel.py`: bucket_size = max(40e6, 1e6 * data-parallel size), parameters; the former
#: is `Stack.bucket_elements`.
MEGATRON_BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True)
class Reduction:
    """How a stack reduces gradients.

    Attributes:
        buckets: in launch order.
        kind: all_reduce, reduce_scatter, or reduce (slice by slice to its owner).
        shards: ranks over which optimizer states are split (1 = none), those of routed experts over as many as hold
            the same ones.
        gradient_shards: ranks over which kept gradients are split, likewise.
        copy_in, copy_out: bytes moved per gradient element to fill a bucket, and to empty it after backward.
        buffer_bytes: bucket buffers beside the gradients themselves.
        transient: whether the buffers exist only during backward.
        gather_elements: elements per all-gather of updated parameters after the optimizer (0 = none).
        resident_gradients: gradients live in a buffer that is never freed (Megatron).
        views: gradients become views of their bucket when it is reduced.
        behind: buckets are reduced behind the last backward, whatever is asked for.
        narrow: whole gradients in the parameters' dtype live beside the buffer until each backward is through.
        by_rank: each rank's piece of each parameter is copied to its place behind the gather.
        norm_of_all: the norm is taken, and the clipping done, of whole gradients on every rank.
        flattened: whole gradients are copied into one buffer bucket by bucket behind backward and back; then a rank
            keeps those of its part alone, unless they are sums that last.
        listed: gathers of parameters go over lists of tensors.
        gathers: how updated parameters are gathered bucket by bucket: behind (the optimizer), used (beside the next
            forward, as modules come to use them), aligned (so, chunks of a pipeline rank ahead of their turn); "" where
            they are not, or by `gather_elements`.
        chunkwise: a chunk's buckets are reduced behind its last backward, not beside it.
        prepared: bytes moved per gradient element just before its bucket is reduced.
        contiguous: gradients are copied into buffers that are made in every backward (`sim.parallel.data.contiguous`).
        copied: a bucket that several ranks have parts of is summed in a copy.
        dealt: `shards` ranks update whole parameters that are dealt out to them (`sim.parallel.muon`), and gather all.
    """

    buckets: list[Bucket]
    kind: str
    shards: int
    gradient_shards: int
    copy_in: float
    copy_out: float
    buffer_bytes: float
    transient: bool
    gather_elements: int
    resident_gradients: bool
    views: bool = False
    behind: bool = False
    narrow: bool = False
    by_rank: bool = False
    norm_of_all: bool = False
    flattened: bool = False
    listed: bool = False
    gathers: str = ""
    chunkwise: bool = False
    prepared: float = 0.0
    contiguous: bool = False
    copied: bool = False
    dealt: bool = False


def sums_wide(plan: Plan, split: bool) -> bool:
    """Whether gradients of the backward pass keep the parameters' dtype beside wider sums (DeepSpeed
    `runtime/bf16_optimizer.py`: fp32_groups_gradients of whole, not of `split`, groups;
    update_hp_grads(clear_lp_grads=False))."""
    precision = plan.scenario.training.precision
    return (plan.stack.gradient_path == "ipg" and not plan.offload.moves_optimizer and precision.master != "none"
            and not split and DTYPE_BYTES[precision.gradients] > DTYPE_BYTES[precision.parameters])


def _spread(plan: Plan) -> bool:
    """Whether routed experts are spread over ranks."""
    return "expert_data" in plan.groups


def ddp(plan: Plan, sharded_optimizer: bool) -> Reduction:
    """PyTorch DDP; with `sharded_optimizer` ZeroRedundancyOptimizer on top (ZeRO-1 of PyTorch).

    Without `gradient_as_bucket_view` a gradient is scaled into its bucket (read, write) and copied back after
    backward (read, write), and the buckets are a second copy of all gradients. With it the division is in place.

    Gradients that go over the wire in another dtype are what a communication hook makes of buckets that stay as they
    are: it casts a bucket and divides the cast before the sum, which it copies back into the bucket (torch 2.2.2
    distributed/algorithms/ddp_comm_hooks/default_hooks.py, bf16_compress_hook). The casts' own memory is not counted.
    """
    parallel, precision = plan.scenario.parallel, plan.scenario.training.precision
    width, wire = DTYPE_BYTES[precision.gradients], DTYPE_BYTES[precision.reduce]
    view, hooked = parallel.gradient_as_bucket_view, precision.reduce != precision.gradients
    limit = parallel.bucket_mb * MIB / width
    buckets = apart(lambda routed, group: fill(
        plan.architecture, limit if routed else FIRST_BUCKET_BYTES / width, limit, routed, group), _spread(plan))
    wrapped = plan.replicas > 1 or parallel.strategy == "ddp"
    return Reduction(
        buckets=buckets, kind="all_reduce", shards=plan.shards() if sharded_optimizer else 1,
        gradient_shards=1, copy_in=2 * width,
        copy_out=(0.0 if view else 2 * width) + (wire + width if hooked else 0.0),
        buffer_bytes=plan.architecture.parameters * width if wrapped else 0.0, transient=False,
        gather_elements=plan.architecture.parameters if sharded_optimizer else 0, resident_gradients=False,
        views=view and wrapped, prepared=width + 3 * wire if hooked else 0.0)


def deepspeed(plan: Plan, stage: int) -> Reduction:
    """DeepSpeed's data parallelism: without ZeRO (stage 0), ZeRO-1 and 2.

    ZeRO-2 copies gradients into contiguous buffers of `reduce_bucket_size` elements, two when reduction overlaps, and
    divides them there; a bucket's slices are reduced to their owners one by one, or flattened once more and summed on
    all ranks, by release (`runtime/zero/stage_1_and_2.py`, average_tensor, allreduce_and_scatter; passes traced on fake
    processes: 0.19.8). So does ZeRO-1 in its last micro-step, from 0.13 or 0.14 on. Before, it ignored both settings:
    it reduced behind the last backward, to all ranks, and flattened each bucket for it, divided it, and copied it back
    (`runtime/engine.py`, _configure_zero_optimizer; reduce_gradients, buffered_reduce_fallback, allreduce_and_copy);
    its first releases flattened all gradients at once (0.3.16 `runtime/zero/stage1.py`, reduce_scatter_gradients).
    Gradients summed in fp32 beside bf16 parameters are one tensor, reduced whole, in a copy of the dtype that travels
    (`runtime/bf16_optimizer.py`, get_grads_for_reduction; `runtime/engine.py`, allreduce_bucket). Stage 0 does as old
    ZeRO-1, in buckets of a fixed size, and keeps all (`runtime/engine.py`, allreduce_gradients,
    MEMORY_OPT_ALLREDUCE_SIZE; traced likewise).
    """
    parameters, precision = plan.architecture.parameters, plan.scenario.training.precision
    width, own = DTYPE_BYTES[precision.reduce], DTYPE_BYTES[precision.gradients]
    wide = sums_wide(plan, stage == 2)
    full = bucket_elements(plan.scenario.parallel, width, DEEPSPEED_BUCKET) if stage else DEEPSPEED_BUCKET
    limit = parameters if wide else full
    buckets = apart(lambda routed, group: fill_before(plan.architecture, limit, routed, group), _spread(plan))
    contiguous = stage == 2 or (stage == 1 and not wide and plan.stack.whole_reduction == "contiguous")
    if not contiguous:
        flat_kind = plan.stack.whole_reduction if stage and plan.stack.whole_reduction != "contiguous" else "all_reduce"
        kind = "all_reduce" if wide else flat_kind
        copied = wide and width < own
        flat = 0 if wide and not copied else parameters if kind != "all_reduce" else limit
        return Reduction(
            buckets=buckets, kind=kind, shards=plan.shards() if stage else 1, gradient_shards=1, copy_in=0.0,
            copy_out=2 * (own + width) + 2 * width, buffer_bytes=min(flat, parameters) * width, transient=True,
            gather_elements=DEEPSPEED_BUCKET if stage else 0, resident_gradients=False, behind=True,
            flattened=stage == 1, listed=plan.stack.listed_gathers)
    overlap, alone = plan.scenario.parallel.overlap, plan.scenario.parallel.pipeline == 1
    buffers, kind = 2 if overlap else 1, plan.stack.partition_reduction
    divided, flattened = 2 * width, 2 * width if kind == "all_reduce" else 0
    return Reduction(
        buckets=buckets, kind="all_reduce" if wide else kind, shards=plan.shards(),
        gradient_shards=plan.shards() if stage == 2 else 1, copy_in=own + width, copy_out=0.0,
        buffer_bytes=buffers * full * width, transient=True, gather_elements=DEEPSPEED_BUCKET,
        resident_gradients=False, views=stage == 1 and overlap and alone, behind=stage == 1 and not overlap,
        flattened=stage == 1, listed=plan.stack.listed_gathers, prepared=divided + flattened,
        contiguous=True, copied=kind == "all_reduce" and not wide)


def deepspeed_stage(plan: Plan) -> Reduction:
    """DeepSpeed ZeRO-1 of a pipeline's stage whose optimizer is on the CPU: gradients are summed whole on the device
    and, behind the last backward, copied into one contiguous bucket after another and reduced; a rank's part of each
    goes to the host as fp32.

    Source: deepspeed 0.14.4 runtime/zero/stage_1_and_2.py (read): contiguous_gradients or cpu_offload;
    reduce_gradients(pipeline_parallel), one buffer of reduce_bucket_size; reduce_ipg_grads, copy_grads_in_partition;
    runtime/engine.py: no overlap with a PipelineModule.
    """
    precision = plan.scenario.training.precision
    width, own = DTYPE_BYTES[precision.reduce], DTYPE_BYTES[precision.gradients]
    limit = bucket_elements(plan.scenario.parallel, width, DEEPSPEED_BUCKET)
    buckets = apart(lambda routed, group: fill_before(plan.architecture, limit, routed, group), _spread(plan))
    return Reduction(
        buckets=buckets, kind=plan.stack.partition_reduction, shards=plan.shards(), gradient_shards=1, copy_in=0.0,
        copy_out=own + width, buffer_bytes=limit * width, transient=True,
        gather_elements=DEEPSPEED_BUCKET, resident_gradients=False, behind=True, listed=plan.stack.listed_gathers,
        copied=plan.stack.partition_reduction == "all_reduce",
        prepared=2 * width if plan.stack.partition_reduction == "reduce" else 4 * width)


def megatron(plan: Plan, distributed_optimizer: bool) -> Reduction:
    """Megatron: gradients accumulate straight into buffers, reduced in place.

    Every chunk of a pipeline rank is wrapped in a DDP of its own. Buckets are cut only in the first rank's first
    chunk, where nothing else hides them, and only if reduction overlaps; all else is one bucket a buffer. With the
    distributed optimizer updated parameters are gathered bucket by bucket.

    Source: megatron-core 0.5.0 to 0.16.0 distributed/distributed_data_parallel.py (bucket_size, disable_bucketing) and
    param_and_grad_buffer.py; NeMo 2.0.0 lightning/megatron_parallel.py, Megatron-Bridge 0.6.0 models/model_provider.py
    (disable_bucketing of every chunk but the first).
    """
    if not plan.stack.lasting_gradients:
        return ddp(plan, False) if plan.scenario.parallel.overlap else _flattened(plan)
    limit = bucket_elements(plan.scenario.parallel, DTYPE_BYTES[plan.scenario.training.precision.gradients],
                            max(plan.stack.bucket_elements, MEGATRON_BUCKET_PER_RANK * plan.replicas))
    overlap = plan.scenario.parallel.overlap
    chunks = plan.chunks or (range(len(plan.architecture.stack)),)

    def whole(routed: Routed, group: str) -> list[Bucket]:
        found: list[Bucket] = []
        for number, chunk in enumerate(chunks):
            cut = overlap and plan.stage == 0 and number == 0
            of_chunk = _buffers(plan, limit if cut else 2.0**63, routed, group, chunk)
            found += [replace(bucket, chunk=number) for bucket in of_chunk]
        return sorted(found, key=lambda bucket: (-bucket.position, bucket.operator))
    return Reduction(
        buckets=apart(whole, _spread(plan)), kind="reduce_scatter" if distributed_optimizer else "all_reduce",
        shards=plan.shards() if distributed_optimizer else 1, gradient_shards=1, copy_in=0.0, copy_out=0.0,
        buffer_bytes=0.0, transient=False, gather_elements=0, resident_gradients=True,
        gathers=gathers_of(plan.scenario, plan.stack) if distributed_optimizer else "",
        chunkwise=plan.stack.pipeline_reduction == "aligned" and takes_turns(plan.scenario),
        prepared=0.0 if plan.stack.averaging_collectives else 2 * DTYPE_BYTES[plan.scenario.training.precision.reduce])


def layer_wise(plan: Plan) -> Reduction:
    """Megatron's layer-wise optimizer: gradients are all-reduced as without it, whole parameters are dealt out.

    Source: megatron-core 0.16.1 optimizer/layer_wise_optimizer.py: "keep all megatron distributed-optimizer related
    options OFF", "Megatron DDP handle allreduce grad".
    """
    return replace(megatron(plan, False), shards=plan.shards(), dealt=True)


def _flattened(plan: Plan) -> Reduction:
    """Megatron before it had buffers, unless it reduced beside backward with PyTorch's DDP (`--DDP-impl torch`): behind
    the last backward all gradients are copied into one tensor, which is divided, reduced and copied back.

    Source: Megatron-LM v1.0 to v2.1 (2020) model/distributed.py, allreduce_params; README (from memory).
    """
    parameters, width = plan.architecture.parameters, DTYPE_BYTES[plan.scenario.training.precision.reduce]
    buckets = apart(lambda routed, group: fill(plan.architecture, 2.0**63, 2.0**63, routed, group), _spread(plan))
    return Reduction(
        buckets=buckets, kind="all_reduce", shards=1, gradient_shards=1, copy_in=0.0, copy_out=2 * width,
        buffer_bytes=parameters * width, transient=True, gather_elements=0, resident_gradients=False, behind=True,
        prepared=4 * width)


def gathers_of(scenario: Scenario, stack: Stack) -> str:
    """How a stack with Megatron's buffers gathers updated parameters (`Reduction.gathers`)."""
    if scenario.parallel.strategy != "zero1" or stack.gradient_path != "grad_buffer":
        return ""
    if not (scenario.parallel.overlap and stack.gathers_ahead):
        return "behind"
    return "aligned" if takes_turns(scenario) else "used"


def takes_turns(scenario: Scenario) -> bool:
    """Whether chunks of a pipeline rank take turns, by Megatron's interleaved schedule."""
    parallel = scenario.parallel
    return parallel.schedule == "interleaved" and parallel.virtual_stages > 1


def _buffers(plan: Plan, limit: float, routed: Routed, group: str, chunk: range) -> list[Bucket]:
    """Buckets of one DDP instance's gradients of one kind.

    Parameters in 8 bits and all others have buffers of their own; those of the others travel with the last of the
    narrow ones, where a stack joins them (`Stack.buckets_joined`).

    Source: megatron-core 0.10.0 to 0.16.0 distributed/param_and_grad_buffer.py, partition_buckets.
    """
    def filled(chosen: Chosen | None) -> list[Bucket]:
        return fill(plan.architecture, limit, limit, routed, group, chunk, chosen)
    if not narrow_only(plan):
        return filled(None)
    narrow = filled(is_matrix)
    wide = [replace(bucket, wide=bucket.numel) for bucket in filled(lambda layer, p: not is_matrix(layer, p))]
    if narrow and wide and plan.stack.buckets_joined:
        return [*narrow[:-1], joined([narrow[-1], *wide])]
    return narrow + wide


def accumulator(plan: Plan, sharded_optimizer: bool) -> Reduction:
    """nanotron: half gradients are whole until backward is through and are then added to one fp32 buffer.

    With ZeRO-1 the model is not wrapped in DDP: the buffer is all-reduced by one call behind the last backward, whole,
    and updated parameters are gathered rank by rank. Without it DDP's buckets of half gradients launch an all-reduce
    of what the buffer holds of their parameters. Gradients that are not accumulated in fp32 are DDP's own.

    Source: nanotron 0.1 to 0.4 (2024) trainer.py, _init_model (make_ddp) and training_step; optim/
    gradient_accumulator.py, FP32GradientAccumulator and get_fp32_accum_hook; optim/zero.py, _all_gather_params;
    optim/clip_grads.py.
    """
    precision, parameters = plan.scenario.training.precision, plan.architecture.parameters
    half, wide = DTYPE_BYTES[precision.parameters], DTYPE_BYTES[precision.gradients]
    if wide <= half:
        return replace(ddp(plan, sharded_optimizer), by_rank=sharded_optimizer, norm_of_all=True)
    wrapped = not sharded_optimizer and plan.replicas > 1
    limit = plan.scenario.parallel.bucket_mb * MIB / half

    def buckets(routed: Routed, group: str) -> list[Bucket]:
        if not sharded_optimizer:
            return fill(plan.architecture, FIRST_BUCKET_BYTES / half, limit, routed, group)
        return fill(plan.architecture, 2.0**63, 2.0**63, routed, group)
    return Reduction(
        buckets=apart(buckets, _spread(plan)), kind="all_reduce", shards=plan.shards() if sharded_optimizer else 1,
        gradient_shards=1, copy_in=2 * half if wrapped else 0.0, copy_out=2 * half if wrapped else 0.0,
        buffer_bytes=parameters * half if wrapped else 0.0, transient=False,
        gather_elements=parameters if sharded_optimizer else 0, resident_gradients=True, behind=sharded_optimizer,
        narrow=True, by_rank=sharded_optimizer, norm_of_all=True)
