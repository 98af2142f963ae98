"""Kernel time models against hand-computed waves, work and traffic."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sim.hardware.device import Device
from sim.hardware.gpu import gpu, gpu_names
from sim.hardware.kernels.attention import attention_times, attention_work, gradient_parts
from sim.hardware.kernels.gemm import alignment_bytes, as_products, overlapped, product_times
from sim.hardware.kernels.operators import product_kernel
from sim.hardware.kernels.rates import AttentionRates, GemmRates, Rates, family_figures, parted_sms
from sim.hardware.kernels.row_blocks import joined_s
from sim.work import DTYPE_BYTES, Kernel

#: 100 SMs of 1 TFLOP/s, one 128 x 128 tile, nothing lost anywhere.
PLAIN = GemmRates(flops_per_s=100e12, fill_k=0, batched_slice=1, batched_tile=None, block_start_s=0.0,
                  operand_cost=0.0, exposed_output=0.0, start_s=0.0,
                  tiles=((128, 128),), splits=(1,), idle_wave_loss=1.0, held_wave_loss=1.0, persistent=False,
                  partial_tile=1.0,
                  spread=0.0, overlap=np.inf, bandwidth_share=1.0, streamed_share=1.0, few_rows_share=1.0,
                  alignment={16: 1.0, 8: 0.5, 4: 0.5, 2: 0.25, 1: 0.25}, batched_unaligned=0.1, flop_j=1e-12,
                  expanded_per_s=1e12, marlin_per_s=1.5e12)
WIDE_BPS = 1e18


def product(m: int, n: int, k: int, batch: int = 1, variant: str = "tn", output_bytes: float = 2.0) -> Kernel:
    size_bytes = batch * (2 * (m * k + k * n) + output_bytes * m * n)
    return Kernel("gemm", "bf16", (batch, m, n, k), variant, 2.0 * batch * m * n * k, size_bytes, "gemm")


def attention(variant: str, causal: bool, heads: int = 16, queries: int = 1024, keys: int = 1024,
              kernel: str = "flash2") -> Kernel:
    return Kernel("attention", "bf16", (1, heads, heads, queries, keys, 128), variant, 1.0, 1.0, "attention",
                  causal=causal, kernel=kernel)


def seconds(kernel: Kernel, rates: GemmRates = PLAIN, sms: int = 100, bandwidth_bps: float = WIDE_BPS) -> float:
    times = product_times(as_products([kernel], rates), rates, sms, 100, bandwidth_bps)
    return float(overlapped(times.compute_s, times.memory_s, rates.overlap)[0])


def test_a_tile_costs_its_products_over_one_sm() -> None:
    # 128·128·1024 multiply-adds on 1 TFLOP/s: 2·2^24 / 1e12 s.
    assert seconds(product(128, 128, 1024)) == pytest.approx(2**25 / 1e12)


def test_a_few_rows_by_stored_weights_wait_for_their_expansion_and_not_for_a_tile() -> None:
    # 8192·8192 weights at 1e12 a second: 67 us; as a tile of 128 rows the row would take 64 tiles' time, 2.1 ms.
    one = product(1, 8192, 8192)
    assert seconds(one) == pytest.approx(2 * 128 * 128 * 8192 / 1e12)
    assert seconds(replace(one, kernel="expanding")) == pytest.approx(8192**2 / 1e12)
    assert seconds(replace(one, kernel="expanding"), sms=50) == pytest.approx(2 * 8192**2 / 1e12)
    # int4 with its scales is read at 50 GB/s in 0.7 ms, which is then what it takes
    stored = replace(one, kernel="expanding", bytes=8192**2 * 0.52)
    assert seconds(stored, bandwidth_bps=50e9) == pytest.approx(8192**2 * 0.52 / 50e9)


def test_more_rows_by_stored_weights_take_no_less_than_few() -> None:
    """On a B200 tensor cores outrun the expansion: 17 rows took a tenth less than 16."""
    b200 = Device(gpu("b200"))
    rows = [replace(product(rows, 14336, 4096), kernel="expanding", bytes=14336 * 4096 * 0.52)
            for rows in (1, 16, 17, 64, 256, 4096)]
    taken = b200.times(rows)
    assert all(more >= less * (1 - 1e-9) for less, more in pairwise(taken))
    # where tiles take longer they are all there is to it
    assert seconds(replace(product(1024, 8192, 8192), kernel="expanding")) == seconds(product(1024, 8192, 8192))


def test_marlin_expands_weights_sooner() -> None:
    one = replace(product(8, 8192, 8192), bytes=0.0)
    tiny, marlin = (seconds(replace(one, kernel=name), bandwidth_bps=WIDE_BPS) for name in ("expanding", "marlin"))
    assert tiny == pytest.approx(1.5 * marlin)


def test_a_graph_starts_products_sooner_than_a_stream() -> None:
    small = product_kernel(8, 128, 128, 1, "bf16")
    for name, sooner_s in (("h100-80g-sxm", 2.1e-6), ("b200", 1.2e-6), ("a100-80g-sxm", 0.5e-6), ("l40s", 0.0)):
        stream, graph = (Device(gpu(name), graphs=graphs).times([small])[0] for graphs in (False, True))
        assert stream - graph == pytest.approx(sooner_s, abs=1e-9), name
    like = Device(gpu("b200"), graphs=True).like(gpu("h100-80g-sxm"))
    assert like.times([small])[0] == Device(gpu("h100-80g-sxm"), graphs=True).times([small])[0]


def test_a_streamed_row_reaches_what_a_pass_over_memory_does() -> None:
    rates = replace(PLAIN, bandwidth_share=0.9, streamed_share=0.85, few_rows_share=0.8)
    one = product(1, 8192, 8192)
    for row, share in ((one, 0.8), (replace(one, kernel="streamed"), 0.85), (replace(one, kernel="expanding"), 0.85)):
        assert seconds(row, rates, bandwidth_bps=50e9) == pytest.approx(one.bytes / share / 50e9, rel=0.03)
    for several, share in ((replace(product(2, 8192, 8192), kernel="expanding"), 0.8), (product(64, 8192, 8192), 0.8),
                           (product(65, 8192, 8192), 0.9)):
        assert seconds(several, rates, bandwidth_bps=50e9) == pytest.approx(several.bytes / share / 50e9, rel=0.03)


def test_a_halved_tensor_peak_does_not_slow_a_row_by_stored_weights() -> None:
    # A GeForce card sums in fp32 at half its chip's rate, and expands weights at the whole one.
    ga102 = gpu("rtx3090")
    row = replace(product(1, 8192, 8192), kernel="expanding", bytes=8192**2 * 0.52)
    whole = Device(replace(ga102, tflops={name: 2 * peak for name, peak in ga102.tflops.items()}))
    assert Device(ga102).times([row]) == pytest.approx(whole.times([row]), rel=0.03)
    (tile, alone), (tile_whole, _) = (one.times([replace(row, kernel=""), row]) for one in (Device(ga102), whole))
    assert tile > 1.4 * tile_whole and tile > 1.8 * alone  # filled up to 64 rows it would be


def test_waves_are_whole() -> None:
    # 10 x 10 tiles fill 100 SMs once; one more row of 10 tiles costs a second wave, as do 20 x 10.
    one = seconds(product(1280, 1280, 512))
    assert one == pytest.approx(2 * 128 * 128 * 512 / 1e12)
    assert seconds(product(1408, 1280, 512)) == pytest.approx(2 * one)
    assert seconds(product(2560, 1280, 512)) == pytest.approx(2 * one)
    assert seconds(product(2561, 1280, 512)) == pytest.approx(3 * one)


def test_half_of_the_idle_wave_is_lost_when_the_figure_says_so() -> None:
    # 110 tiles: 2 whole waves, 1.1 of work; half of the difference is lost: 1.55.
    rates = replace(PLAIN, idle_wave_loss=0.5)
    assert seconds(product(1408, 1280, 512), rates) == pytest.approx(1.55 * 2 * 128 * 128 * 512 / 1e12)


def test_an_edge_tile_costs_a_share_of_what_it_lacks() -> None:
    # 320 columns: 3 tiles of 128 hold 2.5; half of the missing half tile is paid: 2.75 of 3.
    rates = replace(PLAIN, partial_tile=0.5)
    assert seconds(product(128, 320, 512), rates) == pytest.approx(2.75 / 3 * 2 * 128 * 128 * 512 / 1e12)


def test_a_product_of_one_wave_takes_two_beside_held_sms() -> None:
    # 100 tiles, 82 SMs left: a second wave. With 0.8 of it lost: 0.8 · 2 + 0.2 · 100 / 82.
    full = product(1280, 1280, 512)
    assert seconds(full, sms=82) == pytest.approx(2 * seconds(full))
    partly = replace(PLAIN, held_wave_loss=0.8)
    assert seconds(full, partly, sms=82) == pytest.approx((0.8 * 2 + 0.2 * 100 / 82) * seconds(full))


def test_a_persistent_product_takes_a_second_pass_beside_held_sms() -> None:
    # 1,000 tiles in 100 blocks of 10: with 82 SMs left 18 blocks run after the others; 50 tiles fit beside anything.
    persistent = replace(PLAIN, persistent=True)
    many, few = product(12800, 1280, 512), product(640, 1280, 512)
    assert seconds(many, persistent, sms=82) == pytest.approx(2 * seconds(many))
    assert seconds(many, sms=82) == pytest.approx(1.3 * seconds(many))
    assert seconds(few, persistent, sms=82) == pytest.approx(seconds(few))


def test_the_tile_is_picked_for_the_whole_gpu() -> None:
    # 50 tiles of 256 x 128 or 100 of 128 x 128: alone one wave of small tiles is best, and stays the choice with SMs
    # held, though 50 large tiles would still fit one wave.
    rates = replace(PLAIN, tiles=((256, 128), (128, 128)))
    kernel = product(1280, 1280, 512)
    assert seconds(kernel, rates, sms=60) == pytest.approx(2 * seconds(kernel))


def test_batched_products_may_come_in_whole_tiles_and_slices() -> None:
    # K of 136 in slices of 128: two. 130 rows in tiles of 128: two whole ones; columns pay for what they fill.
    rates = replace(PLAIN, tiles=((128, 128), (64, 64)), batched_slice=128, batched_tile=(128, 128),
                    partial_tile=0.0)
    whole = 2 * 128 * 128 * 128 / 1e12
    assert seconds(product(128, 128, 128, batch=2), rates) == pytest.approx(whole)
    assert seconds(product(128, 128, 136, batch=2), rates) == pytest.approx(2 * whole)
    assert seconds(product(130, 128, 128, batch=50), rates) == pytest.approx(whole)  # 100 tiles on 100 SMs
    assert seconds(product(128, 64, 128, batch=2), rates) == pytest.approx(whole / 2)
    assert seconds(product(64, 64, 136), rates) == pytest.approx(2 * 64 * 64 * 136 / 1e12)  # one: any tile and K


def test_batches_share_waves() -> None:
    assert seconds(product(128, 128, 512, batch=100)) == pytest.approx(seconds(product(1280, 1280, 512)))


def test_members_of_a_batch_whose_rows_differ_end_in_the_middle_of_a_tile() -> None:
    """Of 128 rows a tile: 4 tiles each where all have 512 rows, 4.5 on average where they have about as many; one at
    least."""
    def more(rows: int) -> float:
        even = product(rows, 128, 1024, batch=400)
        return seconds(replace(even, kernel="uneven")) / seconds(even)
    assert more(512) == pytest.approx(4.5 / 4)
    assert more(64) == more(1) == 1.0


def test_a_tile_pays_its_start_its_fill_and_its_exposed_output() -> None:
    # Fill worth 128 of K on top of 512; half of 128·128·8 bytes at 1/100 of 1 TB/s; 1 us to start.
    rates = replace(PLAIN, fill_k=128, exposed_output=0.5, block_start_s=1e-6)
    expected = 2 * 128 * 128 * (512 + 128) / 1e12 + 0.5 * 128 * 128 * 8 / 1e10 + 1e-6
    assert seconds(product(1280, 1280, 512, output_bytes=8.0), rates, bandwidth_bps=1e12) == pytest.approx(expected)


def test_small_tiles_pay_for_their_operands() -> None:
    # 0.1 of the products at 128 rows and 128 columns each: 1.2 against 1.15 of the largest tile, 256 x 128.
    rates = replace(PLAIN, operand_cost=0.1)
    assert seconds(product(1280, 1280, 512), rates) == pytest.approx(1.2 / 1.15 * seconds(product(1280, 1280, 512)))


def test_split_k_fills_idle_sms() -> None:
    # One tile, K of 8192: 8 slices take an eighth, plus 9 passes over 128·128 fp32 partial sums.
    rates = replace(PLAIN, splits=(1, 2, 4, 8))
    expected = 2 * 128 * 128 * 1024 / 1e12 + 9 * 4 * 128 * 128 / 2e12
    assert seconds(product(128, 128, 8192, variant="nt"), rates, bandwidth_bps=2e12) == pytest.approx(expected)


def test_the_library_takes_one_of_the_nearly_fastest() -> None:
    # 128 x 10240: 80 tiles of 128 x 128, or 40 of 128 x 256 that take twice as long: weight exp(-1 / 0.5) of the first.
    sharp, vague = (replace(PLAIN, tiles=((128, 256), (128, 128)), spread=spread) for spread in (0.0, 0.5))
    fast = 2 * 128 * 128 * 512 / 1e12
    assert seconds(product(128, 10240, 512), sharp) == pytest.approx(fast)
    weight = np.exp(-2.0)
    assert seconds(product(128, 10240, 512), vague) == pytest.approx(fast * (1 + 2 * weight) / (1 + weight))


def test_a_thin_product_is_bound_by_memory() -> None:
    thin = product(16, 4096, 4096)
    assert seconds(thin, bandwidth_bps=1e11) == pytest.approx(thin.bytes / 1e11)


def test_equal_work_and_traffic_hide_each_other_in_part() -> None:
    assert overlapped(np.array([1.0, 1.0]), np.array([1.0, 0.0]), 3.0) == pytest.approx([2 ** (1 / 3), 1.0])


@pytest.mark.parametrize(("m", "n", "k", "variant", "expected"), [
    (4096, 50264, 1024, "tn", 16), (4096, 50257, 1024, "tn", 2), (4097, 50264, 1024, "tn", 16),
    (4096, 1024, 50257, "nn", 2), (50257, 1024, 4096, "nt", 2), (1024, 50264, 4097, "nt", 16),
    (4096, 12564, 1024, "tn", 8), (4096, 6282, 1024, "tn", 4),
])
def test_alignment_is_that_of_the_contiguous_dimensions(m: int, n: int, k: int, variant: str, expected: int) -> None:
    assert alignment_bytes(product(m, n, k, variant=variant)) == expected


def test_narrow_operands_are_padded() -> None:
    assert {alignment_bytes(replace(product(7, 9, 11), dtype=dtype)) for dtype in ("fp8", "nvfp4", "int8")} == {16}


def test_an_odd_vocabulary_slows_the_head_about_four_times() -> None:
    """LLM Foundry's head with 50257 columns runs 4.1-4.3 times slower than with 50264 (mechanisms of its version 1)."""
    odd, even = Device(gpu("a100-40g-sxm")).times([product(16384, 50257, 2048), product(16384, 50264, 2048)])
    assert 3.8 < odd / even < 4.4


