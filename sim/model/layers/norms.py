"""LayerNorm and RMSNorm: kernels, parameters and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.model.architecture import Operator, Parameter, Tensor
from sim.model.compiled import at_norm
from sim.model.kernels import chain, strided_chain, width
from sim.model.style import Style
from sim.work import Kernel

#: Passes over the activation: forward reads x and writes y; backward reads dy and x and writes dx in one kernel, and
#: reads dy and x again for the weight gradients in a second. Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu.
_FORWARD_PASSES, _INPUT_PASSES, _WEIGHT_PASSES = 2, 3, 2
#: Of a norm in operators: the product that the weight's gradient is the sum of (two reads, a write), and that sum.
_SPELLED_WEIGHT = 4
#: A persistent kernel keeps its row in registers and its weight gradients beside it: backward reads dy and x once, and
#: a second launch adds up what thread blocks left (apex contrib layer_norm ln_bwd_kernels.cuh, which became
#: TransformerEngine's; flash_attn ops/triton/layer_norm.py, _layer_norm_bwd_kernel; from memory).
_PERSISTENT_BACKWARD_PASSES = 3
#: One program an SM holds the weight's gradient as well; behind it the sum over SMs and its cast. Source: liger_kernel
#: 0.5.0 to 0.8.5 ops/rms_norm.py, rms_norm_backward (its forward gives each row a block, which holds it).
_PER_SM_LAUNCHES = 3
#: Widths that apex's FastLayerNorm is built for; others fall back to its two-pass kernel. Source: megatron-core 0.5.0
#: and 0.12.1 fusions/fused_layer_norm.py, persist_ln_hidden_sizes.
_PERSISTENT_COLS = frozenset((
    1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800, 15360, 16384, 18432, 20480, 24576,
    25600, 30720, 32768, 40960, 49152, 65536))


def norm_operator(
    style: Style, name: str, module: str, shape: tuple[int, int] | None = None,
) -> tuple[Operator, tuple[Parameter, ...]]:
    """A norm, and its parameters in registration order.

    Args:
        style: whose `residual` is the dtype of what is normalised.
        shape: rows and columns, default those of the residual stream.
    """
    style = at_norm(style, name)
    rows, cols = shape or (style.tokens, style.hidden)
    layer_norm = style.norm == "layernorm"
    names = ("weight", "bias") if layer_norm and style.bias else ("weight",)
    parameters = tuple(Parameter(f"{module}.{n}", (cols,)) for n in names)
    if style.spelled_rmsnorm:
        forwards, backwards, saved = _hugging_face_rmsnorm(style, name, rows, cols)
    else:
        per_pass = rows * cols * width(style.residual)
        forward = Kernel("norm", style.residual, (rows, cols), "forward", 0.0, _FORWARD_PASSES * per_pass,
                         "memory_bound")
        kernel = _held(style, cols)
        forwards = (replace(forward, kernel="persistent" if kernel else "norm_looped" * style.stack.compile),)
        backwards = _backward(style, rows, cols, kernel)
        statistics = ("mean", "rstd") if layer_norm else ("rstd",)
        saved = (Tensor(f"{name}_input", rows * cols, style.residual),
                 *(Tensor(f"{name}_{s}", rows, "fp32") for s in statistics))
    return Operator(name, forwards, backwards, parameters, saved), parameters


def _backward(style: Style, rows: int, cols: int, kernel: str) -> tuple[Kernel, ...]:
    """Kernels of a norm's gradients, whatever of them `kernel` or torch.compile puts together."""
    per_pass = rows * cols * width(style.residual)
    if kernel:
        launches = _PER_SM_LAUNCHES if kernel == "per_sm" else 2
        return (Kernel("norm", style.residual, (rows, cols), "backward", 0.0, _PERSISTENT_BACKWARD_PASSES * per_pass,
                       "memory_bound", launches=launches, kernel=kernel),)
    if style.stack.compile:
        return _compiled_backward(style, rows, cols)
    inputs, weights = (Kernel("norm", style.residual, (rows, cols), variant, 0.0, passes * per_pass, "memory_bound")
                       for variant, passes in (("inputs", _INPUT_PASSES), ("weights", _WEIGHT_PASSES)))
    return inputs, weights


