"""Casts to 8 bits that torch.compile writes: what Inductor makes of torchao's dynamic scaling by tensor.

A tensor's maximum must be whole before its first element is cast, so what makes it runs twice where it is cheap to make
again: once for the maximum, which writes nothing, and once more for the copies. In 16 bits it is never written, nor
kept for backward. Where it is in memory anyway (attention's output, a gradient that comes from outside or of a
product), both kernels read it.

* Norms and activations are made twice forward, and a cast of what they make rides in the second (`_Source.reads`).
* Both copies of a weight are made forward and the one that backward reads is kept; a weight that was gathered in 8 bits
  is turned, since products read columns of their second operand in a row.
* A gated activation's gradients are made twice, and the second time all copies of both, and of the activation itself
  for the weight gradient behind it, are written by one kernel.
* The maximum of a norm's own gradient is found by the kernel that writes it; a norm's output is cast once more for
  the weight gradient by that kernel too.
* Of what a checkpoint brings back nothing is made that backward makes for itself.

Source: torch 2.13.0's scheduler and partitioner on fake tensors of an H100, on torchtitan's Llama block with torchao
0.13.0's Float8Linear (tensorwise; weights wide or as an fp8 all-gather leaves them; without recomputation, and tagged
as torchtitan's policies tag it), on a GPT's, and on an MLP behind attention's projection of two tensor ranks under its
Float8 styles, where casts of a rank's own tokens are alike. Earlier releases were not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from sim.model.architecture import Operator, Tensor
from sim.model.kernels import elementwise, width
from sim.model.style import Style
from sim.work import Kernel

_CAST, _CAT = "quantise", "qkv_gradient_cat"
#: Tensors that a kernel may read to make one that is not written: of more Inductor makes a buffer (torch 2.13.0
#: _inductor/config.py, realize_reads_threshold).
_READ = 4
#: What linear layers keep of their inputs where nothing makes them again.
_INPUTS = frozenset({"qkv_input", "up_input", "down_input"})


class _Source(NamedTuple):
    """What makes a tensor that is cast.

    Attributes:
        maker: the operator that makes it, "" = it is in memory.
        reads: bytes that making an element of it (once more) reads.
        copies: products that read a copy of their own, where what they read is no buffer that they share.
        written: it is made of too many tensors, so that it is written in 16 bits, forward and again in backward.
    """

    maker: str
    reads: float
    copies: int = 1
    written: bool = False


def compiled_casts(style: Style, operators: Sequence[Operator]) -> list[Operator]:
    """Operators of a decoder's block with casts as torch.compile makes them, if it does (`Style.compiles_casts`)."""
    if not style.compiles_casts:
        return list(operators)
    made = {operator.name: operator for operator in operators[::-1]}  # a second "rotary" copies keys and values out
    changed: dict[str, Operator] = {}
    for at, operator in enumerate(operators):
        if not any(kernel.variant == _CAST for kernel in operator.forward):
            continue
        source = _source(style, operators, at)
        twice = any(role == "input" for _, role in _roles(style, operator.backward))
        changed[operator.name] = _linear(style, operators, at, source, twice)
        if source.maker:
            maker = changed.get(source.maker, made[source.maker])
            maker = maker if source.written else _unwritten(style, maker, forward=True)
            changed[source.maker] = replace(maker, again=() if twice or source.maker == "activation" else None)
        behind = operators[at + 1].name if at + 1 < len(operators) else ""
        if _hands_on(style, operator, behind):
            changed[behind] = _unwritten(style, changed.get(behind, made[behind]), forward=False)
    if style.turns_complex and "attention" in made and made["attention"].joint is None:
        changed["attention"] = _copied(operators, made["attention"])
    if _in_a_row(style, made):
        changed |= {name: _sum(style, made[name]) for name in made if name in ("residual1", "residual2")}
    return [changed.pop(operator.name, operator) for operator in operators]


def _copied(operators: Sequence[Operator], core: Operator) -> Operator:
    """Attention that runs again, whose backward kernel gets copies of its own of queries, keys and values: they are
    views of what is made of complex numbers, which is no buffer, and each kernel asks for how they lie in memory. Where
    a policy keeps attention's output only backward reads them."""
    rotary = [operator for operator in operators if operator.name == "rotary"]
    copies = (rotary[0].forward[-1], *(kernel for operator in rotary[1:] for kernel in operator.forward))
    return replace(core, again=(*copies, *core.forward))