def test_causal_attention_does_half_the_square_and_the_diagonal_blocks() -> None:
    full = 4 * 16 * 1024 * 1024 * 128
    assert attention_work(attention("forward", causal=False)) == full
    assert attention_work(attention("forward", causal=True)) == full * (1024 + 128) / 2 / 1024
    assert attention_work(attention("backward", causal=True)) == 2.5 * full * (1024 + 128) / 2 / 1024
    # 128 new queries after 896 cached keys see all of those and half of their own block, rounded up to the block.
    assert attention_work(attention("forward", causal=True, queries=128)) == 4 * 16 * 128 * 1024 * 128


def test_attention_blocks_share_the_sms() -> None:
    # 16 heads x 8 blocks on 100 SMs of 1 TFLOP/s: 1.28 blocks each; the longest is one block. Joined by squares.
    rates = AttentionRates(flops_per_s=100e12, block_rows=128, longest_share=1.0, balance=2.0, heads_first=False,
                           start_s=0.0, overlap=3.0, bandwidth_share=1.0, flop_j=1e-12)
    block_s = 4 * 128 * 1024 * 128 / 1e12
    times = attention_times(attention("forward", causal=False), rates, 100, WIDE_BPS, 100)
    assert times.block_s[0] == pytest.approx(block_s)
    assert times.compute_s[0] == pytest.approx(block_s * np.hypot(1.28, 1.0))
    # Causal: half the work and the diagonal, but the last block still sees every key.
    causal = attention_times(attention("forward", causal=True), rates, 100, WIDE_BPS, 100)
    assert causal.compute_s[0] == pytest.approx(block_s * np.hypot(1.28 * 1152 / 2048, 1.0))


