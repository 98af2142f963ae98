"""Scenario to Job: chooses the technique, writes its Program, decides which ranks are simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sim.hardware.outside import Outside
from sim.model import build
from sim.model.architecture import Architecture
from sim.model.tuning import tuned_of
from sim.parallel.beside import beside as beside_tensors
from sim.parallel.beside import residents
from sim.parallel.data import bucketed, reductions
from sim.parallel.data.pairs import write_pairs
from sim.parallel.layout import REPLICAS, Layout, Ranks, equitable_classes, simulated_ranks
from sim.parallel.model.expert import pairs
from sim.parallel.muon import is_muon
from sim.parallel.pipeline.lower import lower_pipeline
from sim.parallel.places import expert_dimensions, meets_others
from sim.parallel.serving.request import Serving, lower_inference, run_of
from sim.parallel.sharded import fsdp, zero3
from sim.parallel.sharded.fsdp1 import Fsdp1
from sim.parallel.sharded.fsdp1_sized import Fsdp1Sized, wraps_parts
from sim.parallel.sharded.fsdp2 import Fsdp2
from sim.parallel.sharded.hierarchy import NODE, NODES
from sim.parallel.sharded.quantised import ACROSS, GRADIENTS, INSIDE
from sim.parallel.sharded.secondary import NEIGHBOURS, neighbours
from sim.parallel.step import Plan, Technique, micro_steps, write
from sim.parallel.support.check import check, like_fsdp, spread_over_some
from sim.parallel.variety import ALIKE, Variety, variety
from sim.program import Job
from sim.program.expand import expand
from sim.scenario.fields.schema import TWO_CHUNKS, Scenario
from sim.software import Stack, stack_of
from sim.work import DTYPE_BYTES


@dataclass(frozen=True)
class Lowered:
    """A Job and what it was made from.

    Attributes:
        architecture: of the whole model, however it is cut.
        memory_complete: whether the Program's memory operations come from module code for every layer; false where a
            layer's temporaries are estimated from what it keeps for backward.
        outside: what a GPU of each program's ranks holds beside tensors (the Program's resident "context").
        serving: how an inference run was cut, None in training.
        variety: what is not like the rest of the cluster; its kinds are those of `RankClass.device`.
        layers: names of the layers of each program of the job, by the positions that its memory's marks have.
    """

    job: Job
    architecture: Architecture
    stack: Stack
    memory_complete: bool = False
    outside: tuple[Outside, ...] = ()
    serving: Serving | None = None
    variety: Variety = ALIKE
    layers: tuple[tuple[str, ...], ...] = ()

    def layers_of(self, number: int) -> tuple[str, ...]:
        """Layers that a simulated class of ranks holds; none where they are not known."""
        return self.layers[self.job.classes[number].program] if self.layers else ()


def lower(scenario: Scenario, *, fold: bool = True, cuda_kernels: bool = True) -> Lowered:
    """Lower a resolved scenario to a Job.

    Args:
        scenario: resolved.
        fold: simulate one rank per class of identical ranks; False simulates every rank (for tests).
        cuda_kernels: False counts tensors as fake ones have them (for oracle files; `Stack.cuda_kernels`).

    Raises:
        UserError: the scenario asks for something that is not simulated yet.
    """
    stack = stack_of(scenario.software)
    if not cuda_kernels:
        stack = replace(stack, cuda_kernels=False)
    check(scenario, stack)
    if run_of(scenario) is not None:
        serving = lower_inference(scenario, stack)
        return Lowered(serving.job, serving.architecture, stack, True, (serving.outside,) * len(serving.job.programs),
                       serving, layers=serving.layers)
    scenario = wired(scenario, stack)
    if scenario.parallel.strategy in ("fsdp", "zero3"):  # gathered weights come and go, narrow copies with them
        stack = replace(stack, narrow_weights_cached=False)
    if scenario.parallel.strategy != "zero3":
        stack = replace(stack, partition_checkpoints=False)
    uncut = with_parallel(scenario, tensor=1, context=1, expert=1, pipeline=1)
    whole = build(uncut, stack, scenario.training.micro_batch)
    architecture = build(held(scenario), stack, scenario.training.micro_batch)
    layout = layout_of(scenario)
    if scenario.parallel.pipeline > 1:
        groups = (sharded_groups(scenario, layout) if shards(scenario, stack) else
                  cut_groups(scenario, layout) | state_groups(scenario, layout))
        varied = variety(scenario, layout, groups)
        copied = (whole.tied and not architecture.tied and tuned_of(scenario.training, False) is None) or (
            scenario.model.mtp_layers > 0)
        pipelined = lower_pipeline(scenario, stack, architecture, layout, groups, technique_of(scenario, stack), copied)
        plans, straddles = pipelined.plans, varied.places is not None
    else:
        technique = choose(scenario, stack, architecture, layout)
        if isinstance(technique, bucketed.Bucketed) and pairs(scenario, stack):
            write_pairs(technique)
        else:
            write(technique)
        plans, groups, straddles = [technique.plan], technique.plan.groups, True
        varied = variety(scenario, layout, groups)
    beside = [_outside(scenario, plan) for plan in plans]
    job = _job(scenario, plans[0], fold, varied) if scenario.parallel.pipeline == 1 else pipelined.job(fold, varied)
    if straddles and meets_others(scenario, groups):
        job = expand(job)
    complete = all(layer.program is not None for layer in architecture.stack)
    names = tuple(plan.architecture.names for plan in plans)
    return Lowered(job, whole, stack, complete, tuple(beside), variety=varied, layers=names)


def with_parallel(scenario: Scenario, **changes: int) -> Scenario:
    """The scenario with other parallel degrees, for asking what a model is like."""
    return scenario.model_copy(update={"parallel": scenario.parallel.model_copy(update=changes)})


def wired(scenario: Scenario, stack: Stack) -> Scenario:
    """The scenario with parameters gathered in the dtype they have: in fp8 where the stack keeps no wider ones. What is
    trained beside frozen matrices has none in fp8.

    Scales per block need the wider parameter for both of a matrix's copies, so mxfp8's travel in it. Source:
    megatron-core 0.10.0 to 0.15.0 distributed/param_and_grad_buffer.py (a buffer of uint8 for fp8 parameters) and
    fsdp/src/megatron_fsdp/param_and_grad_buffer.py; distributed_data_parallel_config.py,
    reuse_grad_buf_for_mxfp8_param_ag.
    """
    training = scenario.training
    precision = training.precision
    sharded = scenario.parallel.strategy in ("zero1", "fsdp") and tuned_of(training, False) is None
    narrowed = (sharded and stack.narrow_parameters and precision.compute == "fp8"
                and DTYPE_BYTES[precision.gather] == DTYPE_BYTES[precision.parameters] == 2)
    if not narrowed:
        return scenario
    precision = precision.model_copy(update={"gather": "fp8"})
    return scenario.model_copy(update={"training": training.model_copy(update={"precision": precision})})


def held(scenario: Scenario) -> Scenario:
    """The scenario whose model is what ranks hold: cut into stages, a tied head has a copy of the table of its own.

    Source: Megatron-LM `language_module.py`, setup_embeddings_and_output_layer. Stages of a V are on one rank.
    """
    parallel = scenario.parallel
    if parallel.pipeline == 1 or not scenario.model.tied_embeddings or parallel.schedule in TWO_CHUNKS:
        return scenario
    return scenario.model_copy(update={"model": scenario.model.model_copy(update={"tied_embeddings": False})})


def _outside(scenario: Scenario, plan: Plan) -> Outside:
    """What a rank's GPU holds beside tensors, which becomes part of its program."""
    beside = beside_tensors(scenario, plan.stack, plan.layout, plan.groups, plan.peers, [plan.builder])
    for row in residents(beside):
        plan.resident(*row)
    return beside


