"""Norms of queries and keys in front of their positions, of every head by itself or of all heads together.

Sources: transformers modeling_qwen3.py (Qwen3Attention: q_norm, k_norm of `head_dim` on every head), modeling_olmo2.py
(Olmo2Attention: norms of all heads' columns at once); megatron-core transformer/attention.py (SelfAttention:
q_layernorm, k_layernorm of every head).
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Operator, Parameter
from sim.model.kernels import elementwise, width
from sim.model.layers.norms import norm_operator
from sim.model.style import Style

#: Modules of the queries' and the keys' norm by module style.
_MODULES = {"plain": ("q_norm", "k_norm"), "gpt2": ("attn.q_norm", "attn.k_norm"),
            "transformers": ("self_attn.q_norm", "self_attn.k_norm"),
            "megatron": ("self_attention.q_layernorm", "self_attention.k_layernorm")}


def head_norms(style: Style) -> tuple[list[Operator], list[Parameter]]:
    """The norm of the queries and that of the keys, and their parameters."""
    operators: list[Operator] = []
    parameters: list[Parameter] = []
    names = _MODULES["gpt2" if style.conv1d else style.modules]
    for name, module, heads in zip(("query_norm", "key_norm"), names, (style.heads, style.kv_heads), strict=True):
        rows, cols = head_shape(style, heads)
        one, own = norm_operator(replace(style, residual=style.act), name, module, (rows, cols))
        if copies_parts(style):
            copy = elementwise(f"{name}_contiguous", rows * cols, 2 * width(style.act), style.act)
            one = replace(one, forward=(copy, *one.forward))
        operators.append(one)
        parameters += own
    return operators, parameters


def head_shape(style: Style, heads: int) -> tuple[int, int]:
    """Rows and columns that are normalised, of so many heads."""
    return (style.tokens * heads, style.head_dim) if style.qk_norm == "head" else (style.tokens, heads * style.head_dim)


def copies_parts(style: Style) -> bool:
    """Whether queries and keys are copied out of one projection for a norm of one kernel, which reads rows that lie
    together (TransformerEngine's and PyTorch's fused norms: `input.contiguous()`); operators read them where they
    are."""
    return not (style.projects_apart or style.spelled_rmsnorm or style.stack.compile)