@pytest.mark.parametrize(("heads_first", "steps"), [(False, 8.0), (True, 7.5)])
def test_backward_blocks_are_dealt_in_order_of_the_grid(heads_first: bool, steps: float) -> None:
    # 2 heads x 3 blocks of keys, seen by 3, 2 and 1 blocks of queries; half a step to start: 3.5, 2.5, 1.5. Two SMs:
    # head by head one ends at 3.5 + 3.5, the other at 2.5 + 1.5 + 2.5 + 1.5; block by block both at 3.5 + 2.5 + 1.5.
    rates = AttentionRates(flops_per_s=100e12, block_rows=128, longest_share=1.0, balance=2.0, heads_first=heads_first,
                           start_s=0.0, overlap=3.0, bandwidth_share=1.0, flop_j=1e-12)
    kernel = attention("backward", causal=True, heads=2, queries=384, keys=384)
    times = attention_times(kernel, rates, 2, WIDE_BPS, 100)
    assert times.compute_s[0] == pytest.approx(steps * attention_work(kernel) / 12 / 1e12)


@pytest.mark.parametrize(("heads", "sms", "steps"), [
    (2, 4, 5.0),   # 2 parts a head: blocks 3.5 + 1.5 and 2.5 of three, one SM each; the longer decides
    (2, 2, 7.5),   # 1 part: a head whole, 3.5 + 2.5 + 1.5
    (3, 2, 15.0),  # 1 part: three heads on two SMs are two rounds
])
def test_a_backward_of_fixed_order_deals_parts_of_heads(heads: int, sms: int, steps: float) -> None:
    rates = AttentionRates(flops_per_s=sms * 1e12, block_rows=128, longest_share=1.0, balance=2.0, heads_first=False,
                           start_s=0.0, overlap=3.0, bandwidth_share=0.5, flop_j=1e-12, split=True)
    kernel = attention("backward", causal=True, heads=heads, queries=384, keys=384)
    parts = -(-sms // heads)
    assert gradient_parts(heads, sms) == parts
    step_s = attention_work(kernel) / (6 * heads) / 1e12
    sums_s = 2 * 4 * parts * heads * 384 * 128 / 1e12  # each part zeroed, and read where they are added up, in fp32
    times = attention_times(kernel, rates, sms, 2e12, sms)
    assert times.compute_s[0] == pytest.approx(steps * step_s + sums_s)


def test_only_kernels_that_would_not_keep_an_order_lose_by_one() -> None:
    def seconds_on(card: str, kernel: str) -> float:
        return float(Device(gpu(card)).times([attention("backward", True, 32, 8192, 8192, kernel)])[0])

    # 128 blocks of 64 / 4 key blocks are two rounds on the A100's 108 SMs
    assert seconds_on("a100-80g-sxm", "flash2-fixed") > 1.5 * seconds_on("a100-80g-sxm", "flash2")
    assert seconds_on("a100-80g-sxm", "flash3-fixed") == seconds_on("a100-80g-sxm", "flash2-fixed")
    assert seconds_on("h100-80g-sxm", "flash3-fixed") > 1.2 * seconds_on("h100-80g-sxm", "flash3")
    assert seconds_on("v100-32g-sxm", "flash1-fixed") == seconds_on("v100-32g-sxm", "flash1")
    assert parted_sms(gpu("a100-80g-sxm"), "flash2") == 108 and parted_sms(gpu("h100-80g-sxm"), "flash3") == 0


def test_many_heads_are_dealt_as_if_one_by_one() -> None:
    rates = AttentionRates(flops_per_s=100e12, block_rows=128, longest_share=1.0, balance=2.0, heads_first=False,
                           start_s=0.0, overlap=3.0, bandwidth_share=1.0, flop_j=1e-12)

    def of(heads: int) -> float:
        kernel = attention("backward", causal=True, heads=heads, queries=512, keys=512)
        return float(attention_times(kernel, rates, 8, WIDE_BPS, 100).compute_s[0])

    # 12 steps a head on 8 SMs; past some rounds each head adds exactly its share (rank by rank dealing repeats).
    assert of(80) - of(72) == pytest.approx(8 * (of(1000) - of(999)))
    assert of(200) > of(199)


def test_attention_reaches_published_rates() -> None:
    """Forward and backward at 4096, TFLOP/s. A100: FlashAttention-2 about 170, Triton about 95, FlashAttention-1 80."""
    def both(name: str, kernel: str) -> float:
        pair = [attention(direction, causal=True, heads=64, queries=4096, keys=4096, kernel=kernel)
                for direction in ("forward", "backward")]
        return sum(attention_work(k) for k in pair) / float(Device(gpu(name)).times(pair).sum()) / 1e12

    assert 155 < both("a100-80g-sxm", "flash2") < 185
    assert 85 < both("a100-80g-sxm", "triton") < 100
    assert 70 < both("a100-80g-sxm", "flash1") < 85
    assert both("h100-80g-sxm", "flash3") > 1.5 * both("h100-80g-sxm", "flash2")
    assert both("h100-80g-sxm", "flash1") == both("h100-80g-sxm", "flash2")


def test_measured_products_are_within_a_tenth() -> None:
    """cuBLASLt, A100 SXM, fp16, after 10,000 warm-up calls (Azure AI benchmarking guide), TFLOP/s."""
    device = Device(gpu("a100-80g-sxm"))
    measured = {(4096, 4096, 4096): 228.0, (8192, 8192, 8192): 253.7, (6144, 12288, 12288): 250.8}
    for (m, n, k), tflops in measured.items():
        kernel = product(m, n, k)
        assert kernel.flops / device.times([kernel])[0] / 1e12 == pytest.approx(tflops, rel=0.1)


def test_memory_bound_kernels_move_their_bytes() -> None:
    device = Device(gpu("a100-80g-sxm"))
    rates = Rates(gpu("a100-80g-sxm"))
    stream = Kernel("elementwise", "bf16", (2**30,), "relu", 0.0, 4 * 2**30, "memory_bound", launches=3)
    expected = 4 * 2**30 / (2039e9 * rates.memory_share("elementwise")) + 3 * rates.start_s
    assert device.times([stream])[0] == pytest.approx(expected, rel=1e-3)
    riding = Kernel("elementwise", "bf16", (2**30,), "relu", 0.0, 0.0, "memory_bound", launches=0)
    assert device.times([riding])[0] == 0.0


def row_wise(op: str, rows: int, cols: int) -> float:
    """Bytes of one read and one write per second that an fp32 operator reaches on an A100, over its bandwidth."""
    kernel = Kernel(op, "fp32", (rows, cols), "forward", 0.0, 8.0 * rows * cols, "memory_bound")
    return float(kernel.bytes / Device(gpu("a100-80g-pcie")).times([kernel])[0] / 1935e9)


def waits_s(kernel: Kernel, name: str = "a100-80g-pcie", sms: int = 108) -> float:
    """Seconds of a row-wise kernel as if its bytes took no time."""
    card = gpu(name)
    return joined_s(kernel, 0.0, Rates(card), card, sms)


def test_a_row_costs_a_latency_per_round_and_the_instructions_of_its_sm() -> None:
    # 4096 columns, 1024 threads, one element each: a start, 4 rounds and a barrier twice; 22 instructions of 128 lanes.
    card = gpu("a100-80g-pcie")
    waiting_s, own_s = 11 * Rates(card).latency_s, 4096 * 22 / (128 * card.boost_mhz * 1e6)

    def norm(rows: int) -> float:
        return waits_s(Kernel("rows", "fp16", (rows, 4096), "forward", 0.0, 1.0, "memory_bound", kernel="norm_scalar"))

    assert norm(1) == norm(108) == pytest.approx(waiting_s + own_s)
    assert norm(109) == norm(216) == pytest.approx(waiting_s + 2 * own_s)  # two blocks of 1024 threads on an SM
    assert norm(217) == pytest.approx(2 * waiting_s + 3 * own_s)  # the third begins when one of them ends


def test_registers_leave_room_for_twelve_norms_of_an_sm() -> None:
    def norm(rows: int) -> float:
        return waits_s(Kernel("norm", "fp16", (rows, 2560), "forward", 0.0, 1.0, "memory_bound"))

    assert norm(12 * 108 + 1) - norm(12 * 108) > 2 * (norm(12 * 108) - norm(11 * 108))


def test_arithmetic_of_half_precision_gelu_outlasts_its_bytes() -> None:
    device = Device(gpu("h100-80g-sxm"))
    gelu, relu = (Kernel("elementwise", "bf16", (2**28,), name, 0.0, 4.0 * 2**28, "memory_bound")
                  for name in ("gelu", "relu"))
    assert device.times([gelu])[0] == pytest.approx(2**28 * 53 / (128 * 1980e6 * 132), rel=0.01)
    assert device.times([gelu])[0] > 1.15 * device.times([relu])[0]


def test_one_element_at_a_time_goes_by_sms_and_clock_where_memory_is_faster() -> None:
    """102 issue slots of 128 lanes, 1.25 elements a clock and SM: longer than bytes take in 16 bits, not in 32."""
    card = gpu("h100-80g-sxm")
    device, rate = Device(card), 128 / 102 * card.boost_mhz * 1e6 * card.sms
    product_, sum_ = (Kernel("elementwise", dtype, (2**28,), "x", 0.0, 3.0 * width * 2**28, "memory_bound",
                             kernel="scalar") for dtype, width in (("bf16", 2), ("fp32", 4)))
    assert device.times([product_])[0] == pytest.approx(2**28 / rate, rel=0.01)
    assert device.times([sum_])[0] == pytest.approx(device.times([replace(sum_, kernel="")])[0])
    assert device.times([product_])[0] > 1.5 * device.times([replace(product_, kernel="")])[0]


@pytest.mark.parametrize("cols", [512, 4096])
def test_a_softmax_of_any_width_has_a_time(cols: int) -> None:
    """PyTorch's own takes longer in 16 bits than its bytes do; what a stack fuses does not."""
    device = Device(gpu("a100-80g-sxm"))

    def time_s(dtype: str, kernel: str = "") -> float:
        size = 2.0 * DTYPE_BYTES[dtype] * 2**14 * cols
        return float(device.times([Kernel("softmax", dtype, (2**14, cols), "forward", 0.0, size, "memory_bound",
                                          kernel=kernel)])[0])
    assert time_s("bf16") > 1.5 * time_s("bf16", "fused")
    assert time_s("fp32") == time_s("fp32", "fused")
    assert min(time_s(dtype) for dtype in ("fp64", "fp8", "int4")) > 0


def test_nll_waits_for_one_warp() -> None:
    """A label, then the logit it names: two latencies for every 32 rows, whatever the vocabulary."""
    card = gpu("a100-80g-sxm")
    rates = Rates(card)
    nll = Kernel("elementwise", "fp32", (2 * 16384,), "nll", 0.0, 0.0, "memory_bound", kernel="one_warp")
    assert Device(card).times([nll])[0] == pytest.approx(16384 / 32 * 2 * rates.latency_s + rates.start_s)


def test_a_norm_reads_long_rows_twice_from_memory() -> None:
    # 12 rows on each of 108 SMs: 4 KB rows stay in L1, 64 KB rows (85 MB) fit no cache: 3 accesses instead of 2.
    share = Rates(gpu("a100-80g-pcie")).memory_share("elementwise")
    assert row_wise("norm", 2**15, 16384) == pytest.approx(share * 2 / 3, rel=0.05)
    assert row_wise("norm", 2**19, 1024) > 1.1 * row_wise("norm", 2**15, 16384)



def test_a_persistent_norm_reads_each_row_once_each_way() -> None:
    """Rows of 64 KB, which the two-pass kernel reads twice: 2 accesses forward, 3 backward, at rates of their own."""
    rates, device = Rates(gpu("a100-80g-sxm")), Device(gpu("a100-80g-sxm"))
    size = 2.0 * 2**15 * 16384
    forward, backward = (Kernel("norm", "fp16", (2**15, 16384), way, 0.0, passes * size, "memory_bound",
                                kernel="persistent") for way, passes in (("forward", 2), ("backward", 3)))
    times = device.times([forward, backward]) - rates.start_s
    for seconds_, kernel, pattern in zip(times, (forward, backward), ("elementwise", "softmax"), strict=True):
        reached = kernel.bytes / seconds_ / gpu("a100-80g-sxm").memory_bandwidth_bps
        assert reached == pytest.approx(rates.memory_share(pattern), rel=0.01)
    two_pass = [replace(forward, kernel=""), replace(backward, kernel="", bytes=5 * size)]
    assert (times < 0.8 * (device.times(two_pass) - rates.start_s)).all()


@pytest.mark.parametrize(("variant", "share"), [("tn", 1.0), ("nn", 0.5), ("nt", 0.5)])
def test_products_of_gradients_may_be_slower(variant: str, share: float) -> None:
    slower = replace(PLAIN, gradient_rate=0.5)
    kernel = product(1280, 1280, 1024, variant=variant)
    assert seconds(kernel, slower) == pytest.approx(seconds(kernel) / share)


def test_only_narrow_products_of_gradients_on_hopper_are_slower() -> None:
    found = {(name, dtype): Rates(gpu(name)).gemm(dtype).gradient_rate
             for name in ("h100-80g-sxm", "a100-80g-sxm", "b200") for dtype in ("fp8", "bf16")}
    assert {key for key, rate in found.items() if rate != 1.0} == {("h100-80g-sxm", "fp8")}


def test_softmax_keeps_a_row_on_chip_until_it_is_too_long() -> None:
    # Shared memory holds an aligned row of 48 KB; an unaligned one of 2050 elements, or a longer one, is read thrice.
    short, unaligned = row_wise("softmax", 2**18, 2048), row_wise("softmax", 2**18, 2050)
    long = row_wise("softmax", 2**13, 2**17)
    assert short > unaligned > long
    assert long == pytest.approx(short / 2, rel=0.15)


def test_tensors_that_fit_in_l2_move_faster() -> None:
    device = Device(gpu("l4"))  # 48 MiB of L2
    small, large = (Kernel("elementwise", "fp32", (n,), "mul", 0.0, 8.0 * n, "memory_bound") for n in (10**6, 10**9))
    small_s, large_s = device.times([small, large])
    start_s = Rates(gpu("l4")).start_s
    assert small.bytes / (small_s - start_s) > 1.5 * large.bytes / (large_s - start_s)


@pytest.mark.parametrize("variant", ["fused", "foreach"])
def test_a_pass_over_all_tensors_finds_none_of_them_in_l2(variant: str) -> None:
    """The norm of 4 GB of gradients: each of 200 launches reads 20 MB that fit in L2, but that no kernel left there."""
    device = Device(gpu("l40s"))  # 96 MiB of L2
    norm = Kernel("optimizer", "fp32", (10**9,), variant, 0.0, 4e9, "optimizer", launches=200)
    assert device.times([norm])[0] > 4e9 / device.gpu.memory_bandwidth_bps


def test_few_sms_cannot_keep_the_memory_busy() -> None:
    device = Device(gpu("h100-80g-sxm"))
    stream = Kernel("elementwise", "bf16", (2**30,), "relu", 0.0, 4 * 2**30, "memory_bound")
    alone, beside, crowded = (float(device.times([stream], taken)[0]) for taken in (0, 24, 112))
    assert beside == alone
    assert crowded == pytest.approx(4 * 2**30 / (20 * 32768 / 6e-7), rel=0.01)


def test_every_kind_of_kernel_has_a_time_on_every_gpu() -> None:
    shapes = {"norm": (4096, 1024), "softmax": (4096, 1024), "cross_entropy": (4096, 32000), "embedding": (4096, 1024),
              "elementwise": (2**22,), "optimizer": (2**22,)}
    kernels = [Kernel(op, "fp16", shape, direction, 0.0, 2.0**24, "memory_bound")
               for op, shape in shapes.items() for direction in ("forward", "backward")]
    kernels += [Kernel("gemm", dtype, (1, 512, 512, 512), "tn", 2.0**28, 1.5 * 2**20, "gemm")
                for dtype in ("fp16", "bf16", "fp32", "tf32", "fp8", "nf4")]
    kernels += [attention("forward", True, kernel=kernel) for kernel in ("flash1", "flash2", "flash3", "triton", "")]
    for name in gpu_names():
        times = Device(gpu(name)).times(kernels)
        assert np.isfinite(times).all() and (times > 0).all(), name


def test_unknown_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="no time model"):
        Device(gpu("t4")).times([Kernel("sort", "fp16", (4,), "forward", 0.0, 8.0, "memory_bound")])


