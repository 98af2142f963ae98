"""The loss in chunks, as allocations; see `sim.model.layers.chunked` for the two ways and their sources."""

from __future__ import annotations

from sim.model.compiled import compiles_loss
from sim.model.eager.tensors import between
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Run, Sink, Tensor, Weight
from sim.model.eager.tensors.storage import LOGITS, WORKSPACE, Storage
from sim.model.layers.chunked import chunk_rows, output_chunks
from sim.model.style import Style


def loss(run: Run, style: Style, inputs: list[Tensor], rows: int) -> Tensor:
    """Logits and loss of `rows` rows, the only one of `inputs`; a frozen head has no gradient."""
    run.at("loss")
    if style.tensor > 1 and style.stack.chunks_cut != "whole":
        return _cut(run, style, inputs, rows)
    if style.tuned is not None and style.tuned.chosen((("head", 0),)) and style.keeps_chunks:
        return _branched(run, style, inputs, rows)
    x = inputs.pop()
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


def _cut(run: Run, style: Style, inputs: list[Tensor], rows: int) -> Tensor:
    """torchtitan's, of a slice of the vocabulary: `ChunkedLossWrapper.__call__`, whose chunks are detached copies (of
    one sequence views) and run backward one by one."""
    x = inputs.pop()
    x = between.gathered(run, x, style.tensor) if style.scattered else x
    act, size, trained = x.dtype, style.vocab * style.hidden, style.tuned is None
    if run.autocast:
        act = run.autocast
    weight = Weight(size, style.weight, style.tied)
    copy, _ = op.weight_copy(run, weight if trained else Weight(size, style.weight))
    kind, run.kind = run.kind, WORKSPACE
    sizes = output_chunks(rows)
    chunks = [run.new(part * style.hidden, x.dtype) for part in sizes] if style.batch > 1 else []
    buffer, gradients = run.new(rows * style.hidden, "fp32"), list[Storage]()
    for part in sizes:
        run.kind = LOGITS
        logits = run.new(part * style.vocab, act)  # the loop's variable, to the end of its turn
        gradient = _slice_loss(run, style, part, logits, act)
        run.kind = WORKSPACE
        made = run.new(part * style.hidden, act)
        own = run.new(size, act) if trained else None
        if own is not None and act != style.weight:
            own = run.new(size, style.weight)
        if own is not None and not gradients:
            gradients.append(own)
        del gradient, own, logits
        wide = run.new(part * style.hidden, "fp32") if act != "fp32" else None
        del made, wide
    chunks.clear()
    gradients.insert(0, run.new(rows * style.hidden, x.dtype) if x.dtype != "fp32" else buffer)
    del buffer, copy
    run.kind = kind
    sinks = (x.sink, weight) if trained else (x.sink,)
    node = run.node(lambda run, _: [gradients.pop(0) for _ in sinks], sinks)
    return Tensor(run.new(1, "fp32"), 1, "fp32", node.output())


def _slice_loss(run: Run, style: Style, rows: int, logits: Storage, act: str) -> Storage:
    """A chunk's loss and the gradient of its logits (`_LossParallelCrossEntropy`); compiled, one kernel each way."""
    elements = rows * style.vocab
    if compiles_loss(style):
        return run.new(elements, act)
    wide = run.new(elements, "fp32") if act != "fp32" else logits
    shifted = run.new(elements, "fp32")
    exponential = run.new(elements, "fp32")
    del exponential
    scores = run.new(elements, "fp32")
    del shifted, wide
    zeros, exponential = run.new(elements, "fp32"), run.new(elements, "fp32")
    both = run.new(elements, "fp32")
    del exponential
    gradient = run.new(elements, "fp32")
    del zeros, both, scores
    result = run.new(elements, act) if act != "fp32" else gradient
    del gradient
    return result


def _kept(run: Run, style: Style, x: Tensor, rows: int, weight: Sink | None, copy: Storage | None) -> Tensor:
    """torchtune's: the logits of all chunks, then the loss of each. Compiled, a chunk's loss keeps its logits; eager,
    its fp32 log-softmax. Autograd runs the youngest first: all losses, whose gradients stand in the place of what they
    kept, and only then the products (tests/driver, torchtune 0.4.0 on torch 2.5.1 and 0.5.0 on 2.6.0)."""
    act, sizes = x.dtype, output_chunks(rows)
    summed = _Summed(weight, style.vocab * style.hidden, act, len(sizes)) if weight else None
    chunks = op.split(run, x, [part * style.hidden for part in sizes])
    del x
    kind, logits = run.kind, list[Tensor]()
    for chunk in chunks:
        run.kind = kind
        flat = op.clone(run, chunk, style.batch > 1)  # chunks are cut along the sequence
        run.kind = LOGITS
        logits.append(_logits(run, style, flat, summed, copy))
        del flat
    del chunks, chunk
    return _total(run, style, logits, act, kind)


