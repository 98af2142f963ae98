"""Queries, keys and values out of one product, as Hugging Face's modules take them apart.

Sources: transformers 5.24.0 modeling_phi3.py (slices), modeling_gpt_neox.py (chunk of every head), modeling_falcon.py
(_split_heads: slices and lists of one index, which copy).
"""

from __future__ import annotations

from sim.model.eager.attention.math_core import repeat
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Run, Tensor
from sim.model.style import Style


def joint_parts(run: Run, style: Style, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; of several groups (`core_choice.spread_groups`) of every head."""
    widths = [style.tokens * width for width in (style.query_width, style.kv_width, style.kv_width)]
    if style.joint_qkv == "groups":
        (query,) = op.slices(run, fused, widths[:1])
        key, value = (_picked(run, fused, widths[1]) for _ in range(2))
        if style.kv_heads > 1:
            query = op.clone(run, query)
            key, value = (repeat(run, style, t) for t in (key, value))
        return query, key, value
    taken = op.slices if style.joint_qkv == "parts" else op.split
    query, key, value = taken(run, fused, widths)
    return query, key, value


def _picked(run: Run, x: Tensor, elements: int) -> Tensor:
    """An index by a list: a copy, whose gradient fills a zeroed whole; the index is kept."""
    whole, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(whole, dtype)], (x.sink,))
    run.save(node, run.new(1, "fp64"))
    return Tensor(run.new(elements, dtype), elements, dtype, node.output())
