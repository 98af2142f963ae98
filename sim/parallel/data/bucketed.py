"""Data parallelism with whole parameters on every rank: bucketed gradient reduction, then the optimizer.

One lowering for DDP (PyTorch), ZeRO-1 and 2 (DeepSpeed) and Megatron's DDP and distributed optimizer: they differ in
the facts of a `Reduction`, not in code. Sources: PyTorch `distributed.py`, `reducer.cpp`; DeepSpeed `stage_1_and_2.py`;
Megatron-LM `param_and_grad_buffer.py`, `distributed_data_parallel.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from sim.model import gradient_dtype
from sim.model.architecture import Layer, Parameter
from sim.parallel.activations import GRADIENT_POOL, Activations
from sim.parallel.compute import traffic_kernel
from sim.parallel.data.buckets import Bucket
from sim.parallel.data.contiguous import Contiguous
from sim.parallel.data.gathers import Gathers
from sim.parallel.data.partition import NCCL
from sim.parallel.data.reductions import Reduction, sums_wide
from sim.parallel.data.updated import Updated
from sim.parallel.step import COMPUTE, MicroStep, Plan, collective
from sim.parallel.update import sums_in_master, update_in_backward
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES, Kernel

STREAMS = ("compute", "nccl")


class Bucketed(Updated):
    """Lowering of one job; see the module."""

    def __init__(self, plan: Plan, reduction: Reduction) -> None:
        self.plan, self.reduction = plan, reduction
        self.precision = plan.scenario.training.precision
        # DDP asked for on one rank still launches its all-reduces, and DeepSpeed's engine always
        self.reduces = (plan.replicas > 1 or plan.scenario.parallel.strategy == "ddp"
                        or plan.stack.gradient_path == "ipg")
        self.offload = plan.offload
        self.at_once = plan.scenario.training.optimizer_in_backward
        #: the optimizer on the host takes this rank's part of every bucket
        self.hands_over = self.offload.moves_optimizer and not self.offload.hybrid
        self.completes = self.reduces or self.hands_over  # buckets leave, to other ranks or to the host
        self.wire = self.precision.reduce
        self.sums_wide = sums_wide(plan, reduction.gradient_shards > 1)
        self.width, self.wide = (DTYPE_BYTES[dtype] for dtype in (self.precision.gradients,
                                                                  gradient_dtype(self.precision)))
        self.master_sums = sums_in_master(plan)
        self._copies: dict[tuple[bool, bool], Callable[[Sequence[Parameter]], tuple[Kernel, ...]]] = {}
        self.gradients: dict[int, int] = {}  # bytes that layers have left behind, by position
        self.gathers = Gathers(plan, [bucket for bucket in reduction.buckets if plan.shards(bucket.group) > 1])
        self.numbers = {id(bucket): number for number, bucket in enumerate(reduction.buckets)}
        self.contiguous = Contiguous(plan, reduction.buckets, NCCL, copies=reduction.copied,
                                     keeps=reduction.contiguous and not self.hands_over)
        self.cuts: dict[int, list[tuple[int, list[Bucket]]]] = {}
        for bucket in reduction.buckets:
            at = self.cuts.setdefault(bucket.position, [])
            if at and at[-1][0] == bucket.operator:
                at[-1][1].append(bucket)
            else:
                at.append((bucket.operator, [bucket]))

    # ------------------------------------------------------------------------------------------- micro-step
    def micro_step(self, section: SectionBuilder, micro: MicroStep) -> None:
        """Forward, then backward with every complete bucket on its way."""
        memory = Activations(self.plan, section, len(self.plan.architecture.stack),
                             keep_gradients=self.keeps_gradients(micro))
        self.forward(section, micro, memory)
        self.backward(section, micro, memory)

    def forward(self, section: SectionBuilder, micro: MicroStep, memory: Activations) -> None:
        """Forward of all layers, updated parameters on their way in the first."""
        self.gathers.begin()
        for position, layer in enumerate(self.plan.model(micro.batch).stack):
            memory.forward(position, layer)
            self.layer_forward(section, position, layer, self.gathers_in(micro))

    def backward(self, section: SectionBuilder, micro: MicroStep, memory: Activations) -> None:
        """Backward of all layers, with every complete bucket on its way."""
        stack = self.plan.model(micro.batch).stack
        if self.opens(micro):
            self.open_buckets(section)
        late: list[Bucket] = []
        for position in range(len(stack) - 1, -1, -1):
            self.leave(position, memory.backward(position, stack[position]))
            late += self.layer_backward(section, position, stack[position], micro)
            if self.at_once and stack[position].parameters:
                update_in_backward(self.plan, section, self.plan.architecture.names[position],
                                   [p.numel for p in stack[position].parameters])
            if self.reduction.gradient_shards > 1 and micro.first and not (
                    self.offload.moves_optimizer or self.reduction.contiguous):
                self.shard(section, position, stack[position])
            if micro.reduce and self.reduction.views and not self.keeps_gradients(micro):
                self.drop_gradients(section, position)
        self.backward_done(section, micro, late)

    def opens(self, micro: MicroStep) -> bool:
        """Whether buckets are there from the beginning of a backward. Contiguous ones are made in every backward; those
        of whole gradients last until the reduction, beside the forwards between."""
        if self.reduction.contiguous:
            return micro.first or self.plan.micro_steps[0].reduce
        return micro.reduce and not self.reduction.behind

    def leave(self, position: int, size_bytes: int) -> None:
        """Gradients that a layer leaves behind."""
        self.gradients[position] = self.gradients.get(position, 0) + size_bytes

    def backward_done(self, section: SectionBuilder, micro: MicroStep, late: Sequence[Bucket]) -> None:
        """What comes behind a backward: buckets that are reduced there, and the wait for all."""
        if self.reduction.narrow:
            for position in range(len(self.plan.architecture.stack)):
                self.drop_gradients(section, position)
        if micro.reduce and self.reduction.behind and not self.reduction.contiguous:
            self.open_buckets(section)
        done = 0
        for bucket in late:
            done += bucket.numel
            if self.reduction.contiguous:
                self.drop_until(section, done)
            self.reduce(section, bucket, (), micro)
        if micro.reduce:
            self.finish(section)

    def gathers_in(self, micro: MicroStep) -> bool:
        """Whether a micro-step's forward waits for updated parameters on their way."""
        return micro.first and self.reduces and self.reduction.gathers == "used"

    def layer_forward(self, section: SectionBuilder, position: int, layer: Layer, gathers: bool,
                      name: str = "") -> int:
        """Forward of one layer, its parameters on their way if it `gathers`; returns its last task. It is called by
        its kind, or `name`."""
        label = Label(self.plan.architecture.names[position], "forward", name or layer.kind)
        if gathers:
            return self.gathers.forward(section, position, layer, label)
        return section.kernels(COMPUTE, self.plan.compute.forward(layer), label)

    def layer_backward(self, section: SectionBuilder, position: int, layer: Layer, micro: MicroStep) -> list[Bucket]:
        """Backward of one layer, cut where buckets complete; returns buckets that wait for the end of backward."""
        overlap = self.overlaps or self.in_line
        complete = self.cuts.get(position, []) if micro.reduce and self.completes else []
        cuts = tuple(operator for operator, _ in complete) if overlap else ()
        parts = self.plan.compute.backward_parts(layer, self.plan.policy(position), cuts, self.own_copies(micro))
        name = self.plan.architecture.names[position]
        label = Label(name, "backward", layer.kind)
        late: list[Bucket] = []
        for number, part in enumerate(parts):
            joins = (NCCL,) if self.in_line else ()
            task = section.kernels(COMPUTE, part, label, joins=joins) if part >= 0 else None
            if number < len(cuts):
                for bucket in complete[number][1]:
                    self.reduce(section, bucket, () if task is None else (task,), micro)
        if not overlap:
            late = [bucket for _, buckets in complete for bucket in buckets]
        return late

    def reduce(self, section: SectionBuilder, bucket: Bucket, waits: Sequence[int],
               micro: MicroStep | None = None) -> None:
        """Launch one bucket; an offloading optimizer's part of it goes on to the host in every micro-step."""
        self.contiguous.summed(section, bucket, True)
        task = self.launch(section, bucket, waits) if self.reduces and self.ranks(bucket) else None
        self.contiguous.summed(section, bucket, False)
        self.contiguous.reduced(section, bucket, micro)
        if self.hands_over and micro is not None:
            self.store(section, bucket, waits if task is None else (task,), micro)

    def store(self, section: SectionBuilder, bucket: Bucket, waits: Sequence[int], micro: MicroStep) -> None:
        """This rank's part to the host: as fp32, or of several micro-steps in the model's dtype, each added on the
        device to what is fetched back (DeepSpeed `async_inplace_copy_grad_to_fp32_buffer_from_gpu`,
        `async_accumulate_grad_in_cpu_via_gpu`)."""
        numel = bucket.numel / self.split(bucket.group)
        label = Label(f"bucket{self.numbers[id(bucket)]}", "backward", "partition")
        single = len(self.plan.micro_steps) == 1 or self.reduction.behind
        size = round(numel * (self.offload.state_widths()["gradients"] if single else self.width))
        temporary, stream = self.handed_over_bytes(bucket, size)
        section.allocate("gradient on its way", temporary, "gradients", stream)
        joins = () if waits else (COMPUTE,)
        if not micro.first and self.plan.micro_steps[0].reduce:
            earlier = self.offload.fetch(section, numel * self.width, label, waits, joins, place="cpu")
            waits, joins = (*waits, earlier), ()
        self.offload.store(section, size, label, waits, joins)
        section.free("gradient on its way", temporary, "gradients", stream)

    def handed_over_bytes(self, bucket: Bucket, size: int) -> tuple[int, int]:
        """What is made for a moment of each gradient on its way to the host, and in which stream's memory: one at a
        time a copy in fp32, and where buckets are contiguous one in fp64 before it, for its norm, of all that a rank
        has of it (stage_1_and_2.py, copy_grads_in_partition: set_norm_for_param_grad_in_gpu)."""
        whole = max((p.numel for layer in self.plan.architecture.stack for p in layer.parameters), default=0)
        if not self.reduction.contiguous:
            return round(size * min(1.0, whole / bucket.numel)), NCCL
        piece = min(whole, bucket.numel, self.plan.share(True))
        return round(piece * DTYPE_BYTES["fp64"]), NCCL if self.plan.scenario.parallel.overlap else COMPUTE

    def launch(self, section: SectionBuilder, bucket: Bucket, waits: Sequence[int]) -> int:
        """The reduction of one bucket."""
        label = Label(f"bucket{self.numbers[id(bucket)]}", "backward", self.reduction.kind)
        if self.reduction.prepared:
            kernel = traffic_kernel("prepared bucket", self.wire, bucket.numel, self.reduction.prepared * bucket.numel)
            waits = (section.kernels(COMPUTE, self.plan.compute.own((kernel,)), label, waits),)
        if self.plan.stack.bucket_waits and self.plan.scenario.parallel.overlap:
            section.host(0.0, label, joins=(COMPUTE, NCCL))
        task = -1
        for kind, numel, group in self.calls(bucket):
            call = collective(self.plan, kind, numel * DTYPE_BYTES[self.wire], self.wire, group)
            task = section.collective(NCCL, call, self.plan.stack.host_collective_s, label._replace(name=kind), waits,
                                      () if waits else (COMPUTE,))
            waits = (task,)
        return task

    def calls(self, bucket: Bucket) -> list[tuple[str, float, str]]:
        """Kind, elements and communicator of the collectives that reduce a bucket: where some of its ranks share a set
        of states out, scattered among those, then summed with the other sets' parts (megatron-core
        distributed/param_and_grad_buffer.py, start_grad_sync)."""
        kind, group = self.reduction.kind, bucket.group
        across, shards = self.plan.across(group), self.plan.shards(group)
        if across is None or kind != "reduce_scatter":
            return [(kind, bucket.numel, group)]
        scattered = [(kind, float(bucket.numel), self.plan.within(group))] if shards > 1 else []
        return [*scattered, ("all_reduce", bucket.numel / shards, across)]

    def finish(self, section: SectionBuilder) -> None:
        """Compute waits for all buckets; gradients are copied back where they are not views."""
        if self.reduces:
            numel = self.plan.architecture.parameters
            kernel = traffic_kernel("bucket copy-out", self.precision.gradients, numel,
                                    max(1.0, numel * self.reduction.copy_out))
            if self.reduction.copy_out:
                tensors = sum(len(layer.parameters) for layer in self.plan.architecture.stack)
                launches = len(self.reduction.buckets) if self.reduction.views else tensors
                kernel = replace(kernel, launches=launches, kernel="by_tensor")
            section.kernels(COMPUTE, self.plan.compute.segment((), (kernel,)), Label("buckets", "backward", "copy-out"),
                            joins=(NCCL,))
        if self.reduction.transient and self.reduction.buffer_bytes:
            section.free("gradient buckets", round(self.reduction.buffer_bytes), "buffers")
        self.contiguous.over(section)
        if self.reduction.flattened and not self.sums_wide and not self.reduction.contiguous:
            self.keep_part(section)

    def keep_part(self, section: SectionBuilder) -> None:
        """Gradients outside a rank's part go once they are reduced; the first rank's part, which has the embedding, is
        the first in the order of parameters (DeepSpeed `independent_gradient_partition_epilogue`)."""
        left = self.plan.share(True) * self.width
        for position, layer in enumerate(self.plan.architecture.stack):
            if left <= 0:
                self.drop_gradients(section, position)
            left -= layer.numel * self.width

    def open_buckets(self, section: SectionBuilder) -> None:
        """Bucket buffers that live only while gradients are reduced."""
        if self.reduction.transient and self.reduction.buffer_bytes:
            section.allocate("gradient buckets", round(self.reduction.buffer_bytes), "buffers")

    def drop_until(self, section: SectionBuilder, elements: int) -> None:
        """Gradients that have been copied into buckets go: as many as the layers at the end of the stack have."""
        for position in sorted(self.gradients, reverse=True):
            elements -= self.plan.architecture.stack[position].numel
            if elements < 0:
                return
            self.drop_gradients(section, position)

    @property
    def in_line(self) -> bool:
        """Whether buckets are reduced as soon as they fill, in line with the kernels (DeepSpeed's hooks of ZeRO-2
        without overlap_comm: `reduction_stream` is the current one)."""
        return self.reduction.contiguous and not self.reduction.behind and not self.plan.scenario.parallel.overlap

    @property
    def overlaps(self) -> bool:
        """Whether buckets are reduced beside the last backward."""
        return self.plan.scenario.parallel.overlap and not self.reduction.behind

    def own_copies(self, micro: MicroStep) -> Callable[[Sequence[Parameter]], tuple[Kernel, ...]]:
        """What makes the traffic behind the fresh gradients of parameters in a micro-step."""
        kind = micro.first, micro.reduce
        if kind not in self._copies:
            self._copies[kind] = partial(self.copies, *kind)
        return self._copies[kind]

    def copies(self, first: bool, reduced: bool, fresh: Sequence[Parameter]) -> tuple[Kernel, ...]:
        """Own traffic behind fresh gradients: they are added to earlier ones and, where they are `reduced`, fill the
        buckets, each a kernel a tensor (torch csrc/autograd/functions/accumulate_grad.h; csrc/distributed/c10d/
        reducer.cpp, autograd_hook and mark_variable_ready_dense). Where kept gradients are split only a rank's part is
        added (DeepSpeed `runtime/zero/stage_1_and_2.py`, independent_gradient_partition_epilogue)."""
        kept = self.reduction.gradient_shards
        added, width = (fresh, self.added(first)) if not self.sums_in_products else (
            [p for p in fresh if len(p.shape) < 2], DTYPE_BYTES[self.precision.parameters] + 2 * self.width)
        numel, tensors = sum(p.numel for p in added) // kept, math.ceil(len(added) / kept)
        filled = self.reduction.copy_in if self.reduces and reduced else 0.0
        each = (("gradient", width, numel, 1 if self.master_sums else tensors),
                ("bucket copy-in", filled, sum(p.numel for p in fresh), len(fresh)))
        return tuple(replace(traffic_kernel(name, self.precision.gradients, elements, elements * moved),
                             launches=launches, kernel="by_tensor")
                     for name, moved, elements, launches in each if moved and launches)

    def added(self, first: bool) -> float:
        """Bytes moved to add a fresh element. The first micro-step's gradients are stolen, not added, unless they go
        into a buffer that lasts. Later ones are added to what is there: read both, write one; sums that are as wide as
        master parameters are read and written so (apex/amp/_process_optimizer.py, unscale_with_stashed; from
        memory)."""
        if first and not self.reduction.resident_gradients:
            return self.width + self.wide if self.master_sums else 0.0
        return self.width + 2 * self.wide if self.master_sums else 3 * self.width

    @property
    def sums_in_products(self) -> bool:
        """Whether the model's own kernels add weights' gradients into a buffer that lasts, in every micro-step
        (`main_grad`). Those of norms and biases are added one by one (megatron-core 0.5.0 distributed/
        distributed_data_parallel.py, param_hook)."""
        wider = self.width > DTYPE_BYTES[self.precision.parameters]
        return self.reduction.resident_gradients and (wider or self.plan.stack.adds_halves)

    # ------------------------------------------------------------------------------------------- gradients
    def split(self, group: str) -> int:
        """Ranks over which states of parameters that are reduced over `group` are split."""
        if max(self.reduction.shards, self.reduction.gradient_shards) == 1:
            return 1
        return self.plan.shards(group)

    def ranks(self, bucket: Bucket) -> bool:
        """Whether a bucket has anybody to be reduced with: experts that no other rank holds have not."""
        return bucket.group == "data" or self.plan.expert_replicas > 1

    def keeps_gradients(self, micro: MicroStep) -> bool:
        """Whether a micro-step's gradients stay as new tensors: not where they go into buckets or buffers at once."""
        if self.reduction.narrow:
            return True
        if self.at_once or self.reduction.resident_gradients or self.reduction.gradient_shards > 1:
            return False
        if self.offload.moves_optimizer and not self.reduction.behind:
            return micro.first and not micro.reduce
        return micro.first and not (self.reduction.views and micro.reduce)

    def shard(self, section: SectionBuilder, position: int, layer: Layer) -> None:
        """This rank's part of a layer's gradients, which stays."""
        routed = layer.routed if self.plan.routed else 0
        size = round(self.width * ((layer.numel - routed) / self.split("data") + routed / self.split("expert_data")))
        if size:
            section.allocate(GRADIENT_POOL, size, "gradients")
            self.gradients[position] = size

    def drop_gradients(self, section: SectionBuilder, position: int) -> None:
        """A layer's gradients go: the optimizer has used them, or they have become views of their bucket."""
        size = self.gradients.pop(position, 0)
        if size:
            section.free(GRADIENT_POOL, size, "gradients")
