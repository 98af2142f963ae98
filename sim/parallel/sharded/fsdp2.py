"""FSDP 2 (`fully_shard`): a unit per block with separately padded parameters, explicit copies, deterministic frees.

Order and waits (PyTorch, `_fully_shard/_fsdp_param_group.py`, `_fsdp_collectives.py`, `_fsdp_state.py`):

* forward: all-gather, copy-out on the compute stream, compute. The gathers after next wait for a unit's copy-out
  (`wait_for_unshard`), so a gather starts at the earliest after the copy-out of the unit before the last. Copy-outs
  head their unit's segment; "after copy-out k" is approximated by "after segment k - 1", a copy-out earlier.
* backward: in pre-backward of unit i its own gather is waited for, then the gather of unit i - 1 is issued, free to
  start once copy-out i is through; after compute the gradients are copied into the reduce buffer, which waits for the
  reduce-scatter before it (one input buffer in flight), then reduce-scatter, then all-reduce across replicas.
* the root is gathered first, waits for the compute stream, is not freed after forward and is reduced last.
"""

from __future__ import annotations

from itertools import pairwise

from sim.model.architecture import Layer
from sim.parallel.sharded.fsdp import GATHER, Fsdp, present
from sim.parallel.sharded.units import Unit
from sim.parallel.step import COMPUTE, MicroStep, blocks
from sim.program import SectionBuilder
from sim.work import Kernel


