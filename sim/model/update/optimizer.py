"""The optimizer step and gradient clipping as kernels: bytes per parameter and launches of each implementation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sim.model.architecture import Layer
from sim.model.kernels import width
from sim.model.update.muon import takes
from sim.work import Kernel

#: Tensors one multi-tensor launch takes, by number of tensor lists (1 to 5), elements per chunk and chunks per launch.
#: Source: aten/src/ATen/native/cuda/MultiTensorApply.cuh (depth_to_max_tensors, kChunkSize, depth_to_max_blocks).
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_CHUNK, _CHUNKS_PER_LAUNCH = 65536, 320

#: Accesses per parameter of each kernel of the unfused implementations, as counts of (parameter, gradient, state)
#: accesses; temporaries count as parameters. torch/optim/adamw.py `_single_tensor_adamw`, with moments updated by
#: mul and add as in composer's decoupled_adamw (loop): decay p; m mul; m add g; v mul; v addcmul g; sqrt; divide by the
#: bias correction; add eps; addcdiv. `_multi_tensor_adamw` (foreach) updates m with one lerp.
_P, _G, _S = 0, 1, 2
_STEPS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "adamw": ((2, 0, 0), (0, 0, 2), (0, 1, 2), (0, 0, 2), (0, 1, 2), (1, 0, 1), (2, 0, 0), (2, 0, 0), (3, 0, 1)),
    "adamw-foreach": ((2, 0, 0), (0, 1, 2), (0, 0, 2), (0, 1, 2), (1, 0, 1), (2, 0, 0), (2, 0, 0), (3, 0, 1)),
    "sgd": ((2, 1, 0),),
    "sgd-momentum": ((0, 0, 2), (0, 1, 2), (2, 0, 1)),
    # torch/optim/_adafactor.py: the parameter's norm; decay; norms of the gradient's rows and columns; outer product of
    # the factors; divided by their mean; bounded; rsqrt; times g; its norm; the scaled step
    "adafactor": ((1, 0, 0), (2, 0, 0), (0, 1, 0), (0, 1, 0), (1, 0, 0), (2, 0, 0), (2, 0, 0), (2, 0, 0), (2, 1, 0),
                  (1, 0, 0), (3, 0, 0)),
    # adamw's update written out, its norm and the parameter's, then the scaled step (You et al. 2020, algorithm 2)
    "lamb": ((0, 0, 2), (0, 1, 2), (0, 0, 2), (0, 1, 2), (1, 0, 1), (2, 0, 0), (2, 0, 0), (2, 0, 1), (3, 0, 0),
             (1, 0, 0), (1, 0, 0), (3, 0, 0)),
}
#: bitsandbytes: moments of one byte with an fp32 absmax per 256 elements (Dettmers et al. 2022, arXiv 2110.02861);
#: smaller tensors keep fp32 moments (optim/optimizer.py, min_8bit_size), and so do embeddings, which transformers'
#: Trainer registers for 32 bits. Two lookup tables of 256 fp32 values are there once.
_EIGHT_BIT_BLOCK, _EIGHT_BIT_LEAST, _EIGHT_BIT_TABLES = 256, 4096, 2 * 256 * 4
#: States of the parameters' size an optimizer keeps.
_STATES = {"adamw": 2, "adam": 2, "lamb": 2, "sgd-momentum": 1}

#: Accesses of one fused kernel: apex and torch FusedAdam read p, g, m, v and write p, m, v; FusedLAMB writes the update
#: in a first kernel, takes two norms, and applies it in a third (apex/csrc/multi_tensor_lamb.cu).
_FUSED: dict[str, tuple[tuple[int, int, int], ...]] = {
    "adamw": ((2, 1, 4),),
    "sgd": ((2, 1, 0),),
    "sgd-momentum": ((2, 1, 2),),
    "adafactor": _STEPS["adafactor"],
    "lamb": ((2, 1, 4), (1, 0, 0), (1, 0, 0), (3, 0, 0)),
}


def optimizer_kernels(
    parameters_local: int, tensors: int, precision: Any, optimizer: str, kernel: str, clip: bool, on_cpu: bool = False,
) -> tuple[Kernel, ...]:
    """The optimizer step of one rank.

    Args:
        parameters_local: elements this rank updates.
        tensors: parameters (or shards) it holds.
        precision: the scenario's precision (`.parameters`, `.master`, `.gradients`, `.optimizer`).
        optimizer: adamw, adam, adamw-8bit, sgd, sgd-momentum, adafactor, lamb or none.
        kernel: loop, foreach or fused.
        clip: whether the gradient norm is computed and applied first.
        on_cpu: an optimizer on the CPU, whose fused pass reads gradients as they come and writes half parameters itself
            (DeepSpeed csrc/adam/cpu_adam.cpp, adam_update_copy).

    Returns: kernels in order. fp32 AdamW moves 88 (loop), 80 (foreach) or 28 (fused) bytes per parameter; a master copy
        adds a kernel that copies it to the half parameters (Megatron-LM `_copy_main_params_to_model_params`; DeepSpeed
        stage_1_and_2.py, step; nanotron optim/gradient_accumulator.py, step), and what makes gradients as wide as it
        stands in `gradient_kernels`.
    """
    if optimizer == "none" or parameters_local == 0:
        return ()
    gradients = precision.gradients if on_cpu else gradient_dtype(precision)
    clipping = clip_kernels(parameters_local, tensors, gradients, kernel) if clip else ()
    name = "adamw" if optimizer in ("adam", "adamw-8bit") else optimizer
    master = precision.master if precision.master != "none" else precision.parameters
    state = 1.0 + 4 / _EIGHT_BIT_BLOCK if optimizer == "adamw-8bit" else width(precision.optimizer)
    if optimizer == "adamw-8bit":
        kernel = "fused"
    steps = _FUSED[name] if kernel == "fused" else _STEPS.get(f"{name}-{kernel}", _STEPS[name])
    per_parameter = sum(p * width(master) + g * width(gradients) + s * state for p, g, s in steps)
    # bitsandbytes launches its one kernel tensor by tensor
    launched = "loop" if optimizer == "adamw-8bit" else kernel
    launches = sum(_launches(parameters_local, tensors, launched, _lists(step)) for step in steps)
    step = _kernel(parameters_local, per_parameter, kernel, master, launches)
    return (*clipping, step, *master_copy(parameters_local, tensors, precision, kernel, on_cpu and kernel == "fused"))


def gradient_dtype(precision: Any) -> str:
    """What the optimizer reads gradients in: as wide as its master parameters, where it has such."""
    narrower = precision.master != "none" and width(precision.gradients) < width(precision.master)
    return str(precision.master if narrower else precision.gradients)


def gradient_kernels(
    parameters_local: int, tensors: int, precision: Any, unscaling: str, clip: bool,
) -> tuple[Kernel, ...]:
    """What comes before norm and optimizer: gradients narrower than the master parameters are copied to its dtype,
    tensor by tensor, and those of a scaled fp16 loss are divided and looked through for what is not finite.

    Source: megatron-core 0.12.1 optimizer/optimizer.py, _copy_model_grads_to_main_grads and
    _unscale_main_grads_and_check_for_nan.

    Args:
        unscaling: a pass of its own ("apart"), inside the copy, if there is one ("copied"), or inside the scaling by
            the clip coefficient, if there is one ("clipped"); see `Stack.unscaling`.
        clip: whether gradients are clipped.
    """
    if parameters_local == 0:
        return ()
    wide = gradient_dtype(precision)
    copied = wide != precision.gradients
    kernels = []
    if copied:
        kernels.append(_kernel(parameters_local, width(precision.gradients) + width(wide), "loop", wide, tensors))
    rides = (unscaling == "copied" and copied) or (unscaling == "clipped" and clip)
    if precision.compute == "fp16" and not rides:
        kernels.append(_kernel(parameters_local, 2 * width(wide), "foreach", wide,
                               _launches(parameters_local, tensors, "foreach", 1)))
    return tuple(kernels)


def layers_state_bytes(layers: Iterable[Layer], precision: Any, optimizer: str, flat: bool = False) -> int:
    """Bytes of the states an optimizer keeps of layers' parameters, without allocator rounding; see
    `optimizer_state_bytes`. Muon keeps momentum of its matrices, and AdamW's two moments of everything else."""
    if optimizer == "muon":
        return round(width(precision.optimizer) * sum(
            p.numel * (1 if takes(layer, p) else 2) for layer in layers for p in layer.parameters))
    tensors = [(p.shape, layer.kind == "embedding") for layer in layers for p in layer.parameters]
    return optimizer_state_bytes(tensors, precision, optimizer, flat)


