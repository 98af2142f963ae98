"""Encoder-decoders in inference: the encoder once, then the decoder token by token.

The prompt is the encoder's. The first forward of the decoder reads a start token, and every block of it makes keys and
values of the encoder's output, which are kept; further tokens read them and the block's own cache, which grows. The
encoder's output itself stays as well, because the loop passes it on with every token. The first block's table of
relative positions is looked up for every new query against all keys up to it.

Source: transformers 4.56.2 and 5.23.0, modeling_t5.py (T5Attention.forward, T5Stack.forward), cache_utils.py
(EncoderDecoderCache), generation/utils.py (`encoder_outputs` in model_kwargs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from sim.model.architecture import Architecture, Layer, Operator, Parameter
from sim.model.attention.core import softmax_dtype
from sim.model.attention.core_choice import uses_flash
from sim.model.encoder_decoder import CROSS, TABLE, encoder_decoder
from sim.model.inference.rank import Items, Rank, cache_width
from sim.model.inference.weights import wide_down
from sim.model.kernels import width
from sim.model.style import Style
from sim.model.tuning import Frozen


@dataclass(frozen=True, slots=True)
class _Stack(Rank):
    """One of the two stacks. What T5's module code holds at once: the embeddings (a variable of the stack), the block's
    input (one of the loop), behind attention its output too, what a norm made, and an operator's own tensors: PyTorch
    2.13.0's on fake tensors to 0.1% of the request's peak (`tests/model/inference/test_inference_pair.py`)."""

    def _layer_peak(self, layer: Layer) -> float:
        style, e = self.style, width(self.style.act)
        wide = wide_down(style, self.weights)
        stream = style.tokens * style.hidden * (width("fp32") if wide else width(style.residual))
        if layer.kind == "embedding":
            return stream
        held = stream * (style.modules == "transformers")
        if layer.kind == "head":  # greedy search looks at a copy in fp32
            return held + 2 * stream + style.batch * style.vocab * self.tensor * (e + width("fp32"))
        normed, keys = style.tokens * style.hidden * e, self.keys(layer)
        inner = style.tokens * style.ffn * e
        rows = max((3 if style.gated else 2) * inner, inner + 2 * inner * wide)
        return held + stream + normed + self._bias_bytes(keys) + max(
            self._attention_peak(keys), self._crossing_peak(), stream + rows + self._widest(layer))

    def _attention_peak(self, keys: int) -> float:
        """Queries, keys and values, the scores or the bias that a fused kernel reads, and in a growing cache the old
        keys, while new ones are written, or the old values."""
        style, e = self.style, width(self.style.act)
        projected = style.tokens * (style.query_width + 2 * style.kv_width) * e
        if not self.cached:
            return projected + self._scores(keys) + style.tokens * style.query_width * e * uses_flash(style)
        old = style.batch * (keys - 1) * cache_width(style) / 2 * self._cached * self.weights.appended
        copied = style.batch * keys * cache_width(style) * e * self._expands_cache
        return projected + max(old, copied + self._scores(keys))

    def _crossing_peak(self) -> float:
        """Queries and scores on the encoder's output, whose keys and values the first forward makes and copies."""
        style, e = self.style, width(self.style.act)
        if not style.memory:
            return 0.0
        elements = style.batch * style.memory * cache_width(style)
        made = elements * e if not self.cached or self._expands_cache else 0.0
        return style.tokens * style.query_width * e + max(made, self._scores(style.memory))

    def _scores(self, keys: int) -> float:
        """Scores that are spelled out, twice where one operator reads and writes them; or the fused kernel's bias."""
        style, e = self.style, width(self.style.act)
        rows = style.heads * style.sequence * keys
        if uses_flash(style):
            return rows * e if style.biased else 0.0
        return style.batch * rows * (e + width(softmax_dtype(style)))


