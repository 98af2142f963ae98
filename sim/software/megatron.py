"""Facts of Megatron's own modules, buffers and optimizers, which differ by its releases; part of every `Stack`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Megatron:
    """What Megatron does beside its facts in `Stack`. Other frameworks' profiles leave all of it as it is.

    Attributes:
        permutation_kept: what puts experts' rows back into the tokens' order keeps what it is given for backward, and
            rows are sorted by expert where experts are not spread too.
        counts_summed: slices of the sequence over which the loss that balances experts sums how many tokens each has,
            in every forward: none, context, or all of tensor and context.
        hybrid_offload: an optimizer on the CPU takes whole gradients once their norm is known, and maybe only a part of
            them (HybridDeviceOptimizer).
        shared_buffer: whose products gather the sequence into one buffer that stays, and have spelled-out scores there:
            none, head or layers (and the head).
        bucket_elements: of Megatron's buckets, before they grow with the number of ranks.
        lasting_gradients: Megatron's gradients live in buffers from step to step; else they are reduced by PyTorch's
            DDP, or copied into one tensor behind backward.
        averaging_collectives: Megatron's buckets are averaged by NCCL; else divided by the number of ranks beforehand.
        buckets_joined: buckets of what is not in 8 bits travel with the last of those that are.
        gathers_ahead: updated parameters are gathered beside the next forward if overlap is asked for.
        gathers_by_optimizer: where that is not asked for, each of a mixture's optimizers (one for what all replicas
            hold, one for spread experts) gathers the parameters of both behind its step.
        sums_sequence_gradients: tensor ranks that cut the sequence sum gradients of what each of them holds whole
            (norms, biases behind row-cut products, a router) behind all others, flattened into one tensor.
        reads_norm: the host reads the gradients' norm, and what an fp16 step looks for, on the GPU.
    """

    permutation_kept: bool
    counts_summed: str
    hybrid_offload: bool
    shared_buffer: str
    bucket_elements: int
    lasting_gradients: bool
    averaging_collectives: bool
    buckets_joined: bool
    gathers_ahead: bool
    gathers_by_optimizer: bool
    sums_sequence_gradients: bool
    reads_norm: bool