def test_copies_use_the_measured_link() -> None:
    # 25.1 GB/s over PCIe gen 4: 40 ms for 1 GB.
    assert Device(gpu("a100-80g-sxm")).copy_s("h2d", 1e9) == pytest.approx(1 / 25.1, rel=1e-3)
    assert Device(gpu("v100-16g-sxm")).copy_s("d2h", 1e9) > 0.08


def test_an_sm_frees_after_half_a_block_on_average() -> None:
    device = Device(gpu("a100-80g-sxm"))
    large = product(8192, 8192, 8192)
    assert 0 < device.drain_s(large) < device.times([large])[0] / 10


@pytest.mark.parametrize(("name", "whole", "dtype"), [
    ("rtx3090", "rtx-a6000", "bf16"), ("l40", "l40s", "fp8"), ("a10g", "a40", "fp16"),
])
def test_tensor_units_at_half_the_rate_lose_half_as_much_to_what_feeds_them(name: str, whole: str, dtype: str) -> None:
    def share(card: str) -> float:
        chip = gpu(card)
        return Rates(chip).gemm(dtype).flops_per_s / chip.reached_flops(dtype)
    # of s at the full rate 1/s - 1 is lost beside the arithmetic, which takes twice as long: 1 / (1 + (1/s - 1) / 2)
    half = gpu(name).peak_flops("fp16") / (1024 * gpu(name).sms * gpu(name).tensor_clock_mhz * 1e6)
    assert half == pytest.approx(0.5, rel=3e-3)
    assert share(name) == pytest.approx(1 / (1 + half * (1 / share(whole) - 1)))


