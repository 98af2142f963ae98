"""LoRA's matrices beside frozen linear layers: kernels, what they keep, and how a cut model shares them.

A branch is two products, A of `rank` outputs and B, a scale and a sum. Of a cut model there are two habits:

* peft cuts the matrix that stands beside the cut of the base (tuners/lora/tp_layer.py, LoraParallelLinear): beside a
  product cut by columns A is whole and B is cut; beside one cut by rows A is cut and B is whole.
* Megatron-Bridge and NeMo cut both (peft/utils.py, ParallelLinearAdapter), and they alone know activations that are
  scattered along the sequence: beside columns A makes a share of the `rank` columns, which are gathered before B;
  beside rows A makes partial sums, B a share of the outputs, which are gathered and, scattered, cut along the sequence.

Every expert has matrices of its own where experts are modules (peft: one for each `torch.nn.Linear`); a grouped module
of Megatron's is one module, so that all experts of a rank share one pair. Sources: the files named; LitGPT lora.py and
loralib layers.py (one module for a fused projection).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sim.model.architecture import Joint, Operator, Parameter, Tensor
from sim.model.kernels import cast, elementwise, linear, width
from sim.model.layers.experts import every_expert, expert_rows, loop
from sim.model.style import Style
from sim.work import Kernel

#: What numbers an expert in a module's name.
ROUTED = re.compile(r"\.experts\.\d+\.")

#: Products that are whole on every slice and, scattered, of its own tokens (`latent.py`).
_OWN_TOKENS = ("q_down", "kv_down")

Kernels = tuple[list[Kernel], list[Kernel]]


class Linear(NamedTuple):
    """A linear layer of an operator.

    Attributes:
        module: its name, of routed experts without their number.
        inputs: as this slice has them; parts: outputs by target, several if fused.
        routed: every expert that tokens are routed to has one.
        rows: it reads, default those of its operator (keys and values of cross attention are made of others).
        chunks: rows of each chunk, where it reads them one after another.
    """

    module: str
    inputs: int
    parts: tuple[tuple[str, int], ...]
    routed: bool = False
    rows: int = 0
    chunks: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Outputs of all parts."""
        return sum(width for _, width in self.parts)


def with_branches(op: Operator, linears: Sequence[Linear], style: Style) -> list[Operator]:
    """An operator with the products beside its linear layers that are targets: in the operator, or of a cut model
    behind it, because slices depend on one another there too."""
    tuned = style.tuned
    assert tuned is not None
    if op.name == "loss":  # torchtune's `chunked_output` is never compiled (`@torch.compiler.disable`)
        style = replace(style, stack=replace(style.stack, compile=False))
    made: list[list[Operator]] = []
    for one in linears:
        parts = tuned.chosen(one.parts)
        if parts:
            made.append(_cut(op, one, style) if style.cuts_branches and op.joint is not None else
                        _pair(op, one, parts, style))
    if not (tuned.drops or style.mixes) and style.residual == style.act:  # they read one input, which is kept once
        kept = not style.scattered and any(t.name.endswith("input") for t in op.saved)
        own = [not one.rows for one in linears if tuned.chosen(one.parts)]
        made = [[replace(half, saved=tuple(t for t in half.saved if t.name != "lora_input"))
                 if i or kept or not own[i] else half for half in pair] for i, pair in enumerate(made)]
    branches = [half for pair in made for half in pair]
    # a branch of the block's last product is behind it, and so is what keeps its input
    again = op.recomputed or bool(branches) or (op.name == "down" and tuned.behind("mlp"))
    keeps = tuned.quantised and tuned.base != "int8" and style.stack.quantised_keeps_input
    base = replace(op, recomputed=again or keeps)
    base = replace(base, turns=_turns(op, linears, made, style))
    if style.tensor > 1:
        return [base, *branches]
    reverse = branches[::-1]
    return [replace(
        base, forward=(*op.forward, *(k for half in branches for k in half.forward)),
        backward=(*(k for half in reverse for k in half.backward), *op.backward),
        parameters=(*op.parameters, *(p for half in reverse for p in half.parameters)),
        saved=(*op.saved, *(t for half in branches for t in half.saved)))]


