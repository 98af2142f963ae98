"""Time of kernels that only move bytes: element-wise, norms, softmax, loss, embedding, optimizer."""

from __future__ import annotations

from sim.hardware.rates import Rates
from sim.work import Kernel

#: Class of access pattern by operation and direction; a direction that is not listed is as fast as "forward".
_PATTERN = {
    ("norm", "forward"): "norm_forward", ("norm", "backward"): "norm_backward",
    ("softmax", "forward"): "softmax", ("cross_entropy", "forward"): "softmax",
    ("embedding", "forward"): "elementwise", ("embedding", "backward"): "reduction",
    ("elementwise", "forward"): "elementwise", ("optimizer", "forward"): "elementwise",
    ("reduction", "forward"): "reduction",
}


def pattern(kernel: Kernel) -> str:
    """Class of access pattern: element-wise streams, row-wise passes, or sums over columns and scattered rows."""
    found = _PATTERN.get((kernel.op, kernel.variant)) or _PATTERN.get((kernel.op, "forward"))
    if found is None:
        raise ValueError(f"no time model for operation '{kernel.op}'")
    return found


def memory_time(kernel: Kernel, rates: Rates, bandwidth_bps: float) -> float:
    """Seconds: one start per launch, then bytes over the share of the bandwidth this access pattern reaches."""
    return rates.start_s * kernel.launches + kernel.bytes / (bandwidth_bps * rates.memory_share(pattern(kernel)))
