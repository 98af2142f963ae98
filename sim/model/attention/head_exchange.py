"""Tokens exchanged for heads around attention (Ulysses): a rank's tokens of all heads become all tokens of some heads.

Outside attention every context rank has its slice of the sequence. An all-to-all of queries, of keys and of values in
front of the core, one of its output behind it, and the same in backward: the core sees the whole sequence, or of
`a2a+p2p` (Megatron's) the slice of a set of ranks, round which a ring goes. Per rank 4·N·h/P bytes travel for P ranks,
N tokens and equal heads (arXiv 2309.14509, section 3.2), where a ring passes on 2·N·h·(P - 1)/P.

What is copied around the collectives is read off the code; per tensor, in copies in front of + behind it:

==================  ============  ============  ============  ============
`head_exchange`     to heads      back          to tokens     back
==================  ============  ============  ============  ============
merged              0 + 0         0 + 0         0 + 0         0 + 0
packed              1 + 0         0 + 1         0 + 1         1 + 0
packed, modules     1 + t         t + 1         t + b + 1     1 + 0
of transformers
reordered           1 + 1         1 + 1         1 + 1         1 + 1
==================  ============  ============  ============  ============

b: where a micro-batch has several sequences, which lie beside each other within a token. t: where heads in front of
tokens are another order than behind them, which one head of one sequence is not: modules of transformers want queries,
keys and values so, and their flash kernel writes output and gradients in the order of the queries.

Sources (read): Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509); deepspeed 0.19.8 sequence/layer.py
(DistributedAttention, single_all_to_all with batch_dim_idx 1, Megatron-DeepSpeed's layout) and
runtime/sequence_parallel/ulysses_sp.py (UlyssesSPAttentionHF: keys and values of fewer heads than ranks are repeated);
TransformerEngine 2.8.0 pytorch/attention/dot_product_attention/context_parallel.py (flash_attn_a2a_communicate,
AttnFuncWithCPAndQKVOA2A, of sbhd; AttnFuncWithCPAndKVP2P with cp_size_a2a, which exchanges the output in backward
again).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sim.model.architecture import Joint, Operator, Tensor
from sim.model.kernels import elementwise, width
from sim.model.style import Style
from sim.work import Kernel

#: Names of copies: what is sent behind it, what waits for what is received; both of these side by side are pipelined
#: where the second is REORDERED.
PACKED, UNPACKED, REORDERED = "heads_packed", "heads_unpacked", "heads_reordered"
#: Names of copies that belong to no collective.
_REPEATED, _TURNED = "heads_repeated", "heads_turned"


class Copies(NamedTuple):
    """Copies of a tensor in front of and behind its all-to-all."""

    before: bool
    behind: bool


class Plan(NamedTuple):
    """Copies of a tensor in one stack; `turned`: of queries, keys and values one more when all have come, of the output
    one more before anything else."""

    to_heads: Copies
    heads_back: Copies
    to_tokens: Copies
    tokens_back: Copies
    turned: bool = False


def plan(style: Style, heads: int) -> Plan:
    """How a stack copies a tensor, of which a rank gets so many heads."""
    way, several = style.stack.head_exchange, style.batch > 1
    none, both = Copies(False, False), Copies(True, True)
    if way == "merged":
        return Plan(none, none, none, none)
    if way == "reordered":
        return Plan(both, both, both, both)
    turned = style.modules == "transformers" and (several or heads > 1)
    beside = style.modules == "transformers" and several
    return Plan(Copies(True, False), Copies(turned, True), Copies(beside, True), Copies(True, False), turned)


def within(style: Style) -> Style:
    """The style as the core of attention sees it: tokens of all ranks that exchange, and a share of the heads. Fewer
    heads of keys than ranks: each rank has one."""
    ranks = style.exchanges
    if ranks == 1:
        return style
    return replace(style, sequence=style.sequence * ranks, memory=style.memory * ranks, context=style.context // ranks,
                   heads=style.heads // ranks, kv_heads=max(1, style.kv_heads // ranks), exchanges=1)


def repeats(style: Style) -> int:
    """Copies of every head of keys and values, so that each rank has one."""
    return max(1, style.exchanges // style.kv_heads)


def exchanges_output_again(style: Style) -> bool:
    """Whether backward brings the output to heads once more, which only its tokens are kept of (TransformerEngine,
    inside a ring)."""
    return style.stack.head_exchange == "reordered" and style.context > style.exchanges


def exchanged(style: Style, core: Operator, widths: tuple[int, int] | None = None) -> list[Operator]:
    """Tokens to heads, the core, heads to tokens.

    Args:
        core: of `within(style)`.
        widths: columns of a key's and of a value's head; default both are `head_dim`.
    """
    of_key, of_value = widths or (style.head_dim, style.head_dim)
    rows = style.batch * style.keys * style.kv_heads
    query, out = (style.tokens * style.heads * one for one in (of_key, of_value))
    once = (rows * of_key, rows * of_value)
    key, value = (repeats(style) * n for n in once)
    e, inner = width(style.act), within(style)
    wide, narrow = plan(style, inner.heads), plan(style, inner.kv_heads)
    sent = ((query, wide), (key, narrow), (value, narrow))
    forward = _kernels(style, [(n, one.to_heads) for n, one in sent])
    forward += tuple(_copy(style, _TURNED, n) for n, one in sent if one.turned)
    backward = _kernels(style, [(n, one.heads_back) for n, one in sent[::-1]])
    if repeats(style) > 1 and style.stack.head_exchange != "merged":
        moved = (1 + 1 / repeats(style)) * e
        again = tuple(elementwise(_REPEATED, n, moved, style.act, 1, "attention") for n in (key, value))
        forward, backward = (*again, *forward), (*backward, *again)
    repeated = Tensor("repeated_keys_and_values", key + value - sum(once), style.act)
    # attention keeps what it made; the projection keeps what has come back
    twice = exchanges_output_again(style)
    kept = () if twice else (Tensor("output_of_heads", out, style.act),)
    home = (_copy(style, _TURNED, out),) if wide.turned else ()
    return [
        Operator("to_heads", forward, backward, saved=(repeated,) if repeats(style) > 1 else (), core=True,
                 joint=Joint("heads", query + key + value, style.act),
                 buffers=_buffers(style, [(n, one.to_heads, one.heads_back) for n, one in sent])),
        replace(core, saved=(*core.saved, *kept)),
        Operator("to_tokens", (*home, *_kernels(style, [(out, wide.to_tokens)])),
                 _kernels(style, [(out, wide.tokens_back)] * (2 if twice else 1)), core=True,
                 joint=Joint("heads", out, style.act),
                 buffers=_buffers(style, [(out, wide.to_tokens, wide.tokens_back)]))]


def _kernels(style: Style, sent: Sequence[tuple[int, Copies]]) -> tuple[Kernel, ...]:
    """Copies of tensors of so many elements, one tensor after the other."""
    late = REORDERED if style.stack.head_exchange == "reordered" else UNPACKED
    found: list[Kernel] = []
    for elements, made in sent:
        # one of a tensor's copies tells that it travels
        early = _TURNED if made.before and made.behind and late == UNPACKED else PACKED
        found += [_copy(style, name, elements) for name, one in ((early, made.before), (late, made.behind)) if one]
    return tuple(found)


def _copy(style: Style, name: str, elements: int) -> Kernel:
    return elementwise(name, elements, 2 * width(style.act), style.act, 1, "attention")


def _buffers(style: Style, sent: Sequence[tuple[int, Copies, Copies]]) -> tuple[int, int]:
    """Copies of everything where all go together, else of the largest."""
    joined = sum if style.stack.head_exchange == "reordered" else max
    e = width(style.act)
    return (round(joined(n * sum(made) for n, made, _ in sent) * e),
            round(joined(n * sum(made) for n, _, made in sent) * e))
