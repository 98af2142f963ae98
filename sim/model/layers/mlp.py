"""The feed-forward part: up (and gate) projection, activation, down projection."""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Operator, Parameter, Tensor
from sim.model.kernels import (
    cast,
    chain,
    elementwise,
    linear,
    linear_operator,
    linear_parameters,
    meeting,
    strided_chain,
    width,
)
from sim.model.layers.residual import dropout_operator
from sim.model.style import Style
from sim.work import Kernel

#: Module names: up, gate, down.
_NAMES = {
    "plain": ("up", "gate", "down"),
    "gpt2": ("mlp.c_fc", "", "mlp.c_proj"),
    "transformers": ("mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"),
    "megatron": ("mlp.linear_fc1", "mlp.linear_fc1", "mlp.linear_fc2"),
}


def mlp_operators(
    style: Style, source: str, names: tuple[str, str, str] | None = None,
) -> tuple[list[Operator], list[Parameter]]:
    """Operators of the feed-forward part and parameters in registration order.

    Args:
        source: dtype in which the norm's output arrives.
        names: modules of the up, gate and down projections, default those of the module style.
    """
    up_name, gate_name, down_name = names or _NAMES["gpt2" if style.conv1d else style.modules]
    if style.modules == "transformers" and style.merges_gate and names is None:
        up_name = "mlp.gate_up_proj"
    # side by side with attention both read one norm's output, which the query projection has kept already
    shared = style.parallel_block and style.parallel_norms == 1 and source == style.act
    inputs = () if shared else (Tensor("up_input", style.stream.tokens * style.hidden, style.act),)
    parameters: tuple[Parameter, ...]
    if style.gated and not style.merges_gate:
        up, parameters = _gate_and_up(style, gate_name, up_name, source, inputs)
    else:
        outputs = 2 * style.ffn if style.gated else style.ffn
        up, parameters = linear_operator(style, "up", up_name, style.hidden, outputs, source=source, saved=inputs)
        if style.gated and not (style.modules == "megatron" or style.stack.fused_swiglu or style.stack.compile):
            # the gradients of gate and up are written side by side (split's backward: cat)
            beside = elementwise("gate_gradient_cat", style.tokens * outputs, 2 * width(style.act), style.act)
            up = replace(up, backward=(beside, *up.backward))
    activation, arrives = activation_operator(style)
    product_input = Tensor("down_input", style.tokens * style.ffn, style.act)
    between = [activation]
    if style.kind == "encoder-decoder":
        between, arrives = _t5_between(style, activation, arrives)
    down, more = linear_operator(style, "down", down_name, style.ffn, style.hidden, source=arrives,
                                 saved=(product_input,))
    elements = style.tokens * style.hidden
    up, down = meeting(style, up, "column", elements), meeting(style, down, "row", elements)
    return [up, *between, down], [*parameters, *more]


def activation_operator(style: Style) -> tuple[Operator, str]:
    """The activation (and the product with the gate), and the dtype its result has."""
    return _gated_activation(style) if style.gated else _activation(style)


def _t5_between(style: Style, activation: Operator, arrives: str) -> tuple[list[Operator], str]:
    """T5 drops out the inner activation, and Hugging Face's code casts it to the weights' dtype, fp32 under autocast.

    relu keeps its result, which is the product's input unless dropout or the casts stand between.
    Source: transformers modeling_t5.py (T5DenseActDense, T5DenseGatedActDense).

    Args:
        arrives: dtype of the activation's result.
    """
    casts = style.modules == "transformers" and style.autocast
    if (style.dropout or casts) and not style.gated and style.activation == "relu":
        result = Tensor("activation_output", style.tokens * style.ffn, style.act)
        activation = replace(activation, saved=(result,))
    operators = [activation]
    if style.dropout:
        operators.append(dropout_operator(style, "inner_dropout", arrives, style.ffn))
    if not casts or arrives == "fp32":
        return operators, arrives
    elements = style.tokens * style.ffn
    up, down = cast("inner_cast", elements, style.act, "fp32"), cast("inner_cast", elements, "fp32", style.act)
    return [*operators, Operator("inner_cast", (up,), (down,))], "fp32"


def _gate_and_up(
    style: Style, gate_name: str, up_name: str, source: str, inputs: tuple[Tensor, ...],
) -> tuple[Operator, tuple[Parameter, ...]]:
    """Two projections of the same input; the one that runs last in forward has its gradients first."""
    (forward, backward), (also, back) = (linear(style, style.tokens, style.hidden, style.ffn, source=source,
                                                bias=style.bias, sibling=sibling) for sibling in (False, True))
    gate = linear_parameters(style, gate_name, style.hidden, style.ffn, style.bias)
    up = linear_parameters(style, up_name, style.hidden, style.ffn, style.bias)
    sums = elementwise("input_gradient_sum", style.tokens * style.hidden, 3 * width(source), source)
    ready = (*up, *gate) if style.autocast else (*up[::-1], *gate[::-1])
    saved = inputs * (2 if source != style.act else 1)
    copies = (Tensor("up_weight_copy", 2 * style.hidden * style.ffn, style.act),) if style.autocast else ()
    operator = Operator("up", (*forward, *also), (*back, *backward, sums), ready, saved, weight_copies=copies)
    return operator, (*gate, *up)


