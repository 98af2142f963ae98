"""Constructors of kernels and of the linear layer: shapes, matrix-product FLOPs and honest counts of bytes accessed.

A *chain* is a row of element-wise kernels; each step states the bytes it reads and writes per element. Eager execution
launches every step; Inductor (`compile`) launches one kernel that reads the chain's inputs and writes what leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.model.architecture import Joint, Operator, Parameter, Tensor
from sim.model.compiled import compiles_loss
from sim.model.padded import padded, pads
from sim.model.style import Style
from sim.work import DTYPE_BYTES, Kernel

#: Visits of an element by the kernels of spelled-out rotary positions that are not vectorised, each way: forward both
#: products, the cat of a rotated half and the sum, and half of them by neg; backward both products, a sum, and half of
#: them by neg and by the copies of both slices.
ROTARY_VISITS = 4.5


def softcap(name: str, elements: int, dtype: str, compiled: bool, category: str) -> tuple[Kernel, Kernel]:
    """`tanh(x / cap) * cap`, forward and backward: three operators each way; compiled, part of what stands beside it.

    tanh keeps its output; backward is a product, tanh's own (two reads, a write) and a quotient. Source: transformers
    modeling_gemma2.py (eager_attention_forward, Gemma2ForCausalLM.forward).
    """
    e, launches = width(dtype), 0 if compiled else 3
    forward, backward = (e, 2 * e) if compiled else (6 * e, 7 * e)
    return (elementwise(name, elements, forward, dtype, launches, category),
            elementwise(f"{name}_backward", elements, backward, dtype, launches, category))


def width(dtype: str) -> float:
    """Bytes of an element."""
    return DTYPE_BYTES[dtype]


def elementwise(
    name: str, elements: int, bytes_per_element: float, dtype: str, launches: int = 1, category: str = "memory_bound",
) -> Kernel:
    """A memory-bound kernel of `elements` elements."""
    return Kernel("elementwise", dtype, (elements,), name, 0.0, elements * bytes_per_element, category, False, launches)


def chain(
    name: str, elements: int, steps: Sequence[float], fused: float, dtype: str, compiled: bool,
    category: str = "memory_bound",
) -> Kernel:
    """A row of element-wise kernels.

    Args:
        steps: bytes per element read plus written by each kernel of eager execution.
        fused: bytes per element of the one kernel that replaces them all.
        compiled: whether the chain is fused.
    """
    if compiled:
        return elementwise(name, elements, fused, dtype, 1, category)
    return elementwise(name, elements, sum(steps), dtype, len(steps), category)


def scalar(kernel: Kernel, visits: float = 1.0) -> Kernel:
    """`kernel` by PyTorch's element-wise code that handles one element at a time, each `visits` times in all.

    It is taken where operands are not all contiguous (broadcast, transposed, slices, halves to be joined), and where
    loads cast (from 16 bits to fp32, or a sum of both). Source: torch 2.9.1 aten/src/ATen/native/cuda/CUDALoops.cuh
    (gpu_kernel_impl: vectorised only without offset calculator and dynamic casts), Copy.cu (float to 16 bits has a
    kernel of its own without a cast in its loads).
    """
    return replace(kernel, shape=(max(1, round(kernel.shape[0] * visits)),), kernel="scalar")


def softmax_gradient(dtype: str, elements: int, category: str) -> Kernel:
    """Output times its gradient, which PyTorch's softmax makes a tensor of in front of its backward's own kernel.

    Source: aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: `Tensor tmp = grad * output` (seen in torch
    2.3.1 and 2.6.0 on tests/driver; log-softmax has none).
    """
    return elementwise("softmax_gradient", elements, 3 * width(dtype), dtype, 1, category)


def strided(style: Style, kernel: Kernel, visits: float = 1.0) -> Kernel:
    """`kernel` on operands that are broadcast, picked by index or not contiguous: `scalar`, unless torch.compile writes
    it."""
    return kernel if style.stack.compile else scalar(kernel, visits)


def strided_chain(
    name: str, elements: int, steps: Sequence[float], strided: Sequence[float], dtype: str,
    category: str = "memory_bound", visits: float | None = None,
) -> tuple[Kernel, ...]:
    """A row of element-wise kernels of eager execution some of which handle one element at a time (`scalar`).

    Args:
        steps: bytes per element read plus written by each vectorised kernel.
        strided: by each of the others.
        visits: of an element by those, where not one a kernel.
    """
    vectorised = (elementwise(name, elements, sum(steps), dtype, len(steps), category),) if steps else ()
    if not strided:
        return vectorised
    rest = elementwise(name, elements, sum(strided), dtype, len(strided), category)
    return (*vectorised, scalar(rest, len(strided) if visits is None else visits))


def joint(style: Style, kind: str, elements: int, *, narrow: bool = True) -> Joint | None:
    """Dependence on the other slices of the width; none in a model that is not cut.

    Args:
        narrow: the tensor feeds products in `style.gemm`, whose narrow copy may be what is gathered.
    """
    casts_first = narrow and style.stack.narrow_gathers and width(style.gemm) < width(style.act)
    return Joint(kind, elements, style.act, style.gemm if casts_first else "") if style.tensor > 1 else None


def column_sum(name: str, rows: int, cols: int, dtype: str) -> Kernel:
    """A sum over the rows, e.g. a bias' gradient: one read."""
    return Kernel("reduction", dtype, (rows, cols), name, 0.0, rows * cols * width(dtype), "memory_bound")


