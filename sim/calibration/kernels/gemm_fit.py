"""Fit of the matrix-product figures of one class of units to kernel tables: robust, few figures, physical bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.calibration.kernels.optimise import Vector, minimise
from sim.calibration.kernels.tables import Group
from sim.catalog import merged
from sim.hardware.device import Device
from sim.hardware.kernels.gemm import Products, as_products, overlapped, product_times
from sim.hardware.kernels.rates import UNITS, GemmRates, Rates, family_figures, fed_share
from sim.hardware.power import Power

#: Figure, lowest and highest physical value, value expected before any data.
FIGURES: dict[str, tuple[float, float, float]] = {
    "eta": (0.30, 0.99, 0.85),
    "fill_k": (0.0, 160.0, 40.0),
    "block_start_s": (0.0, 4.0e-6, 1.0e-6),
    "operand_cost": (0.0, 0.6, 0.1),
    "exposed_output": (0.0, 1.0, 0.2),
    "idle_wave_loss": (0.05, 1.0, 0.3),
    "partial_tile": (0.1, 1.0, 0.6),
}
#: Energy of a FLOP over the one `kernels.yaml` states: fitted where a table shows short products at full clock beside
#: throttled long ones, and no other source says more.
ENERGY = (0.5, 2.0, 1.0)
ENERGY_FROM_TABLES = (("blackwell", "half"), ("turing", "fp32"), ("ada", "half"), ("ada", "fp8"), ("gb202", "half"),
                      ("gb202", "fp8"))
_LIBRARY = ("batched_slice", "batched_tile")  # not fitted: what the tables show of which kernels the library picks
_EXPECTED_WEIGHT = 2.0e-4  # pull towards the expected values: decides only where the data do not
_FEW_ROWS = 1000  # with n rows in all the pull grows by 1 + 1000 / n
_NOISE = 0.02  # relative; errors below it are not worth fitting
_SMALL_M_WEIGHT = 0.1  # thin products are bound by memory and by the benchmark's resolution
MOST_ROWS = 1200  # of a group, evenly spaced by work


@dataclass(frozen=True)
class Sample:
    """Products of one group, ready to be timed with any figures."""

    group: Group
    products: Products
    rates: GemmRates
    power: Power
    weights: Vector
    beside_s: Vector

    def predict(self, figures: Mapping[str, Any]) -> Vector:
        """Seconds the benchmark would report."""
        rates = self.rates
        named = [name for name in figures if name in FIGURES and name != "eta"]
        values: dict[str, Any] = {name: float(figures[name]) for name in named}
        values |= {name: figures[name] for name in _LIBRARY if name in figures}
        if "eta" in figures:
            card, dtype = self.group.gpu, self.group.dtype
            share = fed_share(card, UNITS[card.arithmetic(dtype)], float(figures["eta"]))
            values["flops_per_s"] = card.reached_flops(dtype) * share
        if "energy" in figures:
            values["flop_j"] = 1e-12 * stated_energy_pj(self.group) * float(figures["energy"])
        rates = replace(rates, **values)
        card, method = self.group.gpu, self.group.timing
        times = product_times(self.products, rates, card.sms, card.sms, card.memory_bandwidth_bps)
        alone_s = overlapped(times.compute_s, times.memory_s, rates.overlap)
        clock = self.power.clock(rates.flop_j, self.products.flops / alone_s, self.products.total_bytes / alone_s,
                                 alone_s / (alone_s + method.gap_s))
        gpu_s = overlapped(times.compute_s / clock, times.memory_s, rates.overlap) + rates.start_s + self.beside_s
        hosts = np.array(self.group.hosts)
        read = np.empty_like(gpu_s)
        for host in set(self.group.hosts):
            rows = hosts == host
            read[rows] = method.read(host, gpu_s[rows])
        return read


def library(group: Group) -> dict[str, Any]:
    """What the library of a group's GPU does with batched products, by figure of `GemmRates`."""
    rates = Rates(group.gpu).gemm(group.dtype)
    return {name: getattr(rates, name) for name in _LIBRARY}


def stated_energy_pj(group: Group) -> float:
    """Energy of a FLOP that `kernels.yaml` states for the units a group uses, before any fit."""
    energies = family_figures(group.gpu.kernels, fitted=False)["power"]["pj_per_flop"]
    return float(energies[UNITS[group.gpu.arithmetic(group.dtype)]])


def large(products: Products) -> NDArray[np.bool_]:
    """At least 20 GFLOP, no dimension below 512."""
    smallest = np.minimum(np.minimum(products.m, products.n), products.k)
    mask: NDArray[np.bool_] = (products.flops >= 20e9) & (smallest >= 512)
    return mask


def sample(group: Group, most: int | None = MOST_ROWS) -> Sample:
    """A group's products with the weights of the fit; rows thinned evenly in order of work."""
    seen = merged(group.gpu.kernel_figures, group.timing.figures)
    figures = Rates(replace(group.gpu, kernel_figures=seen))
    rates = figures.gemm(group.dtype, group.timing.graphs)
    if most is not None and len(group.kernels) > most:
        order = np.argsort([kernel.flops for kernel in group.kernels], kind="stable")
        group = group.pick(order[np.linspace(0, len(order) - 1, most).astype(np.intp)])
    products = as_products(group.kernels, rates)
    weights = np.where(products.m >= 128, 1.0, _SMALL_M_WEIGHT)
    big = large(products)
    if big.any():
        weights[big] += weights.sum() / big.sum() / 2
    return Sample(group, products, rates, figures.power, weights / weights.sum(), _beside_s(group))


def _beside_s(group: Group) -> Vector:
    """Seconds of what each row timed together with its product."""
    found = np.zeros(len(group.kernels))
    rows = [row for row, kernel in enumerate(group.beside) if kernel is not None]
    if rows:
        device = Device(group.gpu, sustained=False)
        found[rows] = device.times([kernel for kernel in group.beside if kernel is not None])
    return found


def fit(samples: Sequence[Sample], rounds: int = 220) -> dict[str, float]:
    """The figures of least robust relative error over the samples; each benchmark weighs the same, and in it each
    sample: tables of one benchmark share its method and machines."""
    card = samples[0].group.gpu
    free = (card.kernels, UNITS[card.arithmetic(samples[0].group.dtype)]) in ENERGY_FROM_TABLES
    ranges = FIGURES | ({"energy": ENERGY} if free else {})
    low, high, expected = (np.array(column) for column in zip(*ranges.values(), strict=True))
    logs = [np.log(item.group.measured_s) for item in samples]
    benchmarks = [item.group.file.split("_")[0] for item in samples]
    shares = [1.0 / benchmarks.count(name) / len(set(benchmarks)) for name in benchmarks]
    pull = _EXPECTED_WEIGHT * (1.0 + _FEW_ROWS / sum(len(log) for log in logs))

    def cost(scaled: Vector) -> float:
        values = low + scaled * (high - low)
        figures = dict(zip(ranges, values, strict=True))
        total = pull * float((((values - expected) / (high - low)) ** 2).sum())
        for item, log, share in zip(samples, logs, shares, strict=True):
            error = np.log(item.predict(figures)) - log
            total += share * float(item.weights @ np.sqrt(error**2 + _NOISE**2))
        return total

    unit = np.zeros(len(low)), np.ones(len(low))
    found = minimise(cost, (expected - low) / (high - low), *unit, rounds=rounds)
    return dict(zip(ranges, (low + found * (high - low)).tolist(), strict=True))
