"""DeepSpeed ZeRO-3: parameters of a sub-module are gathered before use, released after it; gradients reduce-scattered.

Sources: DeepSpeed `runtime/zero/stage3.py`, `partition_parameters.py`, `partitioned_param_coordinator.py` and, before
0.6, the coordinator inside `stage3.py` (read: 0.3.16, 0.4.5, 0.5.10, 0.6.0, 0.6.7); Rajbhandari et al., ZeRO-Infinity,
SC 2021, section 4.1: with recomputation parameters can be loaded a third time. What differs between the two generations
is one fact of the stack, `parameter_coordinator`:

* streamed: gathers and reductions are single calls on contiguous buffers; a bucket's gradients are laid out by rank
  (`torch.cat`) and divided first. They take turns with compute unless the stack hides them (`takes_turns`).
* blocking: every parameter by itself in `torch.distributed` calls over lists of per-rank tensors, which NCCL's wrapper
  copies one by one. The host waits for the whole device before each gather (`_allgather_param`: a zeroed tensor, then
  `torch.cuda.synchronize`), after those a use needs (`_synchronize_communication`: again), and when a parameter goes (a
  new one-element tensor is copied to the device). So what must be gathered is never hidden, and no reduction lasts
  beyond the next gather.

Over some of the ranks (`sharding_factor`) it is MiCS (`runtime/zero/mics.py`, `mics_utils.py`; read: 0.14.4; Zhang et
al., VLDB 2022): gathers and reductions stay among neighbours, parameters of one gather come in one group call, each in
place, and behind the last micro-step's reductions ranks across sum what they keep. With `hierarchical_gather` such a
gather is two (`_hierarchical_all_gather_params`).

What ZeRO++ adds stands in `secondary.py` (hpZ) and `quantised.py` (qwZ, qgZ).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from sim.model.architecture import Parameter
from sim.parallel.activations import Activations
from sim.parallel.compute import traffic_kernel
from sim.parallel.data.buckets import bucket_elements
from sim.parallel.sharded.arrivals import Arrivals, tensor_of
from sim.parallel.sharded.coordinator import Kept, Limits, Wanted, blocking, met
from sim.parallel.sharded.hierarchy import in_two_steps
from sim.parallel.sharded.pieces import VIEWS_OF_A_PIECE, gather_views, reduction_views
from sim.parallel.sharded.quantised import (
    ACROSS,
    WEIGHTS,
    QuantisedGathers,
    QuantisedReductions,
    arrives_as,
    leaves_as,
)
from sim.parallel.sharded.secondary import Secondary
from sim.parallel.sharded.uses import PERSISTENCE_THRESHOLD, Use, Uses, rerun
from sim.parallel.sharded.zero3_held import Zero3Held
from sim.parallel.step import COMPUTE, MicroStep, Plan, collective
from sim.parallel.update import update
from sim.program import Label, SectionBuilder
from sim.scenario import Scenario
from sim.software import Stack
from sim.work import DTYPE_BYTES, Kernel

#: DeepSpeed `config.py`: elements of the reduce bucket.
REDUCE_BUCKET = 500_000_000
GATHER, REDUCE = 1, 2
STREAMS = ("compute", "all_gather", "reduce_and_partition")
#: Calls in flight before the host waits for the oldest: gathers (`max_ongoing_fetch_events`), reductions
#: (`max_param_reduce_events`).
FETCHES_IN_FLIGHT, REDUCTIONS_IN_FLIGHT = 2, 2


def elements(bucket: Sequence[Parameter]) -> int:
    """Of all gradients of a bucket."""
    return sum(gradient.numel for gradient in bucket)


def takes_turns(scenario: Scenario, stack: Stack) -> bool:
    """Whether gathers and reductions run where kernels do: without overlap_comm they are issued on the default stream
    (runtime/zero/stage3.py); with it published steps are as if they were (`Stack.coordinator_hides`)."""
    return not (scenario.parallel.overlap and stack.coordinator_hides)


class Zero3(Zero3Held):
    """Lowering of one job; see the module."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks = plan.shards()
        self.across = plan.across("data")
        self.precision = plan.scenario.training.precision
        #: Dtypes of gathered parameters and of gradients on their way.
        self.wide, self.wire = arrives_as(self.precision), leaves_as(self.precision)
        self.bucket = bucket_elements(plan.scenario.parallel, DTYPE_BYTES[self.wire], REDUCE_BUCKET)
        self.offload = plan.offload
        self.fetching = self.ranks > 1 or self.offload.moves_parameters
        self.blocking = plan.stack.parameter_coordinator == "blocking"
        self.serial = takes_turns(plan.scenario, plan.stack)
        self.moved: int | None = None  # the last of them, which compute waits for then
        self.segments: dict[tuple[int, str, str, bool], int] = {}
        stack = plan.architecture.stack
        self.uses = Uses(plan, self.fetching)
        #: Elements of each parameter that is whole at all times.
        self.resident = [self.uses.elements(p) for layer in stack for p in layer.weights
                         if p.numel < PERSISTENCE_THRESHOLD]
        self.looked_up = {} if self.blocking else self.uses.looked_up(stack)
        self.decide()
        narrow = self.precision.gather == WEIGHTS and self.ranks > 1
        self.gathers = QuantisedGathers(plan, self.ranks) if narrow else None
        self.reducer = QuantisedReductions(plan) if ACROSS in plan.groups else None
        self.secondary = Secondary(plan, self.ranks, self.wide, DTYPE_BYTES[self.wide])

    def decide(self) -> None:
        """The coordinator's decisions in a step's first micro-step, and in those behind it."""
        stack = self.plan.architecture.stack
        trace, stay = [use.wanted for use in self.uses.of(stack)], frozenset(self.looked_up)
        if self.blocking:
            self.decisions = (blocking(trace, Limits()),) * 2
            return
        modules = self.uses.modules(stack)
        counted_off = sum(self.looked_up.values()) + sum(self.resident) if self.looked_up else 0
        kept = Kept(counted_off, stay=stay, lasting=self.uses.read_outside(stack))
        self.decisions = (met(trace, modules, Limits(), kept),
                          met(trace, modules, Limits(), replace(kept, counted_off=0, there=stay)))

    # ------------------------------------------------------------------------------------------- one micro-step
    def micro_step(self, section: SectionBuilder, micro: MicroStep) -> None:
        """Forward and backward, use by use, as the coordinator decided."""
        stack = self.plan.model(micro.batch).stack
        self.memory = Activations(self.plan, section, len(stack), keep_gradients=False)
        self.arrivals = Arrivals(section, GATHER)
        if not micro.first:
            self.arrivals.held.update(self.lasting())
        self.arriving: dict[Hashable, int] = {}  # their gathers, until somebody waited
        self.copies: dict[Hashable, tuple[Kernel, ...]] = {}  # what lays them out, until somebody did
        self.fetches: list[int] = []
        self.waited: list[int] = []  # the gather of each parameter that was waited for
        self.reductions: list[int] = []
        self.computed: tuple[int, ...] = ()  # the last kernels
        bucket: list[Parameter] = []
        filled = 0
        self.first, self.moved = micro.first, None
        self.secondary.begin(micro.first)
        if self.gathers is not None:
            self.gathers.begin()
        reduces = micro.reduce and (self.ranks > 1 or self.offload.moves_optimizer)
        for use, decision in zip(self.uses.of(stack), self.decisions[0 if micro.first else 1], strict=True):
            for wanted in decision.before:
                self.gather(section, use, wanted, ahead=True)
            self.gather(section, use, decision.fetch, ahead=False)
            waits = self.awaited(section, use)
            copies = self.arrived(section, use)
            self.gather(section, use, decision.ahead, ahead=True)
            computed = self.compute(section, use, waits, copies)
            self.release(section, use, decision.release, computed)
            for wanted in decision.behind:
                self.gather(section, use, wanted, ahead=True)
            if use.direction == "backward" and reduces:
                for gradient in use.part.gradients:
                    numel = gradient.numel
                    if bucket and filled + numel > self.bucket:
                        self.reduce(section, use, bucket, micro.last)
                        bucket, filled = [], 0
                    bucket.append(gradient)
                    filled += numel
        if bucket:
            self.reduce(section, use, bucket, micro.last)
        if micro.first:
            self.secondary.keep(section, self.label(use, "release"), list(self.looked_up.items()))

    def gather(self, section: SectionBuilder, use: Use, wanted: Sequence[Wanted], ahead: bool) -> None:
        """All-gathers of parameters: one call, or one for each parameter between waits for the device (blocking)."""
        label, width = self.label(use, "all_gather"), DTYPE_BYTES[self.wide]
        for together, group in [([w], "shard") for w in wanted] if self.blocking else self.secondary.parted(wanted):
            if self.blocking:
                self.drained(section, label, self.zeroed(section, label, together[0][1]))
            if self.gathers is None:
                parts = {name: (tensor_of(name, len(self.fetches), self.looked_up), round(numel * width))
                         for name, numel in together}
                copied = {name: self.laid_out(numel, alone=len(together) == 1) for name, numel in together}
                flat = not self.blocking and any(copied.values())
                self.arrivals.called(parts, sum(size for _, size in parts.values()) if flat else 0)
                self.copies.update(copied)
            task = self.fetch(section, label, together, group)
            self.fetches.append(task)
            self.moved = task if self.serial else None
            self.arriving.update((name, task) for name, _ in together)
        if self.blocking and wanted and not ahead:
            self.drained(section, label)

    def awaited(self, section: SectionBuilder, use: Use) -> tuple[int, ...]:
        """Gathers that a use waits for. Parameter by parameter the host waits for all but the last two of those that
        were waited for before (`fetch_sub_module`: __ongoing_fetch_events)."""
        tasks = [self.arriving.pop(name) for name, _ in use.wanted if name in self.arriving]
        for task in () if self.blocking else tasks:
            if len(self.waited) > FETCHES_IN_FLIGHT:
                section.host(0.0, self.label(use, "all_gather"), waits=(self.waited[-FETCHES_IN_FLIGHT - 1],))
            self.waited.append(task)
        return tuple(dict.fromkeys(tasks))

    def zeroed(self, section: SectionBuilder, label: Label, numel: int) -> tuple[int, ...]:
        """The blocking coordinator gathers into a tensor of zeros."""
        if self.ranks == 1:
            return ()
        size = DTYPE_BYTES[self.wide] * numel
        fill = traffic_kernel("zeros", self.wide, numel, size)
        return (section.kernels(COMPUTE, self.plan.compute.own((fill,)), label),)

    def drained(self, section: SectionBuilder, label: Label, last: tuple[int, ...] = ()) -> None:
        """`torch.cuda.synchronize`: the host waits for every stream."""
        pending = {*last, *self.fetches[-1:], *self.reductions[-1:], *self.computed}
        if pending:
            section.host(0.0, label, waits=tuple(sorted(pending)))

    def fetch(self, section: SectionBuilder, label: Label, together: Sequence[Wanted], group: str) -> int:
        """Copy of the partitions from outside the GPU, where they are there, and the all-gather behind it."""
        numels = [numel for _, numel in together]
        joins: tuple[int, ...] = () if self.fetches and not self.serial else (COMPUTE, REDUCE)
        waits: tuple[int, ...] = ()
        if self.offload.moves_parameters:
            shard = sum(numels) / self.ranks * DTYPE_BYTES[self.precision.parameters]
            partition = self.offload.fetch(section, shard, label._replace(name="partition"), (), joins)
            if self.ranks == 1:
                return partition
            waits = (partition,)
        if self.gathers is not None:
            return self.gathers.gather(section, label, together, group, waits, joins)
        if self.plan.scenario.parallel.hierarchical_gather:
            return in_two_steps(self.plan, section, label, numels, self.wide, waits, joins)
        call = collective(self.plan, "all_gather", sum(numels) * DTYPE_BYTES[self.wide], self.wide, group)
        views = gather_views(1 if self.across else len(numels), self.blocking)
        return section.collective(GATHER, call, self.call_s(views), label, waits, joins)

    def laid_out(self, numel: int, alone: bool) -> tuple[Kernel, ...]:
        """Copies of a gathered parameter into place.

        streamed: none for one that came alone, `torch.cat` of all ranks' pieces for one of several. blocking: NCCL's
        wrapper, which is C++ as the backward pass is, copies its result into the listed tensors.
        """
        moved = 2 * DTYPE_BYTES[self.wide] * numel
        copy = traffic_kernel("gathered parameter into place", self.wide, numel, moved)
        if self.ranks == 1:
            return ()
        if self.blocking:
            return (replace(copy, launches=self.ranks),)
        return () if alone or self.across else (copy,)

    def arrived(self, section: SectionBuilder, use: Use) -> tuple[Kernel, ...]:
        """Kernels that make what a use waits for fit to be read."""
        if self.gathers is not None:
            return self.gathers.arrived(section, [name for name, _ in use.wanted], self.arrivals.held,
                                        self.looked_up)
        self.arrivals.awaited(name for name, _ in use.wanted)
        return tuple(k for name, _ in use.wanted for k in self.copies.pop(name, ()))

    def compute(self, section: SectionBuilder, use: Use, waits: tuple[int, ...], copies: tuple[Kernel, ...]) -> int:
        """One use with its activations; parameters that have just arrived are laid out first."""
        label = self.label(use, use.layer.kind)
        if self.moved is not None:
            waits = (*waits, self.moved)
        if use.first:
            if use.direction == "forward":
                self.memory.forward(use.position, use.layer)
            else:
                self.memory.backward(use.position, use.layer)
        if copies:
            waits = (section.kernels(COMPUTE, self.plan.compute.segment((), copies), label, waits),)
        self.computed = (section.kernels(COMPUTE, self.segment(use), label, waits),)
        return self.computed[0]

    def segment(self, use: Use) -> int:
        """Kernels of a use, memoised."""
        policy = self.plan.policy(use.position)
        key = (id(use.part), use.direction, policy, use.first)
        if key not in self.segments:
            compute = self.plan.compute
            parts = use.first and policy not in ("full", "selective-op")
            again = compute.recomputed(use.layer, policy) if parts else ()
            whole = compute.checkpoint(use.layer) if use.first and policy == "full" else ()
            if use.direction == "backward":
                self.segments[key] = compute.segment(again, compute.backward_items(use.part.operators))
            elif use.direction == "recompute":
                self.segments[key] = compute.segment((*whole, *compute.forward_items(rerun(use, policy))))
            else:
                self.segments[key] = compute.segment(compute.forward_items(use.part.operators))
        return self.segments[key]

    def release(self, section: SectionBuilder, use: Use, wanted: Sequence[Wanted], computed: int) -> None:
        """Parameters go right after use; the blocking coordinator waits for the GPU."""
        if wanted and self.blocking:
            section.host(0.0, self.label(use, "release"), waits=(computed,))
        self.secondary.keep(section, self.label(use, "release"), wanted)
        for name, _ in wanted:
            section.free(*self.arrivals.held.pop(name), "gathered_parameters", GATHER, (COMPUTE,))

    # ------------------------------------------------------------------------------------------- reduction
    def reduce(self, section: SectionBuilder, use: Use, bucket: Sequence[Parameter], last: bool) -> None:
        """Reduce-scatter of the filled bucket: in one call, or every gradient by itself (blocking).

        The host waits for reductions in flight: all of them (`reduction_stream.synchronize`), or all but the last two.
        In the `last` micro-step ranks across meet behind it.
        """
        label, width = self.label(use, "reduce_scatter"), DTYPE_BYTES[self.wire]
        allowed = 0 if self.blocking else REDUCTIONS_IN_FLIGHT
        if len(self.reductions) > allowed:
            section.host(0.0, label, waits=(self.reductions[-allowed - 1],))
        before = () if self.moved is None else (self.moved,)
        prepared, by_rank = self.prepared(bucket), self.by_rank_bytes(bucket)
        if by_rank:
            section.allocate("gradients by rank", by_rank, "buffers", REDUCE)
        if self.reducer is not None:
            joins = () if prepared else (COMPUTE,)
            if prepared:
                before = (section.kernels(COMPUTE, self.plan.compute.segment((), prepared), label, before),)
            task = self.reducer.reduce(section, label, bucket, before, joins)
        else:
            task = computed = section.kernels(COMPUTE, self.plan.compute.segment((), prepared), label, before)
            for together in [] if self.ranks == 1 else [[p] for p in bucket] if self.blocking else [bucket]:
                call = collective(self.plan, "reduce_scatter", elements(together) * width, self.wire, "shard")
                views = reduction_views(len(together), self.blocking)
                task = section.collective(REDUCE, call, self.call_s(views), label, (computed,))
        if by_rank:
            section.free("gradients by rank", by_rank, "buffers", REDUCE)
        self.reductions.append(task)
        self.moved = task if self.serial else None
        if self.offload.moves_optimizer:
            self.store(section, label._replace(name="partition"), elements(bucket), task, last)
        if last:
            self.meet(section, use, bucket)

    def meet(self, section: SectionBuilder, use: Use, bucket: Sequence[Parameter]) -> None:
        """Ranks across average what they keep of a bucket's gradients (`allreduce_mics_shard_grads`)."""
        if self.across is None:
            return
        numel, dtype = -(-elements(bucket) // self.ranks), self.precision.gradients
        divide = traffic_kernel("gradients averaged", dtype, numel, 2 * DTYPE_BYTES[dtype] * numel)
        label = self.label(use, "all_reduce")
        divided = section.kernels(REDUCE, self.plan.compute.own((replace(divide, launches=len(bucket)),)), label)
        call = collective(self.plan, "all_reduce", numel * DTYPE_BYTES[dtype], dtype, self.across)
        task = section.collective(REDUCE, call, self.call_s(0), label, (divided,))
        self.reductions[-1] = task
        self.moved = task if self.serial else None

    def store(self, section: SectionBuilder, label: Label, numel: int, task: int, last: bool) -> None:
        """A reduced partition goes to the host, added to what is there on the device; in the `last` micro-step, where
        the optimizer is on disks, it is written there as the optimizer reads it (stage3.py `partition_grads`:
        `offload_fp32_gradients`, at the accumulation's boundary alone)."""
        size = round(numel / self.ranks * DTYPE_BYTES[self.precision.gradients])
        section.allocate("gradient partition", size, "gradients", REDUCE)
        waits = (task,) if self.first else (task, self.offload.fetch(section, size, label, (task,), place="cpu"))
        self.offload.store(section, size, label, waits, place="cpu")
        if last and self.offload.on_disks:
            width = self.offload.state_widths()["gradients"]
            self.offload.store(section, numel / self.ranks * width, label._replace(name="swapped out"), (task,))
        section.free("gradient partition", size, "gradients", REDUCE)

    def prepared(self, bucket: Sequence[Parameter]) -> tuple[Kernel, ...]:
        """Kernels before the reduction of a bucket's gradients: copies into the bucket (if they fit), division by the
        ranks, and the layout by rank: `torch.cat` of several, or one copy per rank into NCCL's flat tensor. Of those
        that are quantised the copies alone."""
        reduce = self.wire
        width, gradient = DTYPE_BYTES[reduce], DTYPE_BYTES[self.precision.gradients]
        total = elements(bucket)
        kernels = [] if self.reducer is not None else [
            traffic_kernel("gradients averaged", reduce, total, 2 * width * total)]
        if total < self.bucket:
            copies = traffic_kernel("gradients into bucket", reduce, total, (gradient + width) * total)
            kernels.append(replace(copies, launches=len(bucket)))
        if self.reducer is not None:
            return tuple(kernels)
        if self.blocking:
            lists = traffic_kernel("gradients into lists", reduce, total, 2 * width * total)
            kernels.append(replace(lists, launches=self.ranks * len(bucket)))
        elif len(bucket) > 1:
            kernels.append(traffic_kernel("gradients by rank", reduce, total, 2 * width * total))
        return tuple(kernels)

    def by_rank_bytes(self, bucket: Sequence[Parameter]) -> int:
        """The tensor in which a bucket's gradients are laid out by rank, which the reduction works in; one gradient
        that needs no padding is reduced where it is (runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced).
        """
        if self.blocking or self.reducer is not None or self.ranks == 1:
            return 0
        padded = sum(-(-gradient.numel // self.ranks) * self.ranks for gradient in bucket)
        return 0 if len(bucket) == 1 and padded == bucket[0].numel else round(padded * DTYPE_BYTES[self.wire])

    def call_s(self, views: int) -> float:
        """Host time of a collective call that takes `views` views of every rank's part."""
        return self.plan.stack.host_collective_s + views * self.ranks * self.plan.stack.host_view_s

    def label(self, use: Use, task: str) -> Label:
        """Name of a task of a use for reports."""
        return Label(self.plan.architecture.names[use.position], use.phase, task)

    def optimizer_step(self, section: SectionBuilder) -> None:
        """The optimizer on this rank's shard, after the last reduction; then small parameters are made whole again
        (`stage3.py`, `_post_step`: all_gather of `persistent_parameters`)."""
        several = self.ranks > 1
        numel = -(-self.plan.architecture.parameters // self.ranks)
        for tensor in self.lasting().values():
            section.free(*tensor, "gathered_parameters", GATHER, (COMPUTE,))
        self.secondary.leave(section, self.resident)
        task = update(self.plan, section, numel, 1, (REDUCE,) if several else (), "shard" if several else None,
                      back_bytes=0.0 if self.offload.moves_parameters else DTYPE_BYTES[self.precision.parameters])
        if several and self.resident:
            label = Label("optimizer", "optimizer", "all_gather")
            if self.offload.moves_parameters:
                shard = sum(self.resident) / self.ranks * DTYPE_BYTES[self.precision.parameters]
                task = self.offload.fetch(section, shard, label._replace(name="partition"), (task,), ())
            self.whole_again(section, label, task)
        self.secondary.drop(section)

    def whole_again(self, section: SectionBuilder, label: Label, task: int) -> None:
        """All-gathers of the parameters that stay whole (`partition_parameters.py`).

        streamed: one call for each, whatever its size, and the host waits for them (`_allgather_params_coalesced`).
        blocking: one call for all, then a copy of every rank's piece of every parameter (`_allgather_params`); the
        pieces are so small that the host's loop is what takes its time.
        """
        width = DTYPE_BYTES[self.wide]
        for numel in [sum(self.resident)] if self.blocking else self.resident:
            call = collective(self.plan, "all_gather", numel * width, self.wide, "shard")
            task = section.collective(GATHER, call, self.call_s(0), label, (task,))
        if not self.blocking:
            section.host(0.0, label, waits=(task,))
        else:
            pieces = self.ranks * len(self.resident)
            piece_s = VIEWS_OF_A_PIECE * self.plan.stack.host_view_s + self.plan.stack.host_forward_s
            section.host(pieces * piece_s, label)
            copies = traffic_kernel("persistent parameters into place", self.wide, sum(self.resident),
                                    2 * width * sum(self.resident))
            section.kernels(COMPUTE, self.plan.compute.own((copies,)), label, (task,))
