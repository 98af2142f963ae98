"""A pipelined job: one program per pipeline rank, their communicators joined.

Ranks of one pipeline stage are alike, so a stage is a class of ranks and one of them is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from sim.errors import Fault, UserError
from sim.model.architecture import Architecture
from sim.parallel.compute import is_weight_gradient
from sim.parallel.data.bucketed import Bucketed
from sim.parallel.data.reductions import gathers_of
from sim.parallel.layout import Layout, Ranks, equitable_classes, simulated_ranks
from sim.parallel.model.expert import pairs
from sim.parallel.pipeline.actions import passing
from sim.parallel.pipeline.orders import Action, Costs, check, placement, places, split
from sim.parallel.pipeline.patterns import Schedule
from sim.parallel.pipeline.sharded import ShardedStage
from sim.parallel.pipeline.stage import Passing, Stage
from sim.parallel.pipeline.stages import positions, split_of
from sim.parallel.pipeline.transfers import Edge, Transfers
from sim.parallel.pipeline.weights import kept_for_weights
from sim.parallel.pipeline.whole import WholeStage
from sim.parallel.pipeline.written import Written
from sim.parallel.sharded import fsdp
from sim.parallel.sharded.fsdp import Fsdp
from sim.parallel.step import Plan
from sim.parallel.variety import Variety
from sim.program import Communicator, Job, Program, RankClass
from sim.scenario.fields.schema import Scenario
from sim.software import Stack

#: Streams of every stage: kernels, data-parallel collectives; one per pipeline edge follows.
STREAMS = ("compute", "nccl")
#: Of a rank whose chunks are gathered ahead of their turn (`sim.parallel.data.gathers`).
TURNS = ("gather", "gather")


@dataclass(frozen=True)
class Pipelined:
    """A lowered pipeline: the plan of every stage, and what joins them to a job."""

    plans: list[Plan]
    joined: _Joined

    def job(self, fold: bool = True, varied: Variety | None = None) -> Job:
        """All stages as one job; call it when the plans are complete.

        Args:
            fold: simulate one rank per class of identical ranks; False simulates every rank.
            varied: ranks that are not like the others of their stage.
        """
        programs = [plan.builder.build() for plan in self.plans]
        varied = Variety() if varied is None else varied
        if fold and varied.colours is None:
            return self.joined.alike(programs, self.plans)
        return self.joined.unlike(programs, fold, varied)


def lower_pipeline(scenario: Scenario, stack: Stack, architecture: Architecture, layout: Layout,
                   groups: Mapping[str, Ranks], technique: Callable[[Plan], Bucketed | Fsdp], tied: bool) -> Pipelined:
    """Programs of all stages.

    Args:
        groups: communicators of every rank by name: their ranks, shape (instances, members).
        technique: data parallelism of a stage, from its plan.
        tied: first and last stage train copies of one table.

    Raises:
        UserError: a model that cannot be cut into stages.
    """
    parallel = scenario.parallel
    if any(layer.kind == "bridge" for layer in architecture.stack) or scenario.model.kind == "layers":
        raise UserError(Fault("only decoders and encoders are cut into pipeline stages", field="parallel.pipeline"))
    if scenario.last_micro_batch != scenario.training.micro_batch:
        raise UserError(Fault("a pipeline's micro-batches are all of one size: a replica's share of the global batch "
                              "must be a multiple of the micro-batch", field="training.global_batch"))
    depth, virtual = parallel.pipeline, parallel.virtual_stages
    merged = pairs(scenario, stack)
    schedule = Schedule(parallel.schedule, depth, virtual, scenario.micro_steps, *_costs(architecture), int(merged),
                        stack.all_forwards_first)
    check(parallel.schedule, depth, virtual, scenario.micro_steps)
    placed = placement(parallel.schedule, depth, virtual)
    blocks = len(architecture.stack) - 2
    chunks = positions(architecture, split_of(scenario, stack, blocks, placed), placed)
    _occupied(chunks, parallel.split is not None)
    moves = Transfers(places(parallel.schedule, depth, virtual))
    edges = sorted({edge for rank, own in enumerate(placed) for chunk in range(len(own)) for kind in "FB"
                    if (edge := moves.sent(rank, Action(kind, chunk, 0))) is not None})
    joined = _Joined(scenario, layout, groups, tied, placed, edges)
    table = _table(architecture) if tied else 0
    plans: list[Plan] = []
    written = Written()
    turns = TURNS if "data" in groups and gathers_of(scenario, stack) == "aligned" else ()
    for rank in range(depth):
        own = [edge for edge in edges if rank in (edge.source, edge.target)]
        streams = (*STREAMS, *turns) if "data" in groups else fsdp.STREAMS
        plan = _plan(scenario, stack, architecture, layout, joined, rank, chunks[rank], own,
                     plans[0] if plans else None, streams)
        data = technique(plan)
        make: Callable[..., Stage] = (partial(ShardedStage, sharded=data) if isinstance(data, Fsdp)
                else partial(WholeStage, data=data))
        stage = make(
            rank=rank, depth=depth, plan=plan, chunks=_rebased(chunks[rank]), transfers=moves,
            passing=_passing(scenario, stack, architecture), edges={edge: joined.number(edge) for edge in own},
            streams={edge: len(streams) + i for i, edge in enumerate(own)},
            tied=table if "embedding" in plan.groups else 0, separate=split(parallel.schedule), merged=merged,
            written=written)
        stage.write(schedule)
        plans.append(plan)
    return Pipelined(plans, joined)


def _table(architecture: Architecture) -> int:
    """Elements of the table that embedding and head have copies of (of this tensor rank's rows, where it is cut): the
    head's last parameter. It need not be the largest: positions and an encoder's transformation may be."""
    return architecture.stack[-1].parameters[-1].numel


def _occupied(chunks: list[list[range]], given: bool) -> None:
    """Every rank holds something.

    Raises:
        UserError: a rank without a layer.
    """
    empty = [rank for rank, own in enumerate(chunks) if not any(own)]
    if empty:
        field, hint = (("parallel.split", "give it a block") if given
                       else ("parallel.pipeline", "use fewer stages, or say in parallel.split who holds what"))
        raise UserError(Fault(f"pipeline rank {empty[0]} holds no block, embedding or head", field=field, hint=hint))


def _plan(scenario: Scenario, stack: Stack, architecture: Architecture, layout: Layout, joined: _Joined, rank: int,
          chunks: list[range], edges: list[Edge], sibling: Plan | None, streams: tuple[str, ...]) -> Plan:
    """Plan of one stage: its own layers in a row.

    Both directions between two ranks, and all model chunks on them, are one communicator (PyTorch,
    ProcessGroupNCCL.cpp, `getKeySendRecv`: the lower rank and the higher).
    """
    own = [position for chunk in sorted(chunks, key=_begin) for position in chunk]
    names = architecture.names
    stack_of = tuple(architecture.stack[position] for position in own)
    part = Architecture(stack_of, architecture.tied, architecture.batch, architecture.sequence,
                        tuple(names[position] for position in own))
    streams = (*streams, *["pipeline"] * len(edges))
    peers = {end for edge in edges for end in (edge.source, edge.target)} - {rank}
    groups = joined.of(rank)
    norm = tuple(name for name in ("model",) if name in groups)
    return Plan(scenario, stack, part, layout, groups, streams, [], len(peers), joined.names, norm, sibling, rank,
                tuple(_rebased(chunks)))


def _rebased(chunks: list[range]) -> list[range]:
    """Positions within the rank's own row of layers, which is in the order of the model."""
    found, begin = {}, 0
    for chunk in sorted(chunks, key=_begin):
        found[chunk] = range(begin, begin + len(chunk))
        begin += len(chunk)
    return [found[chunk] for chunk in chunks]


def _begin(chunk: range) -> int:
    return chunk.start


def _costs(architecture: Architecture) -> tuple[Costs, float]:
    """What searched schedules go by: relative times of a block's forward, input and weight gradients, counted as
    matrix-product FLOPs, and the share of its activations that stays for the weight gradients."""
    block = next(layer for layer in architecture.stack if layer.kind == "block")
    weight = sum(k.flops for op in block.operators for k in op.backward if is_weight_gradient(k))
    saved = sum(tensor.size_bytes for tensor in block.saved)
    costs = Costs(block.forward_flops, block.backward_flops - weight, weight)
    return costs, min(1.0, kept_for_weights(block) / saved) if saved else 1.0


def _passing(scenario: Scenario, stack: Stack, architecture: Architecture) -> Passing:
    """What travels between stages: the residual stream, whole or this tensor rank's share."""
    parallel = scenario.parallel
    block = next(layer for layer in architecture.stack if layer.kind == "block")
    elements, share = block.input.elements, 1
    if parallel.pipeline_scatter and parallel.tensor > 1 and not parallel.sequence_parallel:
        share = parallel.tensor
    return Passing(elements, elements // share, block.input.dtype, elements if share > 1 else 0,
                   passing(scenario, stack), stack.partitioned_tensors)


class _Joined:
    """Communicators of all stages: groups within a stage, and those between stages.

    Attributes:
        names: of every kind of group, then one per edge; the same for the programs of all stages.
    """

    def __init__(self, scenario: Scenario, layout: Layout, groups: Mapping[str, Ranks], tied: bool,
                 placed: list[list[int]], edges: list[Edge]) -> None:
        self.layout = layout
        self.stage_of = layout.coordinate("pipeline")
        self.groups = groups
        self.depth = layout.sizes["pipeline"]
        self.edges = edges
        self.twice = sum(map(len, placed)) > 1 + max(map(max, placed))
        self.between: dict[str, tuple[tuple[int, ...], Ranks]] = {}
        if scenario.parallel.schedule not in _UNSYNCHRONISED:
            whole = layout.group([d for d in ("tensor", "pipeline") if layout.sizes[d] > 1])
            self.between["model"] = (tuple(range(self.depth)), whole)
        ends = tuple(next(rank for rank, own in enumerate(placed) if stage in own)
                     for stage in (0, max(map(max, placed))))
        if tied and ends[0] != ends[1] and not self.twice:
            self.between["embedding"] = (ends, layout.moved("pipeline", *ends))
        self.names = (*groups, *self.between, *["pipeline"] * len(edges))
        self._numbers = {edge: len(groups) + len(self.between) + i for i, edge in enumerate(edges)}

    def number(self, edge: Edge) -> int:
        """Communicator of an edge among `names`."""
        return self._numbers[edge]

    def of(self, rank: int) -> dict[str, Ranks]:
        """Groups of one stage's ranks."""
        own = {name: ranks[self.stage_of[ranks[:, 0]] == rank] for name, ranks in self.groups.items()}
        if self.twice:  # both copies of a stage see half of the micro-batches each
            first, second = sorted((rank, self.depth - 1 - rank))
            for name in _REPLICATED & self.groups.keys():
                ranks = self.groups[name]
                own[name] = np.concatenate(
                    [ranks[self.stage_of[ranks[:, 0]] == held] for held in (first, second)], axis=1)
        return own | {name: ranks for name, (stages, ranks) in self.between.items() if rank in stages}

    def unlike(self, programs: list[Program], fold: bool, varied: Variety) -> Job:
        """Ranks of a stage that are not alike are classes of their own, and so are those that meet them."""
        groups: dict[str, Ranks] = {}
        for name, ranks in self.groups.items():
            groups[name] = self._both_copies(ranks) if self.twice and name in _REPLICATED else ranks
        groups |= {name: ranks for name, (_, ranks) in self.between.items()}
        for number, edge in enumerate(self.edges):
            groups[f"pipeline/{number}"] = self.layout.moved("pipeline", edge.source, edge.target)
        if fold:
            own = np.zeros(self.layout.ranks, dtype=np.int64) if varied.colours is None else varied.colours
            distinct = {(tuple(ranks[0]), ranks.shape): name for name, ranks in reversed(groups.items())}
            classes = equitable_classes(own * self.depth + self.stage_of,
                                        {name: groups[name] for name in distinct.values()})
        else:
            classes = np.arange(self.layout.ranks, dtype=np.int64)
        simulated, communicators = simulated_ranks(classes, groups, varied.devices, self.stage_of)
        return Job(programs, simulated, communicators, self.layout.ranks)

    def _both_copies(self, ranks: Ranks) -> Ranks:
        """Replicas of a stage that two pipeline ranks hold: groups of both joined."""
        stage = self.stage_of[ranks[:, 0]]
        return np.concatenate([np.concatenate([ranks[stage == held] for held in (low, self.depth - 1 - low)], axis=1)
                               for low in range(self.depth // 2)])

    def alike(self, programs: list[Program], plans: list[Plan]) -> Job:
        """All stages as one job; ranks of a stage are alike."""
        communicators = [Communicator(name, ranks, len(stages)) for name, (stages, ranks) in self.between.items()]
        communicators += [Communicator("pipeline", self.layout.moved("pipeline", edge.source, edge.target), 2)
                          for edge in self.edges]
        shared = len(communicators)
        classes = []
        common: dict[tuple[str, int], int] = {}
        for rank, plan in enumerate(plans):
            own = len(communicators)
            mirrored = self.depth - 1 - rank
            communicators += [Communicator(name, plan.groups[name], 2 if self.twice and name in _REPLICATED else 1)
                              for name in self.groups]
            for i, name in enumerate(self.groups):
                common[name, rank] = common.get((name, mirrored), own + i) if (
                    self.twice and name in _REPLICATED) else own + i
            takes = [rank in stages for stages, _ in self.between.values()]
            takes += [rank in (edge.source, edge.target) for edge in self.edges]
            numbers = (*(common[name, rank] for name in self.groups), *(i if takes[i] else -1 for i in range(shared)))
            members = np.flatnonzero(self.stage_of == rank)
            classes.append(RankClass(int(members[0]), members, rank, 0, numbers))
        return Job(programs, classes, communicators, self.layout.ranks)


#: Groups of ranks that hold the same parameters: both copies of a stage belong to them.
_REPLICATED = {"data", "expert_data"}

#: Schedules whose optimizer step does not wait for the norm of all stages: it is corrected afterwards (Qi et al. 2023,
#: arXiv 2401.10241, section 4, post-update validation).
_UNSYNCHRONISED = ("zb-1p", "zb-2p")
