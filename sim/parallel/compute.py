"""Layers of an architecture as compute segments: forward, backward, recomputation, and cuts between operators.

Segments are made once per distinct layer; a model of eighty equal blocks has the segments of one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from sim.model.architecture import Layer
from sim.model.recompute import recomputed_but_kept
from sim.program import ProgramBuilder
from sim.software import Stack
from sim.work import Kernel


def traffic_kernel(name: str, dtype: str, elements: int, bytes_moved: float, category: str = "memory_bound") -> Kernel:
    """An element-wise kernel of a technique's own (a copy, a cast, a scaling)."""
    return Kernel("elementwise", dtype, (max(1, elements),), name, 0.0, bytes_moved, category)


class Compute:
    """Makes segments; `policy` is the recomputation of a layer: "none", "full", "selective" or "selective-op"."""

    def __init__(self, builder: ProgramBuilder, stack: Stack) -> None:
        self._builder = builder
        self._stack = stack
        self._made: dict[Hashable, int] = {}
        self._kept: list[object] = []  # keeps layers alive, so that an id stands for one layer only

    def _once(self, layer: object, key: Hashable, make: Callable[[], int]) -> int:
        full = (id(layer), key)
        if full not in self._made:
            self._kept.append(layer)
            self._made[full] = make()
        return self._made[full]

    def segment(self, forward: Sequence[Kernel], backward: Sequence[Kernel] = ()) -> int:
        """A segment whose `forward` kernels are launched by module code and `backward` ones by autograd."""
        f, b = self._stack.host_forward_s, self._stack.host_backward_s
        host = [f * k.launches for k in forward] + [b * k.launches for k in backward]
        return self._builder.segment((*forward, *backward), host)

    def forward(self, layer: Layer, before: tuple[Kernel, ...] = ()) -> int:
        """Forward of a layer, after the technique's own kernels `before`."""
        return self._once(layer, ("forward", before), lambda: self.segment(
            (*before, *(k for op in layer.operators for k in op.forward))))

    def backward(self, layer: Layer, policy: str, before: tuple[Kernel, ...] = (),
                 after: tuple[Kernel, ...] = ()) -> int:
        """Recomputation and backward of a layer between the technique's own kernels."""
        def make() -> int:
            again = recomputed(layer, policy)
            back = tuple(k for op in reversed(layer.operators) for k in op.backward)
            return self.segment((*before, *again), (*back, *after))
        return self._once(layer, ("backward", policy, before, after), make)

    def backward_parts(self, layer: Layer, policy: str, cuts: tuple[int, ...],
                       per_parameter: Callable[[int], tuple[Kernel, ...]]) -> list[int]:
        """Backward cut after the operators numbered `cuts` (ascending in backward order, 0 = the last operator).

        Args:
            per_parameter: gives the technique's own kernels for the number of parameters whose gradients a part made.

        Returns:
            len(cuts) + 1 segments; a part without kernels is -1.
        """
        def make(part: int) -> int:
            operators = tuple(reversed(layer.operators))
            low = cuts[part - 1] + 1 if part else 0
            high = cuts[part] + 1 if part < len(cuts) else len(operators)
            chosen = operators[low:high]
            again: tuple[Kernel, ...] = ()
            if part == 0:
                again = recomputed(layer, policy)
            numel = sum(p.numel for op in chosen for p in op.parameters)
            own = per_parameter(numel) if numel else ()
            back = tuple(k for op in chosen for k in op.backward)
            return self.segment(again, (*back, *own)) if again or back or own else -1
        return [self._once(layer, ("part", policy, cuts, i, per_parameter), lambda i=i: make(i))  # type: ignore[misc]
                for i in range(len(cuts) + 1)]


def recomputed(layer: Layer, policy: str) -> tuple[Kernel, ...]:
    """Kernels recomputation under `policy` runs again in backward (Korthikanti et al. 2022, section 4)."""
    if policy == "full":
        return tuple(k for op in layer.operators if op.recomputed for k in op.forward)
    if policy == "selective-op":
        return recomputed_but_kept(layer)
    if policy == "selective":
        return tuple(k for op in layer.operators if op.core for k in op.core_again or op.forward)
    return ()
