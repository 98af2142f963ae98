"""Scenario to Job: chooses the technique, writes its Program, decides which ranks are simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sim.hardware import gpu
from sim.hardware.outside import Outside, outside
from sim.model import build
from sim.model.architecture import Architecture
from sim.parallel.data import bucketed, reductions
from sim.parallel.layout import Layout, Ranks, equitable_classes, simulated_ranks
from sim.parallel.sharded import fsdp, zero3
from sim.parallel.sharded.fsdp1 import Fsdp1
from sim.parallel.sharded.fsdp2 import Fsdp2
from sim.parallel.step import Plan, Technique, micro_steps, write
from sim.parallel.support import check
from sim.program import Job
from sim.scenario.schema import Scenario
from sim.software import Stack, stack_for


@dataclass(frozen=True)
class Lowered:
    """A Job and what it was made from.

    Attributes:
        memory_complete: whether the Program's memory operations come from module code for every layer; false where a
            layer's temporaries are estimated from what it keeps for backward.
        outside: what a rank's GPU holds beside tensors (the Program's resident "context").
    """

    job: Job
    architecture: Architecture
    stack: Stack
    memory_complete: bool = False
    outside: Outside | None = None


def lower(scenario: Scenario, *, fold: bool = True, devices: Ranks | None = None) -> Lowered:
    """Lower a resolved scenario to a Job.

    Args:
        scenario: resolved.
        fold: simulate one rank per class of identical ranks; False simulates every rank (for tests).
        devices: hardware kind per rank, shape (ranks,), when GPUs differ; default all alike.

    Raises:
        UserError: the scenario asks for something that is not simulated yet.
    """
    software = scenario.software
    stack = stack_for(software.framework, software.year, software.compile, software.versions, software.modules,
                      fused=software.fused, cuda_graphs=software.cuda_graphs)
    check(scenario, stack.gradient_path == "ipg")
    if scenario.parallel.strategy in ("fsdp", "zero3"):  # gathered weights come and go, and their narrow copies with them
        stack = replace(stack, narrow_weights_cached=False)
    architecture = build(scenario, stack, scenario.training.micro_batch)
    technique = choose(scenario, stack, architecture)
    write(technique)
    plan = technique.plan
    beside = outside(gpu(scenario.cluster.topology.gpu).compute_capability, stack.kernel_loading,
                     [members.shape[1] for members in plan.groups.values()])
    plan.resident("CUDA context, NCCL, cuBLAS", beside.total_bytes, "context")
    if not fold:
        classes = np.arange(scenario.gpus, dtype=np.int64)
    else:
        zeros = np.zeros(scenario.gpus, dtype=np.int64)
        classes = zeros if devices is None else equitable_classes(devices, plan.groups)
    simulated, communicators = simulated_ranks(classes, plan.groups, devices)
    job = Job([plan.builder.build()], simulated, communicators, scenario.gpus)
    complete = all(layer.program is not None for layer in architecture.stack)
    return Lowered(job, architecture, stack, complete, beside)


def choose(scenario: Scenario, stack: Stack, architecture: Architecture) -> Technique:
    """The technique behind `parallel.strategy` in this stack."""
    strategy, path = scenario.parallel.strategy, stack.gradient_path
    layout = Layout({"data": scenario.data_parallel}, ("data",))
    if strategy == "fsdp" or (strategy in ("zero2", "zero3") and path != "ipg"):
        return sharded(scenario, stack, architecture, layout)
    if strategy == "zero3":
        plan = Plan(scenario, stack, architecture, layout, {"shard": layout.group("data")}, zero3.STREAMS,
                    micro_steps(scenario))
        return zero3.Zero3(plan)
    plan = Plan(scenario, stack, architecture, layout, {"data": layout.group("data")}, bucketed.STREAMS,
                micro_steps(scenario))
    if path == "ipg" and strategy in ("zero1", "zero2"):  # an offloading optimizer takes only this rank's gradients
        reduction = reductions.deepspeed(plan, 2 if plan.offload.moves_optimizer else int(strategy[-1]))
    elif path == "grad_buffer":
        reduction = reductions.megatron(plan, strategy == "zero1")
    else:
        reduction = reductions.ddp(plan, strategy == "zero1")
    return bucketed.Bucketed(plan, reduction)


def sharded(scenario: Scenario, stack: Stack, architecture: Architecture, layout: Layout) -> Technique:
    """FSDP of the scenario's version; ZeRO-2 of a stack without DeepSpeed is FSDP that keeps parameters."""
    factor, reshard = scenario.parallel.sharding_factor, scenario.parallel.reshard_after_forward
    groups: dict[str, Ranks] = {"shard": layout.group("data", factor)}
    if factor < scenario.data_parallel:
        groups["replicate"] = layout.group("data", scenario.data_parallel // factor, factor)
    if not isinstance(reshard, bool) and 1 < reshard < factor:
        groups["reshard"] = layout.group("data", reshard)
    plan = Plan(scenario, stack, architecture, layout, groups, fsdp.STREAMS, micro_steps(scenario))
    technique = Fsdp2(plan) if scenario.software.fsdp == 2 else Fsdp1(plan)
    if scenario.parallel.strategy == "zero2":
        technique.keep = True
    return technique
