"""The same GPU with more of one resource: what a sensitivity asks about."""

from __future__ import annotations

from dataclasses import replace

from sim.catalog import merged
from sim.hardware.device import Device
from sim.hardware.gpu import Gpu
from sim.hardware.kernels.rates import UNITS, Rates


def with_arithmetic(gpu: Gpu, factor: float) -> Gpu:
    """`gpu` with `factor` times the peak of its tensor cores at the same power.

    Energy per FLOP falls as the peak grows, so that the clock under the power limit stays. Arithmetic without tensor
    cores (fp32, fp64) keeps its peak.
    """
    peaks = {dtype: peak * (1.0 if UNITS.get(dtype) == "fp32" else factor) for dtype, peak in gpu.tflops.items()}
    energies = {units: energy / (1.0 if units == "fp32" else factor)
                for units, energy in Rates(gpu).flop_energies().items()}
    figures = merged(gpu.kernel_figures, {"power": {"pj_per_flop": energies}})
    return replace(gpu, tflops=peaks, kernel_figures=figures)


def with_products(gpu: Gpu, rate: float) -> Gpu:
    """`gpu` whose tensor-core products run at `rate` times their calibrated rate: another release of the library."""
    return gpu if rate == 1.0 else replace(gpu, kernel_figures=merged(gpu.kernel_figures, {"library_rate": rate}))


def scaled(device: Device, arithmetic: float = 1.0, memory_bandwidth: float = 1.0) -> Device:
    """A device with `arithmetic` times the peak of its tensor cores and `memory_bandwidth` times the bandwidth."""
    gpu = device.gpu if arithmetic == 1.0 else with_arithmetic(device.gpu, arithmetic)
    return device.like(replace(gpu, memory_bandwidth_bps=gpu.memory_bandwidth_bps * memory_bandwidth))
