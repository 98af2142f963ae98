"""A pipeline stage whose parameters are sharded over its replicas: FSDP inside every stage.

Every chunk is a root of its own, every block of it a unit. What is whole when an action begins follows from the actions
before it, so it is known when the program is written. Sources:

* PyTorch `distributed/pipelining/stage.py`, `backward_maybe_with_nosync`: all backward passes but a chunk's last run
  without reduction. FSDP 2 keeps parameters after each of them (`set_reshard_after_backward(False)`) and makes all
  reductions behind the last one (`run_post_backward`), beside no backward; gradients are added up unsharded, in the
  reductions' dtype. FSDP 1 runs them under `no_sync`: gradients stay unsharded in the dtype of compute, units are
  freed after backward where they are after forward, and the last backward reduces unit by unit.
* With CPUOffloadPolicy every gather copies this rank's shards to the device first, every reduction its share of the
  gradients to the host, which waits for them behind a chunk's last (torch 2.13 `fsdp/_fully_shard/`
  `_fsdp_param_group.py`, finalize_backward); what is kept from action to action stays on the device.
* `reshard_after_forward`: false gathers once a step; true frees a unit behind every forward, so that the next action
  gathers again. torchtitan's policy "default" is false with a pipeline (`parallelize_llama.py`, apply_fsdp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sim.model.architecture import Architecture, Layer
from sim.parallel.activations import GRADIENT_POOL, Activations
from sim.parallel.compute import traffic_kernel
from sim.parallel.pipeline.actions import Action
from sim.parallel.pipeline.patterns import ALL, NOTHING
from sim.parallel.pipeline.stage import Stage
from sim.parallel.sharded.fsdp import Fsdp, present
from sim.parallel.sharded.fsdp2 import Fsdp2
from sim.parallel.sharded.units import Unit, units_of
from sim.parallel.step import COMPUTE, MicroStep, end_of_step
from sim.program import Label, SectionBuilder
from sim.work import Kernel


@dataclass
class ShardedStage(Stage):
    """Writes the program of one pipeline rank whose parameters are sharded.

    Attributes:
        sharded: the FSDP of this rank's layers.
    """

    sharded: Fsdp = field(kw_only=True)

    def __post_init__(self) -> None:
        units: list[Unit] = []
        architecture, fsdp = self.plan.architecture, self.sharded
        for number, chunk in sorted(enumerate(self.chunks), key=lambda item: item[1].start):
            part = Architecture(architecture.stack[chunk.start:chunk.stop], architecture.tied, architecture.batch,
                                architecture.sequence, architecture.names[chunk.start:chunk.stop])
            made = units_of(part, fsdp.plan.scenario.parallel.wrap, fsdp.factor, fsdp.by_row, fsdp.routed_factor)
            units += [replace(u, name=f"root{number}") if u.name == "root" else u for u in made]
        fsdp.take(units)

    # ---------------------------------------------------------------------------------------------- what is whole when
    @property
    def _after_backward(self) -> bool:
        """Whether a backward that is not the last leaves its units whole."""
        return isinstance(self.sharded, Fsdp2) or self.sharded.keep

    def _resident(self) -> bool:
        return False

    def _states(self) -> None:
        self.sharded.states()

    def _keeps(self) -> tuple[bool, bool]:
        return self.sharded.keep, self._after_backward

    # -------------------------------------------------------------------------------------------------------- actions
    def _forward(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                 gathers: int = NOTHING) -> int:
        if not gathers:
            task = super()._forward(section, action, micro, waiting)
            if not self.sharded.keep:
                self._release_all(section, action.chunk, blocks=True)
            return task
        fsdp, chunk = self.sharded, self.chunks[action.chunk]
        memory = Activations(self.plan, section, chunk.stop, keep_gradients=False)
        ready = self._root(section, action.chunk, gathers)
        arrived = self._gathered(action)
        if arrived:
            label = Label(f"chunk{action.chunk}", "forward", "gather")
            ready = (*ready, section.kernels(COMPUTE, self.plan.compute.run((), arrived), label, joins=waiting))
        computed: list[int] = []
        for position in chunk:
            unit, waits = fsdp.units[position], ready
            copy: tuple[Kernel, ...] = ()
            if self._own(unit):
                gathered, copy = self._unshard(section, unit, "forward", tuple(computed[-3:-2]))
                waits = present(gathered, *ready)
            memory.forward(position, self.plan.architecture.stack[position])
            segment = self.plan.compute.forward(self.plan.architecture.stack[position], copy)
            label = Label(self.plan.architecture.names[position], "forward", "forward")
            computed.append(section.kernels(COMPUTE, segment, label, waits, waiting if not computed else ()))
            ready = ()
            self._drop_buffer(section, unit)
            if self._own(unit) and not fsdp.keep:
                self._release(section, unit)
        return computed[-1] if computed else -1

    def _backward(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                  gathers: int = NOTHING) -> int:
        fsdp, chunk = self.sharded, self.chunks[action.chunk]
        memory = Activations(self.plan, section, chunk.stop, keep_gradients=True)
        held = self._held_for_weights(action.chunk) if self.separate else 0
        final, task, joined = micro.reduce and not self.separate, -1, waiting
        ready: tuple[int, ...] = ()
        arrived = self._gathered(action)
        for position in reversed(chunk):
            unit, layer = fsdp.units[position], self.plan.architecture.stack[position]
            copy: tuple[Kernel, ...] = ()
            if gathers and self._own(unit):
                gathered, copy = self._unshard(section, unit, "backward", (task,) if task >= 0 else ())
                ready = present(gathered)
            left = memory.backward(position, layer)
            own = () if self.separate else self._accumulate([layer], micro.first)
            segment = self.plan.compute.run_backward(
                [layer], [self.plan.policy(position)], "without" if self.separate else "with", arrived, (*copy, *own))
            arrived = ()
            if segment >= 0:
                label = Label(self.plan.architecture.names[position], "backward", "backward")
                task = section.kernels(COMPUTE, segment, label, ready, joined)
                joined, ready = (), ()
            self._drop_buffer(section, unit)
            self._added(section, position, left, micro.first and not self.separate)
            if self._own(unit) and not self._after_backward and not final:
                self._release(section, unit)
            if final and not isinstance(fsdp, Fsdp2) and self._complete(position, chunk):
                self._reduce(section, unit, chunk, task)
        if held:
            section.allocate("kept for weight gradients", held, "activations")
        if final and isinstance(fsdp, Fsdp2):
            self._reduce_all(section, chunk, task)
        return task

    def _weights(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                 gathers: int = NOTHING) -> int:
        chunk = self.chunks[action.chunk]
        for position in chunk:
            self._added(section, position, 0, micro.first)
        task = super()._weights(section, action, micro, waiting)
        if micro.reduce:
            self._reduce_all(section, chunk, task)
        return task

    def _accumulated(self, layers: Sequence[Layer], micro: MicroStep) -> tuple[Kernel, ...]:
        return self._accumulate(layers, micro.first)

    def _finish(self, section: SectionBuilder) -> None:
        self.sharded.optimizer_step(section)
        end_of_step(self.plan, section)

    # --------------------------------------------------------------------------------------------------------- units
    def _own(self, unit: Unit) -> bool:
        return not unit.name.startswith("root")

    def _complete(self, position: int, chunk: range) -> bool:
        """Whether backward of `position` is the last of its unit: a root's is the chunk's first layer."""
        units = self.sharded.units
        return all(units[earlier].name != units[position].name for earlier in range(chunk.start, position))

    def _root(self, section: SectionBuilder, number: int, gathers: int) -> tuple[int, ...]:
        """The gather of a chunk's root, in front of its blocks."""
        found = next((u for p in self.chunks[number] if not self._own(u := self.sharded.units[p])), None)
        if gathers != ALL or found is None or not found.numel:
            return ()
        task, copy = self._unshard(section, found, "forward", ())
        self._drop_buffer(section, found)
        if copy:
            segment = self.plan.compute.own(copy)
            return (section.kernels(COMPUTE, segment, Label(found.name, "forward", "copy-out"), present(task)),)
        return present(task)

    def _unshard(self, section: SectionBuilder, unit: Unit, phase: str,
                 waits: tuple[int, ...]) -> tuple[int | None, tuple[Kernel, ...]]:
        """All-gather of a unit, and the kernels that copy it out."""
        fsdp = self.sharded
        if isinstance(fsdp, Fsdp2):
            task = fsdp.unshard(section, unit, phase, waits)
            return task, fsdp.copy_out(section, unit)
        if fsdp.factor > 1:
            section.allocate(f"gathered:{unit.name}", fsdp.whole_bytes(unit, unit.padded), "gathered_parameters", 1)
        return fsdp.gather(section, unit, phase, waits), ()

    def _drop_buffer(self, section: SectionBuilder, unit: Unit) -> None:
        """FSDP 2 gathers into a buffer, which goes when it is copied out."""
        fsdp = self.sharded
        name = f"gather_buffer:{unit.name}"
        memory = section.section.memory
        opened = sum(1 if op.size_bytes > 0 else -1 for op in memory if op.tensor == name)
        if isinstance(fsdp, Fsdp2) and opened > 0:
            section.free(name, fsdp.buffer_bytes(unit), "buffers", 1)

    def _release(self, section: SectionBuilder, unit: Unit) -> None:
        fsdp = self.sharded
        if isinstance(fsdp, Fsdp2):
            fsdp.release(section, unit)
        elif fsdp.factor > 1:
            section.free(f"gathered:{unit.name}", fsdp.whole_bytes(unit, unit.padded), "gathered_parameters", 1,
                         (COMPUTE,))

    def _release_all(self, section: SectionBuilder, number: int, blocks: bool = False) -> None:
        """Every unit of a chunk, or only its blocks."""
        units = {self.sharded.units[p].name: self.sharded.units[p] for p in self.chunks[number]}
        for unit in units.values():
            if unit.numel and (self._own(unit) or not blocks):
                self._release(section, unit)

    # ----------------------------------------------------------------------------------------------------- gradients
    def _width(self) -> float:
        """Bytes of an unsharded gradient that waits for the reduction."""
        return self.sharded.reduce_bytes if isinstance(self.sharded, Fsdp2) else self.sharded.fresh_bytes

    def _accumulate(self, layers: Sequence[Layer], first: bool) -> tuple[Kernel, ...]:
        """Traffic behind fresh gradients: the first are taken over or cast, later ones added (read both, write)."""
        fresh, kept = self.sharded.fresh_bytes, self._width()
        width = (0.0 if fresh == kept else fresh + kept) if first else fresh + 2 * kept
        numel = sum(layer.numel for layer in layers)
        return (traffic_kernel("accumulate", self.sharded.gather_dtype, numel, numel * width),) if width * numel else ()

    def _held_gradient(self, position: int) -> int:
        return round(self.plan.architecture.stack[position].numel * self._width())

    def _added(self, section: SectionBuilder, position: int, left: int, first: bool) -> None:
        """A layer's fresh gradients become, or are added to, those that wait for the reduction."""
        if first and self._held_gradient(position):
            section.allocate(f"unsharded_gradient:{position}", self._held_gradient(position), "gradients")
        if left:
            section.free(GRADIENT_POOL, left, "gradients")

    def _reduce_all(self, section: SectionBuilder, chunk: range, task: int) -> None:
        """Reductions of a chunk one after another, behind its last backward."""
        for position in reversed(chunk):
            if self._complete(position, chunk):
                self._reduce(section, self.sharded.units[position], chunk, task)
        self.sharded.finalized(section)
        if self.plan.offload.moves_optimizer:
            label = Label(f"chunk{chunk.start}", "backward", "gradients in host memory")
            section.host(0.0, label, joins=(self.plan.offload.stream("d2h"),))

    def _reduce(self, section: SectionBuilder, unit: Unit, chunk: range, task: int) -> None:
        """A unit is freed, its gradient copied into the reduction's buffer and scattered."""
        fsdp = self.sharded
        if not unit.numel:
            return
        if not self._own(unit) or self._after_backward or not self.separate:  # else it went behind its backward
            self._release(section, unit)
        buffer = (f"reduce_buffer:{unit.name}", round(unit.padded * fsdp.reduce_bytes), "buffers", 2)
        section.allocate(*buffer)
        width = self._width() + fsdp.reduce_bytes
        waits = present(task if task >= 0 else None)
        if fsdp.factor * fsdp.replicas > 1:
            waits = (fsdp.copy(section, "copy-in", unit, unit.padded, width, waits),)
        fsdp.reduce(section, unit, waits, True)
        for position in chunk:
            held = self._held_gradient(position) if fsdp.units[position].name == unit.name else 0
            if held:
                section.free(f"unsharded_gradient:{position}", held, "gradients")
        section.free(*buffer)
