"""Time of matrix products: tiles, waves, split K, alignment, memory.

A product of (m, n, k), `batch` times, is cut into output tiles. Each SM works off one tile at a time; a launch lasts
as many waves as tiles exceed the SMs that are free. A tile costs its main loop over K, a pipeline fill worth `fill_k`
of K, and the part of its output traffic that no product hides. The library picks the tile and the number of slices of K
(split K, whose partial sums cost traffic) that are fastest; so does this model. Not faster than memory allows.

Source: tile and wave quantisation, NVIDIA "Matrix Multiplication Background User's Guide" (DU-09799), sections 2 and 3;
tiles of CUTLASS's default list. Figures: `kernels.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.hardware.rates import GemmRates
from sim.work import DTYPE_BYTES, Kernel

_ACCUMULATOR_BYTES = 4  # partial sums of split K are written and read in fp32


def alignment_bytes(kernel: Kernel) -> int:
    """Largest power of two, up to 16 bytes, that divides the contiguous dimension of both inputs and of the output.

    Row-major tensors of a linear layer: forward (tn) x[m, k], w[n, k]; data gradient (nn) dy[m, k], w[k, n]; weight
    gradient (nt) dy[k, m], x[k, n]; the output is [m, n]. 16 bytes is what tensor-core loads need.
    """
    _, m, n, k = kernel.shape
    contiguous = (m, n) if kernel.variant == "nt" else (k, n)
    return math.gcd(16, *(int(size * DTYPE_BYTES[kernel.dtype]) for size in contiguous))


def gemm_times(kernels: Sequence[Kernel], rates: GemmRates, sms: int, bandwidth_bps: float,
               sms_total: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of each product, and of one thread block of the tile it runs with.

    Args:
        kernels: products of one dtype; `shape` = (batch, m, n, k), `bytes` = device-memory traffic.
        rates: figures of the GPU for this dtype.
        sms: SMs free for these kernels, of `sms_total` that `rates.flops_per_s` is stated for.
        bandwidth_bps: device-memory bandwidth left, bytes/s.
    """
    batch, m, n, k = (column[:, None] for column in np.array([kernel.shape for kernel in kernels], dtype=np.float64).T)
    tile_m, tile_n, tile_rate, split = _choices(rates)
    aligned = np.array([_alignment_rate(kernel, rates) for kernel in kernels])[:, None]
    input_bytes = np.array([DTYPE_BYTES[kernel.dtype] for kernel in kernels])[:, None] * batch * (m * k + k * n)
    total_bytes = np.array([kernel.bytes for kernel in kernels])[:, None]
    output_bytes = np.maximum(total_bytes - input_bytes, 0.0)
    reachable_bps = bandwidth_bps * rates.bandwidth_share

    blocks = batch * np.ceil(m / tile_m) * np.ceil(n / tile_n) * split
    whole, exact = np.ceil(blocks / sms), blocks / sms
    waves = np.maximum(1.0, rates.idle_wave_loss * whole + (1.0 - rates.idle_wave_loss) * exact)
    area = tile_m * tile_n
    products_s = 2.0 * area * (k / split + rates.fill_k) * sms_total / (tile_rate * aligned * rates.flops_per_s)
    stored_bytes = area * output_bytes / (batch * m * n * split)
    block_s = products_s + rates.exposed_output * stored_bytes * sms_total / reachable_bps
    partial_bytes = np.where(split > 1, _ACCUMULATOR_BYTES * (split + 1) * batch * m * n, 0.0)
    seconds = waves * block_s + partial_bytes / reachable_bps

    best = np.argmin(seconds, axis=1)
    row = np.arange(len(kernels))
    memory_s = total_bytes[:, 0] / reachable_bps
    start_s = rates.start_s * np.array([kernel.launches for kernel in kernels])
    return np.maximum(seconds[row, best], memory_s) + start_s, block_s[row, best]


def _choices(rates: GemmRates) -> tuple[NDArray[np.float64], ...]:
    """Every (tile rows, tile columns, relative rate, slices of K) the library may pick, as four rows."""
    choices = [(rows, cols, rate, split) for rows, cols, rate in rates.tiles for split in rates.splits]
    return tuple(np.array(choices, dtype=np.float64).T[:, None, :])


def _alignment_rate(kernel: Kernel, rates: GemmRates) -> float:
    return 1.0 if rates.alignment is None else rates.alignment[alignment_bytes(kernel)]