def optimizer_state_bytes(
    tensors: Iterable[tuple[tuple[int, ...], bool]], precision: Any, optimizer: str, flat: bool = False,
) -> int:
    """Bytes of the states an optimizer keeps, without allocator rounding.

    Adafactor keeps the second moment of a matrix as means of its rows and of its columns (Shazeer & Stern 2018), in the
    gradients' dtype, and no first moment (torch/optim/_adafactor.py, read off fake tensors).

    Args:
        tensors: shape of each parameter, and whether it is an embedding's table.
        flat: the optimizer sees one-dimensional slices (a flat parameter), which have no rows.
    """
    found = list(tensors)
    if optimizer == "adafactor":
        return round(sum(width(precision.optimizer) * _factored(shape, flat) for shape, _ in found))
    if optimizer != "adamw-8bit":
        return round(_STATES.get(optimizer, 0) * width(precision.optimizer) * sum(math.prod(s) for s, _ in found))
    total = _EIGHT_BIT_TABLES if found else 0
    for shape, embedding in found:
        numel = math.prod(shape)
        small = embedding or numel < _EIGHT_BIT_LEAST
        total += 8 * numel if small else 2 * (numel + 4 * math.ceil(numel / _EIGHT_BIT_BLOCK))
    return total


def _factored(shape: tuple[int, ...], flat: bool) -> int:
    """Elements of Adafactor's second moment of one tensor."""
    if flat or len(shape) < 2:
        return math.prod(shape)
    outer = math.prod(shape[:-2])
    return outer * (shape[-2] + shape[-1])


