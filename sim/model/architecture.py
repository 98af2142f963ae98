"""An architecture as layers of operators: parameters, kernels of both directions, tensors kept for backward.

Knows nothing of GPUs, ranks or sharding: an `Architecture` is what one model replica does with one micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from sim.model.style import Program
from sim.model.tuning import Frozen
from sim.work import DTYPE_BYTES, Kernel


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable tensor, named as PyTorch names it inside its layer, with its shape (dim 0 is what FSDP 2 shards).

    Attributes:
        routed: of an expert that tokens are routed to: only the ranks that hold the same experts have its like.
    """

    name: str
    shape: tuple[int, ...]
    routed: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor autograd keeps from forward to backward."""

    name: str
    elements: int
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes, without allocator rounding. Booleans (dropout masks) are `int8`."""
        return math.ceil(self.elements * DTYPE_BYTES[self.dtype])


class Joint(NamedTuple):
    """Where the slices of an operator depend on one another, said without ranks.

    Attributes:
        kind: column (every slice reads the same whole input, and makes a partial sum of its gradient), row (the output
            is a partial sum over the slices), summed (so too, but whole on every slice before each takes its tokens);
            read and sum: column and row where activations are never scattered; columns (every slice has made some
            columns of the input, which all read), whole (so too, but each goes on with its own, and the gradient's
            columns come together as well), restored (the same as columns of what goes back into the stream, so that
            its gradient comes from there); vocabulary_loss (per-token scalars of vocabulary slices), ring, rotate,
            gather (keys and values of the other slices of the sequence: one after another, all at once beside a rank's
            own, or before everything), heads (a slice's tokens of all heads become all tokens of some heads, or the
            other way round), dispatch, combine (tokens travel to their experts and back), counts, context_counts (how
            many tokens each expert has is summed over all slices of the sequence, or over those of the context).
        elements: of the tensor in question, whole over the slices of the width.
        dtype: of that tensor.
        gathered: dtype in which it is gathered, where it is cast before; default as it is.
        again: a weight's gradient needs the whole input once more.
        times: parts of it that meet one after another.
        scores: of a dispatch, rows whose scores travel in a call of their own.
        counts: of a dispatch, rows per expert that every slice tells every other before, elements of all slices.
        reads_s: of a dispatch, host time between the end of what it waits for, because it reads the counts, and the
            launch; 0 = it does not wait.
        told: it waits for the counts alone, not for the copies behind them.
        apart: of a column or a row, a call of its own that nothing hides, on what the product keeps or has made.
    """

    kind: str
    elements: int
    dtype: str
    gathered: str = ""
    again: bool = True
    times: int = 1
    scores: int = 0
    counts: int = 0
    reads_s: float = 0.0
    told: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a layer.

    Attributes:
        name: e.g. "qkv", "attention", "up".
        forward, backward: kernels in launch order; in backward the data gradient comes before the weight gradient.
        parameters: in the order in which their gradients become ready within this operator's backward.
        saved: what it adds to the tensors kept for backward.
        core: part of the attention core, which selective recomputation does not keep.
        recomputed: whether full recomputation runs its forward again. Non-reentrant checkpointing stops as soon as the
            last saved tensor exists, so a block's last product is not recomputed there (PyTorch's early stop).
        core_again: kernels selective recomputation runs again, where they are fewer than `forward` (early stop too).
        weight_copies: autocast's half copies of the weights, kept for backward too; under full recomputation they live
            to the end of forward (autocast's cache), then one layer at a time.
        frozen: tensors of it that are not trained.
        reading_s: host time in front of each forward that begins when the GPU has nothing left to do, because the host
            reads what comes before; 0 where it runs ahead.
        buffers: bytes that stand beside what is saved while forward, and beside what flows while backward is at work
            (`sim.model.eager` has them tensor by tensor, of layers that are written down there).
        again: kernels that recomputation runs again, where it leaves out some of `forward`; None = all of them.
            Products whose outputs a policy keeps are among them.
        turns: of each of its products and of those of branches behind it, when modules run it among them, where that
            is not the order of `forward`; -1 = it is no `mm` to autograd.
    """

    name: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    parameters: tuple[Parameter, ...] = ()
    saved: tuple[Tensor, ...] = ()
    core: bool = False
    recomputed: bool = True
    core_again: tuple[Kernel, ...] = ()
    weight_copies: tuple[Tensor, ...] = ()
    joint: Joint | None = None
    frozen: tuple[Frozen, ...] = ()
    reading_s: float = 0.0
    buffers: tuple[int, int] = (0, 0)
    turns: tuple[int, ...] = ()
    again: tuple[Kernel, ...] | None = None

    @property
    def rerun(self) -> Operator:
        """The operator as recomputation runs its forward."""
        return self if self.again is None else replace(self, forward=self.again)

    @property
    def weights(self) -> tuple[Parameter | Frozen, ...]:
        """Its parameters, trained or not."""
        return (*self.parameters, *self.frozen)


@dataclass(frozen=True)
class Layer:
    """Embedding, one block, or head (final norm, logits, loss): what FSDP wraps and checkpointing recomputes.

    Attributes:
        kind: "embedding", "block", "bridge" (from an encoder to its decoder) or "head".
        operators: in forward order; backward runs them reversed.
        input: the tensor full recomputation keeps instead of `saved`.
        parameters: in registration order (`module.parameters()`).
        shared: parameters of an earlier layer that this one multiplies by or looks up (a tied head).
        program: the module code behind it, for its memory (`sim.model.eager`); None: estimated from `saved`.
        frozen: tensors that are not trained and so are no `parameters`.
        window: tokens that a query of a block attends to, 0 = all.
    """

    kind: str
    operators: tuple[Operator, ...]
    input: Tensor
    parameters: tuple[Parameter, ...]
    shared: tuple[Parameter, ...] = ()
    program: Program | None = field(default=None, compare=False)
    frozen: tuple[Frozen, ...] = ()
    window: int = 0

    @property
    def weights(self) -> tuple[Parameter | Frozen, ...]:
        """Its parameters, trained or not."""
        return (*self.parameters, *self.frozen)

    @property
    def further(self) -> bool:
        """Whether it is a head that holds blocks for further tokens (`sim.model.layers.further`)."""
        return self.kind == "head" and self.program is not None and self.program.style.further > 0

    @cached_property
    def numel(self) -> int:
        """Trained parameters of the layer."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def routed(self) -> int:
        """Trained parameters of routed experts."""
        return sum(p.numel for p in self.parameters if p.routed)

    @cached_property
    def reading_s(self) -> float:
        """Host time of one forward that begins when the GPU has nothing left to do."""
        return sum(op.reading_s for op in self.operators)

    @cached_property
    def gradient_order(self) -> tuple[Parameter, ...]:
        """Parameters in the order in which backward makes their gradients ready."""
        return tuple(p for op in reversed(self.operators) for p in op.parameters)

    @cached_property
    def forward_flops(self) -> float:
        """Matrix-product FLOPs of the layer's forward."""
        return sum(k.flops for op in self.operators for k in op.forward)

    @cached_property
    def backward_flops(self) -> float:
        """Matrix-product FLOPs of the layer's backward without recomputation."""
        return sum(k.flops for op in self.operators for k in op.backward)

    @cached_property
    def recompute_flops(self) -> float:
        """Matrix-product FLOPs that full recomputation adds to the layer's backward."""
        return sum(k.flops for op in self.operators if op.recomputed for k in op.forward)

    @cached_property
    def saved(self) -> tuple[Tensor, ...]:
        """Every tensor autograd keeps without recomputation, weight copies apart."""
        return tuple(t for op in self.operators for t in op.saved)


@dataclass(frozen=True)
class Architecture:
    """One replica and one micro-batch.

    Attributes:
        stack: embedding, blocks ..., head, in forward order; equal layers are the same object. An encoder-decoder has a
            bridge between its two rows of blocks.
        tied: the head multiplies by the embedding's matrix, which then belongs to the embedding layer only; its
            gradient is ready with the embedding's, and under FSDP both live in the root unit.
        batch, sequence: of the micro-batch.
        given_names: names of the layers, where they have their own.
    """

    stack: tuple[Layer, ...]
    tied: bool
    batch: int
    sequence: int
    given_names: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the layers for reports: their own, or kinds and numbered blocks ("block0", of two stacks
        "encoder0" ... "decoder0")."""
        if self.given_names:
            return self.given_names
        kinds = [layer.kind for layer in self.stack]
        bridge = kinds.index("bridge") if "bridge" in kinds else len(kinds)
        names, number = [], 0
        for position, kind in enumerate(kinds):
            stack = "block" if bridge == len(kinds) else "encoder" if position < bridge else "decoder"
            names.append(f"{stack}{number}" if kind == "block" else kind)
            number = number + 1 if kind == "block" else 0
        return tuple(names)

    @cached_property
    def block_numbers(self) -> tuple[int, ...]:
        """For every position of the stack the number of its block, from 1 on; 0 for layers that hold none."""
        numbers, count = [], 0
        for layer in self.stack:
            holds = layer.kind == "block" or layer.further
            count += holds
            numbers.append(count if holds else 0)
        return tuple(numbers)

    @cached_property
    def parameters(self) -> int:
        """Trainable parameters."""
        return sum(layer.numel for layer in self.stack)

    @cached_property
    def routed(self) -> int:
        """Trainable parameters of routed experts, a part of `parameters`."""
        return sum(layer.routed for layer in self.stack)

    @cached_property
    def forward_flops(self) -> float:
        """Matrix-product FLOPs of one forward, attention in full."""
        return sum(layer.forward_flops for layer in self.stack)

    @cached_property
    def backward_flops(self) -> float:
        """Matrix-product FLOPs of one backward without recomputation."""
        return sum(layer.backward_flops for layer in self.stack)

    @cached_property
    def frozen_parameters(self) -> int:
        """Parameters that are not trained."""
        return sum(f.numel for layer in self.stack for f in layer.frozen)

    def recompute_flops(self, layers: int | None = None) -> float:
        """FLOPs that full recomputation of the first `layers` blocks (default all) adds to backward."""
        blocks = [layer for layer in self.stack if layer.kind == "block"]
        return sum(block.recompute_flops for block in blocks[:layers])
