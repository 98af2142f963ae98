"""Time of fused (flash) attention kernels. Eager attention comes as products and row-wise kernels instead."""

from __future__ import annotations

import heapq
import math
from functools import lru_cache

import numpy as np

from sim.hardware.kernels.decoding import decoding, decoding_times
from sim.hardware.kernels.gemm import ProductTimes
from sim.hardware.kernels.rates import AttentionRates
from sim.work import Kernel

_DIAGONAL_ROWS = 128  # a causal kernel works in blocks of 64 or 128 keys (FlashAttention-2, section 3.3)
_BACKWARD_WORK = 2.5  # five products instead of two: the scores are computed again (FlashAttention, Dao et al. 2022)

_ROUNDS = 8  # of blocks on every SM that are dealt one by one
_PART_BYTES = 4  # of an element of a part, in fp32
_BLOCK_START = 0.5  # loads and stores of a block's own keys and values, over the work of one block of queries on them


def attention_work(kernel: Kernel) -> float:
    """FLOPs a fused kernel does: backward 2.5 times forward; causal, only blocks on or below the diagonal.

    Causal work of s queries on s keys is s·(s + 128)/2 of the s² scores: half, plus the rest of the diagonal blocks.
    """
    batch, heads, _, queries, keys, dim = kernel.shape
    scores = _scores(queries, keys, kernel.causal)
    return 4.0 * batch * heads * scores * dim * (_BACKWARD_WORK if kernel.variant == "backward" else 1.0)


def _scores(queries: int, keys: int, causal: bool) -> float:
    full = queries * keys
    if not causal:
        return full
    corner = min(queries, keys)
    return min(full, corner * (corner + _DIAGONAL_ROWS) / 2 + max(0, keys - queries) * queries)


def _filled(length: int, tile: int) -> int:
    return math.ceil(length / tile) * tile


def gradient_parts(heads: int, sms: int) -> int:
    """Parts in which a backward of fixed order adds up the queries' gradient, each in fp32 in a tensor of its own.

    Args:
        heads: sequences times heads; sms: of the whole GPU.

    Source: flash-attn 2.7.3 csrc/flash_attn/flash_api.cpp, mha_bwd (nsplits).
    """
    return math.ceil(sms / heads)


def attention_times(kernel: Kernel, rates: AttentionRates, sms: int, bandwidth_bps: float,
                    sms_total: int) -> ProductTimes:
    """Seconds of a fused attention kernel: arithmetic, memory, and one of its thread blocks.

    Each of batch · heads · ceil(s / `block_rows`) blocks takes one SM; backward puts its blocks over the keys, forward
    over the queries. Backward fills an SM with one block, so a launch lasts until the last of them ends (`_dealt`).
    Forward, of which an SM holds several, lasts as long as its work spread evenly over the SMs, or as its longest block
    (causal: twice the average one), joined by the exponent `balance`: the more blocks per SM, the less it shows. Each
    of its blocks takes `block_start_s` of an SM beside its products: it waits for its first queries and keys, and for
    its output to be written, so short sequences run slower. One query a sequence: `decoding.py`.
    A backward of fixed order (`split`) has `gradient_parts` blocks a head, each of which takes every so manieth one of
    keys; the parts' tensors are zeroed before and summed behind (flash_bwd_launch_template.h, convert_dQ).
    """
    batch, heads, _, queries, keys, dim = kernel.shape
    backward = kernel.variant == "backward"
    parts = gradient_parts(batch * heads, sms_total) if rates.split else 0
    rows, columns = (keys, queries) if backward else (queries, keys)
    each = math.ceil(rows / rates.block_rows)
    blocks = batch * heads * each
    work = attention_work(kernel)
    sm_rate = rates.flops_per_s / sms_total
    average_s = work / blocks / sm_rate
    memory_s = kernel.bytes / (bandwidth_bps * rates.bandwidth_share)
    if not backward and decoding(kernel):
        return decoding_times(kernel, rates, sms, bandwidth_bps)
    if backward:
        seconds = average_s * _dealt(batch * heads, each, kernel.causal, sms, rates.heads_first, parts)
        seconds += 2 * parts * batch * heads * queries * dim * _PART_BYTES / (bandwidth_bps * rates.bandwidth_share)
    else:
        # tiles of keys and of queries are multiplied as a whole, whatever stands in them
        rows, columns = _filled(rows, rates.block_rows), _filled(columns, _DIAGONAL_ROWS)
        unmasked = 4.0 * batch * heads * rows * columns * dim
        average_s = unmasked * _scores(rows, columns, kernel.causal) / (rows * columns) / blocks / sm_rate
        average_s += rates.block_start_s
        longest_s = rates.longest_share * unmasked / blocks / sm_rate + rates.block_start_s
        even_s = max(blocks / sms, 1.0) * average_s
        ratio = min(even_s, longest_s) / max(even_s, longest_s)
        seconds = max(even_s, longest_s) * float((1.0 + ratio**rates.balance) ** (1.0 / rates.balance))
    return ProductTimes(np.array([seconds]), np.array([memory_s]), np.array([average_s]))


@lru_cache(maxsize=4096)
def _dealt(heads: int, each: int, causal: bool, sms: int, heads_first: bool, parts: int = 0) -> float:
    """Time over an average block's work until `sms` SMs have worked off `heads` times `each` blocks.

    An SM takes the next block when its last one ends, in order of the grid: every block of a head before the next
    head, or (`heads_first`) every head before the next block. Of a causal mask the first block of keys is seen by all
    blocks of queries, the last by one. Many heads: all but the last few rounds go by evenly. With `parts` of a head an
    SM takes one of them as a whole: every so manieth of its blocks.
    """
    average = (each + 1) / 2 if causal else each
    sizes = [_BLOCK_START + (each - place if causal else each) for place in range(each)]
    if parts:
        sizes = [sum(sizes[part::parts]) for part in range(min(parts, each))]
        each = len(sizes)
    kept = min(heads, math.ceil(_ROUNDS * sms / each))
    order = [size for size in sizes for _ in range(kept)] if heads_first else sizes * kept
    ends = [0.0] * min(sms, len(order))
    for size in order:
        heapq.heapreplace(ends, ends[0] + size)
    return (max(ends) + (heads - kept) * sum(sizes) / sms) / average
