"""Tensors of the exchange of tokens for heads around attention: what is copied and sent, how long it lives, what stays.

Behind the exchange autograd keeps queries, keys, values and the output of all tokens and a share of the heads; those of
a slice go, but the output that has come back, which the projection keeps. So the output is kept twice.

Local variables are those of the sources, because they decide how long a copy lives: TransformerEngine's one function
holds all it has packed until everything has come, and in backward what it saved and the whole's gradients until its
own are back; DeepSpeed's exchanges one tensor after the other, each a node of its own.

Sources (read): deepspeed 0.19.8 sequence/layer.py (single_all_to_all, _SeqAllToAll) and
runtime/sequence_parallel/ulysses_sp.py (UlyssesSPAttentionHF); TransformerEngine 2.8.0
pytorch/attention/dot_product_attention/context_parallel.py (flash_attn_a2a_communicate, AttnFuncWithCPAndQKVOA2A,
AttnFuncWithCPAndKVP2P with cp_size_a2a).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.model.attention.head_exchange import Copies, plan, repeats, within
from sim.model.eager.attention.ring import halves, merged_back, merged_steps, scratch
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Gradients, Run, Tensor
from sim.model.eager.tensors.storage import Storage
from sim.model.style import Style


def exchanged(run: Run, style: Style, tensors: Sequence[Tensor], core: Callable[..., Tensor]) -> Tensor:
    """Queries, keys and values to heads, `core` of them, its output back to tokens.

    Args:
        tensors: queries, keys, values of a slice.
        core: of the style that sees all tokens of a share of the heads, on such tensors.
    """
    query, key, value = tensors
    inner = within(style)
    wide, narrow = plan(style, inner.heads), plan(style, inner.kv_heads)
    key, value = (_repeated(run, t, repeats(style)) for t in (key, value))
    query, key, value = (_sent(run, t, made.to_heads, made.heads_back)
                         for t, made in ((query, wide), (key, narrow), (value, narrow)))
    query = op.clone(run, query, wide.turned)
    key, value = (op.clone(run, t, narrow.turned) for t in (key, value))
    out = op.clone(run, core(inner, query, key, value), wide.turned)
    return _sent(run, out, wide.to_tokens, wide.tokens_back)


def in_one(style: Style) -> bool:
    """Whether exchange and fused attention are one function of autograd (TransformerEngine's)."""
    return style.stack.head_exchange == "reordered"


def _repeated(run: Run, x: Tensor, copies: int) -> Tensor:
    """`repeat_interleave`: a head for every rank; its gradient is summed over them."""
    if copies == 1:
        return x
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    return Tensor(run.new(copies * elements, dtype), copies * elements, dtype, node.output())


def _sent(run: Run, x: Tensor, forward: Copies, backward: Copies) -> Tensor:
    """One tensor exchanged; nothing is saved."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [_arrived(run, elements, dtype, backward)], (x.sink,))
    return Tensor(_arrived(run, elements, dtype, forward), elements, dtype, node.output())


def _arrived(run: Run, elements: int, dtype: str, copies: Copies) -> Storage:
    """What has come, beside what was packed for it until both are in order."""
    packed = [run.new(elements, dtype)] if copies.before else []
    came = run.new(elements, dtype)
    if copies.behind:
        came = run.new(elements, dtype)
    packed.clear()
    return came


def _all_sent(run: Run, sizes: Sequence[int], dtype: str) -> list[Storage]:
    """Tensors exchanged together: a tensor is packed while the one before travels, and what is packed stays until all
    have come."""
    packed: list[Storage] = []
    came: list[Storage] = []
    for turn in range(len(sizes) + 2):
        if 0 < turn <= len(sizes):
            came.append(run.new(sizes[turn - 1], dtype))
        if turn > 1:
            came[turn - 2] = run.new(sizes[turn - 2], dtype)
        if turn < len(sizes):
            packed.append(run.new(sizes[turn], dtype))
    packed.clear()
    return came


def one_function(run: Run, style: Style, tensors: Sequence[Tensor], rows: int, sums: bool) -> Tensor:
    """TransformerEngine's exchange with its attention, on a whole sequence or inside a ring.

    Args:
        tensors: queries, keys, values of a slice.
        rows: log-sum-exps of a slice.
        sums: as in `operations.attention`.
    """
    query, key, value = tensors
    inner, dtype = within(style), query.dtype
    sizes = [t.elements for t in tensors]
    ring, pair = inner.context, key.elements + value.elements
    outputs, half = query.elements * value.elements // key.elements, halves(inner)

    def rule(run: Run, _: Gradients) -> Gradients:
        came = _all_sent(run, [outputs] * (1 if ring == 1 else 2), dtype)  # inside a ring the output too
        if ring > 1:
            own = merged_back(run, ring, sizes[0], pair, dtype, rows, sums=sums, half=half, behind=home)
        else:
            spare = scratch(run, sizes[0], rows, sums)
            whole = [run.new(n, dtype) for n in sizes]
            spare.clear()
            own = home()
            whole.clear()
        came.clear()
        return own

    def home() -> Gradients:
        return [*_all_sent(run, sizes, dtype)]

    node = run.node(rule, tuple(t.sink for t in tensors))
    heads = _all_sent(run, sizes, dtype)
    if ring == 1:
        made = run.new(outputs, dtype)
        kept = [*heads, made]
        states = [run.new(rows, "fp32"), run.new(1, "fp64")]
        out = _all_sent(run, [outputs], dtype)[0]
    else:
        buffers, parts = merged_steps(run, ring, pair, outputs, dtype, rows)
        merged = run.new(outputs, dtype)
        states = [run.new(rows, "fp32"), *(run.new(1, "fp64") for _ in range(ring))]
        out = _all_sent(run, [outputs], dtype)[0]
        kept = [heads[0], buffers[-1], out]
        buffers.clear()
        parts.clear()
        del merged
    run.save(node, *kept, *states)
    return Tensor(out, outputs, dtype, node.output())