def _job(scenario: Scenario, plan: Plan, fold: bool, varied: Variety) -> Job:
    """The job of a single program."""
    if not fold:
        classes = np.arange(scenario.gpus, dtype=np.int64)
    else:
        zeros, colours = np.zeros(scenario.gpus, dtype=np.int64), varied.colours
        classes = zeros if colours is None else equitable_classes(colours, plan.groups)
    simulated, communicators = simulated_ranks(classes, plan.groups, varied.devices)
    return Job([plan.builder.build()], simulated, communicators, scenario.gpus)


def layout_of(scenario: Scenario) -> Layout:
    """Where the parallel dimensions lie; experts are a re-grouping of data and context ranks."""
    parallel = scenario.parallel
    sizes = {"tensor": parallel.tensor, "context": parallel.context, "data": scenario.data_parallel,
             "pipeline": parallel.pipeline}
    return Layout(sizes, tuple(d for d in parallel.order if d in sizes))


def cut_groups(scenario: Scenario, layout: Layout) -> dict[str, Ranks]:
    """Communicators by name: of the replicas, and of the dimensions the model is cut along."""
    parallel = scenario.parallel
    groups = {"data": layout.group(REPLICAS)}
    if parallel.tensor > 1:
        groups["tensor"] = layout.group("tensor")
    groups |= context_groups(scenario, layout)
    if parallel.expert > 1:
        wide = expert_dimensions(scenario)
        ranks = layout.group(wide).shape[1]
        groups["expert"] = layout.group(wide, parallel.expert)
        groups["expert_data"] = layout.group(wide, ranks // parallel.expert, parallel.expert)
    return groups


def context_groups(scenario: Scenario, layout: Layout) -> dict[str, Ranks]:
    """Communicators of the context by name: all its ranks, or neighbours that exchange tokens for heads and, across
    them, those of a ring (megatron-core 0.16.1 parallel_state.py, create_hierarchical_groups)."""
    context, heads = scenario.parallel.context, scenario.head_ranks
    if context == 1:
        return {}
    if heads in (1, context):
        return {"context": layout.group("context")}
    return {"context_heads": layout.group("context", heads),
            "context_ring": layout.group("context", context // heads, heads)}


def state_groups(scenario: Scenario, layout: Layout) -> dict[str, Ranks]:
    """Communicators by name where ZeRO keeps one set of states on some of the ranks that hold the same parameters: of
    the neighbours that share a set out among them, and of those across that hold the same part of it.

    Source: megatron-core 0.12.1 parallel_state.py, intra_ and inter_partial_data_parallel_group; DeepSpeed 0.14.4
    runtime/zero/mics_utils.py, _generate_mics_config.
    """
    factor, replicas, expert = scenario.parallel.sharding_factor, scenario.replica_ranks, scenario.parallel.expert
    if not spread_over_some(scenario):
        return {}
    groups = {"shard": layout.group(REPLICAS, factor), "replicate": layout.group(REPLICAS, replicas // factor, factor)}
    if expert > 1:
        wide, sets = expert_dimensions(scenario), replicas // factor
        ranks = layout.group(wide).shape[1]
        groups["expert_shard"] = layout.group(wide, ranks // expert // sets, expert)
        groups["expert_replicate"] = layout.group(wide, sets, ranks // sets)
    return groups


def zero3_groups(scenario: Scenario, layout: Layout) -> dict[str, Ranks]:
    """Communicators by name that DeepSpeed's ZeRO-3 has beside that of all shards: of neighbours with a second copy of
    the parameters, of the two exchanges of quantised gradients, of MiCS's gathers in two steps.

    Source: deepspeed 0.14.4 utils/groups.py, _create_zero_param_parallel_group, _get_local_all_to_all_group;
    runtime/zero/mics_utils.py, create_mics_comm_groups.
    """
    parallel, cluster = scenario.parallel, scenario.cluster
    found: dict[str, Ranks] = {}
    if near := neighbours(parallel.reshard_after_forward):
        found[NEIGHBOURS] = layout.group(REPLICAS, near)
    if scenario.training.precision.reduce == GRADIENTS and cluster.nodes > 1:
        inside = cluster.gpus_per_node
        found |= {INSIDE: layout.group(REPLICAS, inside), ACROSS: layout.group(REPLICAS, cluster.nodes, inside)}
    if parallel.hierarchical_gather:
        spanned = parallel.sharding_factor // cluster.gpus_per_node
        inside = parallel.sharding_factor // spanned
        found |= {NODE: layout.group(REPLICAS, inside), NODES: layout.group(REPLICAS, spanned, inside)}
    return found


def choose(scenario: Scenario, stack: Stack, architecture: Architecture, layout: Layout) -> Technique:
    """The technique behind `parallel.strategy` in this stack."""
    strategy = scenario.parallel.strategy
    if shards(scenario, stack):
        groups = sharded_groups(scenario, layout)
        return fsdp_of(Plan(scenario, stack, architecture, layout, groups, fsdp.STREAMS, micro_steps(scenario)))
    groups = cut_groups(scenario, layout) | state_groups(scenario, layout)
    if strategy == "zero3":
        every = groups.pop("data")
        groups = {"shard": every, **groups, **zero3_groups(scenario, layout)}  # experts are not spread (see support)
        steps = micro_steps(scenario, tell_last="replicate" in groups or scenario.parallel.offload.optimizer == "nvme")
        return zero3.Zero3(Plan(scenario, stack, architecture, layout, groups, zero3.STREAMS, steps))
    norm = ("tensor",) if "tensor" in groups else ()
    plan = Plan(scenario, stack, architecture, layout, groups, bucketed.STREAMS, micro_steps(scenario),
                norm_groups=norm)
    return bucketed.Bucketed(plan, reduction_of(plan, stack))


def technique_of(scenario: Scenario, stack: Stack) -> Callable[[Plan], bucketed.Bucketed | fsdp.Fsdp]:
    """Data parallelism of a pipeline's stage, from the stage's plan."""
    if shards(scenario, stack):
        return fsdp_of
    known: dict[tuple[int, ...], reductions.Reduction] = {}

    def whole(plan: Plan) -> bucketed.Bucketed:
        layers = tuple(map(id, plan.architecture.stack))
        if layers not in known:
            known[layers] = reduction_of(plan, stack)
        return bucketed.Bucketed(plan, known[layers])

    return whole


def reduction_of(plan: Plan, stack: Stack) -> reductions.Reduction:
    """How gradients of whole parameters are reduced in this stack."""
    strategy, path = plan.scenario.parallel.strategy, stack.gradient_path
    if path == "ipg" and strategy in ("none", "ddp"):
        return reductions.deepspeed(plan, 0)
    if path == "ipg" and strategy in ("zero1", "zero2"):
        if plan.offload.moves_optimizer and plan.scenario.parallel.pipeline > 1:
            return reductions.deepspeed_stage(plan)
        # an offloading optimizer takes only this rank's gradients
        return reductions.deepspeed(plan, 2 if plan.offload.moves_optimizer else int(strategy[-1]))
    if path == "grad_buffer" and strategy == "zero1" and is_muon(plan):
        return reductions.layer_wise(plan)
    if path == "grad_buffer":
        return reductions.megatron(plan, strategy == "zero1")
    if path == "accumulator":
        return reductions.accumulator(plan, strategy == "zero1")
    return reductions.ddp(plan, strategy == "zero1")


def shards(scenario: Scenario, stack: Stack) -> bool:
    """Whether parameters are sharded as FSDP does it; so is ZeRO-2 and 3 of a stack without DeepSpeed's buckets."""
    return like_fsdp(scenario.parallel.strategy, stack.gradient_path == "ipg")


def sharded_groups(scenario: Scenario, layout: Layout) -> dict[str, Ranks]:
    """Communicators of FSDP by name: of shards and replicas, and of the dimensions the model is cut along."""
    factor, reshard = scenario.parallel.sharding_factor, scenario.parallel.reshard_after_forward
    replicas = scenario.replica_ranks
    groups: dict[str, Ranks] = {"shard": layout.group(REPLICAS, factor)}
    if factor < replicas:
        groups["replicate"] = layout.group(REPLICAS, replicas // factor, factor)
    if not isinstance(reshard, bool) and 1 < reshard < factor:
        groups["reshard"] = layout.group(REPLICAS, reshard)
    cut = cut_groups(scenario, layout)
    if "expert_data" in cut:
        groups["expert_shard"] = layout.group(REPLICAS, factor // scenario.parallel.expert, scenario.parallel.expert)
    return groups | {name: cut[name] for name in cut if name not in ("data", "expert_data")}


def fsdp_of(plan: Plan) -> Fsdp1 | Fsdp2:
    """FSDP of the scenario's version; ZeRO-2 keeps parameters after forward."""
    technique: Fsdp1 | Fsdp2
    if plan.scenario.software.fsdp == 2:
        technique = Fsdp2(plan)
    else:
        technique = Fsdp1Sized(plan) if wraps_parts(plan) else Fsdp1(plan)
    if plan.scenario.parallel.strategy == "zero2":
        technique.keep = True
    return technique
