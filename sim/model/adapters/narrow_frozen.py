"""Products in 8 bits and below with weights that are not trained: what serves a weight's gradient goes.

An operand is quantised along both its dimensions because backward reads it along the other one. Without a weight
gradient nobody reads the input or the output's gradient that way; the weight still is, for the input's gradient.
A branch beside the product reads the input in 16 bits, so that is what tensor ranks gather then.

Source: TransformerEngine 2.8.0 pytorch/module/linear.py (backward_needs_input; grad_output_quantizer.set_usage
(columnwise=False) where the weight needs no gradient) and layernorm_linear.py (return_layernorm_output_gathered: ln_out
is gathered in high precision, then quantised); 1.13.0 transposes the gradient all the same. Megatron-Bridge 0.3.1
peft/utils.py, ParallelLinearAdapter: the branches are Megatron's own linear layers, which know no narrow formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sim.model.architecture import Operator
from sim.model.kernels import quantisation
from sim.model.style import Style
from sim.work import Kernel

_QUANTISE, _TURNED = "quantise", "transpose"


def one_way(op: Operator, style: Style, branches: bool) -> Operator:
    """A frozen operator whose operands are quantised along one dimension; others are as they were.

    Args:
        branches: what is trained beside it reads its input.
    """
    kernels = (*op.forward, *op.backward)
    if not any(k.variant == _QUANTISE for k in kernels):
        return op
    backward = [k for k in op.backward if k.variant != _TURNED]
    joint, whole = op.joint, 0
    if joint is not None and branches and style.scattered and joint.kind == "column":
        joint, whole = joint._replace(gathered=""), joint.elements
    return replace(op, forward=tuple(_once(op.forward, style, whole)), backward=tuple(_once(backward, style, 0)),
                   joint=joint)


def _once(kernels: Sequence[Kernel], style: Style, whole: int) -> Iterator[Kernel]:
    """The first of several tensors quantised in a row is the input, or the output's gradient; behind it is the weight.

    Args:
        whole: elements of an input that is gathered before it is quantised; 0 = it is quantised as it was.
    """
    before = ""
    for kernel in kernels:
        first = kernel.variant == _QUANTISE and before != _QUANTISE
        before = kernel.variant
        if not first:
            yield kernel
            continue
        elements = whole or kernel.shape[0]
        yield replace(kernel, shape=(elements,), bytes=quantisation(style, elements, copies=1).bytes)
