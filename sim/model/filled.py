"""New tensors that are filled before a kernel writes them, as PyTorch's deterministic mode does it.

`torch.use_deterministic_algorithms` fills what `at::empty` returns, a kernel of its own each time (torch 2.2 and later,
torch.utils.deterministic.fill_uninitialized_memory, on unless switched off). Operators that ATen generates from a
structured definition (products, activations, softmax, sums, cat) allocate past it; norms, casts, clones, dropout,
lookups and flash attention do not: profiled with torch 2.13. TransformerEngine's products allocate with `at::empty` as
well (transformer_engine_torch 2.6.0 csrc/quantizer.cpp). What a collective writes to is not counted.
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Architecture, Layer, Operator
from sim.model.kernels import elementwise, width
from sim.model.style import Style
from sim.work import Kernel

#: Element-wise kernels that are clones, copies or dropout, and bytes of other tensors they make for an element.
_COPIES = {
    "repeat_kv": 0, "expand_kv": 0, "head_copies": 0, "output_transpose": 0, "heads_first": 0, "heads_last": 0,
    "layout": 0, "input_gradient_copy": 0, "math_casts": 0, "math_casts_backward": 0, "dropout": 1,
    "attention_dropout": 1,
}
#: How the names of others end that make one new tensor.
_ENDINGS = ("_cast", "_contiguous")


def filled(architecture: Architecture, style: Style) -> Architecture:
    """`architecture` with a kernel in front of each one whose output the stack fills (`Stack.fills`)."""
    if style.stack.fills == "none":
        return architecture
    return replace(architecture, stack=tuple(_layer(layer, style) for layer in architecture.stack))


def _layer(layer: Layer, style: Style) -> Layer:
    products = style.stack.fills == "outputs" and layer.kind == "block"
    return replace(layer, operators=tuple(_operator(operator, style, products) for operator in layer.operators))


def _operator(operator: Operator, style: Style, products: bool) -> Operator:
    def with_fills(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        return tuple(k for kernel in kernels for k in (*_fill(kernel, style, products), kernel))
    return replace(operator, forward=with_fills(operator.forward), backward=with_fills(operator.backward),
                   core_again=with_fills(operator.core_again))


def _fill(kernel: Kernel, style: Style, products: bool) -> tuple[Kernel, ...]:
    size_bytes = _filled_bytes(kernel, style, products)
    return (elementwise("fill", round(size_bytes), 1, kernel.dtype, category=kernel.category if kernel.op == "attention"
                        else "memory_bound"),) if size_bytes else ()


def _filled_bytes(kernel: Kernel, style: Style, products: bool) -> float:
    """Bytes of what `kernel` writes to that are filled before it does."""
    e, shape = width(kernel.dtype), kernel.shape
    normed = kernel.op == "norm" and kernel.variant != "weights"
    if normed or (kernel.op == "embedding" and kernel.variant == "forward"):
        return shape[0] * shape[1] * e
    if kernel.op == "attention":
        batch, heads, kv_heads, queries, keys, dim = shape
        gradients = 2 * kv_heads * keys if kernel.variant == "backward" else 0
        return batch * (heads * queries + gradients) * dim * e
    if kernel.op == "elementwise" and (kernel.variant in _COPIES or kernel.variant.endswith(_ENDINGS)):
        return shape[0] * (e + _COPIES.get(kernel.variant, 0))
    added_up = kernel.variant == "nt" and style.main_grad and style.stack.gradient_accumulation_fusion
    if kernel.op == "gemm" and products and not added_up:
        return shape[0] * shape[1] * shape[2] * width(style.act)
    return 0.0
