"""What a rank holds for the whole step where its parameters are whole: states, and how they were made."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from sim.model.eager import shared_buffer
from sim.parallel.construction import (
    APART,
    FLATTENED,
    REMAPPED,
    cloned_into_one,
    moved_into_one,
    remapped,
    stepped,
    widened,
)
from sim.parallel.data.buckets import fragments
from sim.parallel.data.reductions import Reduction
from sim.parallel.muon import is_muon, shares, state_sizes
from sim.parallel.offload import Offload
from sim.parallel.outputs import stage_outputs
from sim.parallel.step import (
    Plan,
    blocks,
    frozen_sizes,
    narrow_only,
    state_bytes,
    state_copies,
    step_counters,
    weight_placeholders,
)
from sim.scenario.fields.schema import Precision
from sim.work import DTYPE_BYTES


class Held:
    """The states of a technique with whole parameters (`sim.parallel.data.bucketed.Bucketed`).

    Attributes:
        sums_wide: gradients keep the parameters' dtype beside wider sums.
        width: bytes of a gradient's element.
    """

    plan: Plan
    reduction: Reduction
    precision: Precision
    offload: Offload
    sums_wide: bool
    width: float

    def states(self) -> None:
        """Parameters whole; master copy and optimizer states split over `shards`."""
        numel = self.plan.architecture.parameters
        part = self.plan.share(self.reduction.shards > 1)
        shared = shares(self.plan, self.reduction.dealt).fullest if is_muon(self.plan) else None
        if shared is not None:
            part = shared.numel
        stack = self.plan.architecture.stack
        frozen = frozen_sizes(self.plan)
        self.plan.resident("frozen parameters", sum(blocks(size) for size in frozen), "parameters", frozen)
        each = [p.numel for layer in stack for p in layer.parameters]
        one = self.storage != APART
        for category, width in state_bytes(self.plan).items():
            if category == "parameters":
                kept = numel - narrow_only(self.plan)
                sizes = [n * width for n in each] if kept == numel and not one else []
                self.plan.resident(category, sum(map(blocks, sizes)) if sizes else kept * width, category, sizes)
            elif category == "gradients":
                if self.reduction.resident_gradients or self.sums_wide:
                    self.plan.resident(category, numel * width, category)
            elif shared is not None:
                sizes = (state_sizes(shared, DTYPE_BYTES[self.precision.optimizer]) if category == "optimizer_states"
                         else [n * width for n in shared.each])
                self.plan.resident(category, sum(map(blocks, sizes)), category, sizes)
                if category == "optimizer_states":
                    step_counters(self.plan, len(shared.others))
            elif (inside := part - self.offload.outside(part)) > 0:
                copies, width = state_copies(self.plan, category), width * inside / part
                sizes = [n * width / copies for n in self.kept(each, part) for _ in range(copies)]
                whole = self.reduction.shards == 1 and not one  # tensors as the model has them
                self.plan.resident(category, sum(map(blocks, sizes)) if whole else part * width, category, sizes)
                if category == "optimizer_states":
                    step_counters(self.plan, len(sizes) // copies)
        self.construction(each)
        if self.offload.moves_optimizer:
            self.host_states(self.offload.outside(part))
        if not self.reduction.transient:
            width = self.reduction.buffer_bytes / max(1, numel)
            sizes = [bucket.numel * width for bucket in self.reduction.buckets] if width else []
            self.plan.resident("gradient buckets", sum(map(blocks, sizes)), "buffers", sizes)
            if len(sizes) > 1 and self.plan.stack.gradient_path == "reducer" and self.plan.stack.whole_first_bucket:
                self.plan.builder.first["gradient buckets"] = [blocks(sum(sizes))]
        outputs = stage_outputs(self.plan)
        self.plan.resident("stage outputs", sum(outputs), "logits", outputs)
        placeholders = weight_placeholders(stack)
        self.plan.resident("weight placeholders", sum(placeholders), "workspace", placeholders)
        buffer = shared_buffer(layer.program for layer in stack if layer.program is not None)
        self.plan.resident("shared buffer", buffer, "workspace")

    def kept(self, each: list[int], part: int) -> list[int]:
        """Elements of each tensor of the master copy and of an optimizer state."""
        if self.storage == FLATTENED:
            return [part]
        if self.reduction.shards == 1:
            return each
        if self.reduction.by_rank:
            return [-(-n // self.reduction.shards) for n in each]
        if self.reduction.resident_gradients and not self.plan.routed:
            return fragments(self.reduction.buckets, self.reduction.shards)
        return [part]

    @property
    def storage(self) -> str:
        """How this technique stores parameters; only what has wider master parameters is flattened or remapped."""
        storage = self.plan.stack.parameter_storage
        remaps = self.reduction.kind != "all_reduce" or self.plan.replicas == 1  # recipes ask for it on any number
        wide = self.precision.master != "none" and DTYPE_BYTES[self.precision.master] > self.width_of_parameters
        if not wide or narrow_only(self.plan) or (storage == REMAPPED and not remaps):
            return APART
        return storage

    @property
    def width_of_parameters(self) -> float:
        """Bytes of an element of the model's parameters."""
        return DTYPE_BYTES[self.precision.parameters]

    def construction(self, each: Sequence[int]) -> None:
        """What is made on the way to parameters, master copy and states, and gone before the first step."""
        builder, width, storage = self.plan.builder, self.width_of_parameters, self.storage
        whole = [ceil(n * width) for n in each]
        if storage == REMAPPED:
            builder.construction["parameters"] = remapped(whole)
        if storage != FLATTENED:
            return
        stack, split = self.plan.stack, self.plan.scenario.parallel.strategy in ("zero1", "zero2")
        if self.sums_wide:
            builder.construction["parameters"] = remapped(whole)
        elif not split:
            builder.construction["parameters"] = cloned_into_one(whole)
        elif not stack.moves_empty_cache:
            builder.construction["parameters"] = moved_into_one(whole)
        master, states = (builder.tensors.get(name) for name in ("master_parameters", "optimizer_states"))
        if master:
            builder.construction["master_parameters"] = widened([ceil(n * width / DTYPE_BYTES[self.precision.master])
                                                                 for n in master], master)
        early = stack.states_made_first or not (split or self.sums_wide)
        zeros = 0 if self.sums_wide or not master else sum(master)  # wide sums are there already
        if states and master and early and not self.offload.pages_optimizer:
            builder.construction["optimizer_states"] = stepped(zeros, states)
        elif master and split and zeros:  # zero gradients are made all the same (initialize_optimizer_states)
            made = builder.construction["master_parameters"]
            builder.construction["master_parameters"] = (*made, (len(made), zeros), (len(made), 0))

    def host_states(self, numel: int) -> None:
        """Host memory of an offloading optimizer; accumulated gradients have a pinned buffer in the model's dtype."""
        self.offload.hold_optimizer(numel)
        if self.reduction.contiguous:  # stage_1_and_2.py: temp_grad_buffer_for_gpu_offload
            largest = max((p.numel for layer in self.plan.architecture.stack for p in layer.parameters), default=0)
            self.plan.resident("offloaded gradient", largest * self.width_of_parameters, "buffers")
        if self.plan.scenario.micro_steps > 1 and not self.offload.hybrid:
            self.offload.hold("accumulated gradients", numel * self.width, "gradients", pinned=True)
