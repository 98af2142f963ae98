"""Time of fused (flash) attention kernels. Eager attention comes as products and row-wise kernels instead."""

from __future__ import annotations

import math

from sim.hardware.rates import AttentionRates
from sim.work import Kernel

_BLOCK_ROWS = 128  # queries of one thread block (FlashAttention-2, section 3.3: 64 or 128)
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
        scores = min(full, corner * (corner + _BLOCK_ROWS) / 2 + max(0, keys - queries) * queries)
    return 4.0 * batch * heads * scores * dim * (_BACKWARD_WORK if kernel.variant == "backward" else 1.0)


def attention_time(kernel: Kernel, rates: AttentionRates, sms: int, bandwidth_bps: float,
                   sms_total: int) -> tuple[float, float]:
    """Seconds of a fused attention kernel, and of one of its thread blocks.

    Each of batch · heads · ceil(s / 128) blocks takes one SM; at the end of a launch SMs run dry, which costs
    `tail_blocks` average blocks. Backward puts its blocks over the keys, forward over the queries.
    """
    batch, heads, _, queries, keys, _ = kernel.shape
    blocks = batch * heads * math.ceil((keys if kernel.variant == "backward" else queries) / _BLOCK_ROWS)
    block_s = attention_work(kernel) / blocks * sms_total / rates.flops_per_s
    seconds = block_s * max(1.0, blocks / sms + rates.tail_blocks)
    memory_s = kernel.bytes / (bandwidth_bps * rates.bandwidth_share)
    return max(seconds, memory_s) + rates.start_s * kernel.launches, block_s
