"""Which fused kernels PyTorch's `scaled_dot_product_attention` has on a GPU: the fact `sdpa_kernels` of a release."""

from __future__ import annotations

from sim.software.stack import Stack


def sdpa_kernels(stack: Stack, capability: str) -> tuple[str, ...]:
    """Fused kernels (cudnn, flash, efficient) in the order in which that function tries them.

    The fact names each with the compute capabilities it was built for: the least one, or the least and the largest.
    AMD's cards have what is not cuDNN's (AOTriton). Empty where the release has no such function.

    Args:
        capability: of the catalogue: "8.0", or a name of AMD's ("gfx942").
    """
    if stack.sdpa_kernels == "none":
        return ()
    named = (line.split() for line in stack.sdpa_kernels.split(", "))
    if not capability[:1].isdigit():
        return tuple(name for name, _ in named if name != "cudnn")
    had = _number(capability)
    return tuple(name for name, span in named if _within(had, span))


def _within(had: tuple[int, ...], span: str) -> bool:
    least, _, largest = span.partition("-")
    return _number(least) <= had and (not largest or had <= _number(largest))


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
