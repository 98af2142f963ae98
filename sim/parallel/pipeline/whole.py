"""A pipeline stage that holds its parameters whole: gradients are added up and reduced once per step, in buckets beside
the last backward or behind it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from sim.model.architecture import Layer
from sim.parallel.activations import Activations
from sim.parallel.data.bucketed import Bucketed
from sim.parallel.data.buckets import Bucket
from sim.parallel.pipeline.actions import Action
from sim.parallel.pipeline.patterns import AHEAD, Batch
from sim.parallel.pipeline.stage import Stage
from sim.parallel.step import COMPUTE, MicroStep, end_of_step
from sim.program import CollectiveCall, Kind, Label, SectionBuilder
from sim.work import DTYPE_BYTES, Kernel


@dataclass
class WholeStage(Stage):
    """Writes the program of one pipeline rank under data parallelism with whole parameters.

    Attributes:
        data: the data-parallel technique of the stage.
    """

    data: Bucketed = field(kw_only=True)
    _late: list[Bucket] = field(default_factory=list)
    _open: bool = False

    def _states(self) -> None:
        self.data.states()

    def _resident(self) -> bool:
        return self.data.reduction.resident_gradients

    def _fresh(self) -> str:
        gathers = self.data.reduction.gathers if self.data.reduces else ""
        return gathers if gathers in ("used", "aligned") else ""

    def _begin(self) -> None:
        if self._fresh() == "aligned":
            section = self.plan.builder.section("first parameters")
            for chunk in range(2):
                self.data.gathers.ahead(section, chunk)
            self.plan.builder.run(section)

    def _arrive(self, section: SectionBuilder, action: Action, micro: MicroStep, gathers: int) -> None:
        if gathers >= AHEAD:
            self.data.gathers.ahead(section, gathers - AHEAD)
        if micro.first and self._fresh() == "aligned":
            section.kernels(COMPUTE, self.plan.compute.segment(()), Label("parameters", "forward", "wait"),
                            joins=(self.data.gathers.stream(action.chunk),))

    def _forward(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                 gathers: int = 0) -> int:
        self._arrive(section, action, micro, gathers)
        if not micro.first or self._fresh() == "aligned":
            return super()._forward(section, action, micro, waiting)
        chunk, gathered = self.chunks[action.chunk], self._gathered(action)
        Activations(self.plan, section, chunk.stop, keep_gradients=False).row(
            "forward", chunk, self._layers(action.chunk))
        if waiting or gathered:
            section.kernels(COMPUTE, self.plan.compute.own(gathered), Label("pipeline", "forward", "wait"),
                            joins=waiting)
        self.data.gathers.begin()
        task = -1
        for position, layer in zip(chunk, self._layers(action.chunk), strict=True):
            task = max(task, self.data.layer_forward(section, position, layer, gathers=True,
                                                      name=f"chunk{action.chunk}"))
        return task

    def _backward(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                  gathers: int = 0) -> int:
        held = self._held_for_weights(action.chunk) if self.separate else 0
        if self._reduces_early(micro) and not self.data.reduction.chunkwise:
            return self._backward_reduced(section, action, micro, waiting)
        layers = self._layers(action.chunk)
        early = self.plan.stack.stages_open_buckets or any(layer.kind == "head" for layer in layers[-1:])
        if micro.first and self.data.reduction.contiguous and early and not self._open:
            # the last stage calls the optimizer's own backward (deepspeed 0.14.4 runtime/pipe/engine.py)
            self.data.open_buckets(section)
            self._open = True
        self._backward_memory(section, action, micro, held)
        policies = [self.plan.policy(position) for position in self.chunks[action.chunk]]
        gathered = self._gathered(action)
        after = () if self.separate else self._accumulated(layers, micro)
        segment = self.plan.compute.run_backward(
            layers, policies, "without" if self.separate else "with", gathered, after)
        task = self._kernels(section, segment, Label(f"chunk{action.chunk}", "backward", "backward"), waiting)
        self._drop_narrow(section)
        if self._reduces_early(micro):
            for bucket in self.data.reduction.buckets:
                if bucket.chunk == action.chunk:
                    self.data.reduce(section, bucket, (task,) if task >= 0 else ())
        return task

    def _drop_narrow(self, section: SectionBuilder) -> None:
        """Whole half gradients go as soon as backward is through, where they are added to a buffer behind it."""
        if self.data.reduction.narrow:
            for position in list(self.data.gradients):
                self.data.drop_gradients(section, position)

    def _backward_memory(self, section: SectionBuilder, action: Action, micro: MicroStep, held: int) -> None:
        chunk = self.chunks[action.chunk]
        memory = Activations(self.plan, section, chunk.stop, keep_gradients=self.data.keeps_gradients(micro))
        for position, left in zip(chunk, memory.row("backward", chunk, self._layers(action.chunk)), strict=True):
            if left:
                if not self.data.reduction.narrow:
                    self._left.append((position, left))
                self._leave(((position, left),))
        if held:
            section.allocate("kept for weight gradients", held, "activations")

    def _leave(self, left: Sequence[tuple[int, int]]) -> None:
        gradients = self.data.gradients
        for position, size in left:
            gradients[position] = gradients.get(position, 0) + size

    def _recurs(self, batch: Batch) -> bool:
        if self.plan.offload.moves_activations:
            return False
        final = any(kind == "B" and last for kind, _, _, last, _ in batch.actions)
        if any(kind == "F" and (first or gathers >= AHEAD) for kind, _, first, _, gathers in batch.actions):
            return False
        return not (final and self._reduces_early(MicroStep(0, False, True)))

    def _end(self) -> Hashable:
        late = tuple([(bucket.position, bucket.operator, bucket.group) for bucket in self._late])
        return (*sorted(self.data.gradients.items()), late, self._open, self.tied, tuple(self.plan.groups))

    def _merges(self, batch: Batch) -> bool:
        kinds = [kind for kind, *_ in batch.actions]
        if batch.actions[0][2] and self._fresh() == "used":
            return False
        return kinds == ["F", "B"] and not self._reduces_early(MicroStep(0, False, batch.actions[1][3]))

    def _pair(self, section: SectionBuilder, forward: Action, backward: Action, micro: MicroStep) -> int:
        ahead, back = self._layers(forward.chunk), self._layers(backward.chunk)
        chunk = self.chunks[forward.chunk]
        Activations(self.plan, section, chunk.stop, keep_gradients=False).row("forward", chunk, ahead)
        self._backward_memory(section, backward, micro, self._held_for_weights(backward.chunk) if self.separate else 0)
        gathered = (*self._gathered(forward), *self._gathered(backward))
        segment = self.plan.compute.run_together(
            ahead, back, [self.plan.policy(position) for position in self.chunks[backward.chunk]],
            "without" if self.separate else "with", gathered,
            () if self.separate else self._accumulated(back, micro))
        waiting = dict.fromkeys((*self._waited(forward), *self._waited(backward)))
        label = Label(f"chunk{forward.chunk}+{backward.chunk}", "backward", "forward and backward")
        return self._kernels(section, segment, label, tuple(waiting))

    def _accumulated(self, layers: Sequence[Layer], micro: MicroStep) -> tuple[Kernel, ...]:
        own = self.data.own_copies(micro)
        return tuple(kernel for layer in layers for kernel in own(layer.parameters))

    def _reduces_early(self, micro: MicroStep) -> bool:
        overlap = self.data.overlaps and not self.separate and self.plan.stack.pipeline_reduction != "behind"
        return micro.reduce and overlap and self.data.reduces

    def _backward_reduced(self, section: SectionBuilder, action: Action, micro: MicroStep,
                          waiting: tuple[int, ...]) -> int:
        """The last backward of a chunk, layer by layer, with every complete bucket on its way."""
        chunk = self.chunks[action.chunk]
        if not self._open:
            self.data.open_buckets(section)
            self._open = True
        if waiting:
            section.kernels(COMPUTE, self.plan.compute.segment(()), Label("pipeline", "backward", "wait"),
                            joins=waiting)
        memory = Activations(self.plan, section, chunk.stop, keep_gradients=self.data.keeps_gradients(micro))
        for position in reversed(chunk):
            layer = self.plan.architecture.stack[position]
            left = memory.backward(position, layer)
            self.data.gradients[position] = self.data.gradients.get(position, 0) + left
            self._late += self.data.layer_backward(section, position, layer, micro)
        self._drop_narrow(section)
        kinds = section.section.kind
        return max((task for task, kind in enumerate(kinds) if kind == Kind.KERNELS), default=-1)

    def _reduce_late(self, section: SectionBuilder) -> None:
        if self._reduces_early(MicroStep(0, False, True)):
            remaining = self._late
        else:
            remaining = self.data.reduction.buckets if self.data.completes else []
            if not self._open:
                self.data.open_buckets(section)
        done = 0
        for bucket in remaining:
            done += bucket.numel
            if self.data.reduction.contiguous:
                self.data.drop_until(section, done)
            self.data.reduce(section, bucket, (), MicroStep(0, True, True))
        self.data.finish(section)
        if self.tied:
            self._tie(section)

    def _finish(self, section: SectionBuilder) -> None:
        self.data.optimizer_step(section)
        end_of_step(self.plan, section)

    def _tie(self, section: SectionBuilder) -> None:
        """First and last stage add up their gradients of the shared embedding (Megatron `finalize_model_grads.py`)."""
        precision = self.plan.scenario.training.precision
        size = round(self.tied * DTYPE_BYTES[precision.gradients])
        call = CollectiveCall("all_reduce", size, precision.gradients,
                              self.plan.builder.communicators.index("embedding"))
        label = Label("embedding", "optimizer", "tied gradients")
        section.collective(1, call, self.plan.stack.host_collective_s, label, joins=(COMPUTE,))
