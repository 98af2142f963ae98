"""A GPU at work: how long its kernels take, alone and while collectives hold SMs and memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.catalog import table
from sim.hardware.gpu import Gpu
from sim.hardware.host import HostShare
from sim.hardware.kernels.attention import attention_times, attention_work
from sim.hardware.kernels.decoding import decoding
from sim.hardware.kernels.gemm import Array, ProductTimes, as_products, overlapped, product_times
from sim.hardware.kernels.memory_bound import memory_time
from sim.hardware.kernels.rates import AttentionRates, Basis, GemmRates, Rates
from sim.work import Kernel

#: What is left free: SMs, and memory bandwidth in bytes/s.
_State = tuple[int, float]
#: Seconds of a kernel and of one of its thread blocks.
_Times = tuple[float, float]


class Device:
    """Kernel times of one GPU, looked up once per kernel and state.

    Args:
        gpu: the GPU.
        sustained: True (training): products run at the clock that long sequences of them settle at under the power
            limit, fused attention at its own. False: each kernel at the clock a benchmark of it alone settles at, in a
            loop with the host's gaps between calls, so that short kernels run at full clock.
        gap_s: that gap, if not the usual one.
        host: its share of the host; None: alone on its link, without disks.
        clock_share: of the clock its like settle at: what a throttled GPU has left. Traffic of device memory, which has
            a clock of its own, is not slowed.
        deviation: standard deviations by which its arithmetic draws more energy than the kind's mean. A job waits for
            the worst of its chips: give the expected maximum over them.
        graphs: CUDA graphs launch its kernels.
    """

    def __init__(self, gpu: Gpu, sustained: bool = True, gap_s: float | None = None,
                 host: HostShare | None = None, clock_share: float = 1.0, deviation: float = 0.0,
                 graphs: bool = False) -> None:
        self.gpu = gpu
        self._graphs = graphs
        self.clock_share = clock_share
        self._deviation = deviation
        self._host = host
        self._sustained = sustained
        self._rates = Rates(gpu)
        self._hunger = 1.0 + deviation * self._rates.chip_spread
        self._gap_s = self._rates.benchmark_gap_s if gap_s is None else gap_s
        self._clock: dict[str, float] = {}  # of the hungriest chip, by dtype
        self._mean_clocks: dict[str, float] = {}
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
        found = self._states(kernels, sms_taken, hbm_taken_bps)
        return np.fromiter((seconds for seconds, _ in found), np.float64, len(found))

    def drain_s(self, kernel: Kernel) -> float:
        """Mean seconds until a thread block of a running `kernel` ends and its SM frees: half a block's time."""
        ((seconds, block_s),) = self._states((kernel,), 0, 0.0)
        return min(block_s, seconds) / 2.0

    def copy_s(self, direction: str, size_bytes: float) -> float:
        """Seconds of a copy between pinned host memory and the device ("h2d", "d2h") or disks ("nvme_read" ...)."""
        catalogue = table("hardware/gpus.yaml")
        if self._host is not None:
            bandwidth_bps = self._host.bandwidth_bps(direction)
        else:
            bandwidth_bps = float(catalogue["copies"][self.gpu.pcie][direction]) * 1e9
        return float(catalogue["copy_start"]["seconds"]) + size_bytes / bandwidth_bps

    def like(self, gpu: Gpu, clock_share: float = 1.0) -> Device:
        """A device of another GPU that is used as this one is, with so much of this one's share of the clock."""
        return Device(gpu, self._sustained, self._gap_s, self._host, self.clock_share * clock_share, self._deviation,
                      self._graphs)

    def basis(self, kernel: Kernel) -> Basis:
        """What the time of `kernel` rests on: confidence, source, whether tables of this very GPU entered."""
        one = kernel.op == "attention" and decoding(kernel)
        return self._rates.basis("decoding" if one else kernel.op, kernel.dtype, kernel.kernel)

    def energy_j(self, kernels: Sequence[Kernel], counts: Sequence[float] | NDArray[np.float64],
                 seconds: float) -> float:
        """Energy the GPU draws over `seconds` in which it runs each kernel so often, joules; its board alone.

        Power as in `power.py`: a constant part for the whole time, traffic of device memory, and arithmetic at the
        clock the GPU runs at (energy per FLOP goes as its square).
        """
        often = np.asarray(counts, dtype=np.float64)
        return self._rates.power.constant_w * seconds + float(often @ self.work_j(kernels)) if len(kernels) else (
            self._rates.power.constant_w * seconds)

    def work_j(self, kernels: Sequence[Kernel]) -> NDArray[np.float64]:
        """Energy of each kernel's own work, joules: what it takes beside the constant part. It is the mean chip's, at
        the clock that one runs at before it waits for the hungriest."""
        arithmetic_j = np.array([self._arithmetic_j(kernel) for kernel in kernels])
        clocks = np.array([self._mean_clock(kernel) for kernel in kernels])
        traffic = np.array([kernel.bytes for kernel in kernels], dtype=np.float64)
        found: NDArray[np.float64] = self._rates.power.byte_j * traffic + arithmetic_j * clocks**2
        return found

    def _arithmetic_j(self, kernel: Kernel) -> float:
        """Energy of a kernel's arithmetic at the stated clock."""
        if kernel.op == "gemm":
            return kernel.flops * self._gemm_rates(kernel.dtype).flop_j
        if kernel.op == "attention":
            return attention_work(kernel) * self._attention_rates(kernel).flop_j
        return 0.0

    def _states(self, kernels: Sequence[Kernel], sms_taken: int, hbm_taken_bps: float) -> list[_Times]:
        gpu = self.gpu
        sms = max(1, gpu.sms - sms_taken)
        bandwidth_bps = max(self._rates.bandwidth_floor * gpu.memory_bandwidth_bps,
                            gpu.memory_bandwidth_bps - hbm_taken_bps)
        known = self._known.setdefault((sms, bandwidth_bps), {})
        found = list(map(known.get, kernels))  # to hash a kernel costs as much as all else here
        if None in found:
            self._time({kernel for kernel, times in zip(kernels, found, strict=True) if times is None}, sms,
                       bandwidth_bps, known)
        return [times or known[kernel] for kernel, times in zip(kernels, found, strict=True)]

    def _time(self, kernels: set[Kernel], sms: int, bandwidth_bps: float, known: dict[Kernel, _Times]) -> None:
        products: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            if kernel.op == "gemm":
                products.setdefault(kernel.dtype, []).append(kernel)
            elif kernel.op == "attention":
                known[kernel] = self._attention_time(kernel, sms, bandwidth_bps)
            else:
                seconds = memory_time(kernel, self._rates, self.gpu, sms, bandwidth_bps)
                known[kernel] = seconds, self._rates.start_s
        for dtype, group in products.items():
            seconds_, block_s = self._product_times(group, dtype, sms, bandwidth_bps)
            known.update(zip(group, zip(seconds_.tolist(), block_s.tolist(), strict=True), strict=True))

    def _product_times(self, group: list[Kernel], dtype: str, sms: int, bandwidth_bps: float) -> tuple[Array, Array]:
        rates = self._gemm_rates(dtype)
        products = as_products(group, rates)
        times = product_times(products, rates, sms, self.gpu.sms, bandwidth_bps, self.gpu.memory_bandwidth_bps)
        if self._sustained:
            clock = np.full(len(group), self._products_clock(dtype) * self.clock_share)
        else:
            clock = self._alone(times, rates, products.flops, products.total_bytes, 1.0)
        starts_s = rates.start_s * np.array([kernel.launches for kernel in group])
        return overlapped(times.compute_s / clock, times.memory_s, rates.overlap) + starts_s, times.block_s / clock

    def _attention_time(self, kernel: Kernel, sms: int, bandwidth_bps: float) -> _Times:
        rates = self._attention_rates(kernel)
        times = attention_times(kernel, rates, sms, bandwidth_bps, self.gpu.sms)
        work, traffic = np.array([attention_work(kernel)]), np.array([kernel.bytes])
        clock = self._alone(times, rates, work, traffic, self._hunger if self._sustained else 1.0)
        seconds = overlapped(times.compute_s / clock, times.memory_s, rates.overlap) + rates.start_s * kernel.launches
        return float(seconds[0]), float((times.block_s / clock)[0])

    def _mean_clock(self, kernel: Kernel) -> float:
        """Clock of a kernel of a training step on a mean chip that nothing else uses."""
        if kernel.op == "gemm":
            if kernel.dtype not in self._mean_clocks:
                self._mean_clocks[kernel.dtype] = self._sequence_clock(kernel.dtype, 1.0) * self.clock_share
            return self._mean_clocks[kernel.dtype]
        if kernel.op != "attention":
            return self.clock_share
        rates = self._attention_rates(kernel)
        times = attention_times(kernel, rates, self.gpu.sms, self.gpu.memory_bandwidth_bps, self.gpu.sms)
        work, traffic = np.array([attention_work(kernel)]), np.array([kernel.bytes])
        return float(self._alone(times, rates, work, traffic, 1.0)[0])

    def _products_clock(self, dtype: str) -> float:
        """Clock of the products of a job in `dtype`, which waits for the hungriest of its chips."""
        return self._clock.get(dtype) or self._clock.setdefault(dtype, self._sequence_clock(dtype, self._hunger))

    def _alone(self, times: ProductTimes, rates: GemmRates | AttentionRates, flops: Array, size_bytes: Array,
               hunger: float) -> Array:
        """Clock of each kernel by its own power, as a share of the stated one; a benchmark's loop has gaps.

        Fused attention runs at it in training too: its arithmetic is at a quarter to a half of the peak, and the
        limit that holds back products is out of its reach (LLM Foundry's H100 steps of 16k to 64k tokens against those
        of 2k to 4k: at one clock for all the former came out 5-7% slower than the latter).
        """
        seconds = overlapped(times.compute_s, times.memory_s, rates.overlap)
        duty = np.ones(len(seconds)) if self._sustained else seconds / (seconds + self._gap_s)
        settled: Array = self._rates.power.clock(hunger * rates.flop_j, flops / seconds, size_bytes / seconds, duty)
        return settled * self.clock_share

    def _sequence_clock(self, dtype: str, hunger: float) -> float:
        """Clock that a long training run's products in `dtype` settle at: they alone, for a stated share of it.

        Args:
            dtype: of the products: those on the fp32 units mostly draw less than those on tensor units.
            hunger: energy of the chip's arithmetic over the kind's mean.
        """
        rates = self._gemm_rates(dtype)
        settled = self._rates.power.clock(hunger * rates.flop_j, np.array([rates.flops_per_s]), np.zeros(1),
                                          np.array([self._rates.training_duty]))
        return float(settled[0])

    def _gemm_rates(self, dtype: str) -> GemmRates:
        return self._gemm.get(dtype) or self._gemm.setdefault(dtype, self._rates.gemm(dtype, self._graphs))

    def _attention_rates(self, kernel: Kernel) -> AttentionRates:
        key = (kernel.kernel, kernel.dtype, kernel.shape[-1], kernel.variant == "backward")
        return self._attention.get(key) or self._attention.setdefault(key, self._rates.attention(*key))
