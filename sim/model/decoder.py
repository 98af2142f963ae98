"""Decoder-only transformers: pre-norm blocks, dense or mixtures of experts, between an embedding and a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.model.architecture import Architecture, Layer, Parameter
from sim.model.attention import attention_operators
from sim.model.blocks import block_layer
from sim.model.embedding import embedding_layer
from sim.model.experts import experts_operators
from sim.model.head import head_layer
from sim.model.latent import latent_operators
from sim.model.mlp import mlp_operators
from sim.model.norms import norm_operator
from sim.model.relative import table_operator
from sim.model.residual import residual_operators
from sim.model.style import Experts, Program, Style

_NORMS = {"plain": ("ln1", "ln2"), "gpt2": ("ln_1", "ln_2"),
          "transformers": ("input_layernorm", "post_attention_layernorm"),
          "megatron": ("input_layernorm", "pre_mlp_layernorm")}


def decoder(style: Style) -> Architecture:
    """Embedding, blocks, head. Blocks that are alike are one object."""
    kinds = [_kind(style, number) for number in range(style.layers)]
    styles = {kind: replace(style, experts=kind[0], window=kind[1]) for kind in dict.fromkeys(kinds)}
    made = {kind: _block(one) for kind, one in styles.items()}
    blocks = [made[kind] for kind in kinds]
    if style.biased:
        blocks[0] = _block(styles[kinds[0]], "relative_attention_bias")
    embedding = replace(embedding_layer(style), program=Program("embedding", style))
    head = replace(head_layer(style), program=Program("head", style))
    return Architecture((embedding, *blocks, head), style.tied, style.batch, style.sequence)


def _kind(style: Style, number: int) -> tuple[Experts | None, int]:
    """What tells block `number` from others: its experts and its window."""
    return style.experts if _is_mixture(style, number) else None, 0 if _sees_all(style, number) else style.window


def _sees_all(style: Style, number: int) -> bool:
    """Whether block `number` attends to all tokens though the model has a window: the ones at the start, then the last
    of every so many."""
    behind = number + 1 - style.first_full
    return behind < 1 or (style.full_every > 0 and behind % style.full_every == 0)


def _is_mixture(style: Style, number: int) -> bool:
    """Whether block `number` holds experts: the last of every so many, after the dense ones at the start."""
    experts = style.experts
    if experts is None or number < experts.first_dense:
        return False
    return (number + 1 - experts.first_dense) % experts.every == 0


def _block(style: Style, table: str = "") -> Layer:
    """Pre-norm block: attention then feed-forward, or both side by side on one norm (`parallel_block`).

    Args:
        table: module of the table of relative positions, in the block that holds it.
    """
    first, second = _NORMS["gpt2" if style.conv1d else style.modules]
    source = style.residual
    norm1, norm1_parameters = norm_operator(style.stream, "norm1", first)
    attend = attention_operators if style.latent is None else latent_operators
    attention, attention_parameters = attend(style, source)
    if table:
        attention.insert(1, table_operator(style, table))
        attention_parameters += attention[1].parameters
    feed_forward = mlp_operators if style.experts is None else experts_operators
    mlp, mlp_parameters = feed_forward(style, source)
    operators = [norm1, *attention, *residual_operators(style.stream, "1")]
    norm2_parameters: tuple[Parameter, ...] = ()
    if not style.parallel_block:
        norm2, norm2_parameters = norm_operator(style.stream, "norm2", second)
        operators.append(norm2)
    operators += [*mlp, *residual_operators(style.stream, "2")]
    parameters = _registered(style, norm1_parameters, attention_parameters, norm2_parameters, mlp_parameters)
    written = not style.biased  # score biases of decoders have no module code for their memory: it is estimated
    return replace(block_layer(style, operators, parameters), window=style.window,
                   program=Program("block", style) if written else None)


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
