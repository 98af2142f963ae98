"""Multi-head latent attention: queries, keys and values through low-rank projections.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; transformers modeling_deepseek_v3.py (`DeepseekV3Attention`).
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Operator, Parameter, Tensor
from sim.model.attention.core import core_operators
from sim.model.attention.core_choice import uses_flash
from sim.model.kernels import ROTARY_VISITS, elementwise, joint, linear_operator, strided, width
from sim.model.layers.norms import norm_operator
from sim.model.style import Latent, Style
from sim.work import Kernel


def latent_operators(style: Style, source: str) -> tuple[list[Operator], list[Parameter]]:
    """Operators from the compression of the queries to the output projection, and parameters in registration order.

    Args:
        source: dtype in which the norm's output arrives.
    """
    latent = style.latent
    assert latent is not None
    whole = latent.nope + latent.rope
    queries, query_parameters = _low_rank(style, source, "q", latent.q_rank, 0, style.heads * whole)
    values, value_parameters = _low_rank(style, source, "kv", latent.kv_rank, latent.rope,
                                         style.heads * (latent.nope + latent.value))
    if latent.q_rank and source == style.act:  # both compressions read one input
        values[0] = replace(values[0], saved=())
    # products with the keys have nope + rope columns, those with the values their own: the mean counts both exactly
    core = core_operators(replace(style, head_dim=(whole + latent.value) // 2, kv_heads=style.heads),
                          (whole, latent.value))
    if uses_flash(style):
        core = [replace(op, backward=tuple(_unequal_backward(k, whole, latent.value) for k in op.backward))
                for op in core]
    attended = Tensor("attention_output", style.tokens * style.heads * latent.value, style.act)
    queries[-1] = replace(queries[-1], joint=joint(style, "column", style.tokens * (latent.q_rank or style.hidden)))
    narrow = latent.kv_rank + latent.rope * style.scattered
    values[-1] = replace(values[-1], joint=joint(style, "column", style.tokens * narrow))
    output, output_parameters = linear_operator(style, "projection", "self_attn.o_proj", style.heads * latent.value,
                                                style.hidden, source=style.act, saved=(attended,))
    output = replace(output, joint=joint(style, "row", style.tokens * style.hidden))
    return ([*queries, *values, _assemble(style, latent), *core, output],
            [*query_parameters, *value_parameters, *output_parameters])


def _unequal_backward(kernel: Kernel, keys: int, values: int) -> Kernel:
    """A fused backward kernel's FLOPs: three of its five products have as many columns as keys, two as many as values
    (scores again, gradients of queries and keys; those of values and of the probabilities)."""
    if kernel.op != "attention":
        return kernel
    return replace(kernel, flops=kernel.flops * (3 * keys + 2 * values) / (2.5 * (keys + values)))


def _low_rank(
    style: Style, source: str, name: str, rank: int, beside: int, outputs: int,
) -> tuple[list[Operator], list[Parameter]]:
    """Compression to `rank` (and `beside` columns that skip the rest), norm, expansion; rank 0 is one projection.

    Compression and norm are whole on every slice of the width; where activations are scattered each does its own tokens
    (Megatron-LM multi_latent_attention.py: duplicated linear layers), and the narrow result is gathered.
    """
    local = style.stream
    inputs = Tensor(f"{name}_input", local.tokens * style.hidden, style.act)
    if not rank:
        one, parameters = linear_operator(style, f"{name}_proj", f"self_attn.{name}_proj", style.hidden, outputs,
                                          source=source, saved=(inputs,))
        return [one], list(parameters)
    down, down_parameters = linear_operator(local, f"{name}_down", f"self_attn.{name}_a_proj", style.hidden,
                                            rank + beside, source=source, saved=(inputs,))
    narrow = replace(local, hidden=rank, residual=style.act)
    norm, norm_parameters = norm_operator(narrow, f"{name}_norm", f"self_attn.{name}_a_layernorm")
    kept = Tensor(f"{name}_compressed", local.tokens * rank, style.act)
    up, up_parameters = linear_operator(style, f"{name}_up", f"self_attn.{name}_b_proj", rank, outputs,
                                        source=style.act, saved=(kept,))
    return [down, norm, up], [*down_parameters, *norm_parameters, *up_parameters]


def _assemble(style: Style, latent: Latent) -> Operator:
    """Rotary on the positional columns (one key for all heads), then queries and keys written whole."""
    e = width(style.act)
    rotated = style.tokens * (style.heads + 1) * latent.rope
    whole = style.tokens * style.heads * (latent.nope + latent.rope)
    values = style.tokens * style.heads * latent.value
    saved = (Tensor("queries", whole, style.act), Tensor("keys", whole, style.act), Tensor("values", values, style.act))
    if style.stack.fused_latent_rope:  # read and written once: queries' columns in place, keys and values
        turned = rotated + (2 * style.tokens * style.heads * latent.nope + style.tokens * style.heads * latent.rope +
                            2 * values) // 2
        return Operator("assemble", (elementwise("assemble", turned, 2 * e, style.act, 2),),
                        (elementwise("assemble_backward", turned, 2 * e, style.act, 2),), saved=saved)
    spin = strided(style, elementwise("rotary", rotated, 10 * e, style.act, 10), ROTARY_VISITS)
    join = strided(style, elementwise("assemble", 2 * whole, 2 * e, style.act, 3))
    back = (strided(style, elementwise("assemble_backward", 2 * whole, 2 * e, style.act, 4)),
            strided(style, elementwise("rotary_backward", rotated, 14 * e, style.act, 18), ROTARY_VISITS))
    return Operator("assemble", (spin, join), back, saved=saved)
