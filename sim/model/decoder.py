"""Decoder-only transformers: blocks, dense or mixtures of experts, between an embedding and a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.model.architecture import Architecture, Layer, Operator, Parameter
from sim.model.attention.latent import latent_operators
from sim.model.attention.layer import attention_operators
from sim.model.attention.relative import table_operator
from sim.model.blocks import block_layer
from sim.model.compiled_casts import compiled_casts
from sim.model.layers.embedding import embedding_layer
from sim.model.layers.experts import experts_operators
from sim.model.layers.further import with_further_tokens
from sim.model.layers.head import head_layer
from sim.model.layers.mlp import mlp_operators
from sim.model.layers.narrow_norms import with_products
from sim.model.layers.norms import norm_operator
from sim.model.layers.residual import residual_operators
from sim.model.mixture import Experts
from sim.model.style import Program, Style

#: Modules of a block's norms by module style: of what attention and MLP read, and of what they add.
_NORMS = {"plain": ("ln1", "ln2"), "gpt2": ("ln_1", "ln_2"),
          "transformers": ("input_layernorm", "post_attention_layernorm"),
          "megatron": ("input_layernorm", "pre_mlp_layernorm")}
_OUTPUT_NORMS = {"plain": ("ln1_output", "ln2_output"), "gpt2": ("ln_1_output", "ln_2_output"),
                 "transformers": ("post_attention_layernorm", "post_feedforward_layernorm"),
                 "megatron": ("post_self_attn_layernorm", "post_mlp_layernorm")}
#: The second norm where there are four (transformers modeling_gemma2.py, Gemma2DecoderLayer).
_SECOND_OF_FOUR = {"transformers": "pre_feedforward_layernorm"}

Norms = dict[str, tuple[Operator, tuple[Parameter, ...]]]


def decoder(style: Style) -> Architecture:
    """Embedding, blocks, head. Blocks that are alike are one object."""
    kinds = [_kind(style, number) for number in range(style.layers)]
    styles = {kind: replace(style, experts=kind[0], window=kind[1]) for kind in dict.fromkeys(kinds)}
    made = {kind: _block(one) for kind, one in styles.items()}
    blocks = [made[kind] for kind in kinds]
    if style.biased:
        blocks[0] = _block(styles[kinds[0]], "relative_attention_bias")
    embedding = replace(embedding_layer(style), program=Program("embedding", style))
    last = styles[kinds[-1]]
    head = with_further_tokens(style, head_layer(style), made[kinds[-1]])
    head = replace(head, program=Program("head", last if style.further else style))
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
    """Attention then feed-forward, or both side by side (`parallel_block`) on one norm or on one each.

    Args:
        table: module of the table of relative positions, in the block that holds it.
    """
    norms = _norms(style)
    attend = attention_operators if style.latent is None else latent_operators
    attention, attention_parameters = attend(style, style.residual)
    if table:
        attention.insert(1, table_operator(style, table))
        attention_parameters += attention[1].parameters
    feed_forward = mlp_operators if style.experts is None else experts_operators
    mlp, mlp_parameters = feed_forward(style, style.residual)
    operators = with_products(style, [
        *_operators(norms, "norm1"), *attention, *_operators(norms, "post_norm1"),
        *residual_operators(style.stream, "1"),
        *_operators(norms, "norm2"), *mlp, *_operators(norms, "post_norm2"), *residual_operators(style.stream, "2")])
    parameters = _registered(style, norms, attention_parameters, mlp_parameters)
    written = not style.biased  # score biases of decoders have no module code for their memory: it is estimated
    operators = compiled_casts(style, operators)
    return replace(block_layer(style, operators, parameters), window=style.window,
                   program=Program("block", style) if written else None)


def _norms(style: Style) -> Norms:
    """A block's norms by name: "norm1" and "norm2" of what attention and MLP read, "post_norm1" and "post_norm2" of
    what they add to the stream."""
    family = "gpt2" if style.conv1d else style.modules
    modules = dict(zip(("norm1", "norm2"), _NORMS[family], strict=True)) if style.norms_input else {}
    if style.parallel_block and style.parallel_norms == 1:
        del modules["norm2"]
    if style.norms_output:
        modules |= dict(zip(("post_norm1", "post_norm2"), _OUTPUT_NORMS[family], strict=True))
        if style.norms_input:
            modules["norm2"] = _SECOND_OF_FOUR.get(family, modules["norm2"])
    branch = replace(style.stream, residual=style.act)
    return {name: norm_operator(branch if name.startswith("post") else style.stream, name, module)
            for name, module in modules.items()}


def _operators(norms: Norms, name: str) -> list[Operator]:
    return [norms[name][0]] if name in norms else []


def _registered(style: Style, norms: Norms, attention: Sequence[Parameter],
                mlp: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """The order of `module.parameters()`: Hugging Face's Llama registers its norms last, plain modules first."""
    own = {name: parameters for name, (_, parameters) in norms.items()}
    in_order = [p for name in ("norm1", "post_norm1", "norm2", "post_norm2") for p in own.get(name, ())]
    if style.separate_qkv:
        return (*attention, *mlp, *in_order)
    if style.modules == "plain":
        return (*in_order, *attention, *mlp)
    behind = own.get("post_norm2", ())
    return (*own.get("norm1", ()), *attention, *own.get("post_norm1", ()), *own.get("norm2", ()), *mlp, *behind)
