"""Selective recomputation by operator: which kernels' outputs are kept, and what runs again in backward.

torchtitan's policy (`torchtitan/distributed/activation_checkpoint.py`, `_get_custom_policy`): outputs of fused
attention are kept, and of the matrix products of linear layers the first, the third and so on; everything else runs
again.
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Layer, Operator
from sim.work import Kernel


def kept_kernels(layer: Layer) -> tuple[Kernel, ...]:
    """Kernels of forward whose outputs are kept."""
    return tuple(kernel for kernel, kept in _forward(layer) if kept)


def again_operators(layer: Layer) -> tuple[Operator, ...]:
    """Operators that run again in backward, with what is left of their forward."""
    kept = iter(kept for _, kept in _forward(layer))
    left = [(op, tuple(kernel for kernel in op.forward if not next(kept))) for op in layer.operators]
    return tuple(replace(op, forward=forward) for op, forward in left if forward and op.recomputed)


def output_elements(kernel: Kernel) -> int:
    """Elements that a product or a fused attention kernel writes."""
    if kernel.op == "attention":
        batch, heads, _, queries, _, dim = kernel.shape
        return batch * heads * queries * dim
    batch, m, n, _ = kernel.shape
    return batch * m * n


def _forward(layer: Layer) -> list[tuple[Kernel, bool]]:
    """Every kernel of forward, and whether its output is kept."""
    products, marked = 0, []
    for op in layer.operators:
        for kernel in op.forward:
            product = kernel.op == "gemm" and not op.core
            products += product
            marked.append((kernel, kernel.op == "attention" or (product and products % 2 == 1)))
    return marked