def _compiled_backward(style: Style, rows: int, cols: int) -> tuple[Kernel, ...]:
    """torch.compile's: one kernel goes over rows for the input's gradient, one over columns for the weights'. What the
    first reads and writes of the stream's gradients is the addition's (`residual_operators`); its own are the gradient
    and the norm's input, which is made again of the stream and the branch where both are of one width.

    Source: what torch 2.13's Inductor makes of a GPT's block under autocast and of Llama's in bf16, on fake tensors.
    """
    act, stream = width(style.act), width(style.residual)
    again = act if act == stream else 0.0
    row = Kernel("norm", style.residual, (rows, cols), "backward", 0.0, rows * cols * (act + stream + again),
                 "memory_bound", kernel="persistent")
    return row, Kernel("reduction", style.residual, (rows, cols), "weights", 0.0, rows * cols * (act + stream),
                       "memory_bound")


def frozen_backward(style: Style, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """A norm's backward without what makes its weights' gradients: of PyTorch's kernels the second; of operators the
    two products' first and the sum behind it (`_hugging_face_rmsnorm`); of compiled ones that over columns. A
    kernel that holds a row moves the same bytes and is no faster (liger_kernel 0.8.5: COMPUTE_DW; earlier ones sum)."""
    kernels = [k for k in kernels if k.variant != "weights"]
    if any(k.kernel in ("per_sm", "persistent") for k in kernels):
        return tuple(replace(k, launches=1) for k in kernels)
    if style.spelled_rmsnorm and not style.stack.compile:
        made = {k: replace(k, bytes=k.bytes - k.shape[0] * _SPELLED_WEIGHT * (4.0 if style.wide_norm else width(
            style.residual)), launches=k.launches - 2) for k in kernels if k.kernel != "scalar"}
        return tuple(made.get(k, k) for k in kernels)
    return tuple(kernels)


def _held(style: Style, cols: int) -> str:
    """The kernel that reads a row once each way: persistent or per_sm; "" where none does."""
    kernel = style.stack.norm_kernel
    listed = "persistent" if cols in _PERSISTENT_COLS else ""
    return {"listed": listed, "two_pass": ""}.get(kernel, kernel)


def _hugging_face_rmsnorm(
    style: Style, name: str, rows: int, cols: int,
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...], tuple[Tensor, ...]]:
    """LlamaRMSNorm in operators: to fp32, pow, mean, add, rsqrt, mul, to the input's dtype, mul with the weight.

    What it keeps: the fp32 input (pow and mul), rsqrt's output, and the normalised tensor (mul with the weight). The
    steps count bytes per element; kernels on one element per token (add, rsqrt) count for their launch. The cast to
    fp32 and products with what is broadcast (rsqrt, weight, the mean's gradient) are no vectorised kernels. T5LayerNorm
    multiplies the input as it came, not its fp32 copy, and keeps both where they differ. Gemma's and OLMo-2's weight
    multiplies before the cast (`rmsnorm-fp32`), so that the normalised tensor is kept in fp32.
    Source: transformers/models/llama/modeling_llama.py, t5/modeling_t5.py, gemma2/modeling_gemma2.py (Gemma2RMSNorm),
    olmo2/modeling_olmo2.py (Olmo2RMSNorm).
    """
    elements = rows * cols
    e = width(style.residual)
    to: list[float] = [] if e == 4 else [e + 4.0]
    wide = style.wide_norm
    times = 4.0 if wide else e
    if style.stack.compile:  # one fused kernel, which keeps what a fused norm keeps
        forward = chain(name, elements, (), _FORWARD_PASSES * e, style.residual, True)
        return (forward,), _compiled_backward(style, rows, cols), (Tensor(f"{name}_input", elements, style.residual),
                                                                   Tensor(f"{name}_rstd", rows, "fp32"))
    forwards = strided_chain(name, elements, [8, 4, 0, 0, *to], [*to, 8, 2 * times], style.residual)
    # d weight: mul, sum; d normalised: mul; cast; mul rule: two products and a sum; rsqrt on rows; mean: div; pow:
    # pow and two products; accumulation; cast
    backwards = strided_chain(f"{name}_backward", elements, [3 * times, times, 12, 4, 0, 0, 0, 8, 8, 12, 12, *to],
                              [2 * times, *to, 8, 4], style.residual)
    saved = [Tensor(f"{name}_input_fp32", elements, "fp32"), Tensor(f"{name}_rsqrt", rows, "fp32"),
             Tensor(f"{name}_normalised", elements, "fp32" if wide else style.residual)]
    if style.kind == "encoder-decoder" and e != 4:
        saved.append(Tensor(f"{name}_input", elements, style.residual))
    return forwards, backwards, tuple(saved)