def test_half_as_many_fp4_units_more_are_fed_as_fast() -> None:
    """B300: 1.5 times B200's rate in fp4 beside the same one in half: 1 / (1 + 1.5 (1/s - 1)) of it are left."""
    def share(card: str, dtype: str) -> float:
        return Rates(gpu(card)).gemm(dtype).flops_per_s / gpu(card).reached_flops(dtype)
    whole = share("b200", "nvfp4")
    for faster in ("b300", "gb300"):
        assert share(faster, "nvfp4") == pytest.approx(1 / (1 + 1.5 * (1 / whole - 1)))
        assert share(faster, "bf16") == pytest.approx(share("b200", "bf16"))
    assert share("gb200", "nvfp4") == pytest.approx(whole)
    assert share("rtx5090", "nvfp4") == pytest.approx(share("rtx-pro-6000", "nvfp4"), rel=0.01)  # only halves are cut


def test_a_family_has_what_the_one_it_is_like_has() -> None:
    """GeForce cards of Ada: products judged, all else as fitted to the L4 and L40S."""
    ada, geforce, judged = family_figures("ada"), family_figures("ada_geforce"), family_figures("ada", fitted=False)
    assert geforce["memory"] == ada["memory"] != judged["memory"] and geforce["attention"] == ada["attention"]
    assert geforce["gemm"]["half"]["eta"] == 0.8 != ada["gemm"]["half"]["eta"]
    assert geforce["gemm"]["start_s"] == ada["gemm"]["start_s"] and "like" not in family_figures("gb202", fitted=False)
    assert gpu("rtx4090").kernels == "ada_geforce" and gpu("rtx5080").kernels == gpu("rtx-pro-6000").kernels == "gb202"


