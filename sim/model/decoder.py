"""Decoder blocks, and `build`: a scenario's architecture as layers of operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sim.model.architecture import Architecture, Layer, Operator, Parameter, Tensor
from sim.model.attention import attention_operators
from sim.model.eager import Program
from sim.model.embedding import embedding_layer
from sim.model.head import head_layer
from sim.model.mlp import mlp_operators
from sim.model.norms import norm_operator
from sim.model.residual import residual_operators
from sim.model.style import Style, style_of
from sim.software import Stack

_NORMS = {"plain": ("ln1", "ln2"), "gpt2": ("ln_1", "ln_2"),
          "transformers": ("input_layernorm", "post_attention_layernorm"),
          "megatron": ("input_layernorm", "pre_mlp_layernorm")}


def build(scenario: Any, stack: Stack, batch: int) -> Architecture:
    """One replica's architecture for a micro-batch of `batch` sequences; memoised on everything that matters.

    Args:
        scenario: a resolved scenario (reads `.model` and `.training`).
        stack: its software.
        batch: sequences of the micro-batch.

    Raises:
        UserError: the architecture is not simulated.
    """
    return _architecture(style_of(scenario, stack, batch))


@lru_cache(maxsize=256)
def _architecture(style: Style) -> Architecture:
    block = replace(_block(style), program=Program("block", style))
    layers = (replace(embedding_layer(style), program=Program("embedding", style)), *(block,) * style.layers,
              replace(head_layer(style), program=Program("head", style)))
    return Architecture(layers, style.tied, style.batch, style.sequence)


def _block(style: Style) -> Layer:
    """Pre-norm block: attention then feed-forward, or both side by side on one norm (`parallel_block`)."""
    first, second = _NORMS["gpt2" if style.conv1d else style.modules]
    source = style.residual
    norm1, norm1_parameters = norm_operator(style, "norm1", first)
    attention, attention_parameters = attention_operators(style, source)
    mlp, mlp_parameters = mlp_operators(style, source)
    operators = [norm1, *attention, *residual_operators(style, "1")]
    norm2_parameters: tuple[Parameter, ...] = ()
    if not style.parallel_block:
        norm2, norm2_parameters = norm_operator(style, "norm2", second)
        operators.append(norm2)
    operators += [*mlp, *residual_operators(style, "2")]
    parameters = _registered(style, norm1_parameters, attention_parameters, norm2_parameters, mlp_parameters)
    stream = Tensor("block_input", style.tokens * style.hidden, style.residual)
    return Layer("block", tuple(_early_stopped(operators, style.stack.early_stop)), stream, parameters)


def _registered(
    style: Style, norm1: Sequence[Parameter], attention: Sequence[Parameter], norm2: Sequence[Parameter],
    mlp: Sequence[Parameter],
) -> tuple[Parameter, ...]:
    """The order of `module.parameters()`: Hugging Face's Llama registers its norms last, plain modules first."""
    if style.separate_qkv:
        return (*attention, *mlp, *norm1, *norm2)
    if style.modules == "plain":
        return (*norm1, *norm2, *attention, *mlp)
    return (*norm1, *attention, *norm2, *mlp)


def _early_stopped(operators: Sequence[Operator], early_stop: bool) -> list[Operator]:
    """Mark what full recomputation skips.

    Everything after the last saved tensor is skipped, and so is the last keeper itself when it keeps only its input
    (a product saves its operands before it runs). With dropout the mask after the last product is the last tensor, so
    the product runs. Source: torch/utils/checkpoint.py (_StopRecomputationError raised in the pack hook).
    """
    if not early_stop:
        return list(operators)
    last = max(i for i, op in enumerate(operators) if op.saved)
    keeps_output = operators[last].name.startswith("dropout")
    keep = last + 1 if keeps_output else last
    return [op if i < keep else replace(op, recomputed=False) for i, op in enumerate(operators)]
