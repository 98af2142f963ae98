"""The feed-forward part as PyTorch modules run it: plain ones, Hugging Face's GPT-2 and Llama, Megatron's.

Sources: transformers modeling_gpt2.py and modeling_llama.py (5.x), Megatron-LM core/transformer/mlp.py.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.model.eager.products import column, entered, row
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Run, Tensor
from sim.model.eager.tensors.narrow import keeping
from sim.model.eager.tensors.storage import Storage
from sim.model.style import Style

#: Tensors beside the gradient where silu_backward is composed of sigmoid, ones, products and a sum, as on fake tensors
#: (torch 2.13 aten/src/ATen/native/Activation.cpp, math_silu_backward; `Stack.cuda_kernels`).
_COMPOSED = 5


def mlp(run: Run, style: Style, x: Tensor, *, keeps: bool = False) -> Tensor:
    """Up (and gate), activation, down.

    Args:
        keeps: what is read is kept, not its quantised copy.
    """
    run.at("up")
    x, above = entered(run, style, x), keeping(style) if keeps else style
    if style.one_forward and not style.gated:
        made = [column(run, style, x, (("mlp", style.ffn),))]
        del x  # no variable holds the norm's output
        hidden = inner(run, style, style.ffn, lambda _: made.pop())
    else:
        hidden = inner(run, style, style.ffn, lambda outputs: column(run, above, x, (("mlp", outputs),)))
    run.at("down")
    return row(run, style, hidden, style.ffn, (("mlp", style.hidden),))


def inner(run: Run, style: Style, ffn: int, up: Callable[[int], Tensor]) -> Tensor:
    """From the products with up (and gate) to what the down projection reads.

    Args:
        up: makes a product of so many outputs.
    """
    if style.gated and not style.merges_gate:
        return _gated(run, style, ffn, up)
    made = up(2 * ffn if style.gated else ffn)
    return activation(run, style, made)


def activation(run: Run, style: Style, made: Tensor) -> Tensor:
    """From what one product of all the columns made, gate and up side by side, to what the down projection reads."""
    run.at("activation")
    if not style.gated:
        return activated(run, style, made)
    if style.modules == "megatron" or style.stack.fused_swiglu or style.stack.compile:
        return _gated_kernel(run, made)
    gate, other = op.split(run, made, [made.elements // 2] * 2)
    return op.mul(run, op.unary(run, gate, saves_input=True, temporaries=_temporaries(style)), other)


def activated(run: Run, style: Style, x: Tensor) -> Tensor:
    """The activation alone, of one kernel or spelled out."""
    if style.spells_gelu and not style.stack.compile:
        return _gelu_new(run, x, style.widens_powers)
    silu, relu = style.gated and style.activation == "silu", style.activation == "relu"
    return op.unary(run, x, saves_input=not relu, saves_output=relu, temporaries=_temporaries(style) if silu else 0)


def _temporaries(style: Style) -> int:
    return 0 if style.stack.cuda_kernels else _COMPOSED


def _gated(run: Run, style: Style, ffn: int, up: Callable[[int], Tensor]) -> Tensor:
    """act(gate(x)) * up(x)."""
    if style.stack.fused_swiglu or style.stack.compile:
        gate, other = (up(ffn) for _ in range(2))
        run.at("activation")
        elements, dtype, over = gate.elements, gate.dtype, style.stack.fused_in_place
        again = run.checkpointed and style.stack.compile and not style.stack.fused_swiglu

        def rule(run: Run, _: object) -> list[Storage | None]:
            if over:
                return [*run.overwritten()]
            product = run.new(elements, dtype) if again else None  # of one kernel with both gradients (Inductor)
            made: list[Storage | None] = [run.new(elements, dtype), run.new(elements, dtype)]
            del product
            return made

        node = run.node(rule, (gate.sink, other.sink))
        run.save(node, gate.storage, other.storage)
        return Tensor(run.new(elements, dtype), elements, dtype, node.output())
    gate = up(ffn)
    run.at("activation")
    gate = op.unary(run, gate, saves_input=True, temporaries=_temporaries(style))
    run.at("up")
    other = up(ffn)
    run.at("activation")
    return op.mul(run, gate, other)


def _gated_kernel(run: Run, both: Tensor) -> Tensor:
    """Megatron's bias_swiglu on gate and up side by side."""
    elements, dtype, out = both.elements, both.dtype, both.elements // 2
    node = run.node(lambda run, _: [run.new(elements, dtype)], (both.sink,))
    run.save(node, both.storage)
    return Tensor(run.new(out, dtype), out, dtype, node.output())


def _gelu_new(run: Run, x: Tensor, widens: bool) -> Tensor:
    """0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * pow(x, 3)))) (transformers NewGELUActivation); one
    expression, whose parts go as soon as the next is there unless they are saved.

    Args:
        widens: autocast takes the power in fp32.
    """
    half = op.scale(run, x)
    return op.mul(run, half, op.shift(run, op.unary(
        run, op.scale(run, op.add(run, x, op.scale(run, op.power(run, x, widens)))), saves_output=True)))