class Fsdp2(Fsdp):
    """Lowering of FSDP 2."""

    by_row = True
    part = 0  # ranks of a group to which units are resharded in part after forward
    parts: dict[str, int]  # bytes kept of such units

    def micro_step(self, section: SectionBuilder, micro: MicroStep) -> None:
        """Forward and backward of one micro-batch."""
        stack = self.begin(section, micro)
        self.buffer: Unit | None = None
        reshard = self.plan.scenario.parallel.reshard_after_forward
        self.part = 0 if isinstance(reshard, bool) or not 1 < reshard < self.factor else reshard
        self.parts = {}
        self.forward_pass(section, stack)
        self.backward_pass(section, stack, micro)
        self.outputs.end(section)

    def forward_pass(self, section: SectionBuilder, stack: tuple[Layer, ...]) -> None:
        """All-gathers in order of use, two ahead at most."""
        computed: list[int] = []
        unit: Unit | None = None
        for position, layer in enumerate(stack):
            waits: tuple[int, ...] = ()
            copy: tuple[Kernel, ...] = ()
            if self.units[position] is not self.root or position == 0:
                unit = self.units[position]
                joins = (COMPUTE, *self.joined()) if position == 0 else ()
                waits = present(self.unshard(section, unit, "forward", computed[-3:-2], joins))
                copy = self.copy_out(section, unit)
                self.free_buffer(section, unit)
            computed.append(self.forward(section, position, layer, waits, self.joined() if position == 0 else (), copy))
            if self.units[position] is not self.root and not self.keep:
                self.keep_part(section, self.units[position])
                self.release(section, self.units[position])
        self.free_buffer(section, None)

    def backward_pass(self, section: SectionBuilder, stack: tuple[Layer, ...], micro: MicroStep) -> None:
        """Blocks in reverse: prefetch one, compute, reduce."""
        last = len(stack) - 1
        mine = [i for i in range(last, -1, -1) if self.units[i] is not self.root]
        following = dict(pairwise([last, *mine] if self.units[last] is self.root else mine))
        gathered: dict[int, int | None] = {}
        prefetch = self.backward_prefetch != "none"
        reduced: int | None = None
        before: int | None = None  # the compute task before, which stands for this unit's copy-out
        for position in range(last, -1, -1):
            unit, layer = self.units[position], stack[position]
            own, again = unit is not self.root, not self.keep
            if own and again and position not in gathered:
                gathered[position] = self.unshard(section, unit, "backward", present(before))
            copy = self.copy_out(section, unit) if own and again else ()
            if own and again and self.factor > 1:
                section.free(f"gather_buffer:{unit.name}", self.buffer_bytes(unit), "buffers", GATHER)
            target = following.get(position)
            if prefetch and again and target is not None:
                gathered[target] = self.unshard(section, self.units[target], "backward", present(before))
            before = self.backward(section, position, layer, present(gathered.get(position)), copy)
            if own or position == 0:
                self.release(section, unit)
                reduced = self.post_backward(section, unit, micro, before, reduced)
        if self.held is not None:
            section.free(*self.held)
            self.held = None

    # ------------------------------------------------------------------------------------------- pieces
    held: tuple[str, int, str] | None = None

    def unshard(self, section: SectionBuilder, unit: Unit, phase: str, waits: tuple[int, ...] | list[int],
                joins: tuple[int, ...] = ()) -> int | None:
        """All-gather into a buffer of its own, from a copy of the shard where its dtype is another."""
        if self.factor > 1:
            size = self.buffer_bytes(unit)
            shard = blocks(size // (self.part if phase == "backward" and self.part else self.factor))
            if self.casts:
                section.allocate("gather_input", shard, "buffers", GATHER)
            section.allocate(f"gather_buffer:{unit.name}", size, "buffers", GATHER)
            if self.casts:
                section.free("gather_input", shard, "buffers", GATHER)
        return self.gather(section, unit, phase, waits, joins)

    def copy_out(self, section: SectionBuilder, unit: Unit) -> tuple[Kernel, ...]:
        """`split_with_sizes_copy` from the gather buffer into the parameters: read and write on the compute stream. A
        shard group of one rank copies its shards, in the same dtype too (_fsdp_param_group.py, wait_for_unshard)."""
        section.allocate(f"gathered:{unit.name}", self.gathered_bytes(unit), "gathered_parameters")
        if self.part and unit.name in self.parts:
            section.free(f"post_forward_shard:{unit.name}", self.parts.pop(unit.name), "gathered_parameters")
        return (self.copy_kernel("copy-out", *self.copied(unit)),)

    def copied(self, unit: Unit) -> tuple[int, float]:
        """Elements that copy-out reads and writes, and bytes of both per element."""
        numel = unit.padded + sum(f.numel for f in unit.frozen)
        return numel, 2 * self.whole_bytes(unit, unit.padded) / max(1, numel)

    def keep_part(self, section: SectionBuilder, unit: Unit) -> None:
        """With `reshard_after_forward: n` this rank keeps an n-th of the unit until backward."""
        if self.part:
            size = self.parts[unit.name] = self.gathered_bytes(unit, self.part)
            section.allocate(f"post_forward_shard:{unit.name}", size, "gathered_parameters")

    def release(self, section: SectionBuilder, unit: Unit) -> None:
        """Reshard: the whole parameters are freed at once."""
        section.free(f"gathered:{unit.name}", self.gathered_bytes(unit), "gathered_parameters")

    def gathered_bytes(self, unit: Unit, parts: int = 1) -> int:
        """A unit's parameters as modules see them, or a part of each: tensors of their own, views of padded ones (torch
        2.13 distributed/fsdp/_fully_shard/_fsdp_param.py: init_all_gather_outputs, init_unsharded_param,
        to_sharded_post_forward)."""
        trained = sum(blocks(numel * self.gather_bytes / parts) for numel in unit.wholes)
        beside = self.whole_bytes(unit, unit.padded) - unit.padded * self.gather_bytes
        return trained + round(beside / parts)

    def accumulated_bytes(self, unit: Unit) -> int:
        """Whole gradients in the dtype of reductions, where micro-steps add up before they reduce."""
        return sum(blocks(numel * self.reduce_bytes) for numel in unit.numels)

    def free_buffer(self, section: SectionBuilder, unit: Unit | None) -> None:
        """In forward a gather buffer lives until the next unit's copy-out."""
        if self.factor > 1:
            if self.buffer is not None:
                section.free(f"gather_buffer:{self.buffer.name}", self.buffer_bytes(self.buffer), "buffers", GATHER)
            self.buffer = unit

    def buffer_bytes(self, unit: Unit) -> int:
        """All-gather output."""
        return blocks(self.whole_bytes(unit, unit.padded))

    def post_backward(self, section: SectionBuilder, unit: Unit, micro: MicroStep, computed: int,
                      reduced: int | None) -> int | None:
        """Copy-in after the reduction before, then this unit's reduction."""
        if not micro.reduce:
            width = self.fresh_bytes + (2 if not micro.first else 1) * self.reduce_bytes
            self.copy(section, "accumulate", unit, unit.numel, width)
            self.drop_unsharded(section, unit)
            if micro.first:
                section.allocate(f"accumulated:{unit.name}", self.accumulated_bytes(unit), "gradients")
            return reduced
        buffer = (f"reduce_buffer:{unit.name}", blocks(unit.padded * self.reduce_bytes), "buffers")
        accumulating = not self.plan.scenario.parallel.reduce_every_micro_step and len(self.plan.micro_steps) > 1
        if accumulating:
            self.drop_unsharded(section, unit)
        if self.held is not None:
            section.free(*self.held)
        section.allocate(*buffer)
        width = self.fresh_bytes + self.reduce_bytes
        task = computed
        if self.factor * self.replicas > 1:
            task = self.copy(section, "copy-in", unit, unit.padded, width, present(computed, reduced))
        self.drop_unsharded(section, unit)
        if accumulating:
            section.free(f"accumulated:{unit.name}", self.accumulated_bytes(unit), "gradients")
        self.held = buffer
        first = micro.first or not self.plan.scenario.parallel.reduce_every_micro_step
        return self.reduce(section, unit, (task,), first)


