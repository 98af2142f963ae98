"""A GPU at work: how long its kernels take, alone and while collectives hold SMs and memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.catalog import table
from sim.hardware.attention import attention_time
from sim.hardware.gemm import gemm_times
from sim.hardware.gpu import Gpu
from sim.hardware.memory_bound import memory_time
from sim.hardware.rates import AttentionRates, GemmRates, Rates
from sim.work import Kernel

#: What is left free: SMs, and memory bandwidth in bytes/s.
_State = tuple[int, float]
#: Seconds of a kernel and of one of its thread blocks.
_Times = tuple[float, float]


class Device:
    """Kernel times of one GPU, looked up once per kernel and state.

    Args:
        gpu: the GPU.
        sustained: tensor work at the clock a long run settles at; False = at the clock of a kernel timed alone.
    """

    def __init__(self, gpu: Gpu, sustained: bool = True) -> None:
        self.gpu = gpu
        self._rates = Rates(gpu, sustained)
        self._gemm: dict[str, GemmRates] = {}
        self._attention: dict[tuple[str, str, int, bool], AttentionRates] = {}
        self._known: dict[_State, dict[Kernel, _Times]] = {}

    def times(self, kernels: Sequence[Kernel], sms_taken: int = 0, hbm_taken_bps: float = 0.0) -> NDArray[np.float64]:
        """Seconds on the GPU of each kernel, in order, its start included.

        Args:
            kernels: what runs.
            sms_taken: SMs held by others (channels of collectives); at least one SM stays free.
            hbm_taken_bps: memory bandwidth others use, bytes/s; a stated share always stays.
        """
        known = self._states(kernels, sms_taken, hbm_taken_bps)
        return np.fromiter((known[kernel][0] for kernel in kernels), np.float64, len(kernels))

    def drain_s(self, kernel: Kernel) -> float:
        """Mean seconds until a thread block of a running `kernel` ends and its SM frees: half a block's time."""
        seconds, block_s = self._states((kernel,), 0, 0.0)[kernel]
        return min(block_s, seconds) / 2.0

    def copy_s(self, direction: str, size_bytes: float) -> float:
        """Seconds of a copy between pinned host memory and the device ("h2d" or "d2h"), alone on its link."""
        catalogue = table("hardware/gpus.yaml")
        bandwidth_bps = float(catalogue["copies"][self.gpu.pcie][direction]) * 1e9
        return float(catalogue["copy_start"]["seconds"]) + size_bytes / bandwidth_bps

    def _states(self, kernels: Sequence[Kernel], sms_taken: int, hbm_taken_bps: float) -> dict[Kernel, _Times]:
        gpu = self.gpu
        sms = max(1, gpu.sms - sms_taken)
        bandwidth_bps = max(self._rates.bandwidth_floor * gpu.memory_bandwidth_bps,
                            gpu.memory_bandwidth_bps - hbm_taken_bps)
        known = self._known.setdefault((sms, bandwidth_bps), {})
        new = {kernel for kernel in kernels if kernel not in known}
        if new:
            self._time(new, sms, bandwidth_bps, known)
        return known

    def _time(self, kernels: set[Kernel], sms: int, bandwidth_bps: float, known: dict[Kernel, _Times]) -> None:
        products: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            if kernel.op == "gemm":
                products.setdefault(kernel.dtype, []).append(kernel)
            elif kernel.op == "attention":
                known[kernel] = attention_time(kernel, self._attention_rates(kernel), sms, bandwidth_bps, self.gpu.sms)
            else:
                known[kernel] = memory_time(kernel, self._rates, bandwidth_bps), self._rates.start_s
        for dtype, group in products.items():
            rates = self._gemm.get(dtype) or self._gemm.setdefault(dtype, self._rates.gemm(dtype))
            seconds, block_s = gemm_times(group, rates, sms, bandwidth_bps, self.gpu.sms)
            known.update(zip(group, zip(seconds.tolist(), block_s.tolist(), strict=True), strict=True))

    def _attention_rates(self, kernel: Kernel) -> AttentionRates:
        key = (kernel.kernel, kernel.dtype, kernel.shape[-1], kernel.variant == "backward")
        return self._attention.get(key) or self._attention.setdefault(key, self._rates.attention(*key))
