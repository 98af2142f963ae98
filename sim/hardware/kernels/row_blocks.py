"""Time of row-wise and element-wise kernels by what their threads wait for; memory traffic stands in memory_bound.

A row-wise kernel gives each row to one thread block, which works along it in rounds: its threads load, compute and
store a few elements each, then the next few. A round costs the latency of a load; the block's start costs one more,
and each of several passes over the row one in which the threads meet. While r blocks share an SM, each also waits for
the instructions of all r. As many blocks run at one time as the SM's threads and registers allow; the rest wait for the
next wave. Where a thread loads one element of 2 bytes at a time, memory is never full.

Sources: `vectorized_layer_norm_kernel` and `cunn_SoftMaxForward` (PyTorch 2.1, layer_norm_kernel.cu, SoftMax.cu);
`rms_norm_kernel`, `act_and_mul_kernel`, `rotary_embedding_kernel` (vLLM 0.2, csrc), whose loops move single elements.
Inductor's reductions: torch 2.13.0 _inductor/runtime/triton_heuristics.py (_reduction_configs: 2,048 elements a round;
triton_config_reduction: 16 warps), choices.py (should_use_persistent_reduction: rows beyond 1,024 are looped over).
Threads, elements and passes are as they stand in them (from memory); instructions per element and the exponents of
`_OVERLAP` were chosen once for all GPUs by scans over the tables of vidur (A100, H100: a block's time when it shares
its SM or not) and neusight. `fit_kernels` does not fit them again, so no row of those tables is left out for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim.hardware.gpu import Gpu
from sim.hardware.kernels.rates import Rates
from sim.work import DTYPE_BYTES, Kernel

_WARP = 32
_ISSUE_LANES = 128  # four schedulers of an SM issue one instruction of a warp each per cycle (Volta to Blackwell)
_LOAD_BYTES = 16  # the widest load of a thread
_WIDE_BYTES = 4  # an element of fp32
_MOST_THREADS = 1024
_PERSISTENT_COLS = 1024  # up to here a warp holds a softmax row in registers (PersistentSoftmax.cuh)
#: Joins a block's waiting and its memory traffic, by passes over the row (1 = they add, infinite = the longer counts).
_OVERLAP = {1: 1.15, 2: 2.2}


@dataclass(frozen=True, slots=True)
class Block:
    """How a kernel works off one row.

    Attributes:
        threads: of a block, at most.
        elements: each thread loads at a time.
        passes: over the row, one after another.
        instructions: per element, all passes.
        most_resident: threads of an SM its registers leave room for.
        parts: shares of a row that are worked off one after another, by threads enough for the first.
    """

    threads: int
    elements: int
    passes: int
    instructions: float
    most_resident: int = 2048
    parts: tuple[float, ...] = (1.0,)


_SOFTMAX_INSTRUCTIONS = 27.0
#: Of PyTorch's own on elements below fp32: in 16 bits an element takes as long on an RTX 3090 as on a B200, by SMs and
#: clock (liger, 1,024 to 4,096 columns: 97-140). Backward it is 81 (B200) with the product in front of it
#: (`softmax_gradient`), whose traffic is two fifths of that.
_NARROW_SOFTMAX = {"forward": 100.0, "backward": 47.0}
#: By `Kernel.kernel`, or by operation where that is empty. 12 layer-norm blocks of 128 threads share an SM: the tables
#: of 2560 columns jump at 12 x 108 rows (A100) and 12 x 132 (H100).
_BLOCKS = {
    "norm": Block(128, 4, 2, 18, 1536),
    # torch.compile's: loops over parts of a row, 16 warps of 4 elements, once for the sum and once more
    "norm_looped": Block(512, 4, 2, 18),
    "norm_scalar": Block(1024, 1, 2, 22),
    "gated_scalar": Block(1024, 1, 1, 16),
    "rotary_scalar": Block(512, 2, 1, 26, parts=(0.5, 0.5)),  # queries, then keys
    "rotary_grouped_scalar": Block(512, 2, 1, 26, parts=(0.8, 0.2)),
}
#: Element-wise functions whose arithmetic can outlast their traffic, instructions per element: `gelu` with erf in 16
#: bit (vidur, A100 and H100 alike), its gradient with what GeluBackwardCUDAKernelImpl adds (an exp, five products, a
#: second load: counted), `powu` by any exponent (neusight, A100-80GB).
_INSTRUCTIONS = {"gelu": 53.0, "gelu_backward": 69.0, "powu": 103.0}
#: PyTorch's kernels that handle one element at a time, in issue slots an element: strided, broadcast or cast operands
#: (`scalar`), a row picked by its number (embedding), the sums of a norm's weight gradients. None of them comes near
#: the bandwidth in 16 bits, and all go by SMs and clock: liger (A100, H100, B200: 95-110; A100 in fp32 and vidur's in
#: fp16: 240-260; A100, H100, B200: 120-185). So does a norm's backward of one program an SM (`per_sm`: liger's
#: RMSNorm on an H100, one row; its LayerNorm in fp32 takes 15% longer per element at 4,096 columns than at 16,384).
_ONE_AT_A_TIME = {"scalar": 102.0, "embedding": 250.0, "norm": 165.0, "per_sm": 200.0}


def block_of(kernel: Kernel) -> Block | None:
    """The block that works off a row of `kernel`; None where it is not cut by rows."""
    if kernel.kernel in _BLOCKS:
        return _BLOCKS[kernel.kernel]
    if kernel.variant != "forward" or kernel.op not in ("norm", "softmax") or kernel.kernel == "persistent":
        return None
    if kernel.op == "norm":
        return _BLOCKS["norm"]
    cols = kernel.shape[1]
    if cols <= _PERSISTENT_COLS:
        return None
    elements = int(_LOAD_BYTES / DTYPE_BYTES[kernel.dtype])
    threads = 2 ** math.ceil(math.log2(cols / elements / 2))
    instructions = _NARROW_SOFTMAX["forward"] if _is_narrow_softmax(kernel) else _SOFTMAX_INSTRUCTIONS
    return Block(max(_WARP, min(_MOST_THREADS, threads)), elements, 2, instructions)


def resident(block: Block, cols: int, rates: Rates) -> tuple[int, int]:
    """Threads of a block that works off `cols` columns, and how many such blocks share an SM."""
    threads = min(block.threads, _WARP * math.ceil(cols * block.parts[0] / block.elements / _WARP))
    return threads, max(1, int(min(rates.sm_threads, block.most_resident) // threads))


def _slots(kernel: Kernel) -> float:
    """Issue slots an element of a kernel that no block by rows stands for."""
    if kernel.op == "elementwise":
        return _ONE_AT_A_TIME["scalar"] if kernel.kernel == "scalar" else _INSTRUCTIONS.get(kernel.variant, 0.0)
    if _is_narrow_softmax(kernel):
        return _NARROW_SOFTMAX[kernel.variant]
    if kernel.kernel == "per_sm":
        return _ONE_AT_A_TIME["per_sm"]
    one = (kernel.op, kernel.variant) in (("embedding", "forward"), ("norm", "weights"))
    return _ONE_AT_A_TIME[kernel.op] if one else 0.0


def _is_narrow_softmax(kernel: Kernel) -> bool:
    """Whether it is PyTorch's own softmax, not one fused with what stands around it, on elements below fp32."""
    return kernel.op == "softmax" and kernel.kernel != "fused" and DTYPE_BYTES[kernel.dtype] < _WIDE_BYTES


