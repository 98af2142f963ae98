"""Logits and loss a chunk of rows at a time, so that the wide logits of one chunk exist at a time.

Three ways. Liger Kernel's makes the gradients in forward and keeps no logits. torchtune's keeps every chunk's logits in
the model's dtype and runs only the loss, its fp32 copies and their gradients by chunks; over tensor ranks it gathers
them. torchtitan's, of a vocabulary that tensor ranks share, runs backward of a chunk behind its forward. Sources: Liger
`fused_linear_cross_entropy.py` (from memory); torchtune 0.6.1 (read) `modules/transformer.py`
(TransformerDecoder.chunked_output), `modules/loss/ce_chunked_output_loss.py`, `models/llama3/_parallelism.py`;
torchtitan 0.3.0 (read) `components/loss.py` (ChunkedLossWrapper, GradAccumulator, _LossParallelCrossEntropy).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from sim.model.architecture import Joint, Operator, Tensor
from sim.model.compiled import compiles_loss
from sim.model.kernels import cast, elementwise, product, width
from sim.model.style import Style
from sim.work import Kernel

#: Kernels forward and backward, and what is kept between.
Ways = tuple[list[Kernel], list[Kernel], tuple[Tensor, ...]]

#: Chunks of torchtune's CEWithChunkedOutputLoss (num_output_chunks).
OUTPUT_CHUNKS = 8


def by_position(style: Style) -> bool:
    """Whether head and loss go a few positions at a time, their logits being the loop's: LitGPT's fine-tuning
    of decoders (`Stack.tuning_chunk`), which knows no tensor ranks."""
    own = style.modules == "plain" and style.kind == "decoder" and style.tensor == 1
    return own and style.tuned is not None and style.stack.tuning_chunk > 0


def chunk_rows(rows: int, hidden: int, vocab: int) -> int:
    """Rows of logits that exist at a time: as many bytes as the head's input, to the next power of two (Liger Kernel,
    `fused_linear_cross_entropy.py`: inc_factor = ceil(V / H), chunk = next_power_of_2(ceil(rows / inc_factor)))."""
    return min(rows, 1 << (math.ceil(rows / math.ceil(vocab / hidden)) - 1).bit_length())


def output_chunks(rows: int) -> list[int]:
    """Rows of each of torchtune's chunks (torch.chunk: equal ones, the last smaller)."""
    chunk = math.ceil(rows / OUTPUT_CHUNKS)
    return parts_of(rows, chunk)


def chunked_forward(style: Style, rows: int, logits: Operator) -> Ways:
    """Logits, loss and their gradients in chunks of rows, all in forward (Liger's fused linear cross-entropy).

    For each chunk: the product, a kernel that reads the logits twice and writes their gradient over them, the data
    gradient, and the weight gradient added to those of the chunks before. Backward has both gradients already; it
    scales them only where the loss is not the last thing computed.

    Args:
        logits: the whole product, for its casts.
    """
    act, e, vocab, hidden = style.act, width(style.act), style.vocab, style.hidden
    forward = [kernel for kernel in logits.forward if kernel.op != "gemm"]
    for size in parts_of(rows, chunk_rows(rows, hidden, vocab)):
        loss = Kernel("cross_entropy", act, (size, vocab), "backward", 0.0, 3 * e * size * vocab, "memory_bound")
        forward += [product(1, size, vocab, hidden, "tn", style.wide, act), loss,
                    product(1, size, hidden, vocab, "nn", style.wide, act),
                    product(1, vocab, hidden, size, "nt", style.wide, act, style.weight, accumulate=True)]
    backward = [kernel for kernel in logits.backward if kernel.op != "gemm" and "weight" not in kernel.variant]
    saved = (Tensor("head_input_gradient", rows * hidden, act), Tensor("head_gradient", vocab * hidden, style.weight))
    return forward, backward, saved


def chunked_kept(style: Style, rows: int, logits: Operator, loss: Callable[[Style, int], Ways]) -> Ways:
    """Every chunk's product, then every chunk's loss; backward takes the chunks one by one.

    Args:
        logits: the whole product, for its casts.
        loss: kernels of the loss of so many rows.
    """
    act, vocab, hidden = style.act, style.vocab, style.hidden
    sizes = output_chunks(rows)
    losses = [loss(style, size) for size in sizes]
    forward = [kernel for kernel in logits.forward if kernel.op != "gemm"]
    forward += [product(1, size, vocab, hidden, "tn", style.wide, act) for size in sizes]
    forward += chain.from_iterable(part[0] for part in losses)
    backward: list[Kernel] = []
    for number, (size, part) in enumerate(zip(sizes, losses, strict=True)):
        backward += [*part[1], product(1, size, hidden, vocab, "nn", style.wide, act),
                     product(1, vocab, hidden, size, "nt", style.wide, act, accumulate=number > 0)]
    backward += [kernel for kernel in logits.backward if kernel.op != "gemm"]
    kept = ("logits", act) if compiles_loss(style) else ("log_softmax", "fp32")
    return forward, backward, (Tensor("head_input", rows * hidden, act), Tensor(kept[0], rows * vocab, kept[1]))


