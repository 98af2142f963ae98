"""Norms that are one module with the product behind them, and so make its input in 8 bits.

Under scales of earlier steps the norm's kernel writes the 8-bit copy alone, which is transposed in backward; under
scales from a tensor's own maximum it finds that in its pass, and the cast behind it needs none of its own. Scales of
blocks ask for the wider tensor. Norms in front of a mixture of experts, of latent attention and of modules that are
fine-tuned stand alone.

Source: TransformerEngine 1.13.0 pytorch/module/layernorm_linear.py (layernorm_fwd_fp8; fp8_transpose of ln_out_total);
transformer_engine_torch 2.7.0 and 2.8.0 csrc/extensions/normalization.cpp, layernorm_fwd and rmsnorm_fwd
(FULLY_FUSED, FUSED_NORM_AMAX_FP8, UNFUSED); megatron-core 0.5.0 to 0.15.0 models/gpt/gpt_layer_specs.py
(TELayerNormColumnParallelLinear, but moe_layer_specs with a norm of their own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from sim.model.architecture import Operator
from sim.model.kernels import elementwise, width
from sim.model.style import Style
from sim.work import Kernel


def with_products(style: Style, operators: Sequence[Operator]) -> list[Operator]:
    """A block's operators, each norm joined with the product that reads it where the stack does so."""
    joins = style.modules == "megatron" and style.gemm == "fp8" and style.tuned is None
    pairs = {"norm1": "qkv" if style.latent is None else "", "norm2": "up" if style.experts is None else ""}
    made = list(operators)
    if not joins or style.stack.norm_quantises == "none":
        return made
    for place, (norm, reader) in enumerate(pairwise(operators)):
        if pairs.get(norm.name) == reader.name:
            made[place], made[place + 1] = _joined(style, norm, reader)
    return made


def _joined(style: Style, norm: Operator, reader: Operator) -> tuple[Operator, Operator]:
    """A norm and the product behind it."""
    at = next(i for i, kernel in enumerate(reader.forward) if kernel.variant == "quantise")
    cast, behind = reader.forward[at], reader.forward[at + 1:]
    if style.stack.norm_quantises == "maximum":
        alone = replace(cast, bytes=cast.bytes - cast.shape[0] * width(style.act), launches=1)
        return norm, replace(reader, forward=(*reader.forward[:at], alone, *behind))
    forward, = norm.forward
    rows, cols = forward.shape
    written = replace(forward, bytes=rows * cols * (width(style.residual) + width(style.gemm)))
    return (replace(norm, forward=(written,)),
            replace(reader, forward=(*reader.forward[:at], *behind),
                    backward=_transposed(style, reader.backward, style.tokens * style.hidden)))


def _transposed(style: Style, backward: Sequence[Kernel], elements: int) -> tuple[Kernel, ...]:
    """Backward with the input's transposition in front of the weight gradient, which is there already where ranks have
    gathered it (`kernels.meeting`)."""
    at = next(i for i, kernel in enumerate(backward) if kernel.op == "gemm" and kernel.variant == "nt")
    if any(kernel.variant == "transpose" for kernel in backward[:at]):
        return tuple(backward)
    return (*backward[:at], elementwise("transpose", elements, 2 * width(style.gemm), style.gemm), *backward[at:])