def joined_s(kernel: Kernel, moving_s: float, rates: Rates, gpu: Gpu, sms: int) -> float:
    """Seconds of a kernel whose traffic alone would take `moving_s` on `sms` SMs: with its blocks' waiting, or its
    arithmetic where that is longer."""
    issue_s = 1.0 / (_ISSUE_LANES * gpu.boost_mhz * 1e6)  # of one instruction of one element on one SM
    block = block_of(kernel)
    if kernel.kernel == "one_warp":
        return max(moving_s, kernel.shape[0] / _WARP * rates.latency_s)
    if block is None:
        return max(moving_s, math.prod(kernel.shape) * _slots(kernel) * issue_s / sms)
    rows, cols = kernel.shape
    threads, together = resident(block, cols, rates)
    loads = block.passes * sum(math.ceil(cols * part / (threads * block.elements)) for part in block.parts)
    rounds = 1 + loads + (block.passes if block.passes > 1 else 0)
    waiting_s, own_s = rounds * rates.latency_s, cols * block.instructions * issue_s
    blocks_s = math.ceil(rows / (together * sms)) * waiting_s + math.ceil(rows / sms) * own_s
    exponent = _OVERLAP[block.passes]
    return float((moving_s**exponent + blocks_s**exponent) ** (1.0 / exponent))
