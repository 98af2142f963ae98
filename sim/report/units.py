"""Numbers as people write them: durations, bytes, rates."""

from __future__ import annotations


def seconds(value: float) -> str:
    """A duration with a unit a person would choose."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}" if unit == "s" else f"{value / size:.3g} {unit}"
    return "0" if value == 0 else f"{value * 1e9:.3g} ns"


def size(value: float) -> str:
    """Bytes in binary units, as nvidia-smi and PyTorch show them."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}" if abs(value) < 1000 * factor else f"{value / factor:,.0f} {unit}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    """A throughput: thousands with commas, small ones with three digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
