"""Facts of DeepSpeed's own engine, which differ by its releases; part of every `Stack`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeepSpeed:
    """What DeepSpeed's ZeRO and its pipelines do. Other frameworks' profiles leave all of it as it is.

    Attributes:
        moves_empty_cache: DeepSpeed's ZeRO-1 and 2 give cached segments back when parameters have left for the host,
            on their way into a flat tensor.
        states_made_first: they make the optimizer's states before the first step.
        partition_checkpoints: under ZeRO-3, tensor ranks share the inputs that recomputed blocks keep.
        parameter_coordinator: how DeepSpeed ZeRO-3 fetches and releases parameters: streamed, or blocking (before 0.6).
        coordinator_hides: whether gathers and reductions of the streamed one run beside compute.
        zero_plus_plus: whether DeepSpeed's ZeRO-3 can quantise gathers and reductions and keep second shards in a node.
        secondary_waits: the host waits for the copy of every second shard.
        quantises_bf16: bf16 is cast around the quantised gathers' kernels, which know fp16 alone.
        partition_reduction: how DeepSpeed's ZeRO-2 brings a bucket to its owners: reduce_scatter, reduce (slice by
            slice) or all_reduce; whole_reduction: how its ZeRO-1 reduces flattened buckets behind the last backward, or
            contiguous: as ZeRO-2 does, in the last backward.
        listed_gathers: DeepSpeed's ZeRO-1 and 2 gather updated parameters into lists of tensors.
        checks_in_double: the optimizer looks its part's gradients through tensor by tensor, in copies in fp32 and fp64.
        partitioned_tensors: what tensor ranks pass on in shares is DeepSpeed's PartitionedTensor: gathered and copied.
        engine_buffers: a stage's engine holds what it received and sent beside what its layers count (see
            `sim.parallel.pipeline.engine_buffers`), and the last one the logits of two micro-batches.
        stages_open_buckets: gradients' hooks make ZeRO-1's bucket in the backwards of every stage; else the last one
            alone has it before the reduction.
        masters_visit: updated master parameters come from the host to the device whole, where they become narrow.
    """

    moves_empty_cache: bool
    states_made_first: bool
    partition_checkpoints: bool
    parameter_coordinator: str
    coordinator_hides: bool
    zero_plus_plus: bool
    secondary_waits: bool
    quantises_bf16: bool
    partition_reduction: str
    whole_reduction: str
    listed_gathers: bool
    checks_in_double: bool
    partitioned_tensors: bool
    engine_buffers: bool
    stages_open_buckets: bool
    masters_visit: bool
