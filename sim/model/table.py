"""A model given as a table of layers: every row a product with its normalisation and activation, by sizes alone.

The shape of a row's product follows from its numbers: `forward_flops` over its output elements is 2 k, where k is the
length of the sum behind an output (kernel height · width · input channels of a convolution); its parameters over k + 2
(weight, and scale and shift of the normalisation) are the n output channels; the product has output elements / n rows.
Source of the implicit product: Chetlur et al. 2014, arXiv 1410.0759, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from sim.model.architecture import Architecture, Layer, Operator, Parameter, Tensor
from sim.model.kernels import cast, elementwise, gradient_ready, width
from sim.model.style import Style
from sim.scenario.named.layer_table import LayerRow, read_table
from sim.work import Kernel

#: Bytes per element in the table's own sizes (activation_bytes, output_bytes).
_TABLE_BYTES = 4
#: Passes over the kept tensors by the kernels around a product. A convolution with batch norm and ReLU keeps two
#: tensors of its output's size, its own output and the activation's, so a pass over that size is half a pass here.
#: Forward: statistics (read), normalisation (read, write); ReLU in place (read, write). Backward: ReLU (2 reads, a
#: write); sums (2 reads), input gradient (2 reads, a write). Source: aten/src/ATen/native/cuda/Normalization.cuh.
_FORWARD_NORM, _FORWARD_ACTIVATION, _BACKWARD_ACTIVATION, _BACKWARD_NORM = 1.5, 1.0, 1.5, 2.5
#: cuDNN pads the channels of tensor-core convolutions to multiples of 8 ("Convolutional Layers User's Guide").
_PADDED = 8


@lru_cache(maxsize=64)
def layer_table(path: str, style: Style) -> Architecture:
    """The architecture of a table of layers: its first row stands as embedding, its last as head, the others as blocks.

    Args:
        path: of the CSV.
        style: batch, dtypes and software.

    Raises:
        UserError: the table cannot be read.
    """
    rows = read_table(Path(path), path)
    layers = []
    for number, row in enumerate(rows):
        before = rows[number - 1] if number else row
        kind = "head" if number == len(rows) - 1 else "block" if number else "embedding"
        layers.append(_layer(style, row, before, kind))
    return Architecture(tuple(layers), False, style.batch, 1, tuple(row.name for row in rows))


def _layer(style: Style, row: LayerRow, before: LayerRow, kind: str) -> Layer:
    """One row; what it reads is taken to be as large as what the row before hands on."""
    inputs = _elements(style, before.output_bytes)
    outputs, kept = _elements(style, row.output_bytes), _elements(style, row.activation_bytes)
    k = round(row.forward_flops * _TABLE_BYTES / (2 * row.output_bytes)) if row.output_bytes else 0
    n = _channels(row, k)
    parameters = _parameters(row, n, k)
    e = width(style.act)
    if k and outputs:
        forward, backward = _product(style, row, n, k, inputs, outputs, kind != "embedding")
        forward += [_norm(style, "forward", outputs // n, n, _FORWARD_NORM * kept * e),
                    elementwise("activation", outputs, _FORWARD_ACTIVATION * kept * e / outputs, style.act)]
        backward = [elementwise("activation_backward", outputs, _BACKWARD_ACTIVATION * kept * e / outputs, style.act),
                    _norm(style, "backward", outputs // n, n, _BACKWARD_NORM * kept * e), *backward]
    else:  # pooling and the like: reads its input, writes its output and what it keeps
        moved = (inputs + outputs + kept) * e / max(1, outputs)
        forward = [elementwise(row.name, max(1, outputs), moved, style.act)]
        backward = [elementwise(f"{row.name}_backward", max(1, outputs), moved, style.act)]
    saved = (Tensor("kept", kept, style.act),) if kept else ()
    operator = Operator(row.name, tuple(forward), tuple(backward), gradient_ready(style, parameters), saved,
                        weight_copies=_weight_copies(style, parameters))
    return Layer(kind, (operator,), Tensor("input", inputs, style.act), parameters)


def _elements(style: Style, size_bytes: float) -> int:
    return round(style.batch * size_bytes / _TABLE_BYTES)


def _channels(row: LayerRow, k: int) -> int:
    """Output channels: the divisor of the output elements nearest to parameters / (k + 2)."""
    elements = round(row.output_bytes / _TABLE_BYTES)
    if not k or not row.parameters:
        return 1
    guess = row.parameters / (k + 2)
    return min(_divisors(elements), key=lambda n: abs(n - guess))


@lru_cache(maxsize=256)
def _divisors(number: int) -> Sequence[int]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return [*small, *(number // i for i in small)]


def _parameters(row: LayerRow, n: int, k: int) -> tuple[Parameter, ...]:
    """The weight of the product and, as one tensor, what is left: scale, shift, bias."""
    if not row.parameters:
        return ()
    weight = n * k if k and n * k <= row.parameters else row.parameters
    parts = [Parameter(f"{row.name}.weight", (n, weight // n) if weight % n == 0 else (weight,))]
    if row.parameters > weight:
        parts.append(Parameter(f"{row.name}.norm", (row.parameters - weight,)))
    return tuple(parts)


def _weight_copies(style: Style, parameters: Sequence[Parameter]) -> tuple[Tensor, ...]:
    return (Tensor("weight_copy", parameters[0].numel, style.act),) if style.autocast and parameters else ()


def _product(
    style: Style, row: LayerRow, n: int, k: int, inputs: int, outputs: int, data_gradient: bool,
) -> tuple[list[Kernel], list[Kernel]]:
    """The product and its two gradients; the first row's input needs none. Bytes count tensors, not the implicit
    product's repeated reads.

    Tensor cores take channels last. Half precision is trained in that layout (PyTorch's channels_last tutorial); tf32
    starts from PyTorch's default, channels first, and cuDNN transposes both tensors of every product ("Convolutional
    Layers User's Guide", section 3.1).
    """
    m, e = outputs // n, width(style.act)
    padded = math.ceil(k / _PADDED) * _PADDED
    flops = style.batch * row.forward_flops
    moved = (inputs + n * k + outputs) * e

    def convolution(shape: tuple[int, int, int], variant: str) -> Kernel:
        return Kernel("gemm", style.gemm, (1, *shape), variant, flops, moved, "gemm", kernel="conv")

    transposes = []
    if style.gemm == "tf32":
        transposes = [elementwise("layout", inputs + outputs, 2 * e, style.act, 2)]
    forward = [*transposes, convolution((m, n, padded), "tn")]
    backward = [*transposes, convolution((m, padded, n), "nn")] if data_gradient else []
    backward += [*transposes, convolution((n, padded, m), "nt")]
    if style.autocast:
        forward.insert(0, cast("weight_cast", n * k, style.weight, style.act))
        backward.append(cast("weight_gradient_cast", n * k, style.act, style.gradient))
    return forward, backward


def _norm(style: Style, variant: str, rows: int, cols: int, moved: float) -> Kernel:
    return Kernel("norm", style.act, (rows, cols), variant, 0.0, moved, "memory_bound", launches=2)