def _turns(op: Operator, linears: Sequence[Linear], made: Sequence[Sequence[Operator]], style: Style,
           ) -> tuple[int, ...]:
    """When each product of an operator and of the branches behind it runs: a linear layer, then its branch. Those of
    bitsandbytes in int8 are no `mm`, and neither is the grouped convolution of a fused projection's parts."""
    tuned = style.tuned
    bases = [kernel for kernel in op.forward if kernel.op == "gemm"]
    if not linears and any(base.dtype == "int8" for base in bases):
        return (-1,) * len(bases)
    if tuned is None or len(bases) != len(linears) or not (made or any(k.dtype == "int8" for k in bases)):
        return ()
    of_base: list[int] = []
    of_branches: list[int] = []
    turn, branches = 0, iter(made)
    for base, one in zip(bases, linears, strict=True):
        of_base.append(-1 if base.dtype == "int8" else turn)
        turn += base.dtype != "int8"
        if not tuned.chosen(one.parts):
            continue
        products = [kernel for half in next(branches) for kernel in half.forward if kernel.op == "gemm"]
        grouped = _merged(one, style) and not style.cuts_branches
        of_branches += [turn, *(-1 for _ in products[1:])] if grouped else range(turn, turn + len(products))
        turn += 1 if grouped else len(products)
    return (*of_base, *of_branches)


# ---------------------------------------------------------------------------------------------------- what they compute
def _rows(op: Operator, one: Linear, style: Style) -> int:
    if one.rows:
        return one.rows
    if one.routed:
        assert style.experts is not None
        return expert_rows(style, style.experts)
    if op.name in _OWN_TOKENS:
        return style.stream.tokens
    return style.batch * style.predicted if op.name in ("logits", "loss") else style.tokens


def _product(style: Style, one: Linear, rows: int, inputs: int, outputs: int) -> Kernels:
    """A matrix on `rows` rows, or every expert's own on its share of them, or one that several chunks pass."""
    style = style.branch
    half = replace(style, gemm=style.wide)
    if one.chunks:
        every = [linear(half, size, inputs, outputs, source=style.act, bias=False) for size in one.chunks]
        again = elementwise("chunk_gradient_add", inputs * outputs, 3 * width(style.act), style.act)
        return ([k for forward, _ in every for k in forward],
                [k for i, (_, backward) in enumerate(every) for k in (*backward, *((again,) if i else ()))])
    if _apart(style, one):
        assert style.experts is not None
        return every_expert(half, style.experts, rows, inputs, outputs, style.act)
    return linear(half, rows, inputs, outputs, source=style.act, bias=False)


def _apart(style: Style, one: Linear) -> bool:
    """Whether every expert has matrices of its own."""
    return one.routed and style.modules != "megatron"


def _launches(style: Style, one: Linear) -> int:
    """Launches of an element-wise operation on the rows of all experts, or of all chunks."""
    if one.chunks:
        return len(one.chunks)
    return loop(style, style.experts) if _apart(style, one) and style.experts is not None else 1


def _matrices(style: Style, one: Linear, name: str, shape: tuple[int, int]) -> tuple[Parameter, ...]:
    if not _apart(style, one):
        return (Parameter(f"{one.module}.{name}", shape, one.routed),)
    assert style.experts is not None
    return tuple(Parameter(f"{one.module.replace('.experts.', f'.experts.{i}.')}.{name}", shape, True)
                 for i in range(style.experts.held))


