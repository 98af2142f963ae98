"""Time of fused attention of one query a sequence over its cached keys and values (flash decoding).

The heads that share keys and values are the rows of one thread block, which reads those once. Where sequences and heads
give fewer blocks than there are SMs, each is split along the keys where that is quicker, and the parts'
outputs are joined, by a second kernel or by the block that ends last.
Sources: flash-attn 2.7.3 csrc/flash_attn/flash_api.cpp (num_splits_heuristic, set_params_splitkv: blocks of 128 keys at
heads of 128, at most 128 parts; seqlenq_ngroups_swapped), Dao et al., Flash-Decoding, 2023. From memory.
"""

from __future__ import annotations

import math

import numpy as np

from sim.hardware.kernels.gemm import ProductTimes
from sim.hardware.kernels.rates import AttentionRates
from sim.work import Kernel

_ROWS = 64  # of queries that share keys and values, in one block
_KEYS = 128  # that a block works off at a time
_MOST_PARTS = 128
_HEAD = 128  # elements of a key that `step_s` is stated for


def decoding(kernel: Kernel) -> bool:
    """Whether an attention kernel has one query a sequence."""
    return kernel.variant == "forward" and kernel.shape[3] == 1


def decoding_times(kernel: Kernel, rates: AttentionRates, sms: int, bandwidth_bps: float) -> ProductTimes:
    """Seconds of such a kernel: its blocks' own waiting, memory, and one of its blocks.

    A block waits `wait_s` for its query, its first keys and its output, and `step_s` for each `_KEYS` keys: their load,
    both products and the softmax between, one after the other. Blocks on one SM hide each other's waiting but for
    `block_start_s` of each, and their loads together are bound by memory.
    """
    batch, heads, kv_heads, _, keys, dim = kernel.shape
    figures = rates.decoding
    tiles = batch * kv_heads * math.ceil(heads / kv_heads / _ROWS)
    steps = math.ceil(keys / _KEYS)
    most = min(steps, max(1, min(_MOST_PARTS, sms // tiles)))

    def waiting(parts: int) -> tuple[float, float]:
        block_s = figures.wait_s + math.ceil(steps / parts) * figures.step_s * dim / _HEAD
        joined_s = figures.join_s if parts > 1 else 0.0
        return max(block_s, tiles * parts / sms * figures.block_start_s) + joined_s, block_s

    waiting_s, block_s = min(waiting(1), waiting(most))
    memory_s = kernel.bytes / (bandwidth_bps * figures.bandwidth_share)
    return ProductTimes(np.array([waiting_s]), np.array([memory_s]), np.array([block_s]))
