"""Time of kernels that only move bytes: element-wise, norms, softmax, loss, embedding, optimizer.

Bytes over the share of the memory bandwidth that the access pattern reaches. Row-wise kernels read a row more than
once: again from memory, or from L2 when the rows that are worked on at one time fit there. Inputs of a kernel whose
tensors fit in L2 are still there from the kernel before. Fewer SMs than it takes to keep the memory busy (Little's law)
slow the stream down.
"""

from __future__ import annotations

import math

from sim.hardware.gpu import Gpu
from sim.hardware.rates import Rates
from sim.work import DTYPE_BYTES, Kernel

#: Class of access pattern by operation and direction; a direction that is not listed is as fast as "forward".
_PATTERN = {
    ("norm", "forward"): "elementwise", ("norm", "backward"): "norm_backward",
    ("softmax", "forward"): "elementwise", ("softmax", "backward"): "softmax",
    ("cross_entropy", "forward"): "softmax", ("cross_entropy", "backward"): "softmax",
    ("embedding", "forward"): "gather", ("embedding", "backward"): "reduction",
    ("elementwise", "forward"): "elementwise", ("optimizer", "forward"): "elementwise",
    ("reduction", "forward"): "reduction",
}
_EVICTION = 4  # how sharply a footprint beyond the cache is evicted; between streaming (1) and a full flush (infinite)
_NORM_THREADS = 128  # per row: PyTorch's vectorized_layer_norm_kernel launches blocks of 32 x 4 threads
_LOAD_BYTES = 16  # per thread and load; softmax gives a row one thread per load, at most 1024 (SoftMax.cu)
_MOST_THREADS = 1024
_WARP = 32
_PERSISTENT_COLS = 1024  # up to here a softmax row stays in registers (PersistentSoftmax.cuh)
_ON_CHIP_ROW_BYTES = 48 * 1024 - 256  # an aligned softmax row that fits in shared memory (SoftMax.cu, smem)


def pattern(kernel: Kernel) -> str:
    """Class of access pattern: element-wise streams, gathers, or sums over columns and scattered rows."""
    found = _PATTERN.get((kernel.op, kernel.variant)) or _PATTERN.get((kernel.op, "forward"))
    if found is None:
        raise ValueError(f"no time model for operation '{kernel.op}'")
    return found


def memory_time(kernel: Kernel, rates: Rates, gpu: Gpu, sms: int, bandwidth_bps: float) -> float:
    """Seconds: one start per launch, then the bytes that reach device memory at the pattern's rate."""
    share = rates.memory_share(pattern(kernel))
    if kernel.op == "softmax":
        share *= rates.memory_share("row_wise")
    reachable_bps = min(share * bandwidth_bps, sms * rates.sm_bandwidth_bps)
    return rates.start_s * kernel.launches + _device_bytes(kernel, rates, gpu) / reachable_bps


def _device_bytes(kernel: Kernel, rates: Rates, gpu: Gpu) -> float:
    """Bytes of device-memory traffic; those read from L2 counted at their relative cost."""
    cache_bytes = rates.l2_share * gpu.l2_bytes
    again, row_bytes, rows_per_sm = _rereads(kernel, rates)
    read_again = again * kernel.bytes / 2 * _cost(rows_per_sm * gpu.sms * row_bytes / cache_bytes, rates)
    # A gather reads rows of a large table, which no kernel has just written.
    produced = math.inf if pattern(kernel) == "gather" else kernel.bytes / max(1, kernel.launches) / cache_bytes
    inputs = kernel.bytes / 2 * _cost(produced, rates)
    return kernel.bytes / 2 + inputs + read_again


def _cost(footprint: float, rates: Rates) -> float:
    """Cost of a byte over one from memory, by the footprint of what is worked on over what L2 keeps of it."""
    missed = 1.0 - 1.0 / (1.0 + footprint**_EVICTION)
    return missed + (1.0 - missed) * rates.reread_cost


def _rereads(kernel: Kernel, rates: Rates) -> tuple[int, float, float]:
    """Times a row is read again, its bytes, and rows an SM works on at one time. Input = half of a forward's bytes."""
    if kernel.op not in ("norm", "softmax") or kernel.variant != "forward" or len(kernel.shape) != 2:
        return 0, 0.0, 0.0
    rows, cols = kernel.shape
    row_bytes = kernel.bytes / 2 / rows
    if kernel.op == "norm":
        return 1, row_bytes, rates.sm_threads / _NORM_THREADS
    width = DTYPE_BYTES[kernel.dtype]
    aligned = cols * width % _LOAD_BYTES == 0
    if cols <= _PERSISTENT_COLS or (aligned and cols * width <= _ON_CHIP_ROW_BYTES):
        return 0, 0.0, 0.0
    threads = min(_MOST_THREADS, max(_WARP, cols * width / _LOAD_BYTES))
    return 2, row_bytes, rates.sm_threads / threads