def optimizer_temporary_bytes(parameters_local: int, largest: int, precision: Any, optimizer: str, kernel: str) -> int:
    """Bytes the optimizer step allocates for a moment.

    AdamW with foreach makes the square root of all second moments at once (`_multi_tensor_adamw`: exp_avg_sq_sqrt, then
    in place); the loop makes it tensor by tensor, and the quotient by the bias correction as a second tensor
    (`_single_tensor_adamw`). Adafactor and LAMB make an update of the parameters' size. Fused kernels make nothing, nor
    do SGD's in-place additions.

    An optimizer of wider master parameters reads gradients in their dtype: narrower ones are copied first, all of them
    (Megatron-LM `_copy_model_grads_to_main_grads`, `.float()`; DeepSpeed runtime/fp16/fused_optimizer.py, step;
    stage_1_and_2.py, `single_grad_partition`).

    Args:
        largest: elements of the largest tensor the rank holds.
    """
    copied = copied_gradient_bytes(parameters_local, precision) if optimizer != "none" else 0.0
    return round(copied + _own_temporaries(parameters_local, largest, precision, optimizer, kernel))


def optimizer_temporary_lists(precision: Any, optimizer: str) -> list[float]:
    """Bytes an element of each list of tensors that foreach makes for a moment, every tensor of the parameters' size:
    gradients in the dtype of wider masters, then what the update makes (`optimizer_temporary_bytes`)."""
    copied = copied_gradient_bytes(1, precision) if optimizer != "none" else 0.0
    return [width for width in (copied, _own_temporaries(1, 1, precision, optimizer, "foreach")) if width]


def copied_gradient_bytes(parameters_local: int, precision: Any) -> float:
    """Bytes of gradients in the dtype of wider master parameters, beside narrower ones."""
    narrower = precision.master != "none" and width(precision.gradients) < width(precision.master)
    return parameters_local * width(precision.master) if narrower else 0.0


def _own_temporaries(parameters_local: int, largest: int, precision: Any, optimizer: str, kernel: str) -> float:
    if kernel == "fused" or optimizer in ("none", "sgd", "sgd-momentum", "adamw-8bit"):
        return 0.0
    width_bytes = width(precision.master if precision.master != "none" else precision.parameters)
    return (parameters_local if kernel == "foreach" else 2 * largest) * width_bytes


def clip_kernels(parameters_local: int, tensors: int, gradients: str, kernel: str) -> tuple[Kernel, ...]:
    """Gradient norm (reads every gradient) and the scaling by the clip coefficient (reads and writes it), which torch
    applies without looking at it. The scalar reduction across ranks is the caller's.

    Source: torch/nn/utils/clip_grad.py.
    """
    foreach = "loop" if kernel == "loop" else "foreach"
    e = width(gradients)
    norm = _kernel(parameters_local, e, kernel, gradients, _launches(parameters_local, tensors, foreach, 1) + 4)
    scale = _kernel(parameters_local, 2 * e, kernel, gradients, _launches(parameters_local, tensors, foreach, 1))
    return norm, scale


def master_copy(parameters_local: int, tensors: int, precision: Any, kernel: str,
                inside: bool = False) -> tuple[Kernel, ...]:
    """Half parameters written from the fp32 master: by a copy of all tensors, or inside the optimizer's pass."""
    if not parameters_local or precision.master == "none" or width(precision.master) == width(precision.parameters):
        return ()
    half = width(precision.parameters)
    per_parameter = half if inside else half + width(precision.master)
    # multi-tensor copies also behind a fused optimizer (_multi_tensor_copy_this_to_that)
    launches = 0 if inside else _launches(parameters_local, tensors, kernel, 2)
    return (_kernel(parameters_local, per_parameter, kernel, precision.parameters, launches),)


def _lists(step: tuple[int, int, int]) -> int:
    """Tensor lists one kernel walks: parameters, gradients and one or (fused Adam) two kinds of state."""
    parameters, gradients, states = step
    return (parameters > 0) + (gradients > 0) + (2 if states > 2 else states > 0)


def _launches(parameters: int, tensors: int, kernel: str, lists: int) -> int:
    """CUDA launches of one pass over all tensors."""
    if kernel == "loop":
        return tensors
    by_tensors = math.ceil(tensors / _TENSORS_PER_LAUNCH[lists])
    by_chunks = math.ceil(parameters / (_CHUNK * _CHUNKS_PER_LAUNCH))
    return max(1, by_tensors, by_chunks)


def _kernel(parameters: int, per_parameter: float, variant: str, dtype: str, launches: int) -> Kernel:
    return Kernel("optimizer", dtype, (parameters,), variant, 0.0, parameters * per_parameter, "optimizer",
                  launches=launches)
