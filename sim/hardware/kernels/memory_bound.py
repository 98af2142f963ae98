"""Time of kernels that only move bytes: element-wise, norms, softmax, loss, embedding, optimizer.

Bytes over the share of the memory bandwidth that the access pattern reaches. Row-wise kernels read a row more than
once: again from memory, or from L1 or L2 when the rows that are worked on at one time fit there. Part of a kernel's
inputs is still in L2 from the kernel before. Fewer SMs than it takes to keep the memory busy (Little's law) slow the
stream down. What a kernel's threads wait for beside their bytes stands in row_blocks.
"""

from __future__ import annotations

import math

from sim.hardware.gpu import Gpu
from sim.hardware.kernels.rates import Rates
from sim.hardware.kernels.row_blocks import block_of, joined_s, resident
from sim.work import DTYPE_BYTES, Kernel

#: Class of access pattern by operation and direction; a direction that is not listed is as fast as "forward".
_PATTERN = {
    ("norm", "forward"): "elementwise", ("norm", "backward"): "norm_backward",
    ("norm", "inputs"): "elementwise", ("norm", "weights"): "elementwise",
    ("softmax", "forward"): "elementwise", ("softmax", "backward"): "softmax",
    ("cross_entropy", "forward"): "softmax", ("cross_entropy", "backward"): "softmax",
    ("embedding", "forward"): "elementwise", ("embedding", "backward"): "reduction",
    ("elementwise", "forward"): "elementwise", ("optimizer", "forward"): "elementwise",
    ("reduction", "forward"): "reduction", ("rows", "forward"): "elementwise",
}
#: A norm that holds its row does so as a fused softmax does, and waits for the same reductions over it.
_HOLDING = ("persistent", "per_sm")
_HOLDING_NORM = {"forward": "elementwise", "backward": "softmax"}
#: How sharply what exceeds a cache is evicted, between streaming (1) and a full flush (infinite): rows in work, and the
#: inputs that a kernel finds of the one before (vidur's sums, just produced, ask for 1, neusight's old inputs for 4).
_EVICTION, _STREAMED = 4, 2
_LOAD_BYTES = 16  # the widest load of a thread
_ON_CHIP_ROW_BYTES = 48 * 1024 - 256  # an aligned softmax row that fits in shared memory (SoftMax.cu, smem)


def pattern(kernel: Kernel) -> str:
    """Class of access pattern: element-wise streams, softmax, or sums over columns and scattered rows."""
    if kernel.op == "norm" and kernel.kernel in _HOLDING:
        return _HOLDING_NORM[kernel.variant]
    found = _PATTERN.get((kernel.op, kernel.variant)) or _PATTERN.get((kernel.op, "forward"))
    if found is None:
        raise ValueError(f"no time model for operation '{kernel.op}'")
    return found


def memory_time(kernel: Kernel, rates: Rates, gpu: Gpu, sms: int, bandwidth_bps: float) -> float:
    """Seconds: one start per launch, then the bytes that reach device memory at the pattern's rate."""
    share = rates.memory_share(pattern(kernel))
    reachable_bps = min(share * bandwidth_bps, sms * rates.sm_bandwidth_bps)
    moving_s = _device_bytes(kernel, rates, gpu) / reachable_bps
    return rates.start_s * kernel.launches + joined_s(kernel, moving_s, rates, gpu, sms)


def _device_bytes(kernel: Kernel, rates: Rates, gpu: Gpu) -> float:
    """Bytes of device-memory traffic; those read from L2 counted at their relative cost."""
    again, per_sm_bytes = _rereads(kernel, rates)
    # Softmax finds nothing of a row in L1: it reads rows again that its block has just evicted.
    missed_l1 = _missed(per_sm_bytes / rates.l1_bytes) if kernel.op == "norm" else 1.0
    cache_bytes = rates.l2_share * gpu.l2_bytes
    missed_l2 = _missed(per_sm_bytes * gpu.sms / cache_bytes)
    read_again = again * kernel.bytes / 2 * missed_l1 * _cost(missed_l2, rates)
    # A lookup reads rows of a large table, which no kernel has just written.
    picks = (kernel.op, kernel.variant) == ("embedding", "forward")
    size_bytes = math.inf if picks else kernel.bytes / _together(kernel)
    return kernel.bytes / 2 * (1.0 + _cost(_missed(size_bytes / cache_bytes, _STREAMED), rates)) + read_again


def _together(kernel: Kernel) -> int:
    """Parts of its bytes that a kernel goes through one after another, each several times: launches that follow upon
    one another's output. Those of a pass over tensors meet other tensors each, and no tensor twice."""
    passes_once = kernel.kernel == "by_tensor" or (
        kernel.op == "optimizer" and kernel.variant in ("foreach", "fused"))
    return 1 if passes_once else max(1, kernel.launches)


def _missed(footprint: float, eviction: int = _EVICTION) -> float:
    """Share of accesses that miss a cache, by what is worked on over what the cache keeps of it."""
    return 1.0 - 1.0 / (1.0 + footprint**eviction)


def _cost(missed: float, rates: Rates) -> float:
    """Cost of a byte over one from memory, if L2 misses so many of them."""
    return missed + (1.0 - missed) * rates.reread_cost


def _rereads(kernel: Kernel, rates: Rates) -> tuple[int, float]:
    """Times a row is read again, and bytes of the rows an SM works on at one time. Half of a forward's are read."""
    block = block_of(kernel)
    if block is None or kernel.op not in ("norm", "softmax"):
        return 0, 0.0
    rows, cols = kernel.shape
    size_bytes = cols * DTYPE_BYTES[kernel.dtype]
    if kernel.op == "softmax" and size_bytes % _LOAD_BYTES == 0 and size_bytes <= _ON_CHIP_ROW_BYTES:
        return 0, 0.0
    _, together = resident(block, cols, rates)
    return (1 if kernel.op == "norm" else 2), together * kernel.bytes / 2 / rows
