"""What must hold for any kernel: nothing is faster than the hardware, and taking something away never helps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.hardware.device import Device
from sim.hardware.gpu import gpu
from sim.hardware.kernels.attention import attention_work
from sim.work import DTYPE_BYTES, Kernel

NAMES = ("v100-32g-sxm", "a100-80g-sxm", "h100-80g-sxm", "b200", "t4", "mi300x")
CASES = settings(max_examples=50, deadline=None)


@st.composite
def products(draw: st.DrawFn) -> Kernel:
    batch = draw(st.integers(1, 32))
    m, n, k = (draw(st.integers(1, 20000)) for _ in range(3))
    dtype = draw(st.sampled_from(("fp16", "fp32", "fp8")))
    size_bytes = batch * DTYPE_BYTES[dtype] * (m * k + k * n + m * n * draw(st.sampled_from((1, 2, 4))))
    variant = draw(st.sampled_from(("tn", "nn", "nt")))
    return Kernel("gemm", dtype, (batch, m, n, k), variant, 2.0 * batch * m * n * k, size_bytes, "gemm")


@st.composite
def attentions(draw: st.DrawFn) -> Kernel:
    heads, queries, keys = draw(st.integers(1, 64)), draw(st.integers(1, 9000)), draw(st.integers(1, 9000))
    dim = draw(st.sampled_from((64, 128, 192)))
    return Kernel("attention", "fp16", (draw(st.integers(1, 4)), heads, heads, queries, keys, dim),
                  draw(st.sampled_from(("forward", "backward"))), 1.0, 2.0 * heads * dim * (queries + 2 * keys),
                  "attention", causal=draw(st.booleans()), kernel=draw(st.sampled_from(("flash1", "flash2", "triton"))))


@st.composite
def streams(draw: st.DrawFn) -> Kernel:
    op = draw(st.sampled_from(("norm", "softmax", "elementwise", "optimizer", "cross_entropy", "embedding")))
    return Kernel(op, "fp16", (1, 1), draw(st.sampled_from(("forward", "backward"))), 0.0,
                  draw(st.floats(0, 1e10)), "memory_bound", launches=draw(st.integers(0, 5)))


kernels = st.one_of(products(), attentions(), streams())


@CASES
@given(kernel=kernels, name=st.sampled_from(NAMES), fewer=st.integers(0, 200), more=st.integers(0, 200),
       taken_bps=st.floats(0, 1e13), further_bps=st.floats(0, 1e13))
def test_taking_sms_or_bandwidth_never_makes_a_kernel_faster(kernel: Kernel, name: str, fewer: int, more: int,
                                                             taken_bps: float, further_bps: float) -> None:
    device = Device(gpu(name))
    some = device.times([kernel], fewer, taken_bps)[0]
    assert device.times([kernel], fewer + more, taken_bps + further_bps)[0] >= some * (1 - 1e-12)


@CASES
@given(kernel=kernels, name=st.sampled_from(NAMES))
def test_no_kernel_beats_the_peak_or_the_memory(kernel: Kernel, name: str) -> None:
    card = gpu(name)
    time_s = Device(card, sustained=False).times([kernel])[0]
    work = attention_work(kernel) if kernel.op == "attention" else kernel.flops
    assert time_s >= work / card.peak_flops(kernel.dtype)
    # Inputs that fit in L2 need not come from memory: half of the bytes always do.
    assert time_s >= kernel.bytes / 2 / card.memory_bandwidth_bps
    if kernel.bytes / max(1, kernel.launches) > 2 * card.l2_bytes:
        assert time_s >= 0.9 * kernel.bytes / card.memory_bandwidth_bps


@CASES
@given(kernel=kernels, name=st.sampled_from(NAMES), factor=st.floats(1, 4))
def test_more_bandwidth_or_a_higher_peak_never_slows(kernel: Kernel, name: str, factor: float) -> None:
    # A library takes one of the nearly fastest tiles; which ones those are may turn against a product of a few us.
    card = gpu(name)
    time_s = Device(card).times([kernel])[0] * (1.35 if kernel.op == "gemm" else 1 + 1e-12)
    assert Device(replace(card, memory_bandwidth_bps=factor * card.memory_bandwidth_bps)).times([kernel])[0] <= time_s
    faster = replace(card, tflops={dtype: factor * value for dtype, value in card.tflops.items()})
    assert Device(faster).times([kernel])[0] <= time_s


@CASES
@given(many=st.lists(kernels, min_size=1, max_size=8), taken=st.integers(0, 24))
def test_a_kernel_takes_the_same_time_in_any_company(many: list[Kernel], taken: int) -> None:
    together = Device(gpu("a100-80g-sxm")).times(many, taken)
    alone = [Device(gpu("a100-80g-sxm")).times([kernel], taken)[0] for kernel in many]
    np.testing.assert_array_equal(together, alone)


@CASES
@given(kernel=kernels, name=st.sampled_from(NAMES))
def test_an_sm_drains_within_the_kernel(kernel: Kernel, name: str) -> None:
    device = Device(gpu(name))
    assert 0 <= device.drain_s(kernel) <= device.times([kernel])[0]
