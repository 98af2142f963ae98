"""Weights and cache of inference as they are stored, and the products that read them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sim.model.architecture import Parameter
from sim.model.attention.relative import TABLE
from sim.model.kernels import cast, elementwise, product, width
from sim.model.style import Style
from sim.model.tuning import Frozen, stored_width
from sim.work import Kernel

#: Bytes per weight and per row of outputs of weights stored in fewer bits, their scales included.
#: int8: one fp32 scale per row (LLM.int8(), arXiv 2208.07339, section 3.1); fp8 alike (vLLM's per-channel weights).
#: int4: groups of 128 with a 16-bit scale and a 4-bit zero (GPTQ, arXiv 2210.17323, section 4; AWQ). nf4: as
#: fine-tuning stores it. mxfp8: a byte of scale per 32 weights (OCP Microscaling Formats 1.0, section 5.3); nvfp4: one
#: per 16 (cuBLAS 12.9, block scaling). Those of fp8, mxfp8 and nvfp4 are recalled.
_STORED: dict[str, tuple[float, float]] = {
    "int8": (1.0, 4.0), "int4": (0.5 + 2.5 / 128, 0.0), "nf4": (stored_width("nf4"), 0.0),
    "nf4-dq": (stored_width("nf4-dq"), 0.0),
    "fp8": (1.0, 4.0), "mxfp8": (1.0 + 1 / 32, 0.0), "nvfp4": (0.5 + 1 / 16, 0.0),
}

#: Formats in which weights can be stored for inference.
NARROW = tuple(_STORED)
#: Those in which products can run as well, on activations quantised before each.
MULTIPLIED = ("fp8", "mxfp8", "nvfp4", "int8")
#: Formats of which a single row is multiplied as they are stored: bitsandbytes' gemv_4bit.
_SINGLE_ROW = ("int4", "nf4", "nf4-dq")
#: Launches by which bitsandbytes' int8 product looks for outlier columns and adds their 16-bit product
#: (bitsandbytes/autograd/_functions.py, MatMul8bitLt.forward). From memory.
_OUTLIER_LAUNCHES = 4


@dataclass(frozen=True, slots=True)
class Weights:
    """How the blocks' matrices and the cache are stored.

    Attributes:
        dtype: one of `NARROW`, or "" = as the kernels read them.
        fused: the product reads them as stored; else a kernel of its own expands them to 16 bits first (int8: the
            product runs in int8 on quantised activations).
        appended: the cache grows by concatenation (read and written whole); else new rows are written in place.
        multiplied: products run in `dtype` on activations quantised before each (vLLM's and TensorRT-LLM's fp8, and
            their int8: SmoothQuant, arXiv 2211.10438, with a scale per token and per channel that the product's end
            applies: vLLM 0.6.3 quantization/utils/w8a8_utils.py, `cutlass_scaled_mm`); else in 16 bits.
        cache: dtype of keys and values in the cache, or "" = as computed. In 8 bits an engine's attention reads them as
            stored (vLLM 0.6.3 csrc/cache_kernels.cu, one `k_scale` and `v_scale` a layer; TensorRT-LLM's fp8 and int8
            caches alike, recalled); else
            they are expanded before it (transformers cache_utils.py, QuantizedCache).
        kernel: of products that read weights as stored: expanding (tinygemm), or marlin (the
            stack's `engine_products`).
    """

    dtype: str
    fused: bool
    appended: bool
    multiplied: bool = False
    cache: str = ""
    kernel: str = "expanding"

    @property
    def expanded(self) -> bool:
        """Whether a matrix stands beside its stored form in 16 bits."""
        return bool(self.dtype) and not (self.fused or self.multiplied or self.dtype == "int8")


def stored_bytes(shape: tuple[int, ...], dtype: str) -> float:
    """Bytes of a quantised matrix (out, in) with its scales."""
    per_weight, per_row = _STORED[dtype]
    return math.prod(shape) * per_weight + shape[0] * per_row


def wide_down(style: Style, weights: Weights) -> bool:
    """Whether T5's `wo` is in fp32 whatever the others are: transformers keeps it so beside fp16, and beside what
    bitsandbytes quantises.

    Source: transformers 4.56.2 and 5.23.0, modeling_t5.py (`_keep_in_fp32_modules`, T5DenseActDense.forward),
    modeling_utils.py (dtype float16, or the quantiser's use_keep_in_fp32_modules), quantizers/base.py.
    """
    t5 = style.kind == "encoder-decoder" and style.biased and style.modules == "transformers"
    quantised = bool(weights.dtype) and not (weights.fused or weights.multiplied)
    return t5 and (quantised or style.act == "fp16")


def parameter_bytes(style: Style, weights: Weights, parameter: Parameter | Frozen, in_block: bool) -> float:
    """Bytes of a slice's parameter, scales included: of a block its matrices are quantised, but no table."""
    if in_block and parameter.name.endswith(".wo.weight") and wide_down(style, weights):
        return parameter.numel * width("fp32")
    if weights.dtype and in_block and len(parameter.shape) > 1 and TABLE not in parameter.name:
        return stored_bytes(parameter.shape, weights.dtype)
    return parameter.numel * width(style.weight)


def single_row(style: Style, kernel: Kernel) -> Kernel:
    """A product as the stack runs it where it has one row: compiled, multiplications summed over the weights as they
    stream by, in Inductor's own kernel.

    Source: torch/_inductor/decomposition.py, mm and addmm of one row under coordinate_descent_tuning, which gpt-fast
    asks for; Accelerating Generative AI with PyTorch II (2023): faster than cuBLAS there. From memory.
    """
    single = kernel.op == "gemm" and kernel.category == "gemm" and kernel.shape[1] == 1
    own = kernel.kernel in ("", "uneven") and width(kernel.dtype) == width(style.act)
    return replace(kernel, kernel="streamed") if single and own and style.stack.compile else kernel


def stored_product(style: Style, weights: Weights, kernel: Kernel, operator: str, number: int) -> Iterator[Kernel]:
    """A block's product with the weights as stored, and the kernels around it; other kernels as they are.

    Args:
        operator: whose kernel it is; number: products of it in front of this one, which read the same input.
    """
    dtype, act, e = weights.dtype, style.act, width(style.act)
    if kernel.op != "gemm" or kernel.category != "gemm":
        yield kernel
        return
    batch, m, n, k = kernel.shape
    if operator == "down" and wide_down(style, weights):
        yield cast("wide_input", batch * m * k, act, "fp32")
        yield product(batch, m, n, k, "tn", "fp32", "fp32")
        return
    if not dtype:
        yield kernel
        return
    stored = batch * stored_bytes((n, k), dtype)
    # of experts asked now and then a product stands for less than a whole one, weights and all
    read = kernel.bytes / product(batch, m, n, k, "tn", act, act).bytes
    in_product = replace(kernel, bytes=kernel.bytes - read * (batch * n * k * e - stored), kernel=weights.kernel)
    if weights.multiplied:
        yield from _quantised(style, batch * m * k, dtype, operator, number)
        narrow = product(batch, m, n, k, "tn", dtype, dtype, act)
        yield replace(narrow, bytes=narrow.bytes - batch * n * k * width(dtype) + stored, flops=kernel.flops,
                      launches=kernel.launches)
    elif weights.fused or (m == 1 and dtype in _SINGLE_ROW):
        yield in_product
    elif dtype == "int8":
        yield cast("quantise", batch * m * k, act, "int8", 1)
        yield replace(product(batch, m, n, k, "tn", "int8", "int8", "fp32"), flops=kernel.flops,
                      launches=kernel.launches)
        yield elementwise("dequantise_outputs", batch * m * n, 4 + e, act, 1 + _OUTLIER_LAUNCHES)
    else:
        yield elementwise("dequantise", batch * n * k, stored / (batch * n * k) + e, act, kernel.launches)
        yield kernel


def _quantised(style: Style, elements: int, dtype: str, operator: str, number: int) -> Iterator[Kernel]:
    """A product's input in `dtype`. Compiled, products of one input share it, and it rides in the norm or activation in
    front of it; behind attention it has a kernel of its own.

    Source: torch 2.6.0 _functorch/partitioners.py (fx_graph_cse); vLLM 0.6.3 compilation/fusion.py
    (rms_norm_static_fp8_quant), TensorRT-LLM's fused norms likewise (recalled).
    """
    if not style.stack.compile or (operator == "projection" and not number):
        yield cast("quantise", elements, style.act, dtype)
    elif not number:
        yield elementwise("quantise", elements, width(dtype), dtype, 0)
