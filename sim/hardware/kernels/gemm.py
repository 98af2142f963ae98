"""Time of matrix products: tiles, waves, split K, alignment, memory, clock.

A product of (m, n, k), `batch` times, is cut into output tiles. Each SM works off one tile at a time; a launch lasts
as many waves as tiles exceed the SMs. A tile costs its main loop over K at a rate that falls with the operand traffic
of small tiles, a pipeline fill, a fixed start and the part of its output traffic that no product hides. The library
picks tile and number of slices of K (split K, whose partial sums cost traffic) by a heuristic that takes one of the
nearly fastest: the expected time over those. Compute and memory overlap, imperfectly where they are about equal.
Batched fp32 products come in one kernel on some generations: whole tiles of rows, whole slices of K (`batched_slice`).
Experts' products are one batch whose members differ in rows (`_whole_tiles`).
Products by weights stored in fewer bits take no less than SMs take to expand these (`expanded`); those of a few rows
have no tiles to fill beside.

Source: tile and wave quantisation, NVIDIA "Matrix Multiplication Background User's Guide" (DU-09799), sections 2 and 3;
tiles of CUTLASS's default list. Figures: `kernels.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.hardware.kernels.rates import GemmRates
from sim.work import DTYPE_BYTES, Kernel

Array = NDArray[np.float64]

_ACCUMULATOR_BYTES = 4  # partial sums of split K are written and read in fp32
_LARGEST = (256.0, 128.0)  # the tile `flops_per_s` is stated for
#: Rows up to which a product that reads weights as stored fills up no tile of many rows: one instruction of the tensor
#: cores (m16n8k16), which tinygemm and Marlin are built on; one row is a gemv.
_FEW_ROWS = 16
#: Names of kernels that expand stored weights: tinygemm and its like, and Marlin.
_EXPANDING = ("expanding", "marlin")
#: Rows of the lowest tile: products of no more go through their weights once.
_ONE_TILE = 64


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products of one dtype as columns: sizes, bytes of both inputs, bytes in all, rate by alignment; whether
    they expand stored weights, whether a batch's members differ in rows, and whether a single row is a sum over the
    weights as they stream by (`Kernel.kernel`)."""

    batch: Array
    m: Array
    n: Array
    k: Array
    input_bytes: Array
    total_bytes: Array
    aligned: Array
    expanding: NDArray[np.bool_]
    marlin: NDArray[np.bool_]
    uneven: NDArray[np.bool_]
    streamed: NDArray[np.bool_]

    @property
    def flops(self) -> Array:
        """FLOPs of each, 2 per multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k

    def take(self, rows: NDArray[np.intp]) -> Products:
        """The products of some rows."""
        return Products(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """Seconds of each product at the stated clock: arithmetic, memory, and one thread block of its usual tile."""

    compute_s: Array
    memory_s: Array
    block_s: Array


def alignment_bytes(kernel: Kernel) -> int:
    """Largest power of two, up to 16 bytes, that divides the contiguous dimension of both inputs and of the output.

    Row-major tensors of a linear layer: forward (tn) x[m, k], w[n, k]; data gradient (nn) dy[m, k], w[k, n]; weight
    gradient (nt) dy[k, m], x[k, n]; the output is [m, n]. 16 bytes is what tensor-core loads need. Kernels in 8 bits
    and fewer take nothing else, so frameworks pad what they hand them (torch._scaled_mm: sizes divisible by 16;
    TransformerEngine, vLLM's and TensorRT-LLM's experts likewise; recalled).
    """
    if DTYPE_BYTES[kernel.dtype] <= 1:
        return 16
    _, m, n, k = kernel.shape
    contiguous = (m, n) if kernel.variant == "nt" else (k, n)
    return math.gcd(16, *(int(size * DTYPE_BYTES[kernel.dtype]) for size in contiguous))


def as_products(kernels: Sequence[Kernel], rates: GemmRates) -> Products:
    """Kernels of one dtype (`shape` = (batch, m, n, k), `bytes` = device-memory traffic) as columns."""
    batch, m, n, k = np.array([kernel.shape for kernel in kernels], dtype=np.float64).reshape(-1, 4).T
    width = np.array([DTYPE_BYTES[kernel.dtype] for kernel in kernels])
    return Products(batch, m, n, k, width * batch * (m * k + k * n),
                    np.array([kernel.bytes for kernel in kernels]),
                    np.array([_rate(kernel, rates) for kernel in kernels]),
                    np.array([kernel.kernel in _EXPANDING for kernel in kernels]),
                    np.array([kernel.kernel == "marlin" for kernel in kernels]),
                    np.array([kernel.kernel == "uneven" for kernel in kernels]),
                    np.array([kernel.kernel == "streamed" or (kernel.kernel in _EXPANDING and kernel.shape[1] == 1)
                              for kernel in kernels]))


def product_times(products: Products, rates: GemmRates, sms: int, sms_total: int, bandwidth_bps: float,
                  bandwidth_total_bps: float | None = None) -> ProductTimes:
    """Seconds of each product when `sms` of `sms_total` SMs and `bandwidth_bps` bytes/s are left to it.

    The library picks the tile for the whole GPU, all its SMs and `bandwidth_total_bps` (what is left, if not stated):
    it does not know what collectives hold, so taking something away never turns its choice, nor makes it faster. With
    SMs held the tiles need more waves, of which the last is wasted nearly whole; a persistent kernel, which starts as
    many blocks as there are SMs and deals its tiles out among them beforehand, needs a second pass.
    """
    tile_m, tile_n, split = (column[None, :] for column in _choices(rates))
    batch, m, n, k = (column[:, None] for column in (products.batch, products.m, products.n, products.k))
    reachable_bps = bandwidth_bps * rates.bandwidth_share
    whole_bps = (bandwidth_total_bps or bandwidth_bps) * rates.bandwidth_share
    high, wide = _whole_tiles(m / tile_m, products.uneven[:, None]), np.ceil(n / tile_n)
    blocks = batch * high * wide * split
    filled = _filled(n / tile_n, wide, rates.partial_tile)
    fixed = (batch > 1) & (rates.batched_tile is not None)
    filled = np.where(fixed, filled, filled * _filled(m / tile_m, high, rates.partial_tile))
    area = tile_m * tile_n
    output_bytes = np.maximum(products.total_bytes - products.input_bytes, 0.0)[:, None]
    rate = _tile_rate(tile_m, tile_n, rates.operand_cost) * products.aligned[:, None] * rates.flops_per_s / sms_total
    stored_bytes = area * output_bytes / (batch * m * n * split)
    sliced = np.ceil(k / split / rates.batched_slice) * rates.batched_slice
    depth = np.where(batch > 1, np.maximum(k / split, sliced), k / split)
    loop_s = filled * 2.0 * area * (depth + rates.fill_k) / rate + rates.block_start_s
    exposed_bytes = filled * rates.exposed_output * stored_bytes * sms_total
    partial_bytes = np.where(split > 1, _ACCUMULATOR_BYTES * (split + 1) * batch * m * n, 0.0)
    waves = _waves(blocks, sms_total, rates.idle_wave_loss)
    expected = waves * (loop_s + exposed_bytes / whole_bps) + partial_bytes / whole_bps
    rows, columns = rates.batched_tile or (0, 0)
    weights = _weights(np.where(fixed & ((tile_m != rows) | (tile_n != columns)), np.inf, expected), rates.spread)

    block_s, partial_s = loop_s + exposed_bytes / reachable_bps, partial_bytes / reachable_bps
    alone = waves * block_s + partial_s
    if sms < sms_total:
        if rates.persistent:
            held = alone * np.ceil(np.minimum(blocks, sms_total) / sms)
        else:
            held = _waves(blocks, sms, rates.held_wave_loss) * block_s + partial_s
        alone = np.maximum(alone, held)
    tiled_s, expanding_s = (weights * alone).sum(axis=1), _expanding_s(products, rates) * sms_total / sms
    few = products.expanding & (products.m <= _FEW_ROWS)
    return ProductTimes(compute_s=np.where(few, expanding_s, np.maximum(tiled_s, expanding_s)),
                        memory_s=products.total_bytes / bandwidth_bps / _memory_share(products, rates),
                        block_s=np.minimum((weights * block_s).sum(axis=1), np.where(few, expanding_s, np.inf)))


def _memory_share(products: Products, rates: GemmRates) -> Array:
    """Share of the memory's bandwidth that each product reaches."""
    found: Array = np.where(products.m <= _ONE_TILE, rates.few_rows_share, rates.bandwidth_share)
    return np.where(products.streamed, rates.streamed_share, found)


