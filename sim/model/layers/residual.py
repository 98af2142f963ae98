"""Dropout and the addition to the residual stream."""

from __future__ import annotations

from sim.model.architecture import Operator, Tensor
from sim.model.kernels import cast, elementwise, width
from sim.model.style import Style
from sim.work import Kernel


def dropout_operator(style: Style, name: str, dtype: str, cols: int = 0) -> Operator:
    """native_dropout on `cols` columns (default the hidden width): keeps one byte per element (the mask), not its
    input. Compiled, it rides in the kernels beside it, and the mask is what is moved for it (torch 2.13's Inductor on
    fake tensors: a GPT's blocks launch as many kernels with it as without)."""
    elements, compiled = style.tokens * (cols or style.hidden), style.stack.compile
    moved, launches = (1, 0) if compiled else (2 * width(dtype) + 1, 1)
    return Operator(
        name, (elementwise("dropout", elements, moved, dtype, launches),),
        (elementwise("dropout_backward", elements, moved, dtype, launches),),
        saved=(Tensor(f"{name}_mask", elements, "int8"),),
    )


def residual_operators(style: Style, suffix: str) -> list[Operator]:
    """Dropout (if any) and addition of a branch's output to the residual stream.

    Backward of the addition costs nothing itself; where the branch left the stream, autograd adds its gradient to the
    stream's, counted here. Under autocast the stream is fp32 and the branch's gradient is cast to half.
    """
    if style.dropout and style.stack.fused_dropout_add:
        return [_fused(style, f"dropout_add{suffix}")]
    elements, r, e = style.tokens * style.hidden, width(style.residual), width(style.act)
    # compiled, the addition rides in the norm that follows: only the branch's output is read extra
    launches = 0 if style.stack.compile else 1
    forward = [elementwise("residual_add", elements, e + r if style.stack.compile else e + 2 * r, style.residual,
                           launches)]
    backward: list[Kernel] = [elementwise("gradient_sum", elements, (1 if style.stack.compile else 3) * r,
                                          style.residual, launches)]
    if r != e:
        backward.append(cast("branch_gradient_cast", elements, style.residual, style.act, launches))
    add = Operator(f"residual{suffix}", tuple(forward), tuple(backward))
    return [dropout_operator(style, f"dropout{suffix}", style.act), add] if style.dropout else [add]


def _fused(style: Style, name: str) -> Operator:
    """Megatron's bias_dropout_add: one kernel reads branch and stream, writes the stream and the mask."""
    elements, e = style.tokens * style.hidden, width(style.act)
    return Operator(
        name, (elementwise("dropout_add", elements, 3 * e + 1, style.act),),
        (elementwise("dropout_add_backward", elements, 2 * e + 1, style.act),
         elementwise("gradient_sum", elements, 3 * e, style.residual)),
        saved=(Tensor(f"{name}_mask", elements, "int8"),),
    )