def _in_a_row(style: Style, made: dict[str, Operator]) -> bool:
    """Whether MLP reads a norm of what attention was added to."""
    return "norm2" in made and style.block_norms == "input" and not style.parallel_block


def _source(style: Style, operators: Sequence[Operator], at: int) -> _Source:
    """What makes the input of the operator numbered `at`, by what stands in front of it."""
    e, operator = width(style.act), operators[at]
    joint = operator.joint
    gathered_wide = style.scattered and joint is not None and joint.kind == "column" and not joint.gathered
    before = operators[at - 1].name if at else ""
    if before == "activation":
        return _Source(before, (2 if style.gated else 1) * e)
    if not before.startswith("norm") or gathered_wide:
        return _Source("", e)
    # stream and branch are made again as well, unless a collective ends the branch
    summed = style.tensor == 1 and at > 1 and operators[at - 2].name.startswith("residual")
    layer_norm = style.norm == "layernorm"
    read = 3 + summed + layer_norm * (1 + style.bias)  # what is normalised, its statistics, weight and bias
    if read > _READ:
        return _Source(before, e, written=True)
    shares = read + 1 > _READ or style.scattered  # the scale is read, too; what is gathered is a buffer
    return _Source(before, (1 + summed) * e, 1 if shares else sum(kernel.op == "gemm" for kernel in operator.forward))


def _hands_on(style: Style, operator: Operator, behind: str) -> bool:
    """Whether gradients of what `behind` reads are made for the operator's casts alone: those of the activation's
    inputs, and of queries and keys that have projections of their own."""
    if operator.name == "up":
        return behind == "activation"
    apart = operator.name == "qkv" and sum(kernel.op == "gemm" for kernel in operator.forward) == 3
    return apart and behind == "rotary" and style.positions == "rotary"


def _roles(style: Style, kernels: Sequence[Kernel]) -> list[tuple[Kernel, str]]:
    """Kernels of one direction, and what casts are of: "gradient" (in backward), "input" or "weight", in this order in
    front of their product; "" of other kernels."""
    weights = not (style.stack.narrow_weights_cached or style.arrives_narrow)
    found: list[tuple[Kernel, str]] = []
    start = 0
    for at, kernel in enumerate(kernels):
        if kernel.op != "gemm" and at + 1 < len(kernels):
            continue
        group = kernels[start:at + 1]
        casts, back = sum(k.variant == _CAST for k in group), kernel.variant == "nn"
        names = iter(["gradient"] * back + ["input"] * (casts - back - weights) + ["weight"] * weights)
        found += [(k, next(names) if k.variant == _CAST else "") for k in group]
        start = at + 1
    return found


def _linear(style: Style, operators: Sequence[Operator], at: int, source: _Source, twice: bool) -> Operator:
    """A linear layer's casts.

    Args:
        twice: backward casts its input once more; if not, it came in 8 bits, and stays so.
    """
    operator, g = operators[at], width(style.gemm)
    turned = not (source.maker or twice) and (operator.joint is None or operator.joint.kind == "row")
    forward: list[Kernel] = []
    again: list[Kernel] = []
    for kernel, role in _roles(style, operator.forward):
        made: Kernel = kernel
        if role == "weight":
            made = _cast(style, kernel, 2 * width(style.act) + 2 * g, 2)
        elif role == "input":
            made = _input(style, kernel, source, 1 + turned)
        forward.append(made)
        if role == "input" and twice and (source.written or not source.maker):  # backward's cast writes it, too
            again.append(_cast(style, kernel, g, 0))
        elif role != "input" or source.maker != "activation":
            again.append(made)
    size = sum(kernel.shape[2] * kernel.shape[3] for kernel in operator.forward if kernel.op == "gemm")
    saved = (*(t for t in operator.saved if t.name not in _INPUTS),
             Tensor(f"{operator.name}_turned_weight", size, style.gemm))
    return replace(operator, forward=tuple(forward), backward=tuple(_backward(style, operators, at, source)),
                   again=tuple(again), saved=saved)


