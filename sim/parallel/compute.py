"""Layers of an architecture as compute segments: forward, backward, recomputation, and cuts between operators.

Segments are made once per distinct layer; a model of eighty equal blocks has the segments of one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from sim.model.architecture import Layer, Operator
from sim.model.recompute import again_operators
from sim.parallel.model.calls import Items
from sim.parallel.model.joints import Joints, Uncut
from sim.program import CollectiveCall, InlineCall, ProgramBuilder
from sim.software import Stack
from sim.work import Kernel


def traffic_kernel(name: str, dtype: str, elements: int, bytes_moved: float, category: str = "memory_bound") -> Kernel:
    """An element-wise kernel of a technique's own (a copy, a cast, a scaling)."""
    return Kernel("elementwise", dtype, (max(1, elements),), name, 0.0, bytes_moved, category)


class Compute:
    """Makes segments; `policy` is the recomputation of a layer: "none", "full", "selective" or "selective-op"."""

    def __init__(self, builder: ProgramBuilder, stack: Stack, joints: Joints | Uncut | None = None) -> None:
        self._builder = builder
        self._stack = stack
        self._joints = joints or Uncut()
        self._made: dict[Hashable, int] = {}
        self._kept: list[object] = []  # keeps layers alive, so that an id stands for one layer only

    def shared(self, builder: ProgramBuilder) -> Compute:
        """The same segments for another program whose builder shares its tables with this one's."""
        other = Compute(builder, self._stack, self._joints)
        other._made, other._kept = self._made, self._kept
        return other

    def _once(self, layer: object, key: Hashable, make: Callable[[], int]) -> int:
        full = (id(layer), key)
        if full not in self._made:
            self._kept.append(layer)
            self._made[full] = make()
        return self._made[full]

    def segment(self, forward: Sequence[Kernel | InlineCall], backward: Sequence[Kernel | InlineCall] = ()) -> int:
        """A segment whose `forward` items are launched by module code and `backward` ones by autograd."""
        f, b = self._stack.host_forward_s, self._stack.host_backward_s
        host = [self._launch_s(item, f) for item in forward] + [self._launch_s(item, b) for item in backward]
        return self._builder.segment((*forward, *backward), host)

    def _launch_s(self, item: Kernel | InlineCall, of_operator: float) -> float:
        if isinstance(item, Kernel):
            return of_operator * item.launches
        return self._stack.host_collective_s + sum(of_operator * k.launches for k in item.beside)

    def forward(self, layer: Layer, before: tuple[Kernel, ...] = ()) -> int:
        """Forward of a layer, after the technique's own kernels `before`."""
        return self._once(layer, ("forward", before), lambda: self.segment(
            (*before, *(item for op in layer.operators for item in self._joints.forward(op)))))

    def backward(self, layer: Layer, policy: str, before: tuple[Kernel, ...] = (),
                 after: tuple[Kernel, ...] = ()) -> int:
        """Recomputation and backward of a layer between the technique's own kernels."""
        def make() -> int:
            again = self.recomputed(layer, policy)
            back = tuple(item for op in reversed(layer.operators) for item in self._joints.backward(op))
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
            again: Items = ()
            if part == 0:
                again = self.recomputed(layer, policy)
            numel = sum(p.numel for op in chosen for p in op.parameters)
            own = per_parameter(numel) if numel else ()
            back = tuple(item for op in chosen for item in self._joints.backward(op))
            return self.segment(again, (*back, *own)) if again or back or own else -1
        return [self._once(layer, ("part", policy, cuts, i, per_parameter), lambda i=i: make(i))  # type: ignore[misc]
                for i in range(len(cuts) + 1)]

    def forward_items(self, operators: Sequence[Operator]) -> Items:
        """What forward of operators runs, with the collectives between them."""
        return tuple(item for op in operators for item in self._joints.forward(op))

    def backward_items(self, operators: Sequence[Operator], weights: str = "with") -> Items:
        """What backward of operators, given in forward order, runs: with, without or only their weight gradients."""
        return tuple(item for op in reversed(operators) for item in self._backward_of(op, weights))

    def recomputed(self, layer: Layer, policy: str) -> Items:
        """What recomputation under `policy` runs again in backward (Korthikanti et al. 2022, section 4)."""
        if policy == "full":
            return tuple(item for op in layer.operators if op.recomputed for item in self._joints.forward(op))
        if policy == "selective":
            return tuple(item for op in layer.operators if op.core for item in self._joints.again(op))
        if policy == "selective-op":
            return tuple(item for op in again_operators(layer) for item in self._joints.forward(op))
        return ()

    # ------------------------------------------------------------------------- rows of layers, for pipeline stages
    def run(self, layers: Sequence[Layer], before: tuple[CollectiveCall, ...] = ()) -> int:
        """Forward of several layers in a row as one segment, after the collectives `before`; -1 if it is empty."""
        def make() -> int:
            self._kept.extend(layers)
            items = tuple(item for layer in layers for op in layer.operators for item in self._joints.forward(op))
            return self.segment((*map(InlineCall, before), *items)) if items or before else -1
        return self._once(tuple, ("run", before, tuple(map(id, layers))), make)

    def run_backward(self, layers: Sequence[Layer], policies: Sequence[str], weights: str = "with",
                     before: tuple[CollectiveCall, ...] = (), after: tuple[Kernel, ...] = ()) -> int:
        """Recomputation and backward of several layers (given in forward order) as one segment; -1 if it is empty.

        Args:
            weights: "with" the weight gradients, "without" them, or "only" them (zero-bubble schedules).
            before, after: collectives in front of it, and the technique's own kernels behind it.
        """
        def make() -> int:
            self._kept.extend(layers)
            back: list[Kernel | InlineCall] = [InlineCall(call) for call in before]
            for layer, policy in zip(reversed(layers), reversed(policies), strict=True):
                if weights != "only":
                    back += self.recomputed(layer, policy)
                for op in reversed(layer.operators):
                    back += self._backward_of(op, weights)
            back += after
            return self.segment((), back) if back else -1
        key = ("run back", before, tuple(map(id, layers)), tuple(policies), weights, after)
        return self._once(tuple, key, make)

    def _backward_of(self, op: Operator, weights: str) -> Items:
        if weights == "with":
            return self._joints.backward(op)
        if weights == "only":
            return tuple(k for k in op.backward if is_weight_gradient(k))
        return self._joints.backward(replace(op, backward=tuple(k for k in op.backward if not is_weight_gradient(k))))


def is_weight_gradient(kernel: Kernel) -> bool:
    """Whether nothing of the backward pass waits for the kernel: the product that makes a weight's gradient
    (spelled-out attention has products of that shape too)."""
    return kernel.op == "gemm" and kernel.variant == "nt" and kernel.category == "gemm"
