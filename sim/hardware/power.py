"""Clock under the power limit (rule 8 of the design): the fixed point of average power against `power_limit_w`.

A GPU draws a constant part, energy per byte of device memory, and energy per FLOP. Throughput follows the clock f and
energy per FLOP the square of the voltage, which follows the clock: arithmetic power goes as f³. When the sum at full
clock exceeds the limit, the clock settles where it does not.

Source: dynamic power C·V²·f (Rabaey et al., Digital Integrated Circuits, chapter 5). Figures: `kernels.yaml`, power.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Power:
    """Power of one GPU.

    Attributes:
        limit_w: what the GPU may draw on average.
        constant_w: drawn at any load: leakage, memory refresh, links, fans' share.
        byte_j: energy of a byte to or from device memory.
        lowest_clock: the clock never falls below this share of the stated one.
    """

    limit_w: float
    constant_w: float
    byte_j: float
    lowest_clock: float

    def clock(self, flop_j: float, flops_per_s: Array, bytes_per_s: Array, duty: Array) -> Array:
        """Share of the stated clock at which average power meets the limit, at most 1.

        Args:
            flop_j: energy per FLOP at the stated clock and voltage, joules.
            flops_per_s: rate of arithmetic while a kernel runs at the stated clock.
            bytes_per_s: device-memory traffic while it runs.
            duty: share of the time it runs; the rest is idle.
        """
        left_w = self.limit_w - self.constant_w - duty * self.byte_j * bytes_per_s
        arithmetic_w = np.maximum(duty * flop_j * flops_per_s, 1e-9)
        cubed = np.maximum(left_w, 0.0) / arithmetic_w
        settled: Array = np.clip(np.cbrt(cubed), self.lowest_clock, 1.0)
        return settled
