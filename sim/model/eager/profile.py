"""What a layer does to memory in forward and in backward, reduced to a few numbers per direction.

The miniature runs once per distinct layer, recomputation policy and treatment of gradients; a model of eighty equal
blocks is measured once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from sim.garbage import undisturbed
from sim.model.eager import decoder, encoder, encoder_decoder
from sim.model.eager.head import head as decoder_head
from sim.model.eager.tensors.autograd import Boundary, Run, Sink, Tensor
from sim.model.eager.tensors.planned import highest, planned
from sim.model.eager.tensors.storage import KINDS, WORKSPACE, Storage, rounded
from sim.model.style import Program, Style
from sim.tensor_trace import INPUT, OUTPUT_GRADIENT, TIED, Trace

Levels = tuple[int, ...]
_DECODER = (decoder.embedding, decoder.block, decoder_head)
_ENCODER = (encoder.embedding, encoder.block, encoder.head)
NOTHING: Levels = (0,) * len(KINDS)


@dataclass(frozen=True, slots=True)
class Pass:
    """One direction of a layer, relative to the level before it.

    Attributes:
        peak: bytes by kind (`KINDS`) at the highest point of their sum.
        net: bytes by kind at the end.
        operator: where the highest point is.
    """

    peak: Levels
    net: Levels
    operator: str


@dataclass(frozen=True, slots=True)
class Profile:
    """A layer's memory.

    Attributes:
        forward: including its output, which the next layer takes over, and without its input if nobody keeps that.
        held: of `forward.net`, bytes that the model's forward lets go before the head.
        cached: of `forward.net`, bytes that go at the end of forward (autocast's cache), by kind.
        backward: starts with the gradient of its output, ends with that of its input and of its parameters.
        trace: the same tensor by tensor.
    """

    forward: Pass
    held: Levels
    cached: Levels
    backward: Pass
    trace: Trace


#: Operators of a block's forward from its begin to attention's output.
_UP_TO_ATTENTION = ("norm1", "qkv", "query_norm", "key_norm", "rotary", "attention")


@lru_cache(maxsize=512)
@undisturbed()
def profile(program: Program, policy: str, keep_gradients: bool, caches_casts: bool = True) -> Profile:
    """Measure a layer; no other thread may look at its frames, for what they hold is not freed in time.

    Args:
        policy: its recomputation: none, full, selective or selective-op. For an embedding: that of the blocks.
        keep_gradients: parameter gradients stay as new tensors; else they are added to existing ones or copied away.
        caches_casts: autocast's weight copies live to the end of forward.
    """
    style = program.style
    run = Run(style.act if style.autocast else "", keep_gradients, style.stack.early_stop, caches_casts,
              style.stack.compile, style.widened, style.stack.reentrant)
    if style.tuned is not None and style.tuned.behind("mlp"):
        run.last = "mlp_adapter"
    inputs, boundary = [], Boundary()  # which holds the input's gradient until all is measured
    if program.layer != "embedding":
        constant = style.constant_input and program.layer == "first block"
        inputs = [run.tensor(style.stream.tokens * style.hidden, style.residual, None if constant else boundary)]
    log, names = run.memory.log, dict.fromkeys(range(run.memory.born), INPUT)
    start, begin = _mark(run), len(log)
    out = _forward(run, program, policy, inputs)
    inputs.clear()
    forward, cuts, output = _measured(run, start), [(begin, len(log))], out.storage.number
    held, middle = _dropped(run, run.held), len(log)
    cached, ends = _dropped(run, run.cache), (cuts[0][1], middle, len(log))
    start, gradients = _before_backward(run, program, out)
    if program.layer != "head":
        names[gradients[0][1].number] = OUTPUT_GRADIENT
    names |= {storage.number: TIED for storage in run.pending}
    cuts.append((ends[2] if program.layer == "head" else len(log), 0))
    if run.reentrant and policy == "full" and program.layer not in ("embedding", "head"):
        run.given = gradients[0][1]
    while gradients:
        sink, gradient = gradients.pop()
        sink.receive(run, gradient)
    del sink, gradient, out
    run.retained.clear()
    run.backward()
    run.given = None
    if boundary.gradient is None and program.layer != "embedding":
        boundary.gradient = run.new(style.stream.tokens * style.hidden, style.residual)  # what layers hand each other
        boundary.gradient.become(WORKSPACE)
    cuts[1] = (cuts[1][0], len(log))
    left = [Storage(run.memory, rounded(elements, dtype), WORKSPACE) for elements, dtype in run.outgoing]
    backward = _measured(run, start)
    trace = _trace(run, names, cuts, ends, -1 if program.layer == "head" else output, boundary)
    del left, boundary
    if style.stack.compile and style.stack.compiled_end != "all" and program.layer not in ("embedding", "head"):
        backward, trace = _reusing(run, policy == "selective-op", backward, trace)
    return Profile(forward, held, cached, backward, trace)


def _reusing(run: Run, selective: bool, backward: Pass, trace: Trace) -> tuple[Pass, Trace]:
    """Backward of a block that is compiled by itself, whose plan keeps buffers for those to come."""
    events = planned(_late(run, trace.backward) if selective else trace.backward, run.arriving, run.nameless)
    more = highest(events) - highest(trace.backward)
    high = tuple(size + more * (kind == WORKSPACE) for kind, size in enumerate(backward.peak))
    return replace(backward, peak=high), trace._replace(backward=events)


def _late(run: Run, events: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """What leads to attention's inputs is made again only where its backward reads them, its output being kept: AOT's
    backward asks for nothing before it needs it (torch 2.6.0 _functorch/partitioners.py,
    reordering_to_mimic_autograd_engine); eager checkpoints run from the block's begin."""
    born = [(i, *run.memory.made[number]) for i, (number, size) in enumerate(events) if size and number >= 0]
    begin = next((i for i, operator, _ in born if operator not in _UP_TO_ATTENTION), 0)
    read = next((i for i, operator, kind in born if i > begin and (operator, kind) == ("attention", "workspace")), 0)
    return events[begin:read] + events[:begin] + events[read:] if read else events


def _trace(run: Run, names: dict[int, int], cuts: list[tuple[int, int]], ends: tuple[int, int, int], output: int,
           boundary: Boundary) -> Trace:
    """The log as a `Trace`; what only other layers make and drop (gradients of what several read) is left out."""
    log = run.memory.log
    own = {number for begin, end in cuts for number, size in log[begin:end] if size} - {s.number for s in run.sums}
    forward, backward = (tuple((names.get(n, n), size) for n, size in log[begin:end]
                               if n in names or (n in own and (size or n != output))) for begin, end in cuts)
    held, cached = (tuple(n for n, size in log[begin:end] if not size and n in own and n != output)
                    for begin, end in pairwise(ends))
    gradient = -1 if boundary.gradient is None else names.get(boundary.gradient.number, boundary.gradient.number)
    tied = run.pending[0].number if run.pending and run.pending[0].number in own else -1
    return Trace(forward, held, cached, backward, output, gradient,
                 tuple(names.get(s.number, s.number) for s in run.gradients), tied, tuple(run.memory.made))


def _before_backward(run: Run, program: Program, out: Tensor) -> tuple[Levels, list[tuple[Sink, Storage]]]:
    """The level at which backward starts, and the gradients that are there then (the loss makes its own)."""
    style, sink = program.style, out.sink
    assert sink is not None
    run.memory.operator, run.kind = program.layer, WORKSPACE
    if program.layer == "head":
        start = _mark(run)
        return start, [(sink, run.new(0, "fp32"))]  # who called backward holds it (`sim.parallel.activations`)
    out.storage.hand_over()
    shared = style.shares_table or (program.layer == "embedding" and style.kind == "encoder-decoder")
    if shared and style.tuned is None and program.layer in ("embedding", "bridge"):
        run.pending.append(run.new(style.vocab * style.hidden, style.weight))
    gradients = [(sink, run.new(out.elements, out.dtype))]
    gradients += [(sink, run.new(elements, dtype)) for sink, elements, dtype in run.incoming]
    run.incoming.clear()
    return _mark(run), gradients


def _forward(run: Run, program: Program, policy: str, inputs: list[Tensor]) -> Tensor:
    """The caller holds a block's input until it is done, but not the head's."""
    style, layer = program.style, program.layer
    if style.kind == "encoder-decoder":
        return _encoder_decoder(run, style, layer, policy, inputs)
    embedding, block, head = _ENCODER if style.kind == "encoder" else _DECODER
    if layer == "embedding":
        return embedding(run, style, policy)
    if layer == "head":
        return decoder_head(run, style, inputs.pop(), policy) if style.further else head(run, style, inputs.pop())
    if policy in ("full", "selective-op"):
        return run.checkpoint(lambda run, x: block(run, style, x, "none"), inputs[0], selective=policy != "full",
                              parts=style.checkpoint_parts if policy == "full" else 1)
    return block(run, style, inputs[0], policy)


def _encoder_decoder(run: Run, style: Style, layer: str, policy: str, inputs: list[Tensor]) -> Tensor:
    if layer == "embedding":
        return encoder_decoder.embedding(run, style, layer, complete=True)
    if layer == "bridge":
        return encoder_decoder.bridge(run, style, inputs[0], policy != "none")
    if layer == "head":
        return encoder_decoder.head(run, style, inputs[0])
    first, last = layer == "first block", layer == "last block"
    if policy not in ("full", "selective-op"):
        return encoder_decoder.block(run, style, inputs[0], policy, first=first, last=last, keep=False)
    return run.checkpoint(lambda run, x: encoder_decoder.block(
        run, style, x, "none", first=first, last=last, keep=True), inputs[0], selective=policy != "full")


def _mark(run: Run) -> Levels:
    run.memory.mark()
    return tuple(run.memory.live)


def _measured(run: Run, start: Levels) -> Pass:
    memory = run.memory
    return Pass(_minus(memory.top_live, start), _minus(tuple(memory.live), start), memory.top_operator)


def _dropped(run: Run, storages: list[Any]) -> Levels:
    """What goes when a list of references is emptied."""
    if not storages:
        return NOTHING
    before = tuple(run.memory.live)
    storages.clear()
    return _minus(before, tuple(run.memory.live))


def _minus(high: Levels, low: Levels) -> Levels:
    return tuple(a - b for a, b in zip(high, low, strict=True))
