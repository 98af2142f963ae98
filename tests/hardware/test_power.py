"""The clock under a power limit, by hand, and what of a kernel follows it."""

from __future__ import annotations

import numpy as np
import pytest

from sim.hardware.device import Device
from sim.hardware.gpu import gpu
from sim.hardware.kernels.operators import product_kernel, row_wise_kernel
from sim.hardware.power import Power

ONE = np.ones(1)
CARD = Power(limit_w=300.0, constant_w=50.0, byte_j=50e-12, lowest_clock=0.4)


def test_the_clock_meets_the_limit() -> None:
    # 1 pJ a FLOP at 400 TFLOP/s: 400 W at full clock; 1 TB/s costs 50 W. 200 W are left: f cubed = 200 / 400.
    assert CARD.clock(1e-12, 400e12 * ONE, 1e12 * ONE, ONE)[0] == pytest.approx(0.5 ** (1 / 3))


def test_light_or_rare_work_runs_at_full_clock_and_hard_limits_have_a_floor() -> None:
    assert CARD.clock(1e-12, 200e12 * ONE, 1e12 * ONE, ONE)[0] == 1.0
    assert CARD.clock(1e-12, 400e12 * ONE, 1e12 * ONE, 0.5 * ONE)[0] == 1.0
    assert CARD.clock(1e-12, 1e17 * ONE, 0.0 * ONE, ONE)[0] == 0.4


def test_a_lower_limit_slows_arithmetic_only() -> None:
    full, capped = Device(gpu("h100-80g-sxm")), Device(gpu("h100-80g-sxm", {"power_limit_w": 400}))
    product = product_kernel(8192, 8192, 8192, 1, "bf16")
    stream = row_wise_kernel("add", 8192, 8192, "bf16")
    assert capped.times([product])[0] > 1.15 * full.times([product])[0]
    assert capped.times([stream])[0] == full.times([stream])[0]


def test_long_sequences_run_slower_than_a_short_product_timed_alone() -> None:
    card = gpu("h100-80g-sxm")
    short = product_kernel(2048, 2048, 2048, 1, "bf16")
    assert Device(card).times([short])[0] > 1.1 * Device(card, sustained=False).times([short])[0]


def test_a_hungrier_chip_is_slower_where_the_limit_binds_and_nowhere_else() -> None:
    product = product_kernel(16384, 16384, 16384, 1, "bf16")
    mean, hungry = (Device(gpu("h100-80g-sxm"), deviation=d) for d in (0.0, 3.0))
    power, rates = mean._rates.power, mean._gemm_rates("bf16")
    # energy of a FLOP 1 + 3 * 0.045 times the mean's: the clock falls with its cube root, whatever the constant part
    slower = hungry._sequence_clock("bf16", hungry._hunger) / mean._sequence_clock("bf16", 1.0)
    assert slower == pytest.approx((1 + 3 * 0.045) ** (-1 / 3))
    assert hungry.times([product])[0] > 1.03 * mean.times([product])[0]
    assert power.constant_w + rates.flop_j * rates.flops_per_s > power.limit_w
    # the energy of a job is that of its mean chips
    assert hungry.work_j([product])[0] == mean.work_j([product])[0]
    alike, other = (Device(gpu("a100-80g-sxm"), deviation=d) for d in (0.0, 3.0))  # its limit is not in reach
    assert alike.times([product])[0] == other.times([product])[0]


def test_figures_say_what_they_rest_on() -> None:
    product = product_kernel(512, 512, 512, 1, "bf16")
    h100, h200, rtx = (Device(gpu(name)).basis(product) for name in ("h100-80g-sxm", "h200", "rtx4090"))
    assert h100.own_data and h100.confidence == "high" and "vidur" in h100.source
    assert not h200.own_data and h200.confidence == "medium"
    assert not rtx.own_data and rtx.confidence == "low"


def test_products_run_at_the_clock_of_their_own_dtype() -> None:
    device = Device(gpu("v100-32g-sxm"))
    # 300 W less 60 are reached by half products: 2.9 pJ at 1370 MHz, and at 1530 more by the square
    rates = device._gemm_rates("fp16")
    assert rates.flop_j == pytest.approx(2.9e-12 * (1530 / 1370) ** 2)
    clock = device._sequence_clock("fp16", 1.0)
    assert clock**3 * rates.flop_j * rates.flops_per_s == pytest.approx(300.0 - 60.0)
    # and hardly by fp32 ones, so a job in fp32 is not held back by what half products would draw
    assert device._sequence_clock("fp32", 1.0) > 0.99
    half, single = (product_kernel(8192, 8192, 8192, 1, dtype) for dtype in ("fp16", "fp32"))
    short = Device(gpu("v100-32g-sxm"), sustained=False, gap_s=1.0)
    assert device.times([single])[0] == pytest.approx(short.times([single])[0], rel=0.01)
    assert device.times([half])[0] > 1.1 * short.times([half])[0]


def test_the_same_chip_at_a_lower_clock_takes_less_energy_for_a_flop() -> None:
    card, board = (Device(gpu(name))._gemm_rates("bf16").flop_j for name in ("h100-80g-pcie", "h100-80g-sxm"))
    assert card / board == pytest.approx((1620 / 1830) ** 2)


def test_the_card_of_the_dgx_2h_differs_by_its_power_alone() -> None:
    plain, more = Device(gpu("v100-32g-sxm3")), Device(gpu("v100-32g-sxm3-450w"))
    product, sums = product_kernel(8192, 8192, 8192, 1, "fp16"), row_wise_kernel("add", 65536, 4096, "fp16")
    assert more.times([product])[0] < 0.95 * plain.times([product])[0]
    assert more.times([sums])[0] == pytest.approx(plain.times([sums])[0])
