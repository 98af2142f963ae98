"""Forward passes of inference as one tensor rank runs them: the prompt at once, then one token per sequence.

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

from sim.model.architecture import Architecture, Layer, Parameter
from sim.model.attention_core import core_operator, softmax_dtype, uses_flash
from sim.model.decoder import decoder
from sim.model.kernels import cast, elementwise, product, width
from sim.model.mixture import Experts, most
from sim.model.style import Style
from sim.model.tuning import stored_width
from sim.network import expected_maximum
from sim.work import Kernel

#: Bytes per weight and per row of outputs of weights stored in fewer bits, their scales included.
#: int8: one fp32 scale per row (LLM.int8(), arXiv 2208.07339, section 3.1); fp8 alike (vLLM's per-channel weights).
#: int4: groups of 128 with a 16-bit scale and a 4-bit zero (GPTQ, arXiv 2210.17323, section 4; AWQ). nf4: as
#: fine-tuning stores it. mxfp8: a byte of scale per 32 weights (OCP Microscaling Formats 1.0, section 5.3); nvfp4: one
#: per 16 (cuBLAS 12.9, block scaling). Those of fp8, mxfp8 and nvfp4 are recalled.
_STORED: dict[str, tuple[float, float]] = {
    "int8": (1.0, 4.0), "int4": (0.5 + 2.5 / 128, 0.0), "nf4": (stored_width("nf4"), 0.0),
    "nf4-dq": (stored_width("nf4-dq"), 0.0),
    "fp8": (1.0, 4.0), "mxfp8": (1.0 + 1 / 32, 0.0), "nvfp4": (0.5 + 1 / 16, 0.0),
}

#: Formats in which weights can be stored for inference.
NARROW = tuple(_STORED)
#: Formats of which a single row is multiplied as they are stored: bitsandbytes' gemv_4bit.
_SINGLE_ROW = ("int4", "nf4", "nf4-dq")

#: Kernels of greedy sampling beside the largest logit: tokens appended, masks and stopping criteria updated
#: (transformers generation/utils.py, `_sample`). From memory.
_SAMPLING_LAUNCHES = 9
#: Launches by which bitsandbytes' int8 product looks for outlier columns and adds their 16-bit product
#: (bitsandbytes/autograd/_functions.py, MatMul8bitLt.forward). From memory.
_OUTLIER_LAUNCHES = 4


class Sum(NamedTuple):
    """What the slices exchange at this point: `kind` (all_reduce, all_gather) over `elements` of `dtype`."""

    kind: str
    elements: int
    dtype: str


Items = tuple[Kernel | Sum, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """How the blocks' matrices and the cache are stored.

    Attributes:
        dtype: one of `NARROW`, or "" = as the kernels read them.
        fused: the product reads them as stored; else a kernel of its own expands them to 16 bits first (int8: the
            product runs in int8 on quantised activations).
        appended: the cache grows by concatenation (read and written whole); else new rows are written in place.
        multiplied: products run in `dtype` on activations quantised before each (vLLM's and TensorRT-LLM's fp8); else
            in 16 bits.
        cache: dtype of keys and values in the cache, or "" = as computed. In 8 bits an engine's attention reads them as
            stored (vLLM's `kv_cache_dtype`, TensorRT-LLM's fp8 and int8 caches: one scale per tensor, recalled); else
            they are expanded before it (transformers cache_utils.py, QuantizedCache).
    """

    dtype: str
    fused: bool
    appended: bool
    multiplied: bool = False
    cache: str = ""

    @property
    def expanded(self) -> bool:
        """Whether a matrix stands beside its stored form in 16 bits."""
        return bool(self.dtype) and not (self.fused or self.multiplied or self.dtype == "int8")


@dataclass(frozen=True, slots=True)
class Rank:
    """One slice of a decoder in inference.

    Attributes:
        style: of the slice, for one forward over `style.sequence` new tokens per sequence.
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
        return _decoder(self.style)

    def forward(self, layer: Layer) -> Items:
        """Kernels and exchanges of one layer, in order; the head's end with the choice of the next token."""
        return tuple(self._items(layer))

    def _items(self, layer: Layer) -> Iterator[Kernel | Sum]:
        style, cut = self.style, self.tensor > 1
        adds = "post_norm" if style.norms_output else "residual"  # where sums of slices are needed
        last_add = max((i for i, op in enumerate(layer.operators) if op.name.startswith(adds)), default=-1)
        for number, op in enumerate(layer.operators):
            if op.name == "loss":
                continue
            # side by side, attention and MLP are summed up together
            if cut and op.name.startswith(adds) and (number == last_add or not style.parallel_block):
                yield Sum("all_reduce", style.tokens * style.hidden, style.act)
            if op.core:
                yield from self._cache_update(layer)
            for kernel in self._core(self.keys(layer)) if op.core and self.cached else op.forward:
                yield from self._stored_product(kernel) if layer.kind == "block" else (kernel,)
        if cut and layer.kind == "embedding":
            yield Sum("all_reduce", style.tokens * style.hidden, style.weight)
        if layer.kind == "head":
            yield from self._sample()

    @property
    def _cached(self) -> float:
        """Bytes of an element of the cache."""
        return width(self.weights.cache or self.style.act)

    @property
    def _expands_cache(self) -> bool:
        """Whether attention reads a copy of the cache in the width of activations."""
        return bool(self.weights.cache) and not (self.weights.fused and uses_flash(self.style))

    def _cache_update(self, layer: Layer) -> Iterator[Kernel]:
        style, weights = self.style, self.weights
        new = style.tokens * cache_width(style)
        source = width(style.act)
        if weights.cache and not weights.fused:
            yield cast("quantise_cache", new, style.act, weights.cache)
            source = self._cached
        if weights.appended:
            new, source = style.batch * self.keys(layer) * cache_width(style), self._cached
        yield elementwise("cache_update", new, source + self._cached, style.act, 2, "attention")

    def _core(self, keys: int) -> Iterator[Kernel]:
        """One query per sequence and head over the cache, which is read once."""
        style = replace(self.style, memory=keys, causal=False, window=0)
        wide, elements = width(style.act), style.batch * keys * cache_width(style)
        less = 0.0 if self._expands_cache else elements * (wide - self._cached)
        if style.latent is not None:
            rank, rope = style.latent.kv_rank, style.latent.rope
            style = replace(style, latent=None, kv_heads=1, head_dim=(2 * rank + rope) // 2)
            less += style.batch * keys * rank * wide  # keys and values are the same columns, read once
        if self._expands_cache:
            yield elementwise("dequantise_cache", elements, self._cached + wide, style.act, 1, "attention")
        for kernel in core_operator(style).forward:
            yield replace(kernel, bytes=kernel.bytes - less) if kernel.op == "attention" else kernel

    def _stored_product(self, kernel: Kernel) -> Iterator[Kernel]:
        """A product with the weights as stored, and the kernels around it."""
        dtype = self.weights.dtype
        if not dtype or kernel.op != "gemm" or kernel.category != "gemm":
            yield kernel
            return
        batch, m, n, k = kernel.shape
        act, e = self.style.act, width(self.style.act)
        stored = batch * stored_bytes((n, k), dtype)
        in_product = replace(kernel, bytes=kernel.bytes - batch * n * k * e + stored)
        if self.weights.multiplied:
            yield cast("quantise", batch * m * k, act, dtype)
            narrow = product(batch, m, n, k, "tn", dtype, dtype, act)
            yield replace(narrow, bytes=narrow.bytes - batch * n * k * width(dtype) + stored, flops=kernel.flops,
                          launches=kernel.launches)
        elif self.weights.fused or (m == 1 and dtype in _SINGLE_ROW):
            yield in_product
        elif dtype == "int8":
            yield cast("quantise", batch * m * k, act, "int8", 1)
            yield replace(product(batch, m, n, k, "tn", "int8", "int8", "fp32"), flops=kernel.flops,
                          launches=kernel.launches)
            yield elementwise("dequantise_outputs", batch * m * n, 4 + e, act, 1 + _OUTLIER_LAUNCHES)
        else:
            yield elementwise("dequantise", batch * n * k, stored / (batch * n * k) + e, act, kernel.launches)
            yield kernel

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
        return sum(self._parameter_bytes(p, layer.kind == "block") for p in layer.parameters)

    def shared_bytes(self, layer: Layer) -> float:
        """Bytes of the matrix a tied head needs of the embedding, where that is on another rank."""
        return sum(self._parameter_bytes(p, False) for p in layer.shared)

    def _parameter_bytes(self, parameter: Parameter, in_block: bool) -> float:
        if self.weights.dtype and in_block and len(parameter.shape) > 1:
            return stored_bytes(parameter.shape, self.weights.dtype)
        return parameter.numel * width(self.style.weight)

    def cache_bytes(self, tokens: int, layers: Sequence[Layer]) -> int:
        """Bytes of the cache of the blocks among `layers` for `tokens` tokens of each sequence.

        2 (keys and values) · kv heads · head width per token and block; latent: compression rank + rotary width. Blocks
        with a window keep so many of the latest, chunked or not (transformers 5.23 cache_utils.py,
        DynamicSlidingWindowLayer).
        """
        style = self.style
        kept = sum(_held(tokens, layer) for layer in layers if layer.kind == "block")
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
            return 2 * stream + style.batch * style.vocab * self.tensor * (e + e * (self.tensor > 1))
        expanded = 0.0
        if style.autocast or self.weights.expanded:
            expanded = e * max(k.shape[2] * k.shape[3] * k.shape[0] for op in layer.operators for k in op.forward
                               if k.op == "gemm" and k.category == "gemm")
        keys = self.keys(layer)
        old = style.batch * cache_width(style) * keys * (
            self._cached * self.weights.appended + e * self._expands_cache)
        return 2 * stream + max(self._attention_peak(keys) + old, expanded + self._mlp_peak())

    def _attention_peak(self, keys: int) -> float:
        style, e = self.style, width(self.style.act)
        projected = style.tokens * (style.query_width + 2 * style.kv_width) * e
        scores = 0.0
        if not uses_flash(style):
            elements = style.batch * style.heads * style.sequence * keys
            scores = elements * (e + width(softmax_dtype(style)))
        return 2 * projected + scores

    def _mlp_peak(self) -> float:
        style, e = self.style, width(self.style.act)
        experts = style.experts
        wide = style.ffn if experts is None else (
            experts.top_k * experts.ffn * experts.load / experts.alike + experts.shared_ffn)
        return style.tokens * (style.hidden + (3 if style.gated else 2) * wide) * e


def rank_of(style: Style, batch: int, new: int, cached: int, weights: Weights) -> Rank:
    """One slice of a model for `new` tokens of each of `batch` sequences, `cached` of them known already.

    Args:
        style: of the slice (`style_of`), its `window` that of the model whatever the length of the sequence.
    """
    half = replace(style, autocast=False, weight=style.act, residual=style.act) if weights.dtype else style
    if weights.multiplied:
        half = replace(half, gemm=style.act)
    if style.experts is not None and style.expert > 1:
        half = replace(half, expert=1, experts=_shared_out(style.experts, style.expert, batch * new))
    return Rank(replace(half, batch=batch, sequence=new, predicted=1, dropout=False), cached, weights)


def _shared_out(experts: Experts, slices: int, tokens: int) -> Experts:
    """Experts over slices that all have the same tokens: each computes its experts' rows, and the sum over slices
    is the tensor ranks' own. Few tokens ask unevenly by chance: rows of a slice are hypergeometric, and all wait for
    the largest of them. Source: vLLM's and TensorRT-LLM's expert parallelism over tensor ranks (recalled).
    """
    ones = tokens * experts.top_k / slices
    rest = (1 - 1 / slices) * (experts.count - experts.top_k) / max(1, experts.count - 1)
    chance = math.sqrt(rest / ones) * expected_maximum(slices)
    load = 1 + math.hypot(experts.load - 1, chance)
    return replace(experts, alike=slices, load=min(most(experts.top_k, slices, experts.held), load))


@lru_cache(maxsize=64)
def _decoder(style: Style) -> Architecture:
    return decoder(style)


def _held(tokens: int, layer: Layer) -> int:
    """Of so many tokens of a sequence, those that a block still attends to."""
    return min(tokens, layer.window) if layer.window else tokens


def cache_width(style: Style) -> int:
    """Elements one token adds to one block's cache."""
    return style.latent.kv_rank + style.latent.rope if style.latent is not None else 2 * style.kv_width


def stored_bytes(shape: tuple[int, ...], dtype: str) -> float:
    """Bytes of a quantised matrix (out, in) with its scales."""
    per_weight, per_row = _STORED[dtype]
    return math.prod(shape) * per_weight + shape[0] * per_row
