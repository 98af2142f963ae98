"""What FSDP 1 and FSDP 2 share: units, groups, gathers, reductions, states.

Sources: PyTorch `torch/distributed/fsdp/` (FSDP 1: `_runtime_utils.py`, `_flat_param.py`; FSDP 2: `_fully_shard/`);
Zhao et al., PyTorch FSDP, VLDB 2023.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sim.model.architecture import Layer
from sim.model.tuning import QUANTISED, Frozen
from sim.parallel.activations import GRADIENT_POOL, Activations
from sim.parallel.compute import traffic_kernel
from sim.parallel.muon import Share, is_muon
from sim.parallel.outputs import Outputs
from sim.parallel.sharded.dist_muon import DistMuon
from sim.parallel.sharded.units import Unit, pieces, units_of
from sim.parallel.step import COMPUTE, MicroStep, Plan, blocks, collective, state_bytes, state_copies, step_counters
from sim.parallel.update import update, update_in_backward
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES, Kernel

GATHER, REDUCE, REPLICATE = 1, 2, 3
STREAMS = ("compute", "all_gather", "reduce_scatter", "all_reduce")
#: Name, bytes, category of a tensor.
Buffer = tuple[str, int, str]


class Fsdp:
    """State of the lowering of one FSDP job; `micro_step` belongs to the versions."""

    by_row = False  # FSDP 1: flat parameters

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        parallel, precision = plan.scenario.parallel, plan.scenario.training.precision
        self.factor = parallel.sharding_factor
        self.replicas = plan.scenario.replica_ranks // self.factor
        # Resharding to groups of one rank keeps a whole copy: nothing to gather in backward.
        self.keep = parallel.reshard_after_forward in (False, 1) and parallel.reshard_after_forward is not True
        spread = parallel.expert if "expert_shard" in plan.groups else 0
        self.routed_factor = self.factor // spread if spread else 0
        self.take(units_of(plan.architecture, parallel.wrap, self.factor, self.by_row, self.routed_factor))
        self.gather_dtype, self.reduce_dtype = precision.gather, precision.reduce
        self.gather_bytes, self.reduce_bytes = DTYPE_BYTES[precision.gather], DTYPE_BYTES[precision.reduce]
        #: Gradients come out of backward as wide as activations at least.
        self.fresh_bytes = max(self.gather_bytes, DTYPE_BYTES["bf16"])
        own = plan.stack.narrow_parameters and self.gather_bytes < self.fresh_bytes  # kept in what is gathered
        self.casts = precision.gather != precision.parameters and not own
        self.serial = not parallel.overlap  # compute and communication take turns
        self.reduced: int | None = None  # reduction that compute waits for then
        self.host_s = plan.stack.host_collective_s
        self.offload = plan.offload
        self.at_once = plan.scenario.training.optimizer_in_backward
        self.constants_apart = plan.stack.constants_apart
        self.kernels: dict[tuple[str, int, float, int], Kernel] = {}
        self.segments: dict[tuple[str, int, float, int], int] = {}
        self.muon = DistMuon(plan, self.factor, self.routed_factor) if is_muon(plan) else None
        self.outlast: list[Buffer] = []  # what replicas reduced, which is held until backward is through

    def take(self, units: list[Unit]) -> None:
        """Units by position of the stack; those of one name are one."""
        self.units = units
        self.root = units[0]
        self.distinct = list({u.name: u for u in units}.values())
        self.last = len(units) - 1

    # ------------------------------------------------------------------------------------------- states
    def states(self) -> None:
        """Shards of parameters, master copy and optimizer states; gradients come and go in the micro-steps."""
        constants = [size for u in self.distinct for f in u.frozen for size in f.beside(self.constants_apart)]
        self.plan.resident("constants of frozen parameters", sum(map(blocks, constants)), "parameters", constants)
        if self.offload.moves_parameters:
            self.host_states()
            return
        self.plan.resident("frozen parameters", sum(self.frozen_shard(u) for u in self.distinct), "parameters", [
            size / self.over(f) for u in self.distinct for f in u.frozen for size in f.parameter(self.constants_apart)])
        shards = Counter(u.shards for u in self.distinct)
        for category, width in state_bytes(self.plan).items():
            if category != "gradients" and width:
                copies = state_copies(self.plan, category)
                if self.muon and category == "optimizer_states":
                    self.muon_states()
                    continue
                size = sum(n * copies * sum(blocks(numel * width / copies) for numel in tensors)
                           for tensors, n in shards.items())
                self.plan.resident(category, size, category, [
                    numel * width / copies for u in self.distinct for numel in u.shards for _ in range(copies)])
                if category == "optimizer_states":
                    step_counters(self.plan, sum(n * len(tensors) for tensors, n in shards.items()))

    def muon_states(self) -> None:
        """States of Muon and of the AdamW beside it, and what its exchanges reserve."""
        assert self.muon is not None
        sizes = self.muon.state_sizes(DTYPE_BYTES[self.plan.scenario.training.precision.optimizer])
        self.plan.resident("optimizer_states", sum(map(blocks, sizes)), "optimizer_states", sizes)
        step_counters(self.plan, len(self.muon.others))
        kept = self.muon.buffers()
        self.plan.resident("muon exchange", sum(kept), "buffers", kept)

    def host_states(self) -> None:
        """With CPUOffload(offload_params=True) or CPUOffloadPolicy all of them are in host memory, parameters and
        gradients pinned, a block for each unit's shard."""
        for unit in self.distinct:
            self.offload.hold(f"frozen parameters:{unit.name}", self.frozen_shard(unit), "parameters", pinned=True)
        for category, width in state_bytes(self.plan).items():
            for unit in self.distinct:
                self.offload.hold(f"{category}:{unit.name}", unit.own * width, category,
                                  pinned=category in ("parameters", "gradients"))

    def optimizer_step(self, section: SectionBuilder) -> None:
        """Clipping and the optimizer on this rank's shards, after the last reduction."""
        if self.at_once:
            return
        numel = sum(u.own for u in self.distinct)
        tensors = self.optimized()
        largest = max((n for u in self.distinct for n in u.shards), default=0)
        update(self.plan, section, numel, tensors, self.joined(), "shard" if self.factor > 1 else None, largest,
               pieces=[n for u in self.distinct for n in u.shards],
               share=Share((), tuple(self.muon.others)) if self.muon else None,
               muon=self.muon.run if self.muon else None)
        for unit in () if self.offload.moves_optimizer else self.distinct:
            section.free(f"gradient:{unit.name}", blocks(self.gradient_bytes(unit)), "gradients", REDUCE)

    def optimized(self) -> int:
        """Tensors that the optimizer sees on the rank that has most of them: parameters cut by rows, flat parameters,
        or what a rank's share of those has of the original ones (use_orig_params)."""
        if self.by_row:
            return sum(u.tensors for u in self.distinct)
        if not self.plan.stack.original_parameters:
            return len(self.distinct)
        alike = Counter(u.numels for u in self.distinct if u.numels)
        counts = np.zeros(self.factor, dtype=np.int64)
        for numels, times in alike.items():
            counts += times * pieces(numels, self.factor)
        return int(counts.max())

    def gradient_bytes(self, unit: Unit) -> int:
        """Sharded gradient the optimizer reads, one tensor for the whole unit; in memory: `blocks` of it."""
        width = DTYPE_BYTES[self.plan.scenario.training.precision.gradients]
        return round((unit.own + (self.graded(unit) - unit.padded) // self.factor) * width)

    def graded(self, unit: Unit) -> int:
        """Elements of a unit's gradient: what is trained in it, and in FSDP 1 what shares its flat parameter, which has
        one dtype (torch/distributed/fsdp/_flat_param.py: views of frozen tensors are autograd's too)."""
        if self.by_row or self.plan.stack.frozen_apart or not unit.numel:
            return unit.padded
        dtype = self.plan.scenario.training.precision.parameters
        return unit.padded + sum(f.numel for f in unit.frozen if f.dtype == dtype)

    # ------------------------------------------------------------------------------------------- communication
    def joined(self) -> tuple[int, ...]:
        """Streams that compute waits for at the end of backward (`_post_backward_final_callback`)."""
        reduce = (REDUCE,) if self.factor > 1 or self.at_once else ()
        return (*reduce, *((REPLICATE,) if self.replicas > 1 else ()))

    def gather(self, section: SectionBuilder, unit: Unit, phase: str, waits: Sequence[int] = (),
               joins: Sequence[int] = ()) -> int | None:
        """All-gather of a unit's parameters; None when they are whole already (one rank a shard group)."""
        if self.factor == 1:
            return None
        if self.serial:
            joins = (COMPUTE, *self.joined(), *joins)
        group = "shard"
        reshard = self.plan.scenario.parallel.reshard_after_forward
        if phase == "backward" and not isinstance(reshard, bool) and reshard < self.factor:
            group = "reshard"
        elif self.offload.moves_parameters:
            waits, joins = (self.fetch(section, unit, phase, waits, joins),), ()
        task, frozen = None, self.frozen_bytes(unit, routed=True) if self.routed_factor else 0.0
        dense = self.whole_bytes(unit, unit.dense) - frozen
        for size, over in self.moved(dense, unit.routed * self.gather_bytes + frozen, group):
            call = collective(self.plan, "all_gather", size, self.gather_dtype, over)
            task = section.collective(GATHER, call, self.host_s, Label(unit.name, phase, "all_gather"), waits, joins)
        return task

    def moved(self, dense_bytes: float, routed_bytes: float, group: str = "shard") -> list[tuple[float, str]]:
        """What of a unit moves over which group, as it is gathered; routed experts over the ranks that hold them."""
        found = [(dense_bytes, group)] if dense_bytes else []
        return [*found, (routed_bytes, "expert_shard")] if routed_bytes and self.routed_factor > 1 else found

    def over(self, frozen: Frozen) -> int:
        """Ranks that share a frozen tensor."""
        return self.routed_factor if frozen.routed and self.routed_factor else self.factor

    def fetch(self, section: SectionBuilder, unit: Unit, phase: str, waits: Sequence[int], joins: Sequence[int]) -> int:
        """This rank's shard to the device, in the parameters' dtype: casts for the gather run there."""
        width = DTYPE_BYTES[self.plan.scenario.training.precision.parameters]
        size = round(unit.own * width + self.frozen_shard(unit))
        section.allocate(f"fetched_shard:{unit.name}", size, "buffers", GATHER)
        task = self.offload.fetch(section, size, Label(unit.name, phase, "shard"), waits, joins)
        section.free(f"fetched_shard:{unit.name}", size, "buffers", GATHER)
        return task

    def whole_bytes(self, unit: Unit, numel: int) -> int:
        """`numel` trained parameters of a unit as they are gathered, and what is gathered with them: quantised weights
        as they are stored, others in the gathers' dtype. In 8 bits go only matrices that products read so (torchao
        float8/fsdp_utils.py: fsdp_pre_all_gather of Float8Linear's weights; Megatron's fp8 parameters)."""
        kept = unit.wide * (self.fresh_bytes - self.gather_bytes) if self.gather_bytes < DTYPE_BYTES["bf16"] else 0
        return round(numel * self.gather_bytes + kept + self.frozen_bytes(unit))

    def frozen_bytes(self, unit: Unit, *, routed: bool = False) -> float:
        """What of a unit is not trained, as it is gathered; of routed experts only, if asked."""
        precision = self.plan.scenario.training.precision
        as_stored = precision.gather == precision.parameters  # no mixed precision policy casts anything
        return sum(sum(f.parameter(self.constants_apart)) if as_stored or f.dtype in QUANTISED else
                   f.numel * self.gather_bytes for f in unit.frozen if f.routed or not routed)

    def frozen_shard(self, unit: Unit) -> int:
        """This rank's part of what is not trained, as it is stored."""
        return sum(blocks(size / self.over(f)) for f in unit.frozen for size in f.parameter(self.constants_apart))

    def reduce(self, section: SectionBuilder, unit: Unit, waits: Sequence[int], first: bool) -> int | None:
        """Reduce-scatter inside the shard group, then all-reduce of the shard across replicas."""
        task = None
        if not unit.numel:
            return None
        self.begin_output(section, unit)
        if self.factor > 1:
            ratio = self.reduce_bytes / self.gather_bytes
            dense = (self.graded(unit) - unit.routed) * self.gather_bytes
            for size, over in self.moved(dense, unit.routed * self.gather_bytes):
                call = collective(self.plan, "reduce_scatter", size * ratio, self.reduce_dtype, over)
                task = section.collective(REDUCE, call, self.host_s, Label(unit.name, "backward", "reduce_scatter"),
                                          waits)
            waits = waits if task is None else (task,)
        if self.replicas > 1:
            own = unit.own + (self.graded(unit) - unit.padded) // self.factor
            call = collective(self.plan, "all_reduce", own * self.reduce_bytes, self.reduce_dtype, "replicate")
            task = section.collective(REPLICATE, call, self.host_s, Label(unit.name, "backward", "all_reduce"), waits)
        if self.serial:
            self.reduced = task
        if self.offload.moves_optimizer:
            self.store(section, unit, waits if task is None else (task,), first)
        elif self.at_once:
            section.allocate(f"gradient:{unit.name}", blocks(self.gradient_bytes(unit)), "gradients", REDUCE)
            stream = REPLICATE if self.replicas > 1 else REDUCE
            update_in_backward(self.plan, section, unit.name, unit.shards, stream, waits if task is None else (task,))
            section.free(f"gradient:{unit.name}", blocks(self.gradient_bytes(unit)), "gradients", REDUCE)
        elif first:
            section.allocate(f"gradient:{unit.name}", blocks(self.gradient_bytes(unit)), "gradients", REDUCE)
        self.end_output(section, unit, first)
        return task

    def finalized(self, section: SectionBuilder) -> None:
        """Backward is through, and so is what lasted until then."""
        for buffer in self.outlast:
            section.free(*buffer, REDUCE)
        self.outlast = []

    def begin_output(self, section: SectionBuilder, unit: Unit) -> None:
        """What a reduction writes into, where that is not the gradient."""

    def end_output(self, section: SectionBuilder, unit: Unit, first: bool) -> None:
        """The gradient is there, or added to those of micro-steps before."""

    def store(self, section: SectionBuilder, unit: Unit, waits: Sequence[int], first: bool) -> None:
        """The gradient shard to the host; a later micro-step's is added to what is there, on the CPU."""
        size, label = self.gradient_bytes(unit), Label(unit.name, "backward", "gradient")
        section.allocate(f"gradient:{unit.name}", blocks(size), "gradients", REDUCE)
        task = self.offload.store(section, size, label, waits)
        section.free(f"gradient:{unit.name}", blocks(size), "gradients", REDUCE)
        if not first:
            section.host(self.offload.add_s(unit.own), label, waits=(task,))

    # ------------------------------------------------------------------------------------------- compute
    def forward(self, section: SectionBuilder, position: int, layer: Layer, waits: Sequence[int],
                joins: Sequence[int] = (), before: tuple[Kernel, ...] = ()) -> int:
        """Forward of the layer at `position`, with what it keeps."""
        label = Label(self.layer_label(position), "forward", layer.kind)
        if layer.kind == "head":
            self.outputs.replaced(section)
        self.memory.forward(position, layer)
        if layer.reading_s:
            cut = self.plan.compute.cut(layer, "", before, (), "forward")
            return self.read(section, layer, cut, label, waits, joins)
        return section.kernels(COMPUTE, self.plan.compute.forward(layer, before), label, waits, joins)

    def read(self, section: SectionBuilder, layer: Layer, segments: Sequence[int], label: Label, waits: Sequence[int],
             joins: Sequence[int] = ()) -> int:
        """Segments between which the host waits for the GPU, to read what the next one needs."""
        reads = [op.reading_s for op in layer.operators if op.reading_s]
        task = section.kernels(COMPUTE, segments[0], label, waits, joins)
        for reading_s, segment in zip(reads, segments[1:], strict=True):
            section.host(reading_s, Label(label.layer, label.phase, "read"), waits=(task,))
            task = section.kernels(COMPUTE, segment, label)
        return task

    @property
    def backward_prefetch(self) -> str:
        """When the next unit of backward is gathered."""
        return "none" if self.serial else str(self.plan.scenario.parallel.prefetch.backward)

    def backward(self, section: SectionBuilder, position: int, layer: Layer, waits: Sequence[int],
                 before: tuple[Kernel, ...] = (), after: tuple[Kernel, ...] = ()) -> int:
        """Recomputation and backward of the layer at `position`; its gradients are added to those of its unit."""
        name = self.units[position].name
        self.unsharded[name] = self.unsharded.get(name, 0) + self.memory.backward(position, layer)
        label = Label(self.layer_label(position), "backward", layer.kind)
        policy = self.plan.policy(position)
        waits = (*waits, *present(self.reduced))
        if layer.reading_s and policy == "full":
            task = self.read(section, layer, self.plan.compute.cut(layer, policy, before, after, "backward"), label,
                             waits)
        else:
            task = section.kernels(COMPUTE, self.plan.compute.backward(layer, policy, before, after), label, waits)
        if layer.kind == "head":
            self.outputs.kept(section)
        return task

    def layer_label(self, position: int) -> str:
        """Name of the layer for reports."""
        return self.plan.architecture.names[position]

    def begin(self, section: SectionBuilder, micro: MicroStep) -> tuple[Layer, ...]:
        """Start a micro-step: its layers, and a fresh book of activations."""
        stack = self.plan.model(micro.batch).stack
        self.memory = Activations(self.plan, section, len(stack), keep_gradients=not self.adds_in_place(micro),
                                  caches_casts=self.by_row)
        self.outputs = Outputs(self.plan, micro)
        self.outputs.begin(section)
        self.reduced = None
        self.unsharded: dict[str, int] = {}  # bytes of whole gradients by unit
        return stack

    def adds_in_place(self, micro: MicroStep) -> bool:
        """Whether backward adds its gradients to whole ones of earlier micro-steps, tensor by tensor."""
        return False

    def drop_unsharded(self, section: SectionBuilder, unit: Unit) -> None:
        """The unit's whole gradients go."""
        size = self.unsharded.pop(unit.name, 0)
        if size:
            section.free(GRADIENT_POOL, size, "gradients")

    def copy_kernel(self, name: str, numel: int, width: float, launches: int = 1) -> Kernel:
        """A kernel of FSDP's own over `numel` elements at `width` bytes read and written each, in so many launches."""
        key = (name, numel, width, launches)
        if key not in self.kernels:
            kernel = traffic_kernel(name, self.gather_dtype, numel, numel * width)
            self.kernels[key] = replace(kernel, launches=launches)
        return self.kernels[key]

    def copy(self, section: SectionBuilder, name: str, unit: Unit, numel: int, width: float,
             waits: Sequence[int] = (), tensors: int = 0) -> int:
        """Such a kernel, or one for each of so many `tensors`, as a task of its own on the compute stream."""
        key = (name, numel, width, tensors)
        if key not in self.segments:
            kernel = self.copy_kernel(name, numel, width)
            if tensors:
                kernel = replace(kernel, launches=tensors, kernel="by_tensor")
            self.segments[key] = self.plan.compute.segment((), (kernel,))
        return section.kernels(COMPUTE, self.segments[key], Label(unit.name, "backward", name), waits)


def present(*tasks: int | None) -> tuple[int, ...]:
    """The tasks that exist."""
    return tuple(t for t in tasks if t is not None)