def _reading(style: Style, one: Linear, rows: int, first: Kernels) -> tuple[list[Kernel], list[Kernel], list[Tensor]]:
    """Dropout in front of A, the sum of the input's gradients behind it, and what is kept; where the frozen layer runs
    in another dtype, the casts of input and gradient."""
    act, compiled, times = style.branch.act, style.stack.compile, _launches(style, one)
    e = width(act)
    forward, backward = list(first[0]), list(first[1])
    kept = [Tensor("lora_input", rows * one.inputs, act)]
    if style.tuned is None or style.tuned.drops:
        forward.insert(0, elementwise("lora_dropout", rows * one.inputs, 2 * e + (not compiled), act, times))
        if not compiled:  # compiled, it rides in the sum behind it, and the mask is drawn again
            backward.append(elementwise("lora_dropout_backward", rows * one.inputs, 2 * e + 1, act, times))
            kept.append(Tensor("lora_dropout_mask", rows * one.inputs, "int8"))
    if style.mixes and not compiled:
        forward.insert(0, cast("lora_input_cast", rows * one.inputs, style.act, act, times))
        backward.append(cast("lora_input_gradient_cast", rows * one.inputs, act, style.act, times))
    e, act = width(style.act), style.act
    backward.append(elementwise("lora_gradient_sum", rows * one.inputs, 3 * e, act, times))
    if one.chunks:  # their gradients are joined; of several sequences a chunk is copied to be one matrix
        backward.append(elementwise("chunk_gradient_cat", rows * one.inputs, 2 * e, act))
        if style.batch > 1:
            copies = 1 if style.tuned is not None and style.tuned.drops else 2  # the base's, and A's
            forward.insert(0, elementwise("chunk_copy", copies * rows * one.inputs, 2 * e, act, copies * times))
    return forward, backward, kept


def _adding(style: Style, one: Linear, elements: int, written: int) -> Kernels:
    """Zeros around parts of a fused projection, scale and sum, on `elements` outputs of which `written` are B's."""
    e, act, times = width(style.act), style.act, _launches(style, one)
    if style.mixes:
        return _adding_mixed(style, elements, times)
    if style.stack.compile:  # in one kernel; the scaled gradient is written where the gradient is made
        return ([elementwise("lora_add", elements, 2 * e + e * written / elements, act, times)],
                [elementwise("lora_scale_backward", written, e, act, times)])
    forward: list[Kernel] = []
    backward = [elementwise("lora_scale_backward", elements, 2 * e, act, times)]
    if written < elements:  # zeros, copy of the parts, index_copy
        forward.append(elementwise("zero_pad", elements, 4 * e + 3 * e * written / elements, act, 4))
        backward.append(elementwise("zero_pad_backward", written, 2 * e, act))
    forward += [elementwise("lora_scale", elements, 2 * e, act, times),
                elementwise("lora_add", elements, 3 * e, act, times)]
    return forward, backward


def _adding_mixed(style: Style, elements: int, times: int) -> Kernels:
    """Scale, a sum that is as wide as the branch, and the cast back; backward casts the gradient of the sum, and that
    of the frozen layer again (peft 0.21.2 tuners/lora/layer.py, Linear.forward: `result.to(torch_result_dtype)`)."""
    narrow, wide = style.act, style.branch.act
    e, w = width(narrow), width(wide)
    if style.stack.compile:
        return ([elementwise("lora_add", elements, 2 * e + w, narrow, times)],
                [elementwise("lora_scale_backward", elements, e + w, wide, times)])
    return ([elementwise("lora_scale", elements, 2 * w, wide, times),
             elementwise("lora_add", elements, e + 2 * w, wide, times),
             cast("lora_sum_cast", elements, wide, narrow, times)],
            [cast("lora_sum_gradient_cast", elements, narrow, wide, times),
             cast("lora_base_gradient_cast", elements, wide, narrow, times),
             elementwise("lora_scale_backward", elements, 2 * w, wide, times)])


def _merged(one: Linear, style: Style) -> bool:
    """Whether a fused projection has one A for its parts, and one grouped convolution for their Bs."""
    return len(one.parts) > 1 and style.modules == "plain"