def test_an_export_variants_attention_is_what_was_measured_on_it() -> None:
    h20 = Rates(gpu("h20")).attention("flash3", "bf16", 128, backward=False)
    assert h20.flops_per_s == pytest.approx(0.85 * 148e12)


def test_a_geforce_card_runs_above_the_clock_its_peak_is_stated_at() -> None:
    card = gpu("rtx4090")
    stated = replace(card, reached_mhz=card.tensor_clock_mhz)
    fast, slow = (Rates(chip).gemm("bf16") for chip in (card, stated))
    assert fast.flops_per_s == pytest.approx(slow.flops_per_s * 2718 / 2520)
    assert fast.flop_j == pytest.approx(slow.flop_j * (2718 / 2520) ** 2)
    assert gpu("a100-80g-sxm").reached_mhz == gpu("a100-80g-sxm").tensor_clock_mhz


def test_an_exact_gelu_in_16_bit_is_held_up_by_its_arithmetic() -> None:
    card = gpu("a100-80g-sxm")
    device, elements = Device(card), 2**28
    issued_s = elements * 53 / (128 * 108 * 1410e6)
    gelu, other = (Kernel("elementwise", "bf16", (elements,), name, 0.0, 4.0 * elements, "memory_bound")
                   for name in ("gelu", "relu"))
    assert device.times([gelu])[0] == pytest.approx(issued_s, rel=0.01)
    assert device.times([other])[0] == pytest.approx(4.0 * elements / (0.835 * 2039e9), rel=0.02)
    wide = replace(gelu, dtype="fp32", bytes=8.0 * elements)  # twice the bytes, as many instructions
    assert device.times([wide])[0] == pytest.approx(8.0 * elements / (0.835 * 2039e9), rel=0.02)


def test_a_card_like_another_keeps_its_own_clocks_and_rates() -> None:
    """With clocks of its own nothing is known beyond them; without fp16 among its peaks bf16 says what part it has."""
    other = gpu({"like": "rtx4090", "clock_mhz": 2000})
    assert other.reached_mhz == 2000
    assert gpu({"like": "rtx4090", "name": "mine"}).reached_mhz == 2718
    assert gpu({"like": "rtx4090", "clock_mhz": 2000, "reached_mhz": 2200}).reached_mhz == 2200
    l4 = gpu("l4")
    fewer = gpu({"like": "l4", "tflops": {"fp32": l4.tflops["fp32"], "bf16": l4.tflops["bf16"]}})
    assert Rates(fewer).gemm("bf16").flops_per_s == Rates(l4).gemm("bf16").flops_per_s
