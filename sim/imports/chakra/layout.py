"""Who holds what in the job of a trace: ranks, degrees of the layout, and what data parallelism does.

Sources: names that torch 2.13.0 writes (DistributedDataParallel, FullyShardedDataParallel, fully_shard's `FSDP::` and
`fsdp::`) and deepspeed 0.19.8 has (autograd functions of stage 3 in runtime/zero/parameter_offload.py and linear.py),
seen in traces; Megatron core tensor_parallel/layers.py (recalled).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.imports.chakra.files import Trace
from sim.imports.chakra.groups import Collective, Group, world_of
from sim.imports.chakra.nodes import Node
from sim.imports.chakra.operators import Pass
from sim.imports.chakra.told import Told
from sim.imports.settings import Said

_FSDP_1, _FSDP_2, _DDP = "FullyShardedDataParallel.forward", "FSDP::", "DistributedDataParallel.forward"
#: autograd functions that ZeRO-3 hangs on modules, and Megatron's own.
_ZERO_3 = ("LinearFunctionForZeroStage3", "PreBackwardFunctionForModule", "PostBackwardFunctionModule")
_MEGATRON = ("LinearWithGradAccumulationAndAsyncCommunication", "_VocabParallelCrossEntropy",
             "_CopyToModelParallelRegion")
_SEQUENCE = "_ReduceScatterToSequenceParallelRegion"
#: A wrapper that spreads an optimizer's states (torch.distributed.optim).
_SPREAD = "Optimizer.step#ZeroRedundancyOptimizer.step"
_AXES = ("tensor", "pipeline", "context", "expert")
_UNIT = "FSDP::pre_forward"


@dataclass(frozen=True)
class Counts:
    """What a rank's trace counts: optimizer steps, forwards, and those of each step."""

    steps: int
    passes: int

    @property
    def micro_steps(self) -> int:
        """Forwards of a step."""
        return max(1, self.passes // max(1, self.steps))


def read_ranks(told: Told, groups: Sequence[Group], along: Mapping[str, Group], calls: Sequence[Collective],
               files: int) -> int:
    """How many GPUs there are and the degrees of the layout; data-parallel ranks, 0 if unknown."""
    world = world_of(list(groups))
    count = 0
    if world is not None:
        count = world.size
        told.draft.gpus = Said(told.file, f"{world.node} {world.about or world.name}", count)
    elif not groups and not calls:
        count = max(1, files)
        told.draft.gpus = Said(told.file, "no process groups", count)
    for axis in _AXES:
        group = along.get(axis)
        if group is not None and group.size > 1:
            told.take(f"parallel.{axis}", group.size, f"{group.node} {group.about}")
    size = 1
    for axis in ("tensor", "pipeline", "context"):
        size *= along[axis].size if axis in along else 1
    sent = [one for one in calls if one.kind == "send"]
    reduced = [one for one in calls if one.node.backward and one.kind in ("all-reduce", "reduce-scatter")]
    if sent and "pipeline" not in along and not reduced and count > size and count % size == 0:
        told.assume("parallel.pipeline", count // size, f"{sent[0].node.name}: ranks send to each other, no gradients "
                    "are reduced, and no group says over how many stages")
        size = count
    elif sent and "pipeline" not in along:
        told.leave(sent[0].node.name, len(sent), "ranks send to each other, and no group says over how many stages: "
                                                 "--set parallel.pipeline=N")
    if count > 1 and not any(axis != "world" for axis in along):
        for axis in ("tensor", "pipeline"):
            told.assume(f"parallel.{axis}", 1, f"no group's description tells of {axis} ranks")
    return count // size if count % size == 0 else 0


def read_strategy(told: Told, trace: Trace, calls: Sequence[Collective], counts: Counts, replicas: int) -> str:
    """Fields of data parallelism; the strategy."""
    names = Counter(node.name for node in trace.nodes if not node.updating)
    new = [node for node in trace.nodes if node.name.startswith(_FSDP_2)]
    old = [node for node in trace.nodes if node.name == _FSDP_1]
    if new or old:
        told.take("parallel.strategy", "fsdp", (new or old)[0])
        told.take("software.fsdp", 2 if new else 1, (new or old)[0])
        _sharding(told, calls, counts, _units(new, old, counts))
        return "fsdp"
    spread = next((node for node in trace.nodes if node.name == _SPREAD), None)
    if spread is not None:
        told.take("parallel.strategy", "zero1", spread)
        return "zero1"
    if names[_DDP]:
        told.take("parallel.strategy", "ddp", _DDP)
        _buckets(told, trace, calls, counts)
        return "ddp"
    zero = next((node for node in trace.nodes if node.name.startswith(_ZERO_3)), None)
    if zero is not None:
        told.take("parallel.strategy", "zero3", zero)
        told.assume("software.framework", "deepspeed", "its ZeRO-3")
        return "zero3"
    return _bare(told, trace, calls, counts, replicas)


def read_framework(told: Told, trace: Trace, groups: Sequence[Group], one: Pass, compiled: bool) -> None:
    """Whose code ran, as far as names tell; whose modules, by what they do in a forward."""
    sequence = next((node for node in trace.nodes if node.name.startswith(_SEQUENCE)), None)
    if sequence is not None:
        told.take("parallel.sequence_parallel", True, sequence)
    own = next((node for node in trace.nodes if node.name.startswith(_MEGATRON)), None)
    group = next((one for one in groups if one.about.endswith("_PARALLEL_GROUP")), None)
    if own is not None or group is not None:
        told.take("software.framework", "megatron", own or f"{group.node} {group.about}" if group else "")
        return
    told.assume("software.framework", "pytorch", "no name in the trace is of another framework (--set "
                "software.framework=NAME)")
    # transformers makes angles in every forward, where others keep a table, and GPT-2's Conv1D is no linear layer.
    turns = any(node.name == "aten::cos" for node in one.others)
    whole = not compiled and any(product.node.name == "aten::addmm" for product in one.products)
    if told.draft.value("model.kind") == "encoder":
        told.assume("software.modules", "transformers", "encoders mostly are its")
    elif turns or whole:
        told.assume("software.modules", "transformers", "its modules make angles in every forward, and its GPT-2 calls "
                    "addmm")
    else:
        told.assume("software.modules", "plain", "nothing in the trace is as transformers' modules have it")


def _units(new: Sequence[Node], old: Sequence[Node], counts: Counts) -> int:
    """Units of FSDP in one forward: the root and what is wrapped inside."""
    if new:
        return len({node.name for node in new if node.name.startswith(_UNIT)}) or 1
    return max(1, len([node for node in old if not node.backward]) // max(1, counts.passes))


def _sharding(told: Told, calls: Sequence[Collective], counts: Counts, units: int) -> None:
    """Shards, what forward frees, and how often gradients are reduced."""
    gathers = [one for one in calls if one.kind == "all-gather" and not one.node.updating and one.over > 0
               and any("fsdp" in name.lower() or "FullySharded" in name for name in one.node.above)]
    reduces = [one for one in calls if one.kind == "reduce-scatter"]
    over = next(iter(gathers or reduces), None)
    if over is None or over.over < 1:
        told.assume("parallel.sharding_factor", "full", "the trace has no gathers of parameters")
        return
    told.take("parallel.sharding_factor", over.over, over.node, "gathered over sent elements")
    each = len(gathers) / max(1, counts.passes)
    if units > 1 and gathers:
        told.take("parallel.reshard_after_forward", each > units, gathers[0].node,
                  f"{len(gathers)} gathers in {counts.passes} forwards of {units} units")
    if counts.micro_steps > 1 and reduces:
        often = len(reduces) >= units * counts.passes
        told.take("parallel.reduce_every_micro_step", often, reduces[0].node,
                  f"{len(reduces)} in {counts.passes} forwards of {units} units")
    layers = told.draft.value("model.layers")
    if isinstance(layers, int) and units != layers // (told.draft.value("parallel.pipeline") or 1) + 1:
        told.leave("units of FSDP", units, f"the root and each of {layers} blocks are counted as units; --set "
                                           "parallel.wrap=N, parameters of a unit, says otherwise")


def _buckets(told: Told, trace: Trace, calls: Sequence[Collective], counts: Counts) -> None:
    sums = [one for one in calls if one.kind == "all-reduce" and one.node.backward]
    copied = sum(node.name == "torch::distributed::reducer::mul_out" for node in trace.nodes)
    gathered = sum(node.name == "torch::autograd::AccumulateGrad" for node in trace.nodes)
    if counts.micro_steps > 1 and sums:
        # Each gradient goes into its bucket once for every backward that reduces.
        often = copied >= gathered if copied else len(sums) % counts.passes == 0 and len(sums) > counts.passes
        told.take("parallel.reduce_every_micro_step", often, sums[0].node,
                  f"{copied or len(sums)} in {counts.passes} backwards")
    told.assume("parallel.bucket_mb", 25, f"DDP's default; {len(sums)} sums of at most "
                f"{max((one.elements for one in sums), default=0):,} elements are in the trace")


def _bare(told: Told, trace: Trace, calls: Sequence[Collective], counts: Counts, replicas: int) -> str:
    """No wrapper's name: what the collectives around backward and the optimizer's step do."""
    steps = [node.id for node in trace.nodes if node.name.startswith("Optimizer.step#")]
    gathers = [one for one in calls if one.kind in ("all-gather", "broadcast") and steps and one.node.id > steps[0]
               and not one.node.backward]
    scatters = [one for one in calls if one.kind in ("reduce-scatter", "reduce")]
    sums = [one for one in calls if one.kind == "all-reduce" and one.elements > 1000]
    if replicas == 1 or not (scatters or sums):
        if replicas == 1:
            told.take("parallel.strategy", "none", "one replica")
        else:
            told.assume("parallel.strategy", "ddp", "no collective in the trace reduces gradients")
        return "none" if replicas == 1 else "ddp"
    if gathers and (scatters or sums):
        often = counts.micro_steps > 1 and len(scatters or sums) % counts.passes == 0
        stage = "zero2" if often else "zero1"
        how = "gradients are reduced in every backward" if often else "gradients are reduced once a step"
        if counts.micro_steps > 1:
            told.take("parallel.strategy", stage, gathers[0].node, f"gathers behind the optimizer's step; {how}")
        else:
            told.assume("parallel.strategy", stage, f"{gathers[0].node.name} behind the optimizer's step; ZeRO-2 looks "
                        "alike where one backward is all of a step")
        told.assume("software.framework", "deepspeed", "its ZeRO, since nothing is named as Megatron's")
        return stage
    told.take("parallel.strategy", "ddp", (sums or scatters)[0].node, "gradients are summed and nothing is gathered")
    return "ddp"