def _expanding_s(products: Products, rates: GemmRates) -> Array:
    """Seconds in which all SMs expand the stored weights of each product once, for all its rows; 0 of other products.
    Tiles of rows that expand them again hide that behind their multiplications (Marlin, arXiv 2408.11743, recalled)."""
    per_s = np.where(products.marlin, rates.marlin_per_s, rates.expanded_per_s)
    found: Array = products.expanding * products.batch * products.n * products.k / per_s
    return found


def overlapped(first_s: Array, second_s: Array, exponent: float) -> Array:
    """Time of two kinds of work in one kernel: the longer one, plus what cannot hide when they are about equal."""
    longer, shorter = np.maximum(first_s, second_s), np.minimum(first_s, second_s)
    ratio = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
    total: Array = longer * (1.0 + ratio**exponent) ** (1.0 / exponent)
    return total


def _choices(rates: GemmRates) -> Array:
    """Every (tile rows, tile columns, slices of K) the library may pick, as three rows."""
    return np.array([(rows, cols, split) for rows, cols in rates.tiles for split in rates.splits], dtype=np.float64).T


def _tile_rate(tile_m: Array, tile_n: Array, operand_cost: float) -> Array:
    """Rate of a tile's main loop: per multiply-add a tile loads 1/rows + 1/columns operands from L2."""
    largest = 1.0 + operand_cost * (128 / _LARGEST[0] + 128 / _LARGEST[1])
    return np.minimum(1.0, largest / (1.0 + operand_cost * (128 / tile_m + 128 / tile_n)))