def cast(name: str, elements: int, source: str, target: str, launches: int = 1, compiled: bool = False) -> Kernel:
    """A change of dtype: one read, one write. What widens casts as it loads (`scalar`), unless compiled."""
    made = elementwise(name, elements, width(source) + width(target), target, launches)
    return scalar(made) if width(source) < width(target) and not compiled else made


def product(
    batch: int, m: int, n: int, k: int, variant: str, dtype: str, operand: str, result: str | None = None,
    accumulate: bool = False, category: str = "gemm",
) -> Kernel:
    """A (batched) matrix product of (m, k) by (k, n): 2·batch·m·n·k FLOPs.

    Args:
        variant: tn forward, nn data gradient, nt weight gradient.
        dtype: of the tensor cores; operand: of both inputs in memory; result: of the output, default as `operand`.
        accumulate: the output is read too (added to what is there).
    """
    inputs = width(operand) * batch * (m * k + k * n)
    output = width(result or operand) * batch * m * n * (2 if accumulate else 1)
    flops = 2.0 * batch * m * n * k
    return Kernel("gemm", dtype, (batch, m, n, k), variant, flops, inputs + output, category)


def linear(
    style: Style, rows: int, features_in: int, features_out: int, *, source: str, bias: bool, sibling: bool = False,
) -> tuple[list[Kernel], list[Kernel]]:
    """Forward and backward kernels of `features_out` outputs on `rows` rows.

    Args:
        source: dtype in which the input arrives; autocast casts it, and the data gradient back.
        bias: forward it rides in the product's epilogue, or a kernel adds it (`Style.adds_biases`); backward sums the
            output gradient over the rows.
        sibling: another layer reads the same input. Compiled, that one's quantised copy serves both (torch 2.6.0
            _functorch/partitioners.py, fx_graph_cse).

    Source: torch.nn.functional.linear and its derivative (derivatives.yaml, addmm); autocast's cached_cast;
    Megatron-LM `LinearWithGradAccumulationAndAsyncCommunication` for the fused accumulation.
    """
    act, gemm = style.act, style.gemm
    size = features_in * features_out
    forward: list[Kernel] = []
    backward: list[Kernel] = []
    casts = source != act and not style.stack.compile  # compiled, they ride in the neighbouring kernels
    if casts:
        forward.append(cast("input_cast", rows * features_in, source, act))
    if style.autocast:
        forward.append(cast("weight_cast", size, style.weight, act, 1 + bias))
    quantise = width(gemm) < width(act)
    serves = sibling and style.stack.compile and not _comes_narrow(style)
    if quantise:
        if not serves:
            forward.append(quantisation(style, rows * features_in))
        if not style.stack.narrow_weights_cached and not style.arrives_narrow:
            forward.append(quantisation(style, size))
    forward.append(product(1, rows, features_out, features_in, "tn", gemm, gemm if quantise else act, act))
    if bias and style.adds_biases:
        forward.append(strided(style, elementwise("bias_add", rows * features_out, 2 * width(act), act)))
    if quantise:
        backward.append(quantisation(style, rows * features_out))
        if style.stack.narrow_keeps_inputs:
            kept = [] if serves else [rows * features_in]
            kept += [] if style.arrives_narrow else [size]
            backward += [quantisation(style, elements) for elements in kept]
    backward.append(product(1, rows, features_in, features_out, "nn", gemm, gemm if quantise else act, act))
    backward += _weight_gradient(style, rows, features_in, features_out, gemm, gemm if quantise else act)
    if bias:
        backward.append(column_sum("bias_gradient", rows, features_out, act))
    if style.autocast:
        backward.append(cast("weight_gradient_cast", size, act, style.gradient, 1 + bias, style.stack.compile))
    if casts:
        backward.append(cast("input_gradient_cast", rows * features_in, act, source))
    if pads(style, rows, features_in, features_out):
        return _padded(style, rows, features_in, features_out, forward, backward)
    return forward, backward


