"""Starts of forward attention's blocks: short sequences run slower, tiles are multiplied as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.hardware import Device, gpu
from sim.hardware.kernels.attention import attention_times, attention_work
from sim.hardware.kernels.operators import attention_kernel
from sim.hardware.kernels.rates import Rates
from sim.work import Kernel

FREE = replace(Rates(gpu("l40s")).attention("flash2", "bf16", 128, False), block_start_s=0.0)
STARTING = replace(FREE, block_start_s=2e-6)


def forward(queries: int, heads: int, dim: int = 128, kernel: str = "flash2") -> Kernel:
    return attention_kernel(1, heads, heads, queries, queries, dim, "bf16", kernel=kernel)


def test_every_block_takes_its_start_of_an_sm() -> None:
    many = forward(1024, 4096)
    blocks = 4096 * 1024 / FREE.block_rows
    with_starts, without = (float(attention_times(many, rates, 142, 1e18, 142).compute_s[0])
                            for rates in (STARTING, FREE))
    assert with_starts - without == pytest.approx(blocks / 142 * 2e-6, rel=0.02)


def test_tiles_are_multiplied_as_a_whole_whatever_stands_in_them() -> None:
    taken = {queries: float(attention_times(forward(queries, 4096), FREE, 142, 1e18, 142).compute_s[0])
             for queries in (16, 64, 129, 192, 1024)}
    assert taken[16] == taken[64] and taken[129] == taken[192]
    even = attention_work(forward(1024, 4096)) / FREE.flops_per_s
    assert taken[1024] == pytest.approx(even, rel=0.05)


@pytest.mark.parametrize(("card", "kernel"), [("h100-80g-sxm", "flash3"), ("l40s", "flash2"),
                                              ("rtx-pro-6000", "flash2")])
def test_short_sequences_run_slower_where_engines_were_measured(card: str, kernel: str) -> None:
    device = Device(gpu(card), sustained=False)
    short, long = (attention_work(k) / float(device.times([k])[0])
                   for k in (forward(512, 1024, 128, kernel), forward(8192, 64, 128, kernel)))
    assert 0.45 < short / long < 0.85


def test_backward_is_as_before_where_forward_was_measured() -> None:
    """No table of AIConfigurator has a backward: its rates stay those of the papers and siblings."""
    hopper, ada = Rates(gpu("h100-80g-sxm")), Rates(gpu("l40s"))
    for rates, kernel, dim, share in ((hopper, "flash3", 128, 0.534), (hopper, "flash3", 64, 0.383),
                                      (ada, "flash2", 128, 0.588), (ada, "flash2", 64, 0.609),
                                      (ada, "flash2", 256, 0.588)):
        peak = (gpu("h100-80g-sxm") if rates is hopper else gpu("l40s")).reached_flops("bf16")
        assert rates.attention(kernel, "bf16", dim, True).flops_per_s == pytest.approx(share * peak)


def test_exponentials_twice_as_fast_feed_a_head_as_one_twice_as_wide() -> None:
    """Of the forward pass alone: B300 and GB300, whose units for exponentials are twice B200's."""
    twice, once = Rates(gpu("b300")), Rates(gpu("b200"))
    assert twice.attention("trtllm", "bf16", 128, False).flops_per_s == pytest.approx(
        once.attention("trtllm", "bf16", 256, False).flops_per_s)
    for kernel in ("trtllm", "flash2"):
        assert twice.attention(kernel, "bf16", 128, True).flops_per_s == pytest.approx(
            once.attention(kernel, "bf16", 128, True).flops_per_s)


def test_where_an_engines_kernel_was_not_built_its_other_one_runs() -> None:
    for card, kernel in (("h100-80g-sxm", "flash3"), ("a100-80g-sxm", "flash2")):
        rates = Rates(gpu(card))
        assert rates.attention("trtllm", "bf16", 128, False) == rates.attention(kernel, "bf16", 128, False)
    assert Rates(gpu("b200")).attention("trtllm", "bf16", 128, False).block_rows == 128
