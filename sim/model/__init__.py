"""Architectures as layers of operators: FLOPs, bytes, parameters, tensors autograd keeps."""

from sim.model.architecture import Architecture, Layer, Operator, Parameter, Tensor
from sim.model.build import build
from sim.model.kernels import accumulation_kernels
from sim.model.update.optimizer import (
    clip_kernels,
    copied_gradient_bytes,
    gradient_dtype,
    gradient_kernels,
    layers_state_bytes,
    optimizer_kernels,
    optimizer_state_bytes,
    optimizer_temporary_bytes,
    optimizer_temporary_lists,
)

__all__ = [
    "Architecture", "Layer", "Operator", "Parameter", "Tensor", "accumulation_kernels", "build", "clip_kernels",
    "copied_gradient_bytes",
    "gradient_dtype", "gradient_kernels", "layers_state_bytes", "optimizer_kernels", "optimizer_state_bytes",
    "optimizer_temporary_bytes",
    "optimizer_temporary_lists",
]
