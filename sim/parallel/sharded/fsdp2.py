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

from collections import Counter
from itertools import pairwise

from sim.model.architecture import Layer
from sim.parallel.sharded.fsdp import GATHER, REDUCE, Buffer, Fsdp, present
from sim.parallel.sharded.units import Unit
from sim.parallel.step import COMPUTE, MicroStep, blocks
from sim.program import SectionBuilder
from sim.work import DTYPE_BYTES, Kernel


class Fsdp2(Fsdp):
    """Lowering of FSDP 2."""

    by_row = True
    part = 0  # ranks of a group to which units are resharded in part after forward
    parts: dict[str, int]  # bytes kept of such units

    def micro_step(self, section: SectionBuilder, micro: MicroStep) -> None:
        """Forward and backward of one micro-batch."""
        stack = self.begin(section, micro)
        self.memory.hooked = True
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
        self.finalized(section)
        self.memory.over()

    def finalized(self, section: SectionBuilder) -> None:
        """Backward is through: the last reduction's input goes, and what replicas reduced."""
        if self.held is not None:
            section.free(*self.held)
            self.held = None
        super().finalized(section)

    # ------------------------------------------------------------------------------------------- pieces
    held: Buffer | None = None

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
        shard group of one rank copies its shards, in the same dtype too (_fsdp_param_group.py, wait_for_unshard). In
        front of it stands what the gather was given, on a stream of its own in PyTorch: the shards cast, and copied
        into its buffer (_fsdp_collectives.py, _get_param_all_gather_inputs and all_gather_copy_in). A kernel that
        splits what was gathered gets its tensors' addresses by a copy from the host (torch 2.6.0: CUDA launches)."""
        name, tensors = f"gathered:{unit.name}", self.plan.builder.tensors
        section.allocate(name, self.gathered_bytes(unit), "gathered_parameters")
        if name not in tensors:
            tensors[name] = self.gathered_tensors(unit)
        if self.factor == 1 and self.casts:
            cast = ("gather_input", self.cast_bytes(unit), "buffers")
            section.allocate(*cast)
            section.free(*cast)
        if self.part and unit.name in self.parts:
            section.free(f"post_forward_shard:{unit.name}", self.parts.pop(unit.name), "gathered_parameters")
        out = self.copy_kernel("copy-out", *self.copied(unit), 2)
        if self.factor == 1 or not unit.own:
            return (out,)
        width = (DTYPE_BYTES[self.plan.scenario.training.precision.parameters] + self.gather_bytes if self.casts else 0)
        shards = self.copy_kernel("shards to gather", unit.own, width + 2 * self.gather_bytes, 1 + self.casts)
        return shards, out

    def cast_bytes(self, unit: Unit) -> int:
        """What stands beside a unit's whole parameters at the highest point while one rank makes them of its shards:
        each is cast into a tensor that the next one's replaces, then copied (wait_for_unshard, a world of one)."""
        sizes = [blocks(numel * self.gather_bytes) for numel in unit.numels]
        highest = whole = before = 0
        for size in sizes:
            highest = max(highest, whole + before + size, whole + 2 * size)
            whole, before = whole + size, size
        return highest - whole

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
        # a unit of hundreds of experts has thousands of tensors in a few sizes, and is asked about again and again
        sizes = Counter(unit.wholes)
        trained = sum(times * blocks(numel * self.gather_bytes / parts) for numel, times in sizes.items())
        beside = self.whole_bytes(unit, unit.padded) - unit.padded * self.gather_bytes
        return trained + round(beside / parts)

    def gathered_tensors(self, unit: Unit) -> list[int]:
        """Bytes of each of a unit's parameters as modules see them, and of all that is frozen beside them."""
        each = {numel: blocks(numel * self.gather_bytes) for numel in set(unit.wholes)}
        sizes = [each[numel] for numel in unit.wholes]
        rest = self.gathered_bytes(unit) - sum(sizes)
        return [*sizes, rest] if rest else sizes

    def accumulated_bytes(self, unit: Unit) -> int:
        """Whole gradients in the dtype of reductions, where micro-steps add up before they reduce."""
        return sum(times * blocks(numel * self.reduce_bytes) for numel, times in Counter(unit.numels).items())

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
        """Copy-in after the reduction before, then this unit's reduction. Where micro-steps add up whole gradients, the
        first casts them, tensor by tensor, and later ones, the last among them, add (run on fake processes: torch 2.14
        _fsdp_param.py, to_accumulated_grad_if_needed and accumulate_unsharded_grad_if_needed; or autograd does)."""
        if self.accumulates and (not micro.first or self.fresh_bytes != self.reduce_bytes):
            width = self.fresh_bytes + (1 if micro.first else 2) * self.reduce_bytes
            computed = self.copy(section, "accumulate", unit, unit.numel, width, tensors=unit.tensors)
        if not micro.reduce:
            self.drop_unsharded(section, unit)
            if micro.first:
                section.allocate(f"accumulated:{unit.name}", self.accumulated_bytes(unit), "gradients")
            return reduced
        buffer = (f"reduce_buffer:{unit.name}", blocks(unit.padded * self.reduce_bytes), "buffers")
        if self.accumulates:
            self.drop_unsharded(section, unit)
        if self.held is not None:
            section.free(*self.held)
        section.allocate(*buffer)
        width = (self.reduce_bytes if self.accumulates else self.fresh_bytes) + self.reduce_bytes
        task = computed
        if self.factor * self.replicas > 1:
            task = self.copy(section, "copy-in", unit, unit.padded, width, present(computed, reduced))
        self.drop_unsharded(section, unit)
        if self.accumulates:
            section.free(f"accumulated:{unit.name}", self.accumulated_bytes(unit), "gradients")
        self.held = buffer
        first = micro.first or not self.plan.scenario.parallel.reduce_every_micro_step
        return self.reduce(section, unit, (task,), first)

    @property
    def accumulates(self) -> bool:
        """Whether micro-steps add up whole gradients before the last one reduces them."""
        return not self.plan.scenario.parallel.reduce_every_micro_step and len(self.plan.micro_steps) > 1

    def adds_in_place(self, micro: MicroStep) -> bool:
        """Where gradients are reduced in the dtype they have, they stay where autograd puts them and it adds to them
        (_fsdp_param.py, to_accumulated_grad_if_needed); else FSDP adds a unit's to copies when its backward is over."""
        return self.accumulates and not micro.first and self.fresh_bytes == self.reduce_bytes

    @property
    def narrows(self) -> bool:
        """Whether gradients are reduced in another dtype than that of the parameters, and cast behind it."""
        return self.reduce_bytes != DTYPE_BYTES[self.plan.scenario.training.precision.gradients]

    def output(self, unit: Unit) -> Buffer:
        """What a reduction writes: this rank's share in the dtype of reductions; in that of the parameters it is the
        gradient itself, or added to it (`foreach_reduce`)."""
        return (f"reduce_output:{unit.name}", blocks(unit.own * self.reduce_bytes), "buffers")

    def begin_output(self, section: SectionBuilder, unit: Unit) -> None:
        """A tensor of its own, but where it becomes the gradient."""
        if self.narrows:
            section.allocate(*self.output(unit), REDUCE)

    def end_output(self, section: SectionBuilder, unit: Unit, first: bool) -> None:
        """Cast, and added where there is a gradient already. What went through an all-reduce lasts until backward is
        through (`AllReduceState`, given up in finalize_backward)."""
        buffer = self.output(unit)
        if not first:
            name, size = f"new_shard:{unit.name}", blocks(self.gradient_bytes(unit))
            if self.narrows:
                section.allocate(name, size, "buffers", REDUCE)
                section.free(name, size, "buffers", REDUCE)
            else:
                section.allocate(*buffer, REDUCE)
        if first and not self.narrows:
            return
        if self.replicas > 1:
            self.outlast.append(buffer)
        else:
            section.free(*buffer, REDUCE)
