"""What every data-parallel technique shares: micro-steps in a row, activations, optimizer step, end of the step.

A technique is an object with three verbs (`Technique`); this file strings them into a Program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from sim.hardware import gpu
from sim.model import (
    build,
    layers_state_bytes,
)
from sim.model.architecture import Architecture, Layer, Parameter
from sim.model.eager import rounded
from sim.model.kernels import quantisation
from sim.model.recompute import joined
from sim.model.style import Style
from sim.model.tuning import Frozen
from sim.network import latest
from sim.parallel.compute import Compute
from sim.parallel.layout import Layout, Ranks
from sim.parallel.model.expert import dispatched, hidden_by
from sim.parallel.model.joints import joints
from sim.parallel.offload import STREAMS, Offload
from sim.program import CollectiveCall, Label, ProgramBuilder, SectionBuilder
from sim.scenario.fields.schema import RecomputeModules, Scenario
from sim.software import Stack
from sim.work import DTYPE_BYTES

#: Stream numbers every technique uses; its own follow.
COMPUTE = 0


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One micro-step: sequences, whether it is the step's first, whether gradients are reduced in it, and whether it is
    known to be the step's last (`micro_steps`)."""

    batch: int
    first: bool
    reduce: bool
    last: bool = False


@dataclass
class Plan:
    """Everything a technique needs to lower a scenario.

    Attributes:
        architecture: of a full micro-batch.
        groups: communicators by name, in order; shape (instances, members).
        micro_steps: in order.
        peers: pipeline stages this program's ranks exchange tensors with.
        communicators: names of the job's communicators, default the groups'.
        sibling: plan of another program of the same job; kernels and segments are shared with it.
        norm_groups: communicators over which the gradient norm is summed beside the data-parallel one.
        stage: pipeline rank.
        chunks: positions of each of a pipeline rank's chunks in its row of layers.
    """

    scenario: Scenario
    stack: Stack
    architecture: Architecture
    layout: Layout
    groups: dict[str, Ranks]
    streams: tuple[str, ...]
    micro_steps: list[MicroStep]
    peers: int = 0
    communicators: tuple[str, ...] = ()
    norm_groups: tuple[str, ...] = ()
    sibling: Plan | None = None
    stage: int = 0
    chunks: tuple[range, ...] = ()
    builder: ProgramBuilder = field(init=False)
    compute: Compute = field(init=False)
    offload: Offload = field(init=False)

    def __post_init__(self) -> None:
        offloads = any(place in ("cpu", "nvme") for _, place in self.scenario.parallel.offload)
        if offloads and STREAMS[0] not in self.streams:
            self.streams = (*self.streams, *STREAMS)
        self.builder = ProgramBuilder(
            self.streams, self.communicators or tuple(self.groups), self.stack.launch_queue,
            self.sibling.builder.tables if self.sibling else None)
        self.offload = Offload(self.scenario, self.stack, self.builder)
        if self.sibling:
            self.compute = self.sibling.compute.shared(self.builder)
            return
        parallel = self.scenario.parallel
        sent = dispatched(self.scenario, self.stack, self.groups.get("expert"))
        self.compute = Compute(self.builder, self.stack, joints(
            self.stack, tuple(self.groups), sequence=parallel.sequence_parallel and parallel.tensor > 1,
            pipelined=parallel.async_tensor, dispatched=sent, shares=hidden_by(self.scenario, self.stack) == "shared",
            parts=parallel.tensor, sms=gpu(self.scenario.cluster.topology.gpu).sms,
            sequences=self.scenario.training.micro_batch))


    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: those gradients are reduced over."""
        return int(self.groups["data"].shape[1])

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same routed experts; `replicas` where experts are not spread over ranks."""
        return int(self.groups.get("expert_data", self.groups["data"]).shape[1])

    def within(self, group: str) -> str:
        """The communicator over which states of what is reduced over `group` are split: some of its ranks, or all."""
        part = {"data": "shard", "expert_data": "expert_shard"}.get(group, group)
        return part if part in self.groups else group

    def across(self, group: str) -> str | None:
        """The communicator of ranks that keep the same part of those states; None where no other rank does."""
        part = {"data": "replicate", "expert_data": "expert_replicate"}.get(group, group)
        return part if part in self.groups else None

    def shards(self, group: str = "data") -> int:
        """Ranks over which states of what is reduced over `group` are split, if they are split."""
        return int(self.groups[self.within(group if group in self.groups else "data")].shape[1])

    @property
    def routed(self) -> int:
        """Parameters of routed experts that are reduced and split apart from the rest."""
        return self.architecture.routed if "expert_data" in self.groups else 0

    def share(self, split: bool) -> int:
        """Parameters whose states this rank keeps: all of them, or its part where they are split over replicas."""
        dense = self.architecture.parameters - self.routed
        if not split:
            return dense + self.routed
        return -(-dense // self.shards()) - (-self.routed // self.shards("expert_data"))

    def model(self, batch: int) -> Architecture:
        """Architecture for a micro-batch of `batch` sequences."""
        return self.architecture if batch == self.architecture.batch else build(self.scenario, self.stack, batch)

    def policy(self, position: int) -> str:
        """Recomputation of the layer at `position` of the stack: "none", "full", "selective", "selective-op", or names
        of modules (`sim.model.recompute.modules_of`)."""
        number = self.architecture.block_numbers[position]
        if not number:
            return "none"
        recompute = self.scenario.training.recompute
        if isinstance(recompute, str):
            return recompute
        if isinstance(recompute, RecomputeModules):
            return joined(recompute.modules)
        return "full" if number <= recompute.layers else "none"

    def resident(self, name: str, size_bytes: float, category: str, tensors: Sequence[float] = ()) -> None:
        """Memory held for the whole step, in tensors of the given bytes (default one). Paged optimizer states are in
        unified memory, but for the small ones."""
        if category == "optimizer_states" and self.offload.pages_optimizer:
            small = [size for size in tensors if self.offload.stays(size)]
            self.builder.managed_bytes += round(size_bytes - sum(small))
            size_bytes, tensors = sum(map(blocks, small)), small
        if size_bytes > 0:
            self.builder.resident.append((name, round(size_bytes), category))
            if tensors:
                self.builder.tensors[name] = [math.ceil(size) for size in tensors]


class Technique(Protocol):
    """A way to split data-parallel training over ranks."""

    plan: Plan

    def states(self) -> None:
        """Declare memory that is held for the whole step."""

    def micro_step(self, section: SectionBuilder, micro: MicroStep) -> None:
        """Forward and backward of one micro-batch with its communication."""

    def optimizer_step(self, section: SectionBuilder) -> None:
        """From complete gradients to updated parameters."""


def fetch_batch(stack: Stack, section: SectionBuilder) -> None:
    """The host fetches a micro-batch and waits for the GPU on the way, where the stack's loop does (`host_batch_s`)."""
    if stack.host_batch_s:
        section.host(stack.host_batch_s, Label("batch", "forward", "fetch"), joins=(COMPUTE,))


def micro_steps(scenario: Scenario, tell_last: bool = False) -> list[MicroStep]:
    """Micro-steps of one optimizer step; the last may be smaller (spec: global_batch), and is like no other where a
    technique asks for it (`tell_last`)."""
    count, every = scenario.micro_steps, scenario.parallel.reduce_every_micro_step
    sizes = [scenario.training.micro_batch] * (count - 1) + [scenario.last_micro_batch]
    return [MicroStep(size, i == 0, every or i == count - 1, tell_last and i == count - 1)
            for i, size in enumerate(sizes)]


def opened(technique: Technique) -> None:
    """What is held for the whole step, before its sections are written."""
    technique.states()
    batch(technique.plan)


def write(technique: Technique) -> None:
    """Write the sections of one optimizer step into the technique's builder."""
    plan = technique.plan
    opened(technique)
    for micro, run in groupby(plan.micro_steps):
        section = plan.builder.section(f"micro-step of {micro.batch}" + (", reduced" if micro.reduce else ""))
        fetch_batch(plan.stack, section)
        technique.micro_step(section, micro)
        plan.builder.run(section, len(list(run)))
    section = plan.builder.section("optimizer step")
    technique.optimizer_step(section)
    end_of_step(plan, section)
    plan.builder.run(section)


def _narrow_matrices(plan: Plan) -> int:
    """Elements of the blocks' matrices that have narrow copies from step to step."""
    compute = plan.scenario.training.precision.compute
    if not plan.stack.narrow_weights_cached or DTYPE_BYTES[compute] >= DTYPE_BYTES["bf16"]:
        return 0
    stack = plan.architecture.stack
    trained = sum(p.numel for layer in stack for p in layer.parameters if is_matrix(layer, p))
    return trained + sum(f.numel for layer in stack for f in layer.frozen if is_matrix(layer, f))


def is_matrix(layer: Layer, tensor: Parameter | Frozen) -> bool:
    """Whether a tensor is a matrix of a block, which narrow products read: what is trained beside frozen matrices is
    multiplied in 16 bits."""
    if layer.kind != "block" or layer.program is None or len(tensor.shape) < 2:
        return False
    return isinstance(tensor, Frozen) == (layer.program.style.tuned is not None)


def narrow_only(plan: Plan) -> int:
    """Trained elements that have no copy in the parameters' dtype, because their narrow copies are the parameters."""
    return 0 if not _narrow_stays(plan) or _tuned(plan) else _narrow_matrices(plan)


def _narrow_stays(plan: Plan) -> bool:
    """Whether matrices are kept in 8 bits alone. Formats of 4 bits are made from wider parameters (Megatron-Bridge
    training/mixed_precision.py, bf16_with_nvfp4_mixed)."""
    return plan.stack.narrow_parameters and DTYPE_BYTES[plan.scenario.training.precision.compute] == 1


def _tuned(plan: Plan) -> bool:
    """Whether matrices are trained beside frozen ones."""
    return any(layer.frozen for layer in plan.architecture.stack)


def frozen_sizes(plan: Plan) -> list[int]:
    """Bytes of each tensor that is not trained, as it is stored; those kept in 8 bits alone are `narrow_weights`'."""
    apart = _narrow_matrices(plan) > 0 and _narrow_stays(plan)
    return [size for layer in plan.architecture.stack for tensor in layer.frozen
            if not (apart and is_matrix(layer, tensor)) for size in tensor.pieces]


def narrow_weights(plan: Plan, section: SectionBuilder) -> None:
    """Narrow copies of the blocks' matrices that last from step to step: made again from the updated weights, and of
    frozen ones that have a wider copy all the same (TransformerEngine module/base.py, get_weight_workspace:
    update_workspace in every first micro-batch)."""
    numel = _narrow_matrices(plan)
    style = next((layer.program.style for layer in plan.architecture.stack if layer.program is not None), None)
    if not numel or style is None:
        return
    compute = plan.scenario.training.precision.compute
    plan.resident(f"{compute} weights", 2 * numel * DTYPE_BYTES[compute], "parameters")
    if _tuned(plan) and _narrow_stays(plan):
        return
    kernel = quantisation(style, numel)
    section.kernels(COMPUTE, plan.compute.own((kernel,)), Label("weights", "optimizer", f"to {compute}"))


def blocks(size_bytes: float) -> int:
    """Bytes the allocator hands out for a tensor of `size_bytes`."""
    return rounded(size_bytes, "int8")


def batch(plan: Plan) -> None:
    """Token numbers and labels, 8 bytes each, which are there when the step begins."""
    tokens = plan.architecture.batch * plan.architecture.sequence
    plan.resident("batch", 2 * rounded(tokens, "fp64"), "buffers")
    style = next((layer.program.style for layer in plan.architecture.stack if layer.program is not None), None)
    if style is not None and style.modules == "transformers" and (numbers := module_buffers(style)):
        plan.resident("module buffers", sum(numbers), "buffers", numbers)


def module_buffers(style: Style) -> list[int]:
    """Bytes of what Hugging Face's modules keep beside parameters: rotary frequencies and their copy
    (modeling_llama.py, inv_freq, original_inv_freq), numbers of positions and token types (modeling_bert.py)."""
    if style.kind == "encoder":
        return [rounded(style.max_positions, "fp64")] * 2
    rotary = style.kind == "decoder" and style.positions == "rotary"
    return [rounded(style.head_dim // 2, "fp32")] * 2 if rotary else []


def frozen_bytes(layers: Iterable[Layer]) -> int:
    """What tensors that are not trained take as they are stored, each in blocks of the allocator."""
    return sum(blocks(size) for layer in layers for tensor in layer.frozen for size in tensor.pieces)


def weight_placeholders(layers: Iterable[Layer]) -> list[int]:
    """Bytes of what autograd gets instead of gradients of the blocks' matrices where a stack keeps such tensors: one
    for each shape (`Stack.weight_placeholders`)."""
    shapes = {(*p.shape, DTYPE_BYTES[layer.program.style.act]) for layer in layers if layer.kind == "block"
              and layer.program is not None and layer.program.style.weight_placeholder
              for p in layer.parameters if len(p.shape) > 1}
    return [blocks(math.prod(shape)) for shape in sorted(shapes)]


def end_of_step(plan: Plan, section: SectionBuilder) -> None:
    """Fixed host work of a step, the wait for the latest node's, and the synchronisation of stacks that read the loss
    every step."""
    label = Label("step", "optimizer", "end of step")
    streams = tuple(range(len(plan.streams))) if plan.stack.step_sync else ()
    stack = plan.stack
    late_s = stack.host_spread_s * (latest(plan.scenario.cluster.nodes) - 1)
    section.host(stack.host_step_s + late_s, label, joins=streams)
    _read_back(plan, section)


def _read_back(plan: Plan, section: SectionBuilder) -> None:
    """All-reduces of a few numbers and states of metrics gathered over all ranks, one after another: the host waits for
    each. A gather is a barrier, a tensor for every rank to receive into, and copies of all of them out of the result.

    Source: composer/trainer/trainer.py, _train_loop and _accumulate_time_across_ranks; torchmetrics
    utilities/distributed.py, gather_all_tensors; c10d ProcessGroupNCCL.cpp, allgather of lists and barrier.
    """
    stack, group = plan.stack, "data" if "data" in plan.groups else "shard"
    ranks = len(plan.groups[group][0]) if group in plan.groups else 1
    if ranks == 1 or group not in plan.builder.communicators:
        return
    apiece_s = ranks * (stack.host_forward_s + stack.host_backward_s)
    calls = [("all_reduce", 1, 0.0)] * stack.step_reductions
    gathers = stack.metric_gathers if stack.metric_losses else 0
    calls += [("all_reduce", 1, 0.0), ("all_gather", ranks, apiece_s)] * gathers
    for kind, numbers, host_s in calls:
        label = Label("step", "optimizer", "numbers of all ranks")
        task = section.collective(1, collective(plan, kind, 4 * numbers, "fp32", group), stack.host_collective_s, label)
        section.host(stack.host_read_s + host_s, label, waits=(task,))


def collective(plan: Plan, kind: str, size_bytes: float, dtype: str, communicator: str) -> CollectiveCall:
    """A collective on the communicator named `communicator`."""
    return CollectiveCall(kind, round(size_bytes), dtype, plan.builder.communicators.index(communicator))


def state_copies(plan: Plan, category: str) -> int:
    """States of an optimizer beside one another: momentum alone, or two moments."""
    momentum = plan.scenario.training.optimizer == "sgd-momentum"
    return 2 if category == "optimizer_states" and not momentum else 1


def step_counters(plan: Plan, tensors: int) -> None:
    """The counters of a fused Adam's steps, a block of the allocator for each of its tensors."""
    training, fused = plan.scenario.training, plan.scenario.software.optimizer_kernel == "fused"
    own = fused and plan.stack.fused_counters and not plan.offload.pages_optimizer
    if own and training.optimizer in ("adam", "adamw", "muon"):
        plan.resident("step counters", tensors * blocks(4), "optimizer_states", [4.0] * tensors)


def state_bytes(plan: Plan) -> dict[str, float]:
    """Bytes per parameter of parameters, master copy, gradients and optimizer states (spec: precision table)."""
    precision, optimizer, parallel = (plan.scenario.training.precision, plan.scenario.training.optimizer,
                                      plan.scenario.parallel)
    flat = parallel.strategy.startswith("zero") or (parallel.strategy == "fsdp" and plan.scenario.software.fsdp == 1)
    layers = plan.architecture.stack
    states = layers_state_bytes(layers, precision, optimizer, flat)
    return {
        "parameters": DTYPE_BYTES[precision.parameters],
        "master_parameters": 0.0 if precision.master == "none" else DTYPE_BYTES[precision.master],
        "gradients": DTYPE_BYTES[precision.gradients],
        "optimizer_states": states / max(1, plan.architecture.parameters),
    }


