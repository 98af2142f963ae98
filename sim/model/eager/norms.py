"""Norms of transformers as PyTorch modules run them.

Sources: transformers modeling_llama.py (LlamaRMSNorm), modeling_t5.py (T5LayerNorm).
"""

from __future__ import annotations

from sim.model.compiled import at_norm
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Run, Tensor, Weight
from sim.model.style import Style


def norm(run: Run, style: Style, x: Tensor, name: str) -> Tensor:
    """LayerNorm, a fused RMSNorm, or LlamaRMSNorm spelled out."""
    run.at(name)
    style = at_norm(style, name)
    trained = style.tuned is None or style.tuned.trains_norms
    if style.norm == "layernorm":
        return op.layer_norm(run, x, style.hidden, (1 + style.bias) * trained, 2, style.weight)
    if not style.spelled_rmsnorm or style.stack.compile:
        # a norm behind a sub-layer leaves its output's gradient to the sum, too (liger_kernel: in_place=False)
        over = style.stack.fused_in_place and style.block_norms == "input"
        return op.layer_norm(run, x, style.hidden, int(trained), 1, style.weight, over)
    half = style.stack.residual_dtype_follows_autocast or style.stack.low_precision_norm  # whatever the weight's dtype
    return rms_norm(run, x, style.hidden, style.weight, trained, promotes=not half, wide=style.wide_norm)


def rms_norm(run: Run, hidden_states: Tensor, cols: int, dtype: str, trained: bool = True, *,
             promotes: bool = True, wide: bool = False) -> Tensor:
    """LlamaRMSNorm, T5LayerNorm; a frozen weight needs nothing kept.

    Args:
        promotes: a weight that is wider than its input makes the output as wide.
        wide: the weight multiplies before the cast back (Gemma2RMSNorm, Olmo2RMSNorm).
    """
    source, rows = hidden_states.dtype, hidden_states.elements // cols
    hidden_states = op.to(run, hidden_states, "fp32")
    variance = op.mean_rows(run, square(run, hidden_states), rows)
    hidden_states = op.mul_rows(run, hidden_states, op.unary(run, op.shift(run, variance), saves_output=True))
    if wide:
        weighted = op.mul_weight(run, hidden_states, Weight(cols, dtype)) if trained else op.scale(run, hidden_states)
        return op.to(run, weighted, source)
    normalised = op.to(run, hidden_states, source)
    output = op.promote(source, dtype) if promotes else source
    return op.mul_weight(run, normalised, Weight(cols, dtype), output) if trained else op.scale(run, normalised)


def square(run: Run, x: Tensor) -> Tensor:
    """`x.pow(2)` of an fp32 tensor."""
    return op.unary(run, x, saves_input=True, temporaries=2)
