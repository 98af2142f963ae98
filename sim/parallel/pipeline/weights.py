"""What a split backward keeps until the weight gradients are made.

Qi et al. 2023 (arXiv 2401.10241), section 2.3: after the input gradient a layer still needs the inputs of its products
and the gradients of their outputs.
"""

from __future__ import annotations

from sim.model.architecture import Layer
from sim.parallel.compute import is_weight_gradient
from sim.work import DTYPE_BYTES


def kept_for_weights(layer: Layer) -> int:
    """Bytes of both factors of every weight-gradient product of a layer (shape (batch, m, n, k), k = tokens)."""
    total = 0.0
    for op in layer.operators:
        for kernel in op.backward:
            if is_weight_gradient(kernel):
                batch, m, n, k = kernel.shape
                total += batch * k * (m + n) * DTYPE_BYTES[kernel.dtype]
    return round(total)
