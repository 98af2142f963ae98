"""The update of parameters from complete gradients: what readies them, clipping, the optimizer, what waits on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.model import (
    clip_kernels,
    copied_gradient_bytes,
    gradient_dtype,
    gradient_kernels,
    optimizer_kernels,
    optimizer_temporary_bytes,
    optimizer_temporary_lists,
)
from sim.parallel.muon import Share, orthogonalise
from sim.parallel.step import COMPUTE, Plan, blocks, collective
from sim.program import Label, SectionBuilder
from sim.software import Stack
from sim.work import DTYPE_BYTES

#: What the optimizer makes for a moment; `builder.tensors` has its parts where they are known.
TEMPORARIES = "optimizer temporaries"
#: What orthogonalises matrices behind some streams, in a section; returns its last task.
Muon = Callable[[SectionBuilder, Sequence[int]], int]


def update(plan: Plan, section: SectionBuilder, numel: int, tensors: int, joins: Sequence[int] = (),
           ranks: str | None = None, largest: int = 0, back_bytes: float = 0.0, clipped: int = 0,
           pieces: Sequence[int] = (), share: Share | None = None, muon: Muon | None = None) -> int:
    """Gradient clipping and the optimizer on `numel` local parameters in `tensors` tensors.

    Args:
        ranks: communicator over which the gradient norm is summed; None if every rank holds all gradients.
        largest: elements of the largest tensor, default all.
        back_bytes: of an optimizer on the CPU, bytes per parameter it copies to the device.
        clipped: gradients that the norm is taken of, default those of the local parameters.
        pieces: elements of each tensor; what foreach makes for a moment is then counted in the allocator's blocks.
        share: of Muon, which matrices those parameters are, and the others.
        muon: what orthogonalises them in place of `sim.parallel.muon.orthogonalise`; waits for streams, gives a task.

    Returns:
        the optimizer's task.
    """
    precision, offload = plan.scenario.training.precision, plan.offload
    if offload.moves_optimizer and not offload.hybrid:
        return offload.update(section, numel, tensors, _met(plan, section, joins, ranks), back_bytes)
    if plan.scenario.training.optimizer != "none":
        joins = _prepared(plan, section, numel, tensors, joins, ranks)
        joins = _clipped(plan, section, clipped or numel, tensors, joins, ranks)
    if share is not None:
        return _orthogonalised(plan, section, share, joins, muon)
    outside = offload.outside(numel)
    if not outside:
        return _stepped(plan, section, numel, tensors, largest or numel, joins, pieces)
    parted = tensors if outside == numel else -(-tensors * outside // numel)
    arrived = offload.hand_over(section, outside, joins)
    if outside < numel:
        _stepped(plan, section, numel - outside, max(1, tensors - parted), largest or numel - outside, joins)
    return offload.update_part(section, outside, parted, arrived, DTYPE_BYTES[precision.parameters])


def _implementation(plan: Plan) -> str:
    return "fused" if plan.offload.pages_optimizer else str(plan.scenario.software.optimizer_kernel)


def _clips(plan: Plan) -> bool:
    return plan.stack.clip_gradients and plan.scenario.training.optimizer != "none"


def _prepared(plan: Plan, section: SectionBuilder, numel: int, tensors: int, joins: Sequence[int],
              ranks: str | None) -> Sequence[int]:
    """Passes that make gradients fit to be clipped; returns the streams that are still to be joined. Where one looks
    them through, all ranks agree on what it found (megatron-core 0.8.0 optimizer/optimizer.py,
    _unscale_main_grads_and_check_for_nan: all_reduce MAX, item)."""
    if sums_in_master(plan):
        return joins
    kernels = gradient_kernels(numel, tensors, plan.scenario.training.precision, plan.stack.unscaling, _clips(plan))
    if not kernels:
        return joins
    label = Label("optimizer", "optimizer", "main gradients")
    task = section.kernels(COMPUTE, plan.compute.own(kernels), label, joins=joins)
    if plan.stack.unscaling == "apart" and plan.scenario.training.precision.compute == "fp16":
        _agreed(plan, section, task, label, ranks)
    return ()


def _agreed(plan: Plan, section: SectionBuilder, task: int, label: Label, ranks: str | None) -> int:
    """A number that ranks reduce, behind `task`, and that the host may read."""
    for group in (*(() if ranks is None else (ranks,)), *plan.norm_groups):
        if len(plan.groups[group][0]) > 1:
            call = collective(plan, "all_reduce", 4, "fp32", group)
            task = section.collective(1, call, plan.stack.host_collective_s, label, waits=(task,))
    if plan.stack.reads_norm:
        section.host(plan.stack.host_read_s, label, waits=(task,))
    return task


def _clipped(plan: Plan, section: SectionBuilder, numel: int, tensors: int, joins: Sequence[int],
             ranks: str | None) -> Sequence[int]:
    """Gradients scaled down to the largest norm allowed; returns the streams that are still to be joined."""
    if not _clips(plan):
        return joins
    dtype = gradient_dtype(plan.scenario.training.precision)
    norm, scale = clip_kernels(numel, tensors, dtype, _implementation(plan))
    label = Label("optimizer", "optimizer", "gradient norm")
    task = section.kernels(COMPUTE, plan.compute.own((norm,)), label, joins=joins)
    task = _agreed(plan, section, task, label, ranks)
    section.kernels(COMPUTE, plan.compute.own((scale,)), Label("optimizer", "optimizer", "clip"), waits=(task,))
    return ()


def _orthogonalised(plan: Plan, section: SectionBuilder, share: Share, joins: Sequence[int],
                    muon: Muon | None) -> int:
    """Muon on matrices, then AdamW on everything else; gradients of wider masters are copies until both are done."""
    wide = round(copied_gradient_bytes(sum(matrix.numel for matrix in share.matrices),
                                       plan.scenario.training.precision))
    if wide:
        section.allocate("main gradients", wide, "workspace")
    task = -1
    if muon is not None:
        task = muon(section, joins)
    elif share.matrices:
        task = orthogonalise(plan, section, share.matrices, joins)
    if share.others:
        behind = joins if task < 0 else ()
        task = _stepped(plan, section, sum(share.others), len(share.others), max(share.others), behind, share.others,
                        "adamw")
    if wide:
        section.free("main gradients", wide, "workspace")
    return task


def _stepped(plan: Plan, section: SectionBuilder, numel: int, tensors: int, largest: int, joins: Sequence[int],
             pieces: Sequence[int] = (), optimizer: str = "") -> int:
    """The optimizer (default the scenario's) on the device, and what the host waits for behind it."""
    training, stack, implementation = plan.scenario.training, plan.stack, _implementation(plan)
    optimizer = optimizer or training.optimizer
    kernels = optimizer_kernels(numel, tensors, training.precision, optimizer, implementation, clip=False)
    label = Label("optimizer", "optimizer", optimizer)
    temporary = optimizer_temporary_bytes(numel, largest, training.precision, optimizer, implementation)
    if temporary and implementation == "foreach" and pieces:
        lists = optimizer_temporary_lists(training.precision, optimizer)
        made = [blocks(width * size) for width in lists for size in pieces]
        temporary, plan.builder.tensors[TEMPORARIES] = sum(made), made
    elif temporary and tensors == 1:
        copied = round(copied_gradient_bytes(numel, training.precision))
        plan.builder.tensors[TEMPORARIES] = [size for size in (copied, temporary - copied) if size]
    if temporary:
        section.allocate(TEMPORARIES, temporary, "workspace")
    task = section.kernels(COMPUTE, plan.compute.own(kernels), label, joins=joins)
    if temporary:
        section.free(TEMPORARIES, temporary, "workspace")
    if reads := _reads(stack, optimizer):
        # the GPU stands until the number is there and the next kernel is launched
        host_s = tensors * reads * (stack.host_read_s + stack.host_forward_s)
        section.host(host_s, Label("optimizer", "optimizer", "numbers read"), waits=(task,))
    if plan.offload.pages_optimizer:  # bitsandbytes optim/optimizer.py, step: torch.cuda.synchronize()
        section.host(0.0, Label("optimizer", "optimizer", "pages in place"), waits=(task,))
    return task


def _reads(stack: Stack, optimizer: str) -> int:
    """Numbers the host reads on the GPU in the update of every tensor.

    Adafactor's step depends on norms: of the parameter and of its update (torch/optim/_adafactor.py,
    `_single_tensor_adafactor`: two `.item()`), or of the parameter alone (transformers optimization.py, `_get_lr`: a
    `max` of Python's)."""
    if optimizer == "adafactor":
        return 1 if stack.modules == "transformers" else 2
    return 0 if optimizer == "none" else stack.optimizer_reads


def sums_in_master(plan: Plan) -> bool:
    """Whether every micro-step's half gradients are unscaled into fp32 ones of the master parameters."""
    precision, stack = plan.scenario.training.precision, plan.stack
    copied = gradient_dtype(precision) != precision.gradients
    return copied and stack.sums_in_master and stack.gradient_path == "reducer"


def _met(plan: Plan, section: SectionBuilder, joins: Sequence[int], ranks: str | None) -> Sequence[int]:
    """Streams an optimizer on the CPU waits for: the sum of all shares in the gradient norm too, which decides how much
    is clipped, where ranks of other stages have one, and of DeepSpeed's the other `ranks` (stage_1_and_2.py, stage3.py:
    complete_grad_norm_calculation_for_cpu_offload)."""
    groups = [ranks] if ranks is not None and plan.stack.gradient_path == "ipg" else []
    groups = [group for group in (*groups, *(name for name in plan.norm_groups if name == "model"))
              if len(plan.groups[group][0]) > 1 or group == "model"]
    if not plan.stack.clip_gradients or not groups:
        return joins
    label = Label("optimizer", "optimizer", "gradient norm")
    waits: tuple[int, ...] = ()
    for group in groups:
        call = collective(plan, "all_reduce", 4, "fp32", group)
        waits = (section.collective(1, call, plan.stack.host_collective_s, label, waits,
                                    () if waits else (*joins, COMPUTE)),)
    return tuple(dict.fromkeys((*joins, 1)))


def update_in_backward(plan: Plan, section: SectionBuilder, name: str, shards: Sequence[int], stream: int = COMPUTE,
                       waits: Sequence[int] = ()) -> int:
    """The optimizer on a layer's or unit's parameters as soon as their gradients are complete, one call each
    (`register_post_accumulate_grad_hook`; FSDP 2 runs the hooks on the stream of its reductions).

    Args:
        shards: elements of each parameter's part on this rank.
    """
    training, implementation = plan.scenario.training, plan.scenario.software.optimizer_kernel
    of = {numel: optimizer_kernels(numel, 1, training.precision, training.optimizer, implementation, clip=False)
          for numel in set(shards)}
    kernels = tuple(kernel for numel in shards for kernel in of[numel])
    largest = max(shards, default=0)
    temporary = optimizer_temporary_bytes(largest, largest, training.precision, training.optimizer, implementation)
    if temporary:
        section.allocate(TEMPORARIES, temporary, "workspace", stream)
    task = section.kernels(stream, plan.compute.own(kernels), Label(name, "backward", training.optimizer), waits)
    if temporary:
        section.free(TEMPORARIES, temporary, "workspace", stream)
    return task