def _logits(run: Run, style: Style, chunk: Tensor, summed: _Summed | None, copy: Storage | None) -> Tensor:
    """A chunk's logits; of a cut vocabulary a slice is gathered, and the gathered ones are put side by side."""
    if summed is None:
        own = op.frozen(run, chunk, style.hidden, style.vocab)
    else:
        own = op.linear(run, chunk, style.hidden, style.vocab, False, dtype=chunk.dtype, sink=summed)
    product = run.nodes[-1]
    product.kind = WORKSPACE  # what it makes in backward are gradients of input and weight
    if copy is not None:
        run.save(product, copy)
    if style.tensor == 1:
        return own
    elements, dtype, whole = own.elements, own.dtype, own.elements * style.tensor
    node = run.node(lambda run, _: [run.new(elements, dtype)], (own.sink,))
    gathered = run.new(whole, dtype)
    joined = run.new(whole, dtype)
    del own, gathered
    return Tensor(joined, whole, dtype, node.output())


class _Summed:
    """A weight that `parts` chunks pass: its gradient is added up in the engine, of the first two in a third tensor
    (`Weight.apart`), from then on in place, and is the parameter's when the last is in."""

    def __init__(self, sink: Sink, elements: int, dtype: str, parts: int) -> None:
        self.sink, self.elements, self.dtype = sink, elements, dtype
        self.parts, self.taken, self.held = parts, 0, list[Storage]()

    def receive(self, run: Run, gradient: Storage) -> None:
        """Take a chunk's."""
        self.taken += 1
        if self.taken == 1:
            self.held.append(gradient)
        elif self.taken == 2:
            self.held[0] = run.new(self.elements, self.dtype)
        if self.taken == self.parts:
            self.sink.receive(run, self.held.pop())


def _branched(run: Run, style: Style, inputs: list[Tensor], rows: int) -> Tensor:
    """torchtune's with LoRA at the head, whose module takes one chunk after another (0.6.1 modules/peft/lora.py,
    LoRALinear.forward); then the loss of each."""
    x, tuned = inputs.pop(), style.tuned
    assert tuned is not None
    act, sizes = x.dtype, output_chunks(rows)
    shapes = (tuned.rank * style.hidden, style.vocab * tuned.rank)
    first, second = (_Summed(Weight(size, tuned.dtype), size, act, len(sizes)) for size in shapes)
    chunks = op.split(run, x, [size * style.hidden for size in sizes])
    kind, run.kind = run.kind, LOGITS
    logits: list[Tensor] = []
    for chunk in chunks:
        flat = op.clone(run, chunk, style.batch > 1)  # what `matmul` makes one matrix of
        base = op.frozen(run, flat, style.hidden, style.vocab)
        del flat
        read = op.dropout(run, chunk) if tuned.drops else op.clone(run, chunk, style.batch > 1)
        down = op.linear(run, read, style.hidden, tuned.rank, False, dtype=tuned.dtype, sink=first)
        update = op.linear(run, down, tuned.rank, style.vocab, False, dtype=tuned.dtype, sink=second)
        update = op.scale(run, update)
        del read, down
        logits.append(op.add(run, base, update))
        del base, update
    del chunks, chunk, x
    return _total(run, style, logits, act, kind)


def _total(run: Run, style: Style, logits: list[Tensor], act: str, kind: int) -> Tensor:
    """The loss of every chunk, then their sum; storages are of `kind` again."""
    losses = [_cross_entropy(run, style, one, act) for one in logits]
    logits.clear()
    run.kind = kind
    node = run.node(lambda _, gradients: [gradients[0]] * len(losses), [one.sink for one in losses])
    return Tensor(run.new(1, "fp32"), 1, "fp32", node.output())


def _cross_entropy(run: Run, style: Style, logits: Tensor, act: str) -> Tensor:
    """A chunk's loss in fp32: compiled, one kernel that keeps the logits and two numbers a row."""
    if compiles_loss(style) and act != "fp32":
        elements = logits.elements
        node = run.node(lambda run, _: [run.new(elements, act)], (logits.sink,))
        run.save(node, logits.storage, *(run.new(elements // (style.vocab * style.tensor), "fp32") for _ in range(2)))
        return Tensor(run.new(1, "fp32"), 1, "fp32", node.output())
    scores = op.softmax(run, logits, "fp32")
    elements = scores.elements
    node = run.node(lambda run, _: [run.new(elements, "fp32")], (scores.sink,))
    run.save(node, scores.storage, run.new(1, "fp32"))
    return Tensor(run.new(1, "fp32"), 1, "fp32", node.output())