def _backward(style: Style, operators: Sequence[Operator], at: int, source: _Source) -> Iterator[Kernel]:
    """A linear layer's backward, with copies of weights that came in 8 bits, turned."""
    casts = 0
    for kernel, role in _roles(style, operators[at].backward):
        if role == "gradient":
            yield _gradient(style, operators, at, kernel, casts)
            casts += 1
        elif role == "input" and source.maker != "activation":
            made = _input(style, kernel, source, 1)
            if source.written:  # once more, and then read for its maximum, too
                made = replace(made, bytes=made.bytes + 2 * kernel.shape[0] * width(style.act), launches=2)
            yield made
        elif kernel.variant == _CAT and style.positions != "rotary":
            yield replace(kernel, bytes=kernel.shape[0] * width(style.act))
        elif not role:
            if style.arrives_narrow and (kernel.op, kernel.variant) == ("gemm", "nn"):
                yield elementwise("transpose", kernel.shape[2] * kernel.shape[3], 2 * width(style.gemm), style.gemm)
            yield kernel


def _gradient(style: Style, operators: Sequence[Operator], at: int, kernel: Kernel, number: int) -> Kernel:
    """The cast of an output's gradient, the `number`th of its operator's backward."""
    e, g, elements = width(style.act), width(style.gemm), kernel.shape[0]
    copies = kernel.bytes - elements * e
    operator, behind = operators[at], operators[at + 1] if at + 1 < len(operators) else None
    name = behind.name if behind is not None else ""
    if behind is not None and _hands_on(style, operator, name):
        if name == "activation":  # one kernel writes all copies, and the activation's own for the weights behind it
            inner = style.tokens * style.ffn
            reads = inner * (_reads(style, behind) + g) if number == 0 else 0.0
            return replace(kernel, bytes=reads + copies, launches=int(number == 0))
        if number > 0:  # the values' are first, which no positions turn
            return replace(kernel, bytes=elements * _reads(style, behind) + copies, launches=1)
    written = name.startswith("post_norm") or name in ("residual1", "dropout1")
    # what is put together of queries', keys' and values' is read part by part, unless positions are turned back in it
    parts = style.positions != "rotary" and any(k.variant == _CAT for k in operator.backward)
    passes = 1 if written or parts else 2
    return replace(kernel, bytes=passes * elements * e + copies, launches=passes)


def _reads(style: Style, operator: Operator) -> float:
    """Bytes per element that the last kernel of an operator's backward reads."""
    last = operator.backward[-1]
    written = 2 if operator.name == "activation" and style.gated else 1
    return last.bytes / last.shape[0] - written * width(style.act)


def _unwritten(style: Style, operator: Operator, *, forward: bool) -> Operator:
    """An operator whose last kernel finds a maximum of what it makes and writes nothing."""
    kernels = operator.forward if forward else operator.backward
    rows = kernels[-1].shape[0] * (kernels[-1].shape[1] if kernels[-1].op == "norm" else 1)
    read = rows * _reads(style, operator) if not forward else kernels[-1].bytes - rows * width(style.act)
    found = (*kernels[:-1], replace(kernels[-1], bytes=read))
    return replace(operator, forward=found) if forward else replace(operator, backward=found)


def _sum(style: Style, operator: Operator) -> Operator:
    """The addition to the stream. What attention adds is read beside the stream wherever the sum is wanted, which is
    written with the block's output alone: a kernel of its own, as each block is a graph of its own. What tensor ranks
    add up is written first (Inductor's partitioner keeps that sum, not the branch). Nobody wants either once more, but
    what a checkpoint's norm reads."""
    (added,) = operator.forward
    e, r = width(style.act), width(style.residual)
    first, written = operator.name == "residual1", style.tensor > 1
    moved = e + r * written if first else 2 * r + e * (1 if written else 2)
    made = replace(added, bytes=added.shape[0] * moved, launches=0 if first else 1)
    return replace(operator, forward=(made,), again=(made,) if first and written else ())


def _input(style: Style, kernel: Kernel, source: _Source, copies: int) -> Kernel:
    """The cast of an input: with a pass for the maximum before it where it is in memory, in one that makes it again
    where something makes it."""
    passes = 1 if source.maker else 2
    return _cast(style, kernel, passes * source.reads + copies * source.copies * width(style.gemm), passes)


def _cast(style: Style, kernel: Kernel, per_element: float, launches: int) -> Kernel:
    return elementwise(_CAST, kernel.shape[0], per_element, style.gemm, launches)
