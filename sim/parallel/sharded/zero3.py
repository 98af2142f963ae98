"""DeepSpeed ZeRO-3: a layer's parameters are gathered before use and released after it, gradients reduce-scattered.

Source: DeepSpeed `partitioned_param_coordinator.py`, `stage3.py`. Modelled per layer (embedding, block, head), the
coalesced unit of a prefetch; DeepSpeed fetches per sub-module, so its prefetch can be a fraction of a block.
"""

from __future__ import annotations

from collections.abc import Iterable

from sim.model.architecture import Layer, Parameter
from sim.parallel.activations import Activations
from sim.parallel.compute import traffic_kernel
from sim.parallel.step import COMPUTE, MicroStep, Plan, collective, frozen_bytes, state_bytes, update
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES

#: DeepSpeed `config.py`, elements: parameters below stay whole; at most this many prefetched; reduce bucket.
PERSISTENCE_THRESHOLD, PREFETCH_BUCKET, REDUCE_BUCKET = 100_000, 50_000_000, 500_000_000
GATHER, REDUCE = 1, 2
STREAMS = ("compute", "all_gather", "reduce_and_partition")
#: `config.py`: elements that stay gathered at most (stage3_max_live_parameters), unless one parameter alone is larger.
MAX_LIVE = 1_000_000_000
#: `partitioned_param_coordinator.py`: ongoing fetch events before the host synchronises.
FETCHES_IN_FLIGHT = 2


