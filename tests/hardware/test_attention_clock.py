"""Fused attention under the power limit: at its own clock, where products next to it are held back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.hardware import Device, gpu
from sim.hardware.kernels.operators import attention_kernel, product_kernel


def forward_rate(device: Device, kernel: str) -> float:
    """FLOP/s on causal work of a long sequence."""
    long = attention_kernel(1, 16, 16, 32768, 32768, 128, "bf16", kernel=kernel)
    return long.flops / 2 / float(device.times([long])[0])


def test_triton_attention_is_out_of_reach_of_700_watts_and_products_are_not() -> None:
    h100 = gpu("h100-80g-sxm")
    limited, free = Device(h100), Device(replace(h100, power_limit_w=2000.0))
    assert forward_rate(limited, "triton") == pytest.approx(forward_rate(free, "triton"), rel=1e-6)
    big = product_kernel(8192, 8192, 8192, 1, "bf16")
    assert limited.times([big])[0] > 1.1 * free.times([big])[0]


def test_at_500_watts_it_is_held_back() -> None:
    """(500 - 130 W) / (1.6 · 1.21 pJ · 326 TFLOP/s = 632 W), cube root 0.84."""
    h100 = gpu("h100-80g-sxm")
    share = forward_rate(Device(replace(h100, power_limit_w=500.0)), "flash2") / forward_rate(Device(h100), "flash2")
    assert share == pytest.approx(0.84 / 0.967, abs=0.03)


def test_its_energy_goes_with_its_own_clock() -> None:
    h100 = gpu("h100-80g-sxm")
    long = attention_kernel(1, 16, 16, 32768, 32768, 128, "bf16", kernel="triton")
    device = Device(h100)
    traffic_j = long.bytes * device._rates.power.byte_j
    assert device.work_j([long])[0] - traffic_j == pytest.approx(device._arithmetic_j(long), rel=1e-6)


def test_b200s_own_attention_holds_what_long_loops_of_it_do() -> None:
    """SimuMax's loops over 131,072 tokens, 60 to 190 ms a call: 1,113 TFLOP/s forward, 931 backward."""
    b200 = Device(gpu("b200"))
    for backward, measured in ((False, 1113e12), (True, 931e12)):
        long = attention_kernel(1, 16, 2, 131072, 131072, 128, "bf16", backward, kernel="flash2")
        assert long.flops / 2 / float(b200.times([long])[0]) == pytest.approx(measured, rel=0.06)