@dataclass(frozen=True, slots=True)
class PairRank(Rank):
    """One slice of an encoder-decoder in inference.

    Attributes:
        style: of the encoder and the whole prompt; `decoder_sequence` counts the decoder's new tokens.
        cached: of the decoder; 0 = the encoder runs too.
    """

    def architecture(self) -> Architecture:
        """Both stacks and the bridge between them."""
        return _architecture(self.style)

    def forward(self, layer: Layer) -> Items:
        """Kernels and exchanges of one layer; none of the encoder's once the cache is filled."""
        if layer.kind == "bridge":
            return self._bridge(layer)
        if _decodes(layer):
            return self._decoder.forward(layer)
        return () if self.cached else self._encoder.forward(layer)

    def part(self, layer: Layer, operators: Sequence[Operator]) -> Items:
        """Those of some of its operators."""
        mine = {id(op) for op in operators}
        if layer.kind == "bridge":
            return self._bridge(replace(layer, operators=tuple(op for op in layer.operators if id(op) in mine)))
        if _decodes(layer):
            return self._decoder.part(layer, operators)
        return () if self.cached else self._encoder.part(layer, operators)

    def _bridge(self, layer: Layer) -> Items:
        """The encoder's last norm, and the decoder's embedding."""
        begin = next((i for i, op in enumerate(layer.operators) if op.name == "embedding"), len(layer.operators))
        ends = () if self.cached else tuple(kernel for op in layer.operators[:begin] for kernel in op.forward)
        begins = replace(layer, operators=layer.operators[begin:])
        return (*ends, *self._decoder.forward(begins)) if begins.operators else ends

    @property
    def _encoder(self) -> _Stack:
        return _Stack(replace(self.style, causal=False), 0, self.weights)

    @property
    def _decoder(self) -> _Stack:
        style = self.style
        return _Stack(replace(style, sequence=style.decoder_sequence, layers=style.decoder_layers, causal=True,
                              memory=style.sequence), self.cached, self.weights)

    def hooks(self, layer: Layer, parameter: Parameter | Frozen) -> int:
        """Once the cache is filled, nothing of the encoder's runs, and no keys and values of its output are made. T5's
        embedding is one module of three names (modeling_t5.py: shared, encoder.embed_tokens, decoder.embed_tokens)."""
        made = any(f"{CROSS}.{name}." in parameter.name for name in ("k", "v", "kv"))
        if self.cached and (made or parameter.name.startswith("encoder.")):
            return 0
        return 3 if self.style.biased and parameter.name == TABLE and layer.kind != "head" else 1

    def kept_bytes(self) -> float:
        """The encoder's output."""
        return self.style.tokens * self.style.hidden * width(self.style.residual)

    def cache_bytes(self, tokens: int, layers: Sequence[Layer]) -> int:
        """Bytes of the caches of the decoder's blocks among `layers`: for `tokens` of its own tokens and all of the
        encoder's, 2 (keys and values) · kv heads · head width each."""
        return self.crossing_bytes(layers) + round(
            tokens * self.style.batch * _blocks(layers) * cache_width(self.style) * self._cached)

    def cache_tensors(self, tokens: int, layers: Sequence[Layer]) -> tuple[int, ...]:
        """Keys and values of the encoder's output, and a block's own, of one block after another."""
        crossing, all_bytes = self.crossing_bytes(layers), self.cache_bytes(tokens, layers)
        blocks = _blocks(layers)
        return (crossing // blocks // 2,) * 2 * blocks + ((all_bytes - crossing) // blocks // 2,) * 2 * blocks

    def crossing_bytes(self, layers: Sequence[Layer]) -> int:
        """What of them is keys and values of the encoder's output."""
        return round(self.style.tokens * _blocks(layers) * cache_width(self.style) * self._cached)

    def _layer_peak(self, layer: Layer) -> float:
        if _decodes(layer):
            return self._decoder._layer_peak(layer)
        if self.cached:
            return 0.0
        # the last norm reads one stream and writes another
        return 2 * self.kept_bytes() if layer.kind == "bridge" else self._encoder._layer_peak(layer)


def _blocks(layers: Sequence[Layer]) -> int:
    """The decoder's blocks among some layers."""
    return sum(layer.kind == "block" and _decodes(layer) for layer in layers)


def _decodes(layer: Layer) -> bool:
    """Whether a layer that is no bridge is the decoder's."""
    return layer.program is not None and layer.program.style.memory > 0


@lru_cache(maxsize=64)
def _architecture(style: Style) -> Architecture:
    return encoder_decoder(style)