def chunked_gathered(style: Style, rows: int, logits: Operator, loss: Callable[[Style, int], Ways],
                     ) -> tuple[Operator, ...]:
    """torchtune's over tensor ranks, each of which gathers the logits of all slices chunk by chunk, puts them side by
    side (cat along the vocabulary) and takes the whole loss; backward takes its own columns of the gradient, and sums
    that of each chunk's input."""
    act, vocab, hidden, e = style.act, style.vocab, style.hidden, width(style.act)
    sizes, every = output_chunks(rows), vocab * style.tensor
    losses = [loss(replace(style, vocab=every, tensor=1), size) for size in sizes]
    forward = [kernel for kernel in logits.forward if kernel.op != "gemm"]
    forward += [product(1, size, vocab, hidden, "tn", style.wide, act) for size in sizes]
    backward: list[Kernel] = []
    for number, size in enumerate(sizes):
        backward += [product(1, size, hidden, vocab, "nn", style.wide, act),
                     product(1, vocab, hidden, size, "nt", style.wide, act, accumulate=number > 0)]
    backward += [kernel for kernel in logits.backward if kernel.op != "gemm"]
    joined = elementwise("logits_cat", rows * every, 2 * e, act, len(sizes))
    own = elementwise("logits_gradient_split", rows * vocab, 2 * e, act, len(sizes))
    met = Joint("restored", rows * every, act, times=len(sizes))
    kept = ("logits", act) if compiles_loss(style) else ("log_softmax", "fp32")
    whole = Operator("loss", (joined, *chain.from_iterable(part[0] for part in losses)),
                     (*chain.from_iterable(part[1] for part in losses), own), joint=met,
                     saved=(Tensor(kept[0], rows * every, kept[1]),))
    joint = logits.joint and logits.joint._replace(times=len(sizes))
    return replace(logits, forward=tuple(forward), backward=tuple(backward), joint=joint), whole


def chunked_cut(style: Style, rows: int, logits: Operator, loss: Callable[[Style, int], Ways]) -> tuple[Operator, ...]:
    """torchtitan's, of a slice of the vocabulary: every chunk runs forward and backward at once, its input's gradient
    is copied into one buffer in fp32, its head's is added to what is there, and the buffer is cast to what the decoder
    goes on with. Slices meet in front of all chunks (whose gradient is their sum), and in every chunk's loss.

    Args:
        logits: the whole product, for its casts and its joint.
        loss: kernels of the loss of so many rows.
    """
    act, vocab, hidden, e = style.act, style.vocab, style.hidden, width(style.act)
    sizes = output_chunks(rows)
    copies = (elementwise("chunk_copy", rows * hidden, 2 * e, act, len(sizes)),) if style.batch > 1 else ()
    # functional collectives reduce a copy (torch 2.13 distributed/_functional_collectives.py: clone, or cat of chunks)
    copied = elementwise("input_gradient_copy", rows * hidden, 2 * e, act)
    entry = Operator("chunks", (*copies, elementwise("chunk_gradient_zero", rows * hidden, 4, "fp32")), (copied,),
                     joint=logits.joint)
    forward = [kernel for kernel in logits.forward if kernel.op != "gemm"]
    for number, size in enumerate(sizes):
        there, back, _ = loss(style, size)
        forward += [product(1, size, vocab, hidden, "tn", style.wide, act), *there, *back,
                    product(1, size, hidden, vocab, "nn", style.wide, act),
                    product(1, vocab, hidden, size, "nt", style.wide, act)]
        if number:
            forward.append(elementwise("chunk_weight_gradient_add", vocab * hidden, 3 * e, act))
        forward += [*([cast("chunk_gradient_cast", size * hidden, act, "fp32")] if e < 4 else []),
                    elementwise("chunk_gradient_copy", size * hidden, 8, "fp32")]
    if e < 4:
        forward.append(cast("input_gradient_cast", rows * hidden, "fp32", act))
    backward = [kernel for kernel in logits.backward if kernel.op != "gemm" and "weight" not in kernel.variant]
    saved = (Tensor("head_input_gradient", rows * hidden, act), Tensor("head_gradient", vocab * hidden, act))
    met = Joint("vocabulary_loss", rows, "fp32", times=len(sizes))
    return entry, Operator("loss", tuple(forward), tuple(backward), logits.parameters, saved, joint=met)


def parts_of(rows: int, chunk: int) -> list[int]:
    """Rows of each chunk; the last takes what is left."""
    return [chunk] * (rows // chunk) + ([rows % chunk] if rows % chunk else [])
