"""The loss in chunks, as allocations; see `sim.model.chunked` for the two ways and their sources."""

from __future__ import annotations

from sim.model.chunked import chunk_rows, output_chunks
from sim.model.eager import operations as op
from sim.model.eager.autograd import Gradients, Run, Sink, Tensor, Weight
from sim.model.eager.storage import LOGITS, WORKSPACE, Storage
from sim.model.style import Style


def loss(run: Run, style: Style, x: Tensor, rows: int) -> Tensor:
    """Logits and loss of `rows` rows; a frozen head has no gradient."""
    run.at("loss")
    size = style.vocab * style.hidden
    weight = None if style.tuned else Weight(size, style.weight, style.tied)
    copy, cast = op.weight_copy(run, weight or Weight(size, style.tuned.plain if style.tuned else style.weight))
    x = op.to(run, x, run.autocast or x.dtype)
    if style.keeps_chunks:
        return _kept(run, style, x, rows, cast if weight else None, copy)
    return _forward(run, style, x, rows, weight)


def _forward(run: Run, style: Style, x: Tensor, rows: int, weight: Weight | None) -> Tensor:
    """Liger's: a chunk of logits at a time, the gradients of input and weight made in forward and handed out in
    backward."""
    kind, run.kind = run.kind, WORKSPACE
    gradients = [run.new(rows * style.hidden, x.dtype),
                 *([run.new(style.vocab * style.hidden, style.weight)] if weight else [])]
    run.kind = LOGITS
    logits = run.new(chunk_rows(rows, style.hidden, style.vocab) * style.vocab, x.dtype)
    run.kind = kind
    inputs = (x.sink, weight) if weight else (x.sink,)
    node = run.node(lambda run, _: [gradients.pop(0) for _ in inputs], inputs)
    del logits
    return Tensor(run.new(1, "fp32"), 1, "fp32", node.output())


def _kept(run: Run, style: Style, x: Tensor, rows: int, weight: Sink | None, copy: Storage | None) -> Tensor:
    """torchtune's: the logits of all chunks, then the loss of each. Compiled, a chunk's loss keeps its logits; eager,
    its fp32 log-softmax. Backward frees chunk by chunk."""
    act, hidden, vocab = x.dtype, style.hidden, style.vocab
    kind, run.kind = run.kind, LOGITS
    sizes = output_chunks(rows)
    kept = [run.new(size * vocab, act) for size in sizes]
    if not style.stack.loss_compiled:
        kept = _widened(run, kept, sizes, vocab, act)
    run.kind = kind

    def rule(run: Run, _: Gradients) -> Gradients:
        made = [run.new(rows * hidden, act), *([run.new(vocab * hidden, act)] if weight else [])]
        outer, run.kind = run.kind, LOGITS
        for size in sizes:
            wide = None if style.stack.loss_compiled else run.new(size * vocab, "fp32")
            gradient = run.new(size * vocab, act)
            del wide
            kept.pop(0)
            del gradient
        run.kind = outer
        return list(made)

    node = run.node(rule, (x.sink, weight) if weight else (x.sink,))
    run.save(node, x.storage, *([copy] if copy is not None else []))
    return Tensor(run.new(1, "fp32"), 1, "fp32", node.output())


def _widened(run: Run, logits: list[Storage], sizes: list[int], vocab: int, act: str) -> list[Storage]:
    """The fp32 log-softmax of every chunk, made beside all chunks' logits."""
    scores: list[Storage] = []
    for size in sizes:
        wide = run.new(size * vocab, "fp32") if act != "fp32" else None
        scores.append(run.new(size * vocab, "fp32"))
        del wide
    logits.clear()
    return scores
