"""Time of fused (flash) attention kernels. Eager attention comes as products and row-wise kernels instead."""

from __future__ import annotations

import math

import numpy as np

from sim.hardware.gemm import ProductTimes
from sim.hardware.rates import AttentionRates
from sim.work import Kernel

_DIAGONAL_ROWS = 128  # a causal kernel works in blocks of 64 or 128 keys (FlashAttention-2, section 3.3)
_BACKWARD_WORK = 2.5  # five products instead of two: the scores are computed again (FlashAttention, Dao et al. 2022)


def attention_work(kernel: Kernel) -> float:
    """FLOPs a fused kernel does: backward 2.5 times forward; causal, only blocks on or below the diagonal.

    Causal work of s queries on s keys is s·(s + 128)/2 of the s² scores: half, plus the rest of the diagonal blocks.
    """
    batch, heads, _, queries, keys, dim = kernel.shape
    full = queries * keys
    scores: float = full
    if kernel.causal:
        corner = min(queries, keys)
        scores = min(full, corner * (corner + _DIAGONAL_ROWS) / 2 + max(0, keys - queries) * queries)
    return 4.0 * batch * heads * scores * dim * (_BACKWARD_WORK if kernel.variant == "backward" else 1.0)


def attention_times(kernel: Kernel, rates: AttentionRates, sms: int, bandwidth_bps: float,
                    sms_total: int) -> ProductTimes:
    """Seconds of a fused attention kernel: arithmetic, memory, and one of its thread blocks.

    Each of batch · heads · ceil(s / `block_rows`) blocks takes one SM; backward puts its blocks over the keys, forward
    over the queries. A launch lasts as long as its work spread evenly over the SMs, or as its longest block (causal:
    twice the average one), joined by the exponent `balance`: the more blocks per SM, the less the longest one shows.
    """
    batch, heads, _, queries, keys, _ = kernel.shape
    rows, columns = (keys, queries) if kernel.variant == "backward" else (queries, keys)
    blocks = batch * heads * math.ceil(rows / rates.block_rows)
    work = attention_work(kernel)
    sm_rate = rates.flops_per_s / sms_total
    average_s = work / blocks / sm_rate
    unmasked = 4.0 * batch * heads * rows * columns * kernel.shape[-1]
    unmasked *= _BACKWARD_WORK if kernel.variant == "backward" else 1.0
    longest_s = rates.longest_share * unmasked / blocks / sm_rate
    even_s = max(work / sms / sm_rate, average_s)
    ratio = min(even_s, longest_s) / max(even_s, longest_s)
    seconds = max(even_s, longest_s) * float((1.0 + ratio**rates.balance) ** (1.0 / rates.balance))
    memory_s = kernel.bytes / (bandwidth_bps * rates.bandwidth_share)
    return ProductTimes(np.array([seconds]), np.array([memory_s]), np.array([average_s]))
