"""What a check of the scenario finds, and the hint that most of them give."""

from __future__ import annotations

#: (dotted field, message, hint)
Finding = tuple[str, str, str]


def divisors_near(whole: int, wanted: int) -> str:
    """A hint naming the divisors of `whole` around `wanted`."""
    if whole > 10**9:
        return ""
    small = [d for d in range(1, int(whole**0.5) + 1) if whole % d == 0]
    divisors = sorted({*small, *(whole // d for d in small)})
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    near = " or ".join(str(d) for d in below + above)
    return f"{near} would divide" if near else ""
