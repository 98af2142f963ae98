"""A forward of prompts and of one token of each of some answers together, as engines with continuous batching run it.

All tokens go through products, norms and sums together; attention is each kind's own, the prompts' fused kernel and the
answers' queries on their cache. Logits are made of the last token of every prompt and of every answer.

Source: vLLM 0.6.3 attention/backends/flash_attn.py, FlashAttentionImpl.forward (prefill and decode parts of one batch,
a call each); TensorRT-LLM's gptAttentionPlugin, context and generation requests of a batch in flight (recalled).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sim.model.architecture import Layer, Operator
from sim.model.inference.kinds import rank_of
from sim.model.inference.rank import Rank
from sim.model.inference.weights import Weights
from sim.model.kernels import width
from sim.model.style import Style
from sim.work import Kernel


@dataclass(frozen=True, slots=True)
class MixedRank(Rank):
    """One slice of a decoder, for one forward over all tokens of prompts and answers as one sequence.

    Attributes:
        prompts: the prompts alone, as ranks see them.
        answers: the answers alone, a token each; None where none is made.
        read: tokens of each prompt that are in the cache before.
    """

    prompts: Rank
    answers: Rank | None
    read: int

    def _operator(self, layer: Layer, op: Operator, crossing: bool) -> Iterator[Kernel]:
        if not op.core:
            yield from Rank._operator(self, layer, op, crossing)  # super() needs the class that slots replace
            return
        yield from self._cache_update(self.style.tokens)
        yield from (self._lengthened(kernel) for kernel in _counterpart(self, layer, op).forward)
        if self.answers is not None:
            yield from self.answers._core(self.answers.keys(layer), own=True)

    def _lengthened(self, kernel: Kernel) -> Kernel:
        """The prompts' attention, whose tokens meet also what was read before."""
        if kernel.op != "attention" or not self.read:
            return kernel
        batch, heads, kv_heads, queries, keys, dim = kernel.shape
        more_bytes = 2.0 * batch * self.read * kv_heads * dim * width(kernel.dtype)
        return replace(kernel, shape=(batch, heads, kv_heads, queries, self.read + keys // 2, dim), causal=False,
                       flops=kernel.flops * (self.read + keys) / keys, bytes=kernel.bytes + more_bytes)


def mixed_rank(style: Style, weights: Weights, prompts: int, tokens: int, read: int, answers: int,
               cached: int) -> Rank:
    """One slice of a decoder for `tokens` of each of `prompts` prompts, `read` of each known already, and one token of
    each of `answers` answers that have `cached` tokens in the cache.

    Args:
        style: as for `rank_of`.
    """
    if not prompts:
        return rank_of(style, answers, 1, cached, weights)
    alone = rank_of(style, prompts, tokens, 0, weights)
    whole = rank_of(style, 1, prompts * tokens + answers, 0, weights)
    return MixedRank(replace(whole.style, predicted=prompts + answers), 0, weights, alone,
                     rank_of(style, answers, 1, cached, weights) if answers else None, read)


def _counterpart(rank: MixedRank, layer: Layer, op: Operator) -> Operator:
    """The operator of the prompts alone in the place of one of all tokens."""
    place = next(i for i, one in enumerate(rank.architecture().stack) if one is layer)
    number = next(i for i, one in enumerate(layer.operators) if one is op)
    return rank.prompts.architecture().stack[place].operators[number]
