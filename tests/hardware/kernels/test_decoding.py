"""Attention of one query a sequence over its cache: blocks' waiting, their parts along the keys, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.hardware import Device, gpu
from sim.hardware.kernels.attention import attention_times
from sim.hardware.kernels.operators import attention_kernel
from sim.hardware.kernels.rates import AttentionRates, DecodingRates
from sim.work import Kernel

#: Blocks wait 4 us and 2 us for each 128 keys, parts are joined in 3 us; of an SM a block takes 1 us where many follow
#: each other.
WAITING = AttentionRates(flops_per_s=100e12, block_rows=128, longest_share=1.0, balance=2.0, heads_first=False,
                         start_s=0.0, overlap=3.0, bandwidth_share=1.0, flop_j=0.0,
                         decoding=DecodingRates(wait_s=4e-6, step_s=2e-6, join_s=3e-6, block_start_s=1e-6,
                                                bandwidth_share=0.8))
WIDE_BPS = 1e18


def one_query(batch: int, heads: int, kv_heads: int, keys: int, dim: int = 128) -> Kernel:
    return attention_kernel(batch, heads, kv_heads, 1, keys, dim, "bf16", causal=False)


def waiting_s(kernel: Kernel, rates: AttentionRates = WAITING, sms: int = 100) -> float:
    return float(attention_times(kernel, rates, sms, WIDE_BPS, sms).compute_s[0])


def test_a_block_waits_for_its_start_and_for_its_keys() -> None:
    assert waiting_s(one_query(1, 60, 60, 100)) == pytest.approx(6e-6)
    assert waiting_s(one_query(1, 60, 60, 1000)) == pytest.approx(4e-6 + 8 * 2e-6)
    assert waiting_s(one_query(1, 60, 60, 1000, dim=64)) == pytest.approx(4e-6 + 8 * 1e-6)


def test_few_sequences_are_split_along_the_keys_and_the_parts_are_joined() -> None:
    # 4 blocks on 100 SMs: 25 parts of 4 x 128 keys, and joined
    assert waiting_s(one_query(1, 4, 4, 12800)) == pytest.approx(4e-6 + 4 * 2e-6 + 3e-6)
    # no more parts than pieces of 128 keys, no more than 128; none where joining takes longer than is saved
    assert waiting_s(one_query(1, 4, 4, 384)) == pytest.approx(4e-6 + 2e-6 + 3e-6)
    assert waiting_s(one_query(1, 4, 4, 256)) == pytest.approx(4e-6 + 2 * 2e-6)
    assert waiting_s(one_query(1, 1, 1, 256 * 128), sms=1000) == pytest.approx(4e-6 + 2 * 2e-6 + 3e-6)


def test_fewer_sms_are_never_faster() -> None:
    kernel = one_query(3, 16, 8, 700)
    taken = [waiting_s(kernel, sms=sms) for sms in (200, 132, 100, 60, 47, 24, 10)]
    assert taken == sorted(taken)


def test_heads_that_share_keys_are_one_block() -> None:
    assert waiting_s(one_query(64, 32, 32, 100)) == pytest.approx(64 * 32 / 100 * 1e-6)
    assert waiting_s(one_query(64, 32, 8, 100)) == pytest.approx(6e-6)
    # of 128 queries a block holds 64
    assert waiting_s(one_query(1000, 128, 1, 100)) == pytest.approx(2000 / 100 * 1e-6)


def test_many_sequences_are_bound_by_memory() -> None:
    kernel = one_query(64, 32, 32, 4096)
    times = attention_times(kernel, WAITING, 100, 2e12, 100)
    assert times.memory_s[0] == pytest.approx(kernel.bytes / 2e12 / 0.8)
    assert times.memory_s[0] > 10 * times.compute_s[0]


def test_a_cache_of_fewer_bytes_is_read_faster_and_waits_as_long() -> None:
    device = Device(gpu("h100-80g-sxm"))
    long, short = one_query(64, 32, 32, 4096), one_query(1, 32, 32, 128)
    for kernel, ratio in ((long, 0.5), (short, 1.0)):
        taken, less = device.times([kernel, replace(kernel, bytes=kernel.bytes / 2)])
        assert less / taken == pytest.approx(ratio, abs=0.03)


@pytest.mark.parametrize("name", ["v100-32g-sxm", "rtx3090", "mi300x"])
def test_families_without_figures_of_their_own_take_the_shared_ones(name: str) -> None:
    taken_us = 1e6 * float(Device(gpu(name)).times([one_query(1, 8, 8, 128)])[0])
    assert 6 < taken_us < 14


def test_what_it_rests_on_is_its_own() -> None:
    for card, own in (("h100-80g-sxm", True), ("l40s", True), ("v100-32g-sxm", False)):
        basis = Device(gpu(card)).basis(one_query(1, 8, 8, 128))
        assert basis.own_data is own and ("aic_attention" in basis.source) is own
    assert "azure" in Device(gpu("h100-80g-sxm")).basis(attention_kernel(1, 8, 8, 128, 128, 128, "bf16")).source
