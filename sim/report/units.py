"""Numbers as people write them: durations, bytes, rates."""

from __future__ import annotations

#: Three digits round up to a thousand from here on, which would be written as 1e+03.
_THOUSAND = 999.5


def seconds(value: float) -> str:
    """A duration with a unit a person would choose."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size * _THOUSAND / 1000:
            return f"{value / size:.4g} {unit}" if unit == "s" else f"{value / size:.3g} {unit}"
    return "0" if value == 0 else f"{value * 1e9:.3g} ns"


def size(value: float) -> str:
    """Bytes in binary units, as nvidia-smi and PyTorch show them."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= factor:
            return f"{figure(value / factor)} {unit}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    """A throughput: thousands with commas, small ones with three digits."""
    return figure(value)


def figure(value: float, sign: str = "") -> str:
    """Three digits, or thousands with commas; never an exponent for what is large.

    Args:
        sign: "+" for a change.
    """
    return f"{value:{sign},.0f}" if abs(value) >= _THOUSAND else f"{value:{sign}.3g}"
