"""Forward passes of inference as one tensor rank runs them: the prompt at once, then one token per sequence; of an
encoder nothing but the prompt. Encoder-decoders, which are two stacks, are in `pair.py`; `kinds.py`
makes either from a model's style.

The kernels are those of the training model's forward on a style whose heads, inner widths and vocabulary are cut over
the tensor ranks; what differs is the cache of keys and values, the attention of one query over it, and weights or
cache stored in fewer bits.

A slice needs the sums of all slices twice per block (Shoeybi et al. 2019, arXiv 1909.08053, section 3): a `Sum` says
where, without ranks. Latent attention caches the compressed keys and values and folds the expansion into queries and
outputs, whose products have the expansion's weights and FLOPs (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from sim.model.architecture import Architecture, Layer, Operator, Parameter
from sim.model.attention.core import core_operator, softmax_dtype
from sim.model.attention.core_choice import uses_flash
from sim.model.attention.relative import bias_forward, table_operator
from sim.model.decoder import decoder
from sim.model.encoder import pooled_encoder
from sim.model.inference.weights import Weights, parameter_bytes, single_row, stored_product
from sim.model.kernels import cast, elementwise, width
from sim.model.style import Style
from sim.model.tuning import Frozen
from sim.work import Kernel

#: Kernels of greedy sampling beside the largest logit: tokens appended, masks and stopping criteria updated
#: (transformers generation/utils.py, `_sample`). From memory.
_SAMPLING_LAUNCHES = 9


class Sum(NamedTuple):
    """What the slices exchange at this point: `kind` (all_reduce, all_gather) over `elements` of `dtype`."""

    kind: str
    elements: int
    dtype: str


Items = tuple[Kernel | Sum, ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """One slice of a decoder or encoder in inference.

    Attributes:
        style: of the slice, for one forward over `style.sequence` new tokens per sequence; with `memory`, its blocks
            attend to as many tokens of an encoder's output too.
        cached: tokens per sequence that are in the cache before; 0 = this is the prompt.
    """

    style: Style
    cached: int
    weights: Weights

    @property
    def tensor(self) -> int:
        """Slices of the model."""
        return self.style.tensor

    def keys(self, layer: Layer) -> int:
        """Keys a new token meets in a block."""
        return _held(self.cached + self.style.sequence, layer)

    def architecture(self) -> Architecture:
        """The slice's layers."""
        return _architecture(self.style)

    def forward(self, layer: Layer) -> Items:
        """Kernels and exchanges of one layer, in order; the head's end with the choice of the next token."""
        return tuple(item for _, item in self._items(layer))

    def part(self, layer: Layer, operators: Sequence[Operator]) -> Items:
        """Those of some of its operators; what ends a layer belongs to its last."""
        mine = {id(op) for op in operators}
        return tuple(item for op, item in self._items(layer) if id(op) in mine)

    def _items(self, layer: Layer) -> Iterator[tuple[Operator, Kernel | Sum]]:
        style, cut = self.style, self.tensor > 1
        adds = "post_norm" if style.norms_output else "residual"  # where sums of slices are needed
        last_add = max((i for i, op in enumerate(layer.operators) if op.name.startswith(adds)), default=-1)
        attended = 0
        for number, op in enumerate(layer.operators):
            if op.name == "loss":
                continue
            products = 0
            # side by side, attention and MLP are summed up together
            if cut and op.name.startswith(adds) and (number == last_add or not style.parallel_block):
                yield op, Sum("all_reduce", style.tokens * style.hidden, style.act)
            for kernel in self._operator(layer, op, attended > 0):
                for stored in (stored_product(style, self.weights, kernel, op.name, products) if layer.kind == "block"
                               else (kernel,)):
                    yield op, single_row(style, stored)
                products += kernel.op == "gemm"
            attended += op.core
        last = layer.operators[-1]
        if cut and layer.kind in ("embedding", "bridge"):
            yield last, Sum("all_reduce", style.tokens * style.hidden, style.weight)
        if layer.kind == "head" and style.kind != "encoder":
            yield from ((last, item) for item in self._sample())

    def _operator(self, layer: Layer, op: Operator, crossing: bool) -> Iterator[Kernel]:
        """Kernels of an operator, the cache's among them.

        Args:
            crossing: a core of the block is behind it already, so that attention here is to the encoder's output, whose
                keys and values the first forward made and kept.
        """
        crossing = crossing and self.style.memory > 0
        if op.core and crossing:
            if not self.cached:
                yield from self._cache_update(self.style.batch * self.style.memory)
            yield from self._core(self.style.memory) if self.cached else op.forward
        elif op.core:
            if self.style.causal:
                yield from self._cache_update(self.style.tokens, self.keys(layer) if self.weights.appended else 0)
            one = self.cached or self.style.memory  # a single query, which has no later keys to be kept from
            yield from self._core(self.keys(layer), own=True) if one else op.forward
        elif op.name == "qkv" and crossing and self.cached:
            yield from _first_product(op.forward)
        elif op.name == "position_bias" and self.cached:
            # a token's query meets every key; older code numbers all pairs up to here and takes the last row
            queries = self.keys(layer) if self.style.stack.relative_bias_anew else self.style.sequence
            yield from table_operator(replace(self.style, sequence=queries, memory=self.keys(layer)), "").forward
        else:
            yield from (kernel for kernel in op.forward if not self._read_grouped(kernel))

    def _read_grouped(self, kernel: Kernel) -> bool:
        """Whether a copy of keys and values for every query head is none: the kernel that reads the cache reads groups
        as they are."""
        return kernel.variant == "expand_kv" and self.cached > 0 and self.style.stack.compile

    @property
    def _cached(self) -> float:
        """Bytes of an element of the cache."""
        return width(self.weights.cache or self.style.act)

    @property
    def _expands_cache(self) -> bool:
        """Whether attention reads a copy of the cache in the width of activations."""
        return bool(self.weights.cache) and not (self.weights.fused and uses_flash(self.style))

    def _cache_update(self, rows: int, anew: int = 0) -> Iterator[Kernel]:
        """`rows` new tokens written to a block's cache.

        Args:
            anew: tokens per sequence of a cache that is read and written whole, 0 = in place.
        """
        style, weights = self.style, self.weights
        new = rows * cache_width(style)
        source = width(style.act)
        if weights.cache and not weights.fused:
            yield cast("quantise_cache", new, style.act, weights.cache)
            source = self._cached
        if anew:
            new, source = style.batch * anew * cache_width(style), self._cached
        whole = weights.fused or not weights.cache
        fused = style.stack.compile and style.positions == "rotary" and not anew and whole
        yield elementwise("cache_update", new, source + self._cached, style.act, 1 if fused else 2, "attention")

    def _core(self, keys: int, own: bool = False) -> Iterator[Kernel]:
        """One query per sequence and head over the cache, which is read once.

        Args:
            own: the keys are the stack's own, whose relative positions a fused kernel reads in a copy.
        """
        style = replace(self.style, memory=keys, causal=False, window=0)
        wide, elements = width(style.act), style.batch * keys * cache_width(style)
        less = 0.0 if self._expands_cache else elements * (wide - self._cached)
        if own and style.biased and uses_flash(style):
            yield from bias_forward(style)
        if style.latent is not None:
            rank, rope = style.latent.kv_rank, style.latent.rope
            style = replace(style, latent=None, kv_heads=1, head_dim=(2 * rank + rope) // 2)
            less += style.batch * keys * rank * wide  # keys and values are the same columns, read once
        if self._expands_cache:
            yield elementwise("dequantise_cache", elements, self._cached + wide, style.act, 1, "attention")
        for kernel in core_operator(style).forward:
            yield replace(kernel, bytes=kernel.bytes - less) if kernel.op == "attention" else kernel

    def _sample(self) -> Iterator[Kernel | Sum]:
        """The largest logit of every sequence's last token."""
        style = self.style
        if self.tensor > 1:
            yield Sum("all_gather", style.batch * style.vocab * self.tensor, style.act)
        logits = style.batch * style.vocab * self.tensor
        yield elementwise("argmax", logits, width(style.act), style.act, 1 if style.stack.compile else
                          1 + _SAMPLING_LAUNCHES)

    def weight_bytes(self, layer: Layer) -> float:
        """Bytes of the slice's weights of a layer, scales included. Norms, embedding and head are not quantised."""
        return sum(self.parameter_bytes(layer, p) for p in layer.parameters)

    def hooks(self, layer: Layer, parameter: Parameter | Frozen) -> int:
        """How many hooks of the module of one of a layer's parameters run in this forward: one for each name under
        which the model has it, none where it does not run."""
        return 1

    def parameter_bytes(self, layer: Layer, parameter: Parameter | Frozen) -> float:
        """Bytes of one of a layer's."""
        return parameter_bytes(self.style, self.weights, parameter, layer.kind == "block")

    def shared_bytes(self, layer: Layer) -> float:
        """Bytes of the matrix a tied head needs of the embedding, where that is on another rank."""
        return sum(parameter_bytes(self.style, self.weights, p, False) for p in layer.shared)

    def kept_bytes(self) -> float:
        """Bytes that stay from the first forward to the end of the request, weights and cache apart."""
        return 0.0

    def crossing_bytes(self, layers: Sequence[Layer]) -> int:
        """Bytes of the cache that are of an encoder's output."""
        return 0

    def cache_tensors(self, tokens: int, layers: Sequence[Layer]) -> tuple[int, ...]:
        """`cache_bytes` tensor by tensor."""
        return (self.cache_bytes(tokens, layers),)

    def cache_bytes(self, tokens: int, layers: Sequence[Layer]) -> int:
        """Bytes of the cache of the blocks among `layers` for `tokens` tokens of each sequence.

        2 (keys and values) · kv heads · head width per token and block; latent: compression rank + rotary width. Blocks
        with a window keep so many of the latest, chunked or not (transformers 5.23 cache_utils.py,
        DynamicSlidingWindowLayer).
        """
        style = self.style
        kept = sum(_held(tokens, layer) for layer in layers if layer.kind == "block") if style.causal else 0
        return round(style.batch * kept * cache_width(style) * self._cached)

    def transient_bytes(self, layers: Sequence[Layer]) -> int:
        """The most a forward pass through `layers` holds at once beside weights and cache: no tensor is kept, so the
        stream, an operator's inputs and outputs, a matrix expanded to 16 bits, and a cache being concatenated."""
        return max((math.ceil(self._layer_peak(layer)) for layer in layers), default=0)

    def _layer_peak(self, layer: Layer) -> float:
        style, e = self.style, width(self.style.act)
        stream = style.tokens * style.hidden * width(style.residual)
        if layer.kind == "embedding":
            return stream
        if layer.kind == "head":
            wide = style.hidden if style.kind == "encoder" else style.vocab * self.tensor * (1 + (self.tensor > 1))
            return 2 * stream + style.batch * wide * e
        expanded, keys = self._widest(layer), self.keys(layer)
        old = style.batch * cache_width(style) * keys * style.causal * (
            self._cached * self.weights.appended + e * self._expands_cache)
        return 2 * stream + self._bias_bytes(keys) + max(self._attention_peak(keys) + old, expanded + self._mlp_peak())

    def _bias_bytes(self, keys: int) -> float:
        """The bias of the scores that the first block makes and all read, and with cross attention the zeros of its."""
        style = self.style
        if not style.biased:
            return 0.0
        queries = keys if self.cached and style.stack.relative_bias_anew else style.sequence
        return style.heads * (queries * keys * width(style.weight) + style.sequence * style.memory * width(style.act))

    def _widest(self, layer: Layer) -> float:
        """The largest matrix that stands in 16 bits beside its stored form."""
        if not (self.style.autocast or self.weights.expanded):
            return 0.0
        return width(self.style.act) * max(k.shape[2] * k.shape[3] * k.shape[0] for op in layer.operators
                                           for k in op.forward if k.op == "gemm" and k.category == "gemm")

    def _attention_peak(self, keys: int) -> float:
        style, e = self.style, width(self.style.act)
        projected = style.tokens * (style.query_width + 2 * style.kv_width) * e
        rows = style.heads * style.sequence * keys
        if not style.causal:  # no cache is made
            made = style.tokens * style.query_width * e
            return projected + (made if uses_flash(style) else style.batch * rows * (e + width(softmax_dtype(style))))
        if uses_flash(style):
            return 2 * projected + rows * e * style.biased
        return 2 * projected + style.batch * rows * (e + width(softmax_dtype(style)))

    def _mlp_peak(self) -> float:
        style, e = self.style, width(self.style.act)
        experts = style.experts
        wide = style.ffn if experts is None else (
            experts.top_k * experts.ffn * experts.load / experts.alike + experts.shared_ffn)
        return style.tokens * (style.hidden + (3 if style.gated else 2) * wide) * e


def _first_product(kernels: Sequence[Kernel]) -> Sequence[Kernel]:
    """Those of the first of several projections: of cross attention, the queries'."""
    return kernels[:1 + next(i for i, kernel in enumerate(kernels) if kernel.op == "gemm")]


@lru_cache(maxsize=256)
def _architecture(style: Style) -> Architecture:
    return pooled_encoder(style) if style.kind == "encoder" else decoder(style)


def _held(tokens: int, layer: Layer) -> int:
    """Of so many tokens of a sequence, those that a block still attends to."""
    return min(tokens, layer.window) if layer.window else tokens


def cache_width(style: Style) -> int:
    """Elements one token adds to one block's cache."""
    return style.latent.kv_rank + style.latent.rope if style.latent is not None else 2 * style.kv_width
