"""What blocks of every architecture share: the block as a layer, and where early stop ends its recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.model.architecture import Layer, Operator, Parameter, Tensor
from sim.model.style import Style


def block_layer(style: Style, operators: Sequence[Operator], parameters: Sequence[Parameter]) -> Layer:
    """A block of `operators`, whose input is the residual stream."""
    stream = Tensor("block_input", style.stream.tokens * style.hidden, style.residual)
    return Layer("block", tuple(_early_stopped(operators, style.stack.early_stop)), stream, tuple(parameters))


def _early_stopped(operators: Sequence[Operator], early_stop: bool) -> list[Operator]:
    """Mark what full recomputation skips.

    Everything after the last saved tensor is skipped, and so is the last keeper itself when it keeps only its input
    (a product saves its operands before it runs). A dropout mask or a norm's statistics come out of the kernel, so
    where they are last it runs. Source: torch/utils/checkpoint.py (_StopRecomputationError raised in the pack hook).
    """
    if not early_stop:
        return list(operators)
    last = max(i for i, op in enumerate(operators) if op.saved)
    keeps_output = operators[last].name.startswith(("dropout", "norm", "post_norm"))
    keep = last + 1 if keeps_output else last
    return [op if i < keep else replace(op, recomputed=False) for i, op in enumerate(operators)]