def _whole_tiles(tiles: Array, uneven: NDArray[np.bool_]) -> Array:
    """Tiles that cover as many rows as `tiles` are. Members of a batch whose rows differ (experts, by what a router
    gives them) end anywhere in their last tile, so half of one is empty on average; each has one at least."""
    found: Array = np.where(uneven, np.maximum(1.0, tiles + 0.5), np.ceil(tiles))
    return found


def _filled(tiles: Array, whole: Array, partial: float) -> Array:
    """Work of an average tile over a full one, of `tiles` in `whole` ones: an edge tile costs `partial` of what it
    lacks."""
    return partial + (1.0 - partial) * tiles / whole


def _waves(blocks: Array, sms: int, idle_loss: float) -> Array:
    exact = blocks / sms
    return np.maximum(1.0, idle_loss * np.ceil(exact) + (1.0 - idle_loss) * exact)


def _weights(seconds: Array, spread: float) -> Array:
    """Chance of each choice: falls by e with every `spread` that it is slower than the fastest, in relative terms."""
    slower = seconds / seconds.min(axis=1, keepdims=True) - 1.0
    chances = np.exp(-slower / spread) if spread > 0 else (slower == 0).astype(np.float64)
    total: Array = chances / chances.sum(axis=1, keepdims=True)
    return total


def _rate(kernel: Kernel, rates: GemmRates) -> float:
    """What alignment, and sums outside the tensor cores in products of gradients, leave of the rate."""
    return _alignment_rate(kernel, rates) * (1.0 if kernel.variant == "tn" else rates.gradient_rate)


def _alignment_rate(kernel: Kernel, rates: GemmRates) -> float:
    if rates.alignment is None:
        return 1.0
    size_bytes = alignment_bytes(kernel)
    alone = rates.alignment[size_bytes]
    return min(alone, rates.batched_unaligned) if size_bytes < 16 and kernel.shape[0] > 1 else alone
