"""What decides the kernels of a model: shapes, dtypes and the stack's fusions, as one hashable value.

`style_of` is the only place of this room that reads a scenario.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.errors import Fault, UserError
from sim.software import Stack
from sim.work import DTYPE_BYTES

_HALF = ("fp16", "bf16")
#: Compute dtypes below 16 bits run their matrix products in them and everything else in bf16 (TransformerEngine).
_NARROW = ("fp8", "mxfp8", "nvfp4", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Style:
    """One micro-batch of one decoder, as its layers see it.

    Attributes:
        batch, sequence: sequences and tokens per sequence of the micro-batch.
        predicted: tokens per sequence that reach the vocabulary head.
        hidden, heads, kv_heads, head_dim, ffn, vocab, max_positions, layers: as in the scenario.
        gemm: dtype of the matrix products; act: of activations; residual: of the residual stream and norms; weight: of
            the module's weights as kernels see them; gradient: dtype the weight gradients accumulate in.
        autocast: weights are fp32 and cast to `act` where they are used.
        window: keys each query sees, 0 = all.
        dropout: whether dropout masks exist (their probability changes nothing else).
    """

    batch: int
    sequence: int
    predicted: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    layers: int
    gated: bool
    activation: str
    positions: str
    norm: str
    bias: bool
    tied: bool
    dropout: bool
    window: int
    parallel_block: bool
    attention: str
    chunked_loss: bool
    gemm: str
    act: str
    residual: str
    weight: str
    gradient: str
    autocast: bool
    stack: Stack

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.batch * self.sequence

    @property
    def query_width(self) -> int:
        """Width of the queries and of the attention output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.kv_heads * self.head_dim

    @property
    def modules(self) -> str:
        """Whose layers run: plain, transformers or megatron."""
        return self.stack.modules

    @property
    def conv1d(self) -> bool:
        """Hugging Face's GPT-2 code: fused `c_attn`, weights stored (in, out), gelu_new spelled out in operators."""
        return self.modules == "transformers" and self.positions == "learned" and not self.gated

    @property
    def separate_qkv(self) -> bool:
        """Three projections instead of one (Hugging Face's Llama code)."""
        return self.modules == "transformers" and not self.conv1d


def style_of(scenario: Any, stack: Stack, batch: int) -> Style:
    """The style of a scenario's decoder.

    Raises:
        UserError: the architecture is not a plain decoder.
    """
    model, training, precision = scenario.model, scenario.training, scenario.training.precision
    _refuse_unsimulated(model)
    act = "bf16" if precision.compute in _NARROW else "fp32" if precision.compute == "tf32" else precision.compute
    half = act in _HALF
    autocast = half and precision.parameters not in _HALF and precision.gather not in _HALF
    follows = stack.residual_dtype_follows_autocast or stack.low_precision_norm
    hidden, heads = model.hidden, model.heads
    return Style(
        batch=batch, sequence=training.sequence, predicted=training.predicted_tokens or training.sequence,
        hidden=hidden, heads=heads, kv_heads=model.kv_heads or heads, head_dim=model.head_dim or hidden // heads,
        ffn=model.ffn or 4 * hidden, vocab=model.vocab, max_positions=model.max_positions or training.sequence,
        layers=model.layers, gated=bool(model.gated_mlp), activation=model.activation or "gelu",
        positions=model.positions, norm=model.norm, bias=bool(model.bias), tied=bool(model.tied_embeddings),
        dropout=bool(model.dropout), window=_window(model.window, training.sequence),
        parallel_block=bool(model.parallel_block), attention=training.attention,
        chunked_loss=bool(training.chunked_loss), gemm=precision.compute, act=act,
        residual="fp32" if autocast and not follows else act, weight="fp32" if autocast else act,
        gradient=_gradient(precision, act, autocast), autocast=autocast, stack=stack,
    )


def _gradient(precision: Any, act: str, autocast: bool) -> str:
    """Dtype the weight gradient of one micro-step ends in: fp32 `main_grad` beside half weights, else the weights'."""
    if autocast:
        return "fp32"
    main_grad = precision.parameters in _HALF and DTYPE_BYTES[precision.gradients] > DTYPE_BYTES[act]
    return str(precision.gradients) if main_grad else act


def _window(window: int | None, sequence: int) -> int:
    return window if window and window < sequence else 0


def _refuse_unsimulated(model: Any) -> None:
    """Raise for architectures whose layers are not written yet."""
    faults = []
    if model.kind != "decoder":
        message = f"models of kind '{model.kind}' are not simulated yet, only decoders"
        raise UserError(Fault(message, field="model.kind"))
    if model.moe is not None:
        faults.append(Fault("mixture of experts is not simulated yet", field="model.moe"))
    if model.mla is not None:
        faults.append(Fault("latent attention is not simulated yet", field="model.mla"))
    if model.positions == "relative":
        message = "relative positions of a decoder are not simulated yet; use learned, rotary, alibi or none"
        faults.append(Fault(message, field="model.positions"))
    if faults:
        raise UserError(faults)
