"""FSDP 1 (`FullyShardedDataParallel`): flat parameters, rate limiter, prefetch in backward, late frees.

Order and waits (PyTorch, `fsdp/_runtime_utils.py`, `_limiter_utils.py`, `api.py`):

* every all-gather is issued by the host on the unshard stream; before it, with a limiter of n, the host waits for the
  oldest free event when n frees are pending (a unit is freed, and its event queued, after its compute is issued).
* forward: gather of the next unit only because the host runs ahead, or explicitly right after this unit's own gather
  (`forward_prefetch`). The root is not freed after forward.
* backward: BACKWARD_PRE issues the next unit's gather before this unit's compute, BACKWARD_POST after it and after
  resharding, both before this unit's reduce-scatter.
* reduce-scatter on the post-backward stream after compute; all-gather and reduce-scatter share one communicator.
* the next forward's root gather waits for the compute stream; compute waits for all reductions at the end of backward.

Casts of shards in front of a gather (pre-unshard stream), division and cast of gradients (post-backward stream) compete
with compute for the same memory bandwidth: they are counted there.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from sim.model.architecture import Layer
from sim.parallel.construction import sharded_by_unit
from sim.parallel.sharded.fsdp import GATHER, REDUCE, Fsdp, present
from sim.parallel.sharded.units import Unit
from sim.parallel.step import COMPUTE, MicroStep, blocks, state_bytes, state_copies
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES, Kernel


class Fsdp1(Fsdp):
    """Lowering of FSDP 1."""

    def states(self) -> None:
        """Shards, each of a unit that was whole for a moment; blocks are wrapped before the root."""
        super().states()
        names = [name for name, _, category in self.plan.builder.resident if category == "parameters"]
        if self.factor == 1 or self.offload.moves_parameters or names != ["parameters"]:
            return
        width, copies = state_bytes(self.plan)["parameters"], state_copies(self.plan, "parameters")
        self.plan.builder.construction["parameters"] = sharded_by_unit([
            ([blocks(n * width / copies) for n in unit.numels], blocks(unit.padded * width / copies),
             blocks(unit.own * width / copies))
            for unit in (*(u for u in self.distinct if u is not self.root), self.root) for _ in range(copies)])

    def micro_step(self, section: SectionBuilder, micro: MicroStep) -> None:
        """Forward and backward of one micro-batch. Free events of earlier micro-steps are long complete."""
        stack = self.begin(section, micro)
        self.frees: deque[int] = deque()
        self.ready: dict[str, int | None] = {}
        self.forward_pass(section, stack)
        self.backward_pass(section, stack, micro)
        self.outputs.end(section)

    def forward_pass(self, section: SectionBuilder, stack: tuple[Layer, ...]) -> None:
        """Units in order; the root with the first layer."""
        prefetch = self.plan.scenario.parallel.prefetch.forward and not self.serial
        for position, layer in enumerate(stack):
            unit = self.units[position]
            if unit.name not in self.ready:
                self.unshard(section, unit, "forward", (COMPUTE, *self.joined()) if position == 0 else ())
            waits = present(self.ready[unit.name])
            following = self.units[position + 1] if position < self.last else self.root
            if prefetch and following.name not in self.ready:
                self.unshard(section, following, "forward")
            task = self.forward(section, position, layer, waits, self.joined() if position == 0 else ())
            if unit is not self.root and not self.keep:
                self.reshard(section, unit, task)

    def backward_pass(self, section: SectionBuilder, stack: tuple[Layer, ...], micro: MicroStep) -> None:
        """Units in reverse with the prefetch the scenario asks for."""
        mode = self.backward_prefetch
        every = self.plan.scenario.parallel.reduce_every_micro_step
        mine = [i for i in range(self.last, -1, -1) if self.units[i] is not self.root]
        order = [self.last, *mine] if self.units[self.last] is self.root else mine
        following = dict(pairwise(order))
        for position in range(self.last, -1, -1):
            unit, layer = self.units[position], stack[position]
            own = unit is not self.root
            if unit.name not in self.ready:
                self.unshard(section, unit, "backward")
            waits = present(self.ready[unit.name])
            target = self.units[following[position]] if position in following else None
            if mode == "pre" and target is not None and target.name not in self.ready:
                self.unshard(section, target, "backward")
            complete = own or position == 0
            after = self.flatten(unit, micro) if complete else ()
            task = self.backward(section, position, layer, waits, after=after)
            if complete:
                if micro.first or every:  # the flat gradient: autograd writes the views' gradients side by side
                    size = round(self.graded(unit) * self.fresh_bytes)
                    section.allocate(f"unsharded_gradient:{unit.name}", size, "gradients", self.graded_on)
                self.drop_unsharded(section, unit)
                self.reshard(section, unit, task)
                if mode == "post" and target is not None and target.name not in self.ready:
                    self.unshard(section, target, "backward")
                self.post_backward(section, unit, micro, task)

    def unshard(self, section: SectionBuilder, unit: Unit, phase: str, joins: tuple[int, ...] = ()) -> None:
        """All-gather, held back by the rate limiter."""
        limit = self.plan.scenario.parallel.prefetch.limit
        if self.factor > 1 and limit is not None and len(self.frees) >= limit:
            section.host(0.0, Label(unit.name, phase, "rate limiter"), waits=(self.frees.popleft(),))
        if self.factor > 1:
            section.allocate(f"gathered:{unit.name}", self.gathered_bytes(unit), "gathered_parameters", GATHER)
        shard = round(unit.own * self.gather_bytes) if self.copies_shards else 0
        if shard:
            section.allocate(f"gathered_shard:{unit.name}", shard, "gathered_parameters", GATHER)
        self.ready[unit.name] = self.gather(section, unit, phase, joins=joins)
        if shard:
            section.free(f"gathered_shard:{unit.name}", shard, "gathered_parameters", GATHER, (GATHER,))

    @property
    def copies_shards(self) -> bool:
        """Whether a shard is copied before it is gathered: to cast it, or because a dtype was asked for at all."""
        return self.factor > 1 and (self.casts or self.plan.stack.shards_copied)

    @property
    def graded_on(self) -> int:
        """The stream on which flat gradients are made (`Stack.views_beside`)."""
        return GATHER if self.plan.stack.views_beside else COMPUTE

    def reshard(self, section: SectionBuilder, unit: Unit, task: int) -> None:
        """Free the unsharded flat parameter; its event is complete when `task` is."""
        del self.ready[unit.name]
        if self.factor > 1:
            self.frees.append(task)
            section.free(f"gathered:{unit.name}", self.gathered_bytes(unit), "gathered_parameters", GATHER, (COMPUTE,))

    def gathered_bytes(self, unit: Unit) -> int:
        """The unsharded flat parameter."""
        return self.whole_bytes(unit, unit.padded)

    def flatten(self, unit: Unit, micro: MicroStep) -> tuple[Kernel, ...]:
        """Gradients of the views into the flat gradient (2 passes), which is added to that of micro-steps before where
        those are not reduced (3), division before the reduction (2), cast and copies (if any), and the copies of its
        shard from which the unit was gathered. Launches are those of torch 2.3.1: what was reduced is divided again and
        cast to its gradient, too."""
        if not unit.numel:
            return ()
        g, r = self.fresh_bytes, self.reduce_bytes
        every = self.plan.scenario.parallel.reduce_every_micro_step
        width, passes = 2 * g + (0 if micro.first or every else 3 * g), 1 + (not micro.first and not every)
        if micro.reduce and self.factor * self.replicas > 1:
            casts, copies = self.gather_dtype != self.reduce_dtype, self.plan.stack.reduction_copied and self.factor > 1
            width += 2 * r + (g + r if casts else 0) + (2 * r if copies else 0)
            passes += 2 + casts + copies + (self.reduce_dtype != self.plan.scenario.training.precision.gradients)
        numel = unit.numel + self.graded(unit) - unit.padded
        kernels = (self.copy_kernel("flatten gradient", numel, width, passes),)
        if not self.copies_shards or not unit.own:
            return kernels
        times = 1 if self.keep or unit is self.root else 2
        width = times * (DTYPE_BYTES[self.plan.scenario.training.precision.parameters] + self.gather_bytes)
        return (*kernels, self.copy_kernel("shards to gather", unit.own, width, times))

    def reduced_copies(self, unit: Unit) -> list[tuple[str, int]]:
        """Copies of a unit's gradient on the way to its reduction: cast to its dtype, padded (`reduction_copied`)."""
        size, cast = round(self.graded(unit) * self.reduce_bytes), self.gather_dtype != self.reduce_dtype
        names = [*(("cast_gradient",) if cast else ()),
                 *(("padded_gradient",) if self.plan.stack.reduction_copied and self.factor > 1 else ())]
        return [(f"{name}:{unit.name}", size) for name in names if size]

    def reduced_shards(self, unit: Unit, first: bool) -> list[tuple[str, int]]:
        """What comes out of the reduction, and its cast, until they are added to the gradient there is; the first
        becomes the gradient."""
        if self.factor == 1 or not unit.own:
            return []
        cast = self.reduce_dtype != self.plan.scenario.training.precision.gradients
        narrow = [(f"reduced_shard:{unit.name}", round(unit.own * self.reduce_bytes))] if cast else []
        return narrow if first else [*narrow, (f"added_shard:{unit.name}", self.gradient_bytes(unit))]

    def post_backward(self, section: SectionBuilder, unit: Unit, micro: MicroStep, task: int) -> None:
        """Reduction of a unit's gradient; the unsharded gradient is freed behind it."""
        if not micro.reduce:
            return
        first = micro.first or not self.plan.scenario.parallel.reduce_every_micro_step
        copies = self.reduced_copies(unit)
        for name, size in copies:
            section.allocate(name, size, "gradients", REDUCE)
        self.reduce(section, unit, (task,), first)
        shards = self.reduced_shards(unit, first)
        for name, size in shards:
            section.allocate(name, size, "gradients", REDUCE)
        recorded = (REDUCE,) if self.plan.stack.records_streams else ()
        for name, size in (*copies, *shards):
            section.free(name, size, "gradients", REDUCE, recorded)
        size = round(self.graded(unit) * self.fresh_bytes)
        section.free(f"unsharded_gradient:{unit.name}", size, "gradients", self.graded_on, (REDUCE,))