class Zero3:
    """Lowering of one job; see the module."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks = plan.scenario.data_parallel
        self.precision = plan.scenario.training.precision
        # a tied head multiplies by the embedding's matrix and fetches it again
        stack = plan.architecture.stack
        width = DTYPE_BYTES[self.precision.gather]
        # what is frozen is split and fetched as well, as it is stored
        self.gathered = [self.fetched((*layer.parameters, *layer.shared)) + round(frozen_bytes([layer]) / width)
                         for layer in stack]
        self.live = [self.held(numel, layer) for numel, layer in zip(self.gathered, stack, strict=True)]
        self.resident = sum(p.numel for layer in plan.architecture.stack for p in layer.parameters
                            if p.numel < PERSISTENCE_THRESHOLD)

    def fetched(self, parameters: Iterable[Parameter]) -> int:
        """Elements of the parameters that are split and so have to be fetched."""
        return sum(p.numel for p in parameters if p.numel >= PERSISTENCE_THRESHOLD)

    def held(self, numel: int, layer: Layer) -> int:
        """Elements of a layer that are whole at one time. Sub-modules are fetched and released one by one; what is in
        use and what is fetched ahead share the limit."""
        largest = max((p.numel for p in (*layer.parameters, *layer.shared)), default=0)
        return min(numel, max(MAX_LIVE // 2, largest))

    def states(self) -> None:
        """Everything split over all ranks, small parameters whole as well."""
        numel = self.plan.architecture.parameters
        self.plan.resident("frozen parameters", frozen_bytes(self.plan.architecture.stack) / self.ranks, "parameters")
        for category, width in state_bytes(self.plan).items():
            self.plan.resident(category, numel * width / self.ranks, category)
        if self.ranks > 1:
            width = DTYPE_BYTES[self.precision.gather]
            self.plan.resident("persistent parameters", self.resident * width, "parameters")
            bucket = min(REDUCE_BUCKET, self.plan.architecture.parameters)
            self.plan.resident("reduce bucket", bucket * DTYPE_BYTES[self.precision.reduce], "buffers")

    def micro_step(self, section: SectionBuilder, micro: MicroStep) -> None:
        """Forward and backward, each layer fetched one ahead when the prefetch bucket allows."""
        stack = self.plan.model(micro.batch).stack
        self.memory = Activations(self.plan, section, len(stack), keep_gradients=False)
        order = [(i, "forward") for i in range(len(stack))] + [(i, "backward") for i in reversed(range(len(stack)))]
        fetches: dict[int, int | None] = {}
        done: list[int] = []
        pending = 0
        for step, (position, phase) in enumerate(order):
            if step not in fetches:
                fetches[step] = self.fetch(section, position, phase, done, start=step == 0)
            ahead = step + 1
            if ahead < len(order) and self.gathered[order[ahead][0]]:
                fetches[ahead] = self.fetch(section, *order[ahead], done, start=False)
            task = fetches[step]
            waits = () if task is None else (task,)
            done.append(self.compute(section, position, phase, stack[position], waits))
            self.release(section, position, phase)
            if phase == "backward" and micro.reduce:
                pending += stack[position].numel
                if pending and (position == 0 or pending + stack[position - 1].numel > REDUCE_BUCKET):
                    self.reduce(section, position, pending, done[-1])
                    pending = 0

    def fetch(self, section: SectionBuilder, position: int, phase: str, done: list[int], start: bool) -> int | None:
        """All-gather of a layer; the host lets two fetches be in flight."""
        numel = self.gathered[position]
        if self.ranks == 1 or not numel:
            return None
        name = self.plan.architecture.names[position]
        if len(done) >= FETCHES_IN_FLIGHT:
            section.host(0.0, Label(name, phase, "fetch limit"), waits=(done[-FETCHES_IN_FLIGHT],))
        size = round(numel * DTYPE_BYTES[self.precision.gather])
        section.allocate(f"fetched:{position}:{phase}", self.live_bytes(position), "gathered_parameters", GATHER)
        call = collective(self.plan, "all_gather", size, self.precision.gather, "shard")
        return section.collective(GATHER, call, self.plan.stack.host_collective_s, Label(name, phase, "all_gather"),
                                  joins=(COMPUTE, REDUCE) if start else ())

    def compute(self, section: SectionBuilder, position: int, phase: str, layer: Layer, waits: tuple[int, ...]) -> int:
        """One direction of a layer with its activations."""
        label = Label(self.plan.architecture.names[position], phase, layer.kind)
        if phase == "forward":
            self.memory.forward(position, layer)
            return section.kernels(COMPUTE, self.plan.compute.forward(layer), label, waits)
        width = DTYPE_BYTES[self.precision.gradients] + DTYPE_BYTES[self.precision.reduce]
        copy = traffic_kernel("gradient into bucket", self.precision.reduce, layer.numel, layer.numel * width)
        self.memory.backward(position, layer)
        segment = self.plan.compute.backward(layer, self.plan.policy(position), (), (copy,) if layer.numel else ())
        return section.kernels(COMPUTE, segment, label, waits)

    def release(self, section: SectionBuilder, position: int, phase: str) -> None:
        """Parameters are released right after use, in forward too."""
        size = self.live_bytes(position)
        if self.ranks > 1 and size:
            section.free(f"fetched:{position}:{phase}", size, "gathered_parameters", GATHER, (COMPUTE,))

    def live_bytes(self, position: int) -> int:
        """What a layer's fetched parameters take."""
        return round(self.live[position] * DTYPE_BYTES[self.precision.gather])

    def reduce(self, section: SectionBuilder, position: int, numel: int, computed: int) -> None:
        """Reduce-scatter of the filled bucket."""
        if self.ranks > 1:
            name = self.plan.architecture.names[position]
            call = collective(self.plan, "reduce_scatter", numel * DTYPE_BYTES[self.precision.reduce],
                              self.precision.reduce, "shard")
            section.collective(REDUCE, call, self.plan.stack.host_collective_s,
                               Label(name, "backward", "reduce_scatter"), (computed,))

    def optimizer_step(self, section: SectionBuilder) -> None:
        """The optimizer on this rank's shard, after the last reduction."""
        numel = -(-self.plan.architecture.parameters // self.ranks)
        update(self.plan, section, numel, 1, (REDUCE,) if self.ranks > 1 else (), "shard" if self.ranks > 1 else None)