def _gated_activation(style: Style) -> tuple[Operator, str]:
    """act(gate) * up: two kernels that keep gate, act(gate) and up, or one that keeps gate and up."""
    elements, e = style.tokens * style.ffn, width(style.act)
    fused = style.stack.fused_swiglu or style.stack.compile
    if style.spells_gelu and not fused:
        return _spelled_gate(style)
    kept = ["gate", "up"] if fused else ["gate", "activated_gate", "up"]
    saved = tuple(Tensor(name, elements, style.act) for name in kept)
    # merged, gate and up are slices of what one product made
    forwards = strided_chain("gated_activation", elements, (), [2 * e, 3 * e], style.act)
    backwards = strided_chain("gated_activation_backward", elements, [3 * e], [3 * e, 3 * e], style.act)
    if fused or not style.merges_gate:
        forwards = (chain("gated_activation", elements, [2 * e, 3 * e], 3 * e, style.act, fused),)
        backwards = (chain("gated_activation_backward", elements, [3 * e, 3 * e, 3 * e], 5 * e, style.act, fused),)
    return Operator("activation", forwards, backwards, saved=saved), style.act


def _spelled_gate(style: Style) -> tuple[Operator, str]:
    """act(gate) * up where the activation is spelled out: the product has the dtype it promotes to."""
    spelled, wide = _gelu_new(style)
    elements, e, w = style.tokens * style.ffn, width(style.act), width(wide)
    to = [w + e] if w != e else []  # the gradient of up in its own dtype
    forward = chain("gate_product", elements, [2 * w + e], 2 * w + e, wide, False)
    backward = chain("gate_product_backward", elements, [2 * w + e, 3 * w, *to], 3 * w + e, wide, False)
    saved = (*spelled.saved, Tensor("activated_gate", elements, wide), Tensor("up", elements, style.act))
    return replace(spelled, forward=(*spelled.forward, forward), backward=(backward, *spelled.backward),
                   saved=saved), wide


def _activation(style: Style) -> tuple[Operator, str]:
    """One kernel that keeps its input, or its result (relu: the next product's input, kept there).

    PyTorch's own GELU is exact (erf), a fused one takes tanh (Megatron's fused_bias_gelu.py); Hugging Face's GPT-2
    spells gelu_new out.
    """
    elements, e = style.tokens * style.ffn, width(style.act)
    if style.spells_gelu:
        return _gelu_new(style)
    name = "gelu" if style.activation == "gelu" and not style.stack.fused_bias_gelu else "activation"
    forward = elementwise(name, elements, 2 * e, style.act)
    backward = elementwise(f"{name}_backward", elements, 3 * e, style.act)
    saved = () if style.activation == "relu" else (Tensor("up_output", elements, style.act),)
    return Operator("activation", (forward,), (backward,), saved=saved), style.act


def _gelu_new(style: Style) -> tuple[Operator, str]:
    """0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * pow(x, 3)))) in eight kernels.

    Kept: pow's input, 0.5 * x, tanh's output and 1 + tanh (both factors of the last product). Where autocast runs pow
    in fp32, everything after it promotes. Source: transformers/activations.py (NewGELUActivation).
    """
    elements, e = style.tokens * style.ffn, width(style.act)
    wide = "fp32" if style.widens_powers else style.act
    w = width(wide)
    compiled = style.stack.compile
    to = [e + w] if w != e else []
    steps = [2 * e, *to, 2 * w, 2 * w, e + 2 * w, 2 * w, 2 * w, 2 * w, e + 2 * w]
    back: list[float] = [2 * w + e, e + 2 * w, 3 * w, 2 * w, 2 * w, 2 * w, 2 * w, 3 * w, 3 * w, *to, 2 * e, 3 * e]
    forward: Kernel = chain("gelu_new", elements, steps, 2 * e, style.act, compiled)
    backward: Kernel = chain("gelu_new_backward", elements, back, 3 * e, style.act, compiled)
    if compiled:
        saved: tuple[Tensor, ...] = (Tensor("up_output", elements, style.act),)
        return Operator("activation", (forward,), (backward,), saved=saved), style.act
    saved = (Tensor("pow_input", elements, wide), Tensor("half_input", elements, style.act),
             Tensor("tanh", elements, wide), Tensor("one_plus_tanh", elements, wide))
    return Operator("activation", (forward,), (backward,), saved=saved), wide
