"""Layers of an architecture as compute segments: forward, backward, recomputation, and cuts between operators.

Segments are made once per distinct layer; a model of eighty equal blocks has the segments of one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar

from sim.model.architecture import Layer, Operator, Parameter
from sim.model.recompute import again_operators, module_operators, modules_of
from sim.parallel.model.calls import Items
from sim.parallel.model.joints import Joints, Uncut
from sim.parallel.model.overlap import Timed, together
from sim.program import InlineCall, MemoryOp, ProgramBuilder, Read
from sim.software import Stack
from sim.tensor_trace import LayerMemory
from sim.work import Kernel


def traffic_kernel(name: str, dtype: str, elements: int, bytes_moved: float, category: str = "memory_bound") -> Kernel:
    """An element-wise kernel of a technique's own (a copy, a cast, a scaling)."""
    return Kernel("elementwise", dtype, (max(1, elements),), name, 0.0, bytes_moved, category)


T = TypeVar("T")

#: Rows of a segment, the host time of each, and the reads of the host among them.
_Part = tuple[tuple[int, ...], tuple[float, ...], tuple[Read, ...]]


class Compute:
    """Makes segments; `policy` is the recomputation of a layer (`sim.model.recompute`)."""

    def __init__(self, builder: ProgramBuilder, stack: Stack, joints: Joints | Uncut | None = None) -> None:
        self._builder = builder
        self._stack = stack
        self._joints = joints or Uncut()
        self._made: dict[Hashable, int] = {}
        self._parts: dict[Hashable, _Part] = {}
        #: What `Activations.row` has worked out: memory operations, what they belong to, gradients left behind.
        self.rows_of_memory: dict[Hashable, tuple[list[MemoryOp], list[LayerMemory], list[int]]] = {}
        self._memory: dict[Hashable, Any] = {}
        self._kept: list[object] = []  # keeps layers alive, so that an id stands for one layer only

    def shared(self, builder: ProgramBuilder) -> Compute:
        """The same segments for another program whose builder shares its tables with this one's."""
        other = Compute(builder, self._stack, self._joints)
        other._made, other._parts, other._kept = self._made, self._parts, self._kept
        other.rows_of_memory, other._memory = self.rows_of_memory, self._memory
        return other

    def memory_of(self, layer: Layer, key: Hashable, make: Callable[[], T]) -> T:
        """What a layer holds, worked out once for all programs and sections of a job."""
        full = (id(layer), key)
        if full not in self._memory:
            self._kept.append(layer)
            self._memory[full] = make()
        found: T = self._memory[full]
        return found

    def _once(self, layer: object, key: Hashable, make: Callable[[], int]) -> int:
        full = (id(layer), key)
        if full not in self._made:
            self._kept.append(layer)
            self._made[full] = make()
        return self._made[full]

    def segment(self, forward: Sequence[Kernel | InlineCall], backward: Sequence[Kernel | InlineCall] = ()) -> int:
        """A segment whose `forward` items are launched by the model's modules and `backward` ones by autograd."""
        return self._row((self._part(forward, self._module_s), self._part(backward, self._stack.host_backward_s)))

    def own(self, items: Sequence[Kernel | InlineCall]) -> int:
        """A segment of a technique's own kernels: operators called one after another, with no modules around them."""
        return self._row((self._part(items, self._stack.host_forward_s),))

    @property
    def _module_s(self) -> float:
        """Host time of an operator of the model: its own, and that of the Python around it."""
        return self._stack.host_forward_s + self._stack.host_module_s

    def _part(self, items: Sequence[Kernel | InlineCall], of_operator: float) -> _Part:
        return self._builder.rows(items), tuple([self._launch_s(item, of_operator) for item in items]), reads(items)

    def _row(self, parts: Iterable[_Part]) -> int:
        rows, host, within = zip(*parts, strict=True)
        begins = accumulate(map(len, rows), initial=0)
        moved = tuple(Read(at + read.behind, at + read.before, read.host_s)
                      for at, part in zip(begins, within, strict=False) for read in part)
        return self._builder.segment_of(tuple(chain.from_iterable(rows)), tuple(chain.from_iterable(host)), moved)

    def _of(self, layer: Layer, key: Hashable, items: Callable[[], Iterable[Kernel | InlineCall]],
            of_operator: float) -> _Part:
        """A part that is the same wherever the layer stands."""
        full = (id(layer), key)
        if full not in self._parts:
            self._kept.append(layer)
            self._parts[full] = self._part(tuple(items()), of_operator)
        return self._parts[full]

    def called_s(self, item: Kernel | InlineCall) -> float:
        """Host time of what the model's modules launch."""
        return self._launch_s(item, self._module_s)

    def launched_s(self, item: Kernel | InlineCall) -> float:
        """Host time of what autograd launches."""
        return self._launch_s(item, self._stack.host_backward_s)

    def _launch_s(self, item: Kernel | InlineCall, of_operator: float) -> float:
        if isinstance(item, Kernel):
            return of_operator * item.launches
        return self._stack.host_collective_s + sum(of_operator * k.launches for k in item.beside)

    def forward(self, layer: Layer, before: tuple[Kernel, ...] = ()) -> int:
        """Forward of a layer, after the technique's own kernels `before`."""
        return self._once(layer, ("forward", before), lambda: self.segment(
            (*before, *self.forward_items(layer.operators))))

    def cut(self, layer: Layer, policy: str, before: tuple[Kernel, ...], after: tuple[Kernel, ...],
            phase: str) -> list[int]:
        """Forward of a layer, or its backward behind what is recomputed, cut in front of each operator whose forward
        begins with a read of the host (`Operator.reading_s`): one segment more than such operators run."""
        def make(part: int) -> int:
            operators = [op if phase == "forward" else op.rerun for op in layer.operators
                         if phase == "forward" or op.recomputed]
            marks = [0, *(i for i, op in enumerate(operators) if op.reading_s), len(operators)]
            items = self.forward_items(operators[marks[part]:marks[part + 1]])
            head: Items = before if part == 0 else ()
            if phase == "backward" and part == 0:
                head = (*before, *self.checkpoint(layer))
            last = phase == "backward" and part == len(marks) - 2
            return self.segment((*head, *items), (*self.backward_items(layer.operators), *after) if last else ())
        count = 1 + sum(bool(op.reading_s) for op in layer.operators)
        return [self._once(layer, ("cut", phase, policy, before, after, i), lambda i=i: make(i))  # type: ignore[misc]
                for i in range(count)]

    def backward(self, layer: Layer, policy: str, before: tuple[Kernel, ...] = (),
                 after: tuple[Kernel, ...] = ()) -> int:
        """Recomputation and backward of a layer between the technique's own kernels."""
        def make() -> int:
            again = self.recomputed(layer, policy)
            back = self.backward_items(layer.operators)
            return self.segment((*before, *again), (*back, *after))
        return self._once(layer, ("backward", policy, before, after), make)

    def forward_parts(self, layer: Layer, cuts: tuple[int, ...]) -> list[int]:
        """Forward cut in front of the operators numbered `cuts` (ascending); len(cuts) + 1 segments, a part without
        kernels is -1."""
        if not cuts:
            return [self.forward(layer)]
        marks = [0, *cuts, len(layer.operators)]

        def make(part: int) -> int:
            items = self.forward_items(layer.operators[marks[part]:marks[part + 1]])
            return self.segment(items) if items else -1
        return [self._once(layer, ("forward part", cuts, i), lambda i=i: make(i))  # type: ignore[misc]
                for i in range(len(marks) - 1)]

    def backward_parts(self, layer: Layer, policy: str, cuts: tuple[int, ...],
                       behind: Callable[[Sequence[Parameter]], tuple[Kernel, ...]]) -> list[int]:
        """Backward cut after the operators numbered `cuts` (ascending in backward order, 0 = the last operator).

        Args:
            behind: gives the technique's own kernels behind the gradients that a part made, of these parameters.

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
            made = [p for op in chosen for p in op.parameters]
            own = behind(made) if made else ()
            back = self.backward_items(tuple(reversed(chosen)))
            return self.segment(again, (*back, *own)) if again or back or own else -1
        return [self._once(layer, ("part", policy, cuts, i, behind), lambda i=i: make(i))  # type: ignore[misc]
                for i in range(len(cuts) + 1)]

    def forward_items(self, operators: Sequence[Operator]) -> Items:
        """What forward of operators runs, with the collectives between them."""
        return self._joints.row([(op.name, self._joints.forward(op)) for op in operators])

    def backward_items(self, operators: Sequence[Operator], weights: str = "with") -> Items:
        """What backward of operators, given in forward order, runs; `weights` as in `run_backward`."""
        return self._joints.row([(op.name, self._backward_of(op, weights)) for op in reversed(operators)])

    def recomputed(self, layer: Layer, policy: str) -> Items:
        """What recomputation under `policy` runs again in backward (Korthikanti et al. 2022, section 4)."""
        if policy == "full":
            return (*self.checkpoint(layer), *self.forward_items(
                [op.rerun for op in layer.operators if op.recomputed]))
        if policy == "selective-op":
            return tuple(item for op in again_operators(layer) for item in self._but_sums(op))
        modules = modules_of(policy)
        return self._joints.row([(op.name, self._joints.again(op) if op.core else self._joints.forward(op))
                                 for op in module_operators(layer, modules)]) if modules else ()

    def _but_sums(self, operator: Operator) -> Items:
        """Forward once more of an operator whose scattered sum is kept; compiled, its product is dead code then."""
        items = self._joints.forward(operator)
        if not any(isinstance(item, InlineCall) and item.call.kind == "reduce_scatter" for item in items):
            return items
        made: list[Kernel | InlineCall] = []
        for item in items:
            if isinstance(item, InlineCall) and item.call.kind != "reduce_scatter":
                made.append(item)
                continue
            kernels = item.beside if isinstance(item, InlineCall) else (item,)
            made += [kernel for kernel in kernels if kernel.variant != "partial_sums"
                     and not (self._stack.compile and kernel.op == "gemm")]
        return tuple(made)

    def checkpoint(self, layer: Layer) -> Items:
        """What full recomputation of a layer begins with where ranks share its input."""
        return self._joints.checkpoint(layer)

    # ------------------------------------------------------------------------- rows of layers, for pipeline stages
    def run(self, layers: Sequence[Layer], before: Items = ()) -> int:
        """Forward of several layers in a row as one segment, after what is in front of it; -1 if it is empty."""
        def make() -> int:
            self._kept.extend(layers)
            parts = [self._part(before, self._stack.host_forward_s)]
            parts += [self._of(layer, "forward", partial(self.forward_items, layer.operators), self._module_s)
                      for layer in layers]
            return self._row(parts) if any(part[0] for part in parts) else -1
        return self._once(tuple, ("run", before, tuple(map(id, layers))), make)

    def run_backward(self, layers: Sequence[Layer], policies: Sequence[str], weights: str = "with",
                     before: Items = (), after: tuple[Kernel, ...] = ()) -> int:
        """Recomputation and backward of several layers (given in forward order) as one segment; -1 if it is empty.

        Args:
            weights: "with" the weight gradients, "without" them, or "only" them (zero-bubble schedules).
            before, after: what is in front of it, and the technique's own kernels behind it.
        """
        def make() -> int:
            self._kept.extend(layers)
            cost = self._stack.host_backward_s
            parts = [self._part(before, cost)]
            for layer, policy in zip(reversed(layers), reversed(policies), strict=True):
                if weights != "only" and policy != "none":
                    parts.append(self._of(layer, ("again", policy), partial(self.recomputed, layer, policy),
                                          self._module_s))
                parts.append(self._of(layer, weights, partial(self.backward_items, layer.operators, weights), cost))
            parts.append(self._part(after, cost))
            return self._row(parts) if any(part[0] for part in parts) else -1
        key = ("run back", before, tuple(map(id, layers)), tuple(policies), weights, after)
        return self._once(tuple, key, make)

    def run_together(self, ahead: Sequence[Layer], back: Sequence[Layer], policies: Sequence[str],
                     weights: str = "with", before: Items = (),
                     after: tuple[Kernel, ...] = ()) -> int:
        """Forward of layers and backward of others as one segment, in which either side's tokens travel to their
        experts while the other side computes (`sim.parallel.model.overlap.together`).

        Args:
            ahead, back: layers of the forward and of the backward pass, both in forward order.
            policies, weights, before, after: as in `run_backward`.
        """
        def timed(items: Items, of_operator: float) -> list[Timed]:
            return [(item, self._launch_s(item, of_operator)) for item in items]

        def make() -> int:
            self._kept += (*ahead, *back)
            f, b = self._module_s, self._stack.host_backward_s
            merged = together((timed(self.forward_items(layer.operators), f) for layer in ahead),
                              ([*timed(() if weights == "only" else self.recomputed(layer, policy), f),
                                *timed(self.backward_items(layer.operators, weights), b)]
                               for layer, policy in zip(reversed(back), reversed(policies), strict=True)),
                              is_weight_gradient, self._joints.expert)
            found = [*timed(before, self._stack.host_forward_s), *merged, *timed(after, b)]
            return self._builder.segment([item for item, _ in found], [launch_s for _, launch_s in found])
        key = ("together", before, tuple(map(id, ahead)), tuple(map(id, back)), tuple(policies), weights, after)
        return self._once(tuple, key, make)

    def _backward_of(self, op: Operator, weights: str) -> Items:
        if weights == "with":
            return self._joints.backward(op)
        if weights == "only":
            return tuple(k for k in op.backward if is_weight_gradient(k))
        return self._joints.backward(replace(op, backward=tuple(k for k in op.backward if not is_weight_gradient(k))))


def reads(items: Sequence[Kernel | InlineCall]) -> tuple[Read, ...]:
    """Where the host stops among items to read what some of them make (`InlineCall`)."""
    found: list[Read] = []
    told = -1
    for place, item in enumerate(items):
        if isinstance(item, InlineCall) and item.reads_s:
            found.append(Read(told if told >= 0 else place, place, item.reads_s))
            told = -1
        if isinstance(item, InlineCall) and item.told:
            told = place + 1
    return tuple(found)


def is_weight_gradient(kernel: Kernel) -> bool:
    """Whether nothing of the backward pass waits for the kernel: the product that makes a weight's gradient
    (spelled-out attention has products of that shape too)."""
    return kernel.op == "gemm" and kernel.variant == "nt" and kernel.category == "gemm"
