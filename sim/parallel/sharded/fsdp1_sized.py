"""FSDP 1 wrapped by size, where single layers of a block are large enough to be units of their own.

`size_based_auto_wrap_policy` (PyTorch, `torch/distributed/fsdp/wrap.py`) walks up from the leaves: a module becomes a
unit when what its children left unwrapped reaches the least size. In a block whose linear layers are that large each
of them is one, so that a single one is whole at a time. Recomputation of the block runs their forward hooks again: they
are gathered, and freed behind their forward, a third time before backward asks for them.

The rest is `Fsdp1`. Norms and small parameters, which PyTorch leaves to the root, go with the layer in front of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from sim.model.architecture import Layer
from sim.parallel.activations import Activations
from sim.parallel.sharded.fsdp import present
from sim.parallel.sharded.fsdp1 import Fsdp1
from sim.parallel.sharded.submodules import Submodule, submodules
from sim.parallel.sharded.units import Unit, flat_padding
from sim.parallel.step import COMPUTE, MicroStep, Plan
from sim.program import Label, SectionBuilder


class Use(NamedTuple):
    """A run of a block's operators with the unit that it needs.

    Attributes:
        direction: "forward", "recompute" or "backward".
        first: whether it is the first use of its layer in forward, or after forward.
    """

    position: int
    layer: Layer
    part: Submodule
    unit: Unit
    direction: str
    first: bool


def wraps_parts(plan: Plan) -> bool:
    """Whether blocks fall into several units: by size, of whole dense layers on an uncut pipeline."""
    parallel = plan.scenario.parallel
    if parallel.wrap == "block" or parallel.pipeline > 1 or parallel.expert > 1:
        return False
    blocks = [layer for layer in plan.architecture.stack if layer.kind == "block"]
    if any(layer.frozen or layer.shared for layer in blocks):
        return False
    return any(len(submodules(layer, int(parallel.wrap))) > 1 for layer in blocks)


class Fsdp1Sized(Fsdp1):
    """Lowering of FSDP 1 with several units in a block."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        least = int(plan.scenario.parallel.wrap)
        self.least = least
        self.cut: dict[int, tuple[Submodule, ...]] = {}  # by a layer's id
        self.pieces: dict[tuple[int, str], int] = {}  # segments by part and direction
        self.kept: list[Layer] = []
        self.by_position: dict[int, list[Unit]] = {}
        for position, layer in enumerate(plan.architecture.stack):
            if self.units[position] is not self.root:
                name = plan.architecture.names[position]
                self.by_position[position] = [
                    _unit(f"{name}.{number}", part, self.factor) for number, part in enumerate(self.parts(layer))]
        self.distinct = [*([self.root] if any(u is self.root for u in self.units) else []),
                         *(unit for units in self.by_position.values() for unit in units)]

    def parts(self, layer: Layer) -> tuple[Submodule, ...]:
        """Runs of a layer's operators that begin with a large one."""
        if id(layer) not in self.cut:
            self.kept.append(layer)
            self.cut[id(layer)] = submodules(layer, self.least)
        return self.cut[id(layer)]

    def begin(self, section: SectionBuilder, micro: MicroStep) -> tuple[Layer, ...]:
        """As `Fsdp`; a part's gradients go into its unit's at once, so that a block does not collect them."""
        stack = super().begin(section, micro)
        self.memory = Activations(self.plan, section, len(stack), keep_gradients=True, caches_casts=False,
                                  blocks_keep=False)
        return stack

    def uses(self, position: int, layer: Layer, direction: str) -> Iterator[Use]:
        """Uses of a block in a direction, in order; recomputation comes before backward."""
        pairs = list(zip(self.parts(layer), self.by_position[position], strict=True))
        again = direction == "backward" and self.plan.policy(position) == "full"
        for number, (part, unit) in enumerate(pairs if again else ()):
            yield Use(position, layer, part, unit, "recompute", number == 0)
        for number, (part, unit) in enumerate(reversed(pairs) if direction == "backward" else pairs):
            yield Use(position, layer, part, unit, direction, number == 0 and not again)

    # ------------------------------------------------------------------------------------------- passes
    def forward_pass(self, section: SectionBuilder, stack: tuple[Layer, ...]) -> None:
        """Units in order; the root with the first layer."""
        for position, layer in enumerate(stack):
            if position not in self.by_position:
                if self.root.name not in self.ready:
                    self.unshard(section, self.root, "forward", (COMPUTE, *self.joined()))
                self.forward(section, position, layer, present(self.ready[self.root.name]),
                             self.joined() if position == 0 else ())
                continue
            for use in self.uses(position, layer, "forward"):
                self.unshard(section, use.unit, "forward")
                task = self.run(section, use)
                if not self.keep:
                    self.reshard(section, use.unit, task)

    def backward_pass(self, section: SectionBuilder, stack: tuple[Layer, ...], micro: MicroStep) -> None:
        """Units in reverse, each block's recomputation in front of its backward."""
        mode = self.plan.scenario.parallel.prefetch.backward
        every = self.plan.scenario.parallel.reduce_every_micro_step
        order = [unit for position in sorted(self.by_position, reverse=True)
                 for unit in reversed(self.by_position[position])]
        following = {one.name: other for one, other in pairwise(order)}
        for position in range(self.last, -1, -1):
            layer = stack[position]
            if position not in self.by_position:
                self._root_backward(section, position, layer, micro)
                continue
            for use in self.uses(position, layer, "backward"):
                unit, target = use.unit, following.get(use.unit.name)
                if unit.name not in self.ready:
                    self.unshard(section, unit, "backward")
                if use.direction == "recompute":
                    task = self.run(section, use)
                    if not self.keep:
                        self.reshard(section, unit, task)
                    continue
                if mode == "pre" and target is not None and target.name not in self.ready:
                    self.unshard(section, target, "backward")
                task = self.run(section, use, micro)
                if micro.first or every:
                    size = round(self.graded(unit) * self.fresh_bytes)
                    section.allocate(f"unsharded_gradient:{unit.name}", size, "gradients", self.graded_on)
                self.reshard(section, unit, task)
                if mode == "post" and target is not None and target.name not in self.ready:
                    self.unshard(section, target, "backward")
                self.post_backward(section, unit, micro, task)

    def _root_backward(self, section: SectionBuilder, position: int, layer: Layer, micro: MicroStep) -> None:
        root, every = self.root, self.plan.scenario.parallel.reduce_every_micro_step
        if root.name not in self.ready:
            self.unshard(section, root, "backward")
        complete = position == 0
        task = self.backward(section, position, layer, present(self.ready[root.name]),
                             after=self.flatten(root, micro) if complete else ())
        if complete:
            if micro.first or every:
                size = round(self.graded(root) * self.fresh_bytes)
                section.allocate(f"unsharded_gradient:{root.name}", size, "gradients", self.graded_on)
            self.drop_unsharded(section, root)
            self.reshard(section, root, task)
            self.post_backward(section, root, micro, task)

    # ------------------------------------------------------------------------------------------- compute
    def run(self, section: SectionBuilder, use: Use, micro: MicroStep | None = None) -> int:
        """Kernels of a use; a block's memory moves with its first."""
        if use.first and use.direction == "forward":
            self.memory.forward(use.position, use.layer)
        elif use.first:
            self.memory.backward(use.position, use.layer)
        phase = "forward" if use.direction == "forward" else "backward"
        label = Label(self.layer_label(use.position), phase, use.layer.kind)
        return section.kernels(COMPUTE, self.segment(use, micro), label, present(self.ready[use.unit.name]))

    def segment(self, use: Use, micro: MicroStep | None) -> int:
        """Segment of a use, memoised."""
        compute, part = self.plan.compute, use.part
        if use.direction == "backward" and micro is not None:
            policy = self.plan.policy(use.position)
            ahead = compute.recomputed(use.layer, policy) if use.first and policy != "full" else ()
            key = (id(part), f"backward {policy} {use.first} {micro} {use.unit.padded}")
            if key not in self.pieces:
                self.pieces[key] = compute.segment(ahead, (*compute.backward_items(part.operators),
                                                           *self.flatten(use.unit, micro)))
            return self.pieces[key]
        key = (id(part), use.direction)
        if key not in self.pieces:
            operators = part.again if use.direction == "recompute" else part.operators
            self.pieces[key] = compute.segment(compute.forward_items(operators))
        return self.pieces[key]


def _unit(name: str, part: Submodule, factor: int) -> Unit:
    parameters = [p for op in part.operators for p in op.parameters]
    padded = flat_padding(parameters, factor)
    return Unit(name, sum(p.numel for p in parameters), padded, len(parameters), (padded // factor,),
                own=padded // factor)