def _pair(op: Operator, one: Linear, branched: tuple[tuple[str, int], ...], style: Style) -> list[Operator]:
    """A and B of a whole model, or one of them cut as the base is. Merged modules have one A for their parts and one
    product for each of them."""
    tuned = style.tuned
    assert tuned is not None
    merged = _merged(one, style)
    parts = branched if merged else one.parts
    rows, down, written = _rows(op, one, style), tuned.rank * (len(branched) if merged else 1), sum(w for _, w in parts)
    forward, backward, kept = _reading(style, one, rows, _product(style, one, rows, one.inputs, down))
    first = Operator("lora_A", tuple(forward), tuple(backward), saved=tuple(kept))
    widths = [w for _, w in parts] if merged else [written]
    pairs = [_product(style, one, rows, tuned.rank, w) for w in widths]
    added, added_back = _adding(style, one, rows * one.outputs, rows * written)
    second = Operator("lora_B", (*(k for f, _ in pairs for k in f), *added),
                      (*added_back, *(k for _, b in reversed(pairs) for k in b)),
                      saved=(Tensor("lora_rank", rows * down, style.branch.act),))
    shapes = (down, one.inputs), (written, tuned.rank)
    return [replace(half, name=f"{op.name}_{half.name}", joint=_beside(op, half, style, rows * down),
                    parameters=_matrices(style, one, half.name, shape))
            for half, shape in zip((first, second), shapes, strict=True)]


# ------------------------------------------------------------------------------------------------------- of a cut model
def _beside(op: Operator, half: Operator, style: Style, between: int) -> Joint | None:
    """Where one of peft's matrices depends on other slices. Beside a product cut by columns A is whole on every rank
    and B is cut like the product, so that the gradient of the `between` elements in the middle is a sum over ranks;
    beside one cut by rows A makes partial sums."""
    if op.joint is None or half.name != {"column": "lora_B", "row": "lora_A"}.get(op.joint.kind):
        return None
    return Joint("read" if op.joint.kind == "column" else "sum", between, style.branch.act)


def _cut(op: Operator, one: Linear, style: Style) -> list[Operator]:
    """A, B and the sum where both matrices are cut; each knows what the others of the tensor group have to do with it.

    Beside rows the sum stands apart: the outputs of all ranks come together between B and it, and of scattered
    activations each rank adds its own tokens.
    """
    tuned = style.tuned
    assert tuned is not None and op.joint is not None
    rows, rank, slices, act = _rows(op, one, style), tuned.rank, style.tensor, style.act
    columns, between = op.joint.kind == "column", Tensor("lora_rank", rows * rank, act)
    down, outputs = (rank // slices, one.outputs) if columns else (rank, one.outputs // slices)
    forward, backward, kept = _reading(style, one, rows, _product(style, one, rows, one.inputs, down))
    # the input's gradient is partial: scattered, it is summed with the base's
    joint = Joint("sum", between.elements, act) if not columns else None if style.scattered else (
        Joint("read", rows * one.inputs, act))
    first = Operator(f"{op.name}_lora_A", tuple(forward), tuple(backward), saved=tuple(kept), joint=joint,
                     parameters=_matrices(style, one, "lora_A", (down, one.inputs)))
    up, up_back = _product(style, one, rows, rank, outputs)
    local = rows * one.outputs if columns or not style.scattered else rows // slices * one.outputs
    added, added_back = _adding(style, one, local, local)
    second = Operator(f"{op.name}_lora_B", tuple(up), tuple(up_back), saved=(between,), recomputed=op.recomputed,
                      parameters=_matrices(style, one, "lora_B", (outputs, rank)),
                      joint=Joint("columns" if columns else "read", between.elements, act))
    if columns:
        return [first, replace(second, forward=(*up, *added), backward=(*added_back, *up_back))]
    whole = Joint("restored", rows * one.outputs, act)
    return [first, second, Operator(f"{op.name}_lora_sum", tuple(added), tuple(added_back), joint=whole,
                                    recomputed=op.recomputed)]