def _padded(style: Style, rows: int, features_in: int, features_out: int, forward: Sequence[Kernel],
            backward: Sequence[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Kernels of a linear layer whose products torch.compile pads (`sim.model.padded`).

    Each way a copy of the weight is read and written, forward by autocast's cast, which is there and writes once more.
    What compiled neighbours make of an uneven input, or gradient of an uneven output, they write a second time: as it
    is for one product, turned for the other. A gradient that comes from outside is read for both.
    """
    act, size = width(style.act), features_in * features_out
    made = [padded(kernel) if kernel.op == "gemm" else kernel for kernel in forward]
    back = [padded(kernel) if kernel.op == "gemm" else kernel for kernel in backward]
    made.insert(0, elementwise("weight_padding", size, act if style.autocast else 2 * act, style.act))
    back.insert(0, elementwise("weight_padding", size, 2 * act, style.act))
    multiple = round(16 / act)
    if features_in % multiple:
        made.insert(0, elementwise("input_padding", rows * features_in, act, style.act, 0))
    if features_out % multiple:
        passes = 1 if compiles_loss(style) else 3
        back.insert(0, elementwise("gradient_padding", rows * features_out, passes * act, style.act, passes // 3))
    return made, back


def _comes_narrow(style: Style) -> bool:
    """Whether linear layers of a tensor rank find their inputs quantised, once for all that read one, and keep them so
    (torchao 0.13.0 float8/float8_tensor_parallel.py, PrepareFloat8ModuleInput, Float8RowwiseParallel; float8_linear.py,
    matmul_with_hp_or_float8_args: tensor_already_casted_to_fp8)."""
    return style.tensor > 1 and style.scattered and style.stack.shared_scale == "every"


def _cast_once(kernels: Sequence[Kernel], forward: bool) -> tuple[Kernel, ...]:
    """Kernels of products without casts of an input that came quantised: forward the first cast of every product but
    the first, backward the second cast of every product, behind that of the output's gradient."""
    made: list[Kernel] = []
    products, casts = 0, 0
    for kernel in kernels:
        casts += kernel.variant == "quantise"
        needless = casts == 1 and products > 0 if forward else casts == 2
        if kernel.variant != "quantise" or not needless:
            made.append(kernel)
        if kernel.op == "gemm":
            products, casts = products + 1, 0
    return tuple(made)


def behind_sum(style: Style, operator: Operator) -> Operator:
    """A layer that is cut along its rows where its bias is added to the sum, of which every slice has its own tokens
    then: so the bias' gradient sums over those alone.

    Source: megatron-core 0.3.0 to 0.15.0 transformer/transformer_layer.py, self_attn_bda and mlp_bda, behind the
    reduce-scatter (skip_bias_add; 0.12.0 traced on fake tensors), TransformerEngine's modules or not.
    """
    if not (style.scattered and style.modules == "megatron"):
        return operator
    backward = [column_sum(k.variant, k.shape[0] // style.tensor, k.shape[1], k.dtype)
                if k.variant == "bias_gradient" else k for k in operator.backward]
    return replace(operator, backward=tuple(backward))


def meeting(style: Style, operator: Operator, kind: str, elements: int) -> Operator:
    """An operator whose slices depend on one another (`joint`). A narrow input or gradient that comes together along
    the sequence is quantised by every slice for its own tokens; backward transposes the whole for the weight gradient,
    but where scales are of blocks: both copies are made of the wider tensor then, and travel.

    Source: TransformerEngine 1.13.0 pytorch/module/base.py, grad_output_preprocess (cast_to_fp8, gather, fp8_transpose)
    and layernorm_linear.py (ln_out is narrow before it is gathered); 2.8.0 likewise.
    """
    met = replace(operator if kind == "column" else behind_sum(style, operator), joint=joint(style, kind, elements))
    if met.joint is None or not met.joint.gathered or not style.scattered:
        return met
    if _comes_narrow(style):
        forward = _cast_once(met.forward, True) if kind == "column" else met.forward
        met = replace(met, forward=forward, backward=_cast_once(met.backward, False))
    blocks = style.gemm == "mxfp8"
    whole, own = quantisation(style, elements), quantisation(style, elements // style.tensor, copies=1 + blocks)
    turned = () if blocks else (elementwise("transpose", elements, 2 * width(style.gemm), style.gemm),)

    def quantised(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
        return tuple(own if kernel == whole else kernel for kernel in kernels)

    def transposed(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
        at = next((i for i, k in enumerate(kernels) if k.op == "gemm" and k.variant == "nt"), None)
        return tuple(kernels) if at is None else (*kernels[:at], *turned, *kernels[at:])
    if kind == "column":
        return replace(met, forward=quantised(met.forward), backward=transposed(met.backward))
    return replace(met, backward=transposed(quantised(met.backward)))


def quantisation(style: Style, elements: int, copies: int = 2) -> Kernel:
    """A tensor in the products' narrow dtype, as it is and transposed: tensor cores read fp8 operands along the inner
    dimension only, and backward reads each operand along the other one.

    One kernel reads once and writes both `copies` (TransformerEngine `cast_transpose`); a scale from the tensor's own
    maximum needs a pass before it, which scales per block (mxfp8) and delayed scales do not. Compiled, the maximum is
    found by the kernel that makes the tensor (torchao float8 README: scaling and casting are left to torch.compile);
    what becomes of it in dense blocks stands in `sim.model.compiled_casts`.
    """
    act, gemm = width(style.act), width(style.gemm)
    maximum = style.stack.narrow_amax_pass and style.gemm != "mxfp8" and not style.stack.compile
    per_element = act + copies * gemm + (act if maximum else 0.0)
    return elementwise("quantise", elements, per_element, style.gemm, 2 if maximum else 1)


def _weight_gradient(
    style: Style, rows: int, features_in: int, features_out: int, gemm: str, operand: str,
) -> list[Kernel]:
    """The weight-gradient product, and the addition into an fp32 `main_grad` where the stack keeps one."""
    fused = style.main_grad and style.stack.gradient_accumulation_fusion
    kernels = [product(1, features_out, features_in, rows, "nt", gemm, operand,
                       style.gradient if fused else style.act, accumulate=fused)]
    if style.main_grad and not fused:
        per_element = width(style.act) + 2 * width(style.gradient)
        kernels.append(elementwise("main_grad_add", features_in * features_out, per_element, style.gradient))
    return kernels


def linear_operator(
    style: Style, name: str, module: str, features_in: int, features_out: int, *, source: str,
    saved: Sequence[Tensor] = (), rows: int = 0, bias: bool | None = None,
) -> tuple[Operator, tuple[Parameter, ...]]:
    """A linear layer with its input kept for backward.

    Args:
        module: the module's name inside its layer, e.g. "mlp.c_fc".
        source: dtype in which the input arrives.
        saved: tensors it keeps, normally its input.
        rows: default all tokens.
        bias: default the style's.

    Returns: the operator, and its parameters in registration order.
    """
    has_bias = style.bias if bias is None else bias
    forward, backward = linear(style, rows or style.tokens, features_in, features_out, source=source, bias=has_bias)
    parameters = linear_parameters(style, module, features_in, features_out, has_bias)
    copies = (Tensor(f"{name}_weight_copy", features_in * features_out, style.act),) if style.autocast else ()
    ready = gradient_ready(style, parameters)
    return Operator(name, tuple(forward), tuple(backward), ready, tuple(saved), weight_copies=copies), parameters


def linear_parameters(
    style: Style, module: str, features_in: int, features_out: int, bias: bool,
) -> tuple[Parameter, ...]:
    """Weight and bias as registered: (out, in), or (in, out) for Hugging Face's Conv1D."""
    shape = (features_in, features_out) if style.conv1d else (features_out, features_in)
    weight = Parameter(f"{module}.weight", shape)
    return (weight, Parameter(f"{module}.bias", (features_out,))) if bias else (weight,)


def gradient_ready(style: Style, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """The order in which a linear layer's gradients arrive.

    The bias' AccumulateGrad hangs on addmm's node itself, the weight's behind a transpose: bias first. Under autocast
    both hang behind a cast, and of two casts the one recorded last in forward runs first; C++ evaluates arguments from
    the right, so `linear(x, w, b)` records the weight's last, and Conv1D's `addmm(b, x, w)` the bias'.
    Source: torch/csrc/autograd/engine.cpp (priority by sequence number), aten/src/ATen/autocast_mode.h.
    """
    return parameters if style.autocast and not style.conv1d else parameters[::-1]


def accumulation_kernels(parameters: int, tensors: int, dtype: str) -> tuple[Kernel, ...]:
    """AccumulateGrad of a later micro-step: grad += new, one kernel per tensor. The first micro-step only takes over.

    Source: torch/csrc/autograd/functions/accumulate_grad.h.
    """
    return (elementwise("accumulate_gradient", parameters, 3 * width(dtype), dtype, tensors),)
