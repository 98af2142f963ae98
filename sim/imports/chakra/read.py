"""Execution traces of PyTorch and Chakra as scenarios: one file of each rank, and a model's config.json beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.errors import Fault, UserError
from sim.imports.chakra.files import Trace, is_trace, read_trace
from sim.imports.chakra.groups import Group, collectives, degrees, groups_of, world_of
from sim.imports.chakra.layout import Counts, read_framework, read_ranks, read_strategy
from sim.imports.chakra.lora import Pair, read_pairs, take_pairs
from sim.imports.chakra.model import read_joined, read_model, split_blocks
from sim.imports.chakra.nodes import Node
from sim.imports.chakra.operators import Pass, most_common, sort_calls, token_embedding
from sim.imports.chakra.told import Told
from sim.imports.chakra.work import (
    compiler_in,
    optimizer_steps,
    read_batch,
    read_kernels,
    read_optimizer,
    read_precision,
    read_recompute,
)
from sim.imports.draft import Draft
from sim.imports.settings import Said, read_settings

_STEP = "record a whole training step, from its first forward to the optimizer's step"
_LAST = 2**62
_OTHER_AXES = ("tensor", "pipeline", "context", "expert", "expert tensor")
#: What tensor ranks (DTensor) and norms of gradients sum by; DDP and FSDP do not.
_FUNCTIONAL = "_c10d_functional::all_reduce"


@dataclass
class _Rank:
    """A rank's trace, sorted: its groups, forward and what runs again, the embedding's calls, what is counted."""

    trace: Trace
    groups: list[Group]
    forward: Pass
    again: Pass
    embeddings: list[Node]
    steps: list[Node]
    counts: Counts
    pairs: list[Pair]

    @property
    def first(self) -> Pass:
        """Calls of the first forward."""
        starts = self.starts()
        return self.forward.between(starts[0], starts[1] if len(starts) > 1 else _LAST)

    def starts(self) -> list[int]:
        """Numbers of the calls that each forward begins with."""
        if self.embeddings:
            return [node.id for node in self.embeddings]
        first = self.forward.products[0]
        same = [one.node.id for one in self.forward.products if first.place is not None and one.place == first.place]
        return [0, *same[1:]]


def read(files: Sequence[str], draft: Draft) -> None:
    """Takes what execution traces say.

    Raises:
        UserError: a file that is no such trace or holds no training step, or ranks that do not belong together.
    """
    traces = [file for file in files if is_trace(file)]
    blocks = None
    for file in (one for one in files if one not in traces):
        blocks = read_settings(file).get("num_hidden_layers", "n_layer", "num_layers")
        for settings in draft.opened([file]):
            raise UserError(Fault("is no execution trace and no model's config.json", "", settings.file))
    if not traces:
        raise UserError(Fault("is a model's config.json alone", "", files[0], 0, "name an execution trace too"))
    first = _sorted(read_trace(traces[0]))
    for file in traces[1:]:
        _belongs(_sorted(read_trace(file)), first, len(traces))
    _read(first, len(traces), draft, blocks)


def _sorted(trace: Trace) -> _Rank:
    forward, again = sort_calls(trace.nodes)
    if not forward.products and not again.products:
        raise UserError(Fault("holds no product with weights that tells its sizes", "", trace.file, 0, _STEP))
    if not any(node.backward for node in trace.nodes):
        raise UserError(Fault("holds no backward: it is of inference, or of less than a step", "", trace.file, 0,
                              _STEP))
    if not forward.products or not forward.attention:
        lacking = "attention" if forward.products else "forward"
        raise UserError(Fault(f"holds no {lacking} that tells its sizes", "", trace.file, 0, _STEP))
    pairs = take_pairs(forward)
    take_pairs(again)
    embeddings = token_embedding(forward)
    batch = next((node.shape(1)[0] for node in embeddings if len(node.shape(1)) == 2), 0)
    for call in (*forward.attention, *again.attention):
        call.part(batch)
    steps = optimizer_steps(trace)
    rank = _Rank(trace, groups_of(trace), forward, again, embeddings, steps, Counts(0, 0), pairs)
    named = [sum(one.name == node.name for one in steps) for node in steps]
    rank.counts = Counts(max(named, default=1), max(1, len(rank.starts())))
    return rank


def _belongs(rank: _Rank, first: _Rank, files: int) -> None:
    """Raises UserError where a rank's trace is not of the job of the first."""
    def differ(what: str, mine: object, other: object) -> None:
        if mine != other:
            raise UserError(Fault(f"has {what} {mine}, but {first.trace.file} has {other}: not of one job", "",
                                  rank.trace.file, 0, "give files of one job's ranks"))

    worlds = [world_of(one.groups) for one in (rank, first)]
    sizes = [world.size if world is not None else 0 for world in worlds]
    differ("ranks in all", *sizes)
    if 0 < sizes[0] < files or not sizes[0]:
        raise UserError(Fault(f"is one of {files} files, but of a job of {sizes[0] or 1} ranks", "", rank.trace.file))
    differ("forwards", rank.counts.passes, first.counts.passes)
    shapes = [next((node.shape(1) for node in one.embeddings), None) for one in (rank, first)]
    if None not in shapes:
        differ("tokens", *("x".join(map(str, shape or ())) for shape in shapes))
    differ("heads of attention", *(one.forward.attention[0].heads for one in (rank, first)))


def _read(rank: _Rank, files: int, draft: Draft, blocks: Said | None) -> None:
    trace, counts, one = rank.trace, rank.counts, rank.first
    along = degrees(trace, rank.groups)
    devices = [product.node.first_device(index) for product in rank.forward.products[:9] for index in range(3)]
    told = Told(draft, Path(trace.file).name, along["tensor"].size if "tensor" in along else 1, draft.has("model.hf"),
                next((device.partition(":")[0] for device in devices if device), ""))
    # Sums and gathers of tensor ranks and the like are no data parallelism's.
    others = {group.name for group in rank.groups if group.axis in _OTHER_AXES}
    everything = collectives(trace)
    calls = [call for call in everything if call.group not in others and _FUNCTIONAL not in call.node.above]
    replicas = read_ranks(told, rank.groups, along, everything, files)
    if not one.attention:
        raise UserError(Fault("holds no whole forward: attention comes before its first embedding", "", trace.file, 0,
                              _STEP))
    embedding = rank.embeddings[0] if rank.embeddings else None
    layers = len(one.attention)
    stages = draft.value("parallel.pipeline") or 1
    if blocks is not None and blocks.value != layers * stages:
        draft.leave(blocks, f"{trace.file} has {layers * stages} calls of attention in a forward: is it this model's?")
    told.take("model.layers", layers * stages, one.attention[0].node,
              f"{layers} calls of attention in a forward" + (f" of one of {stages} stages" if stages > 1 else ""))
    read_model(told, one, embedding)
    read_pairs(told, rank.pairs, split_blocks(one))
    read_batch(told, one, embedding, counts, draft.value("parallel.context") or 1)
    strategy = read_strategy(told, trace, calls, counts, replicas)
    compiled = compiler_in(trace) is not None
    read_framework(told, trace, rank.groups, one, compiled)
    read_joined(told, one)
    states = read_optimizer(told, trace, rank.steps)
    gradients = most_common([node.dtype(0) for node in trace.nodes if node.name == "torch::autograd::AccumulateGrad"])
    read_precision(told, rank.forward, calls, strategy, states, gradients)
    read_recompute(told, rank.again, layers, counts.passes, compiled)
    read_kernels(told, trace, one)
    _frozen(told, rank, strategy)
    if not rank.steps:
        told.leave("Optimizer.step", 0, "no optimizer's step is in the trace: all of it is taken as one step")


def _frozen(told: Told, rank: _Rank, strategy: str) -> None:
    """Tells of weights that get no gradient, where the trace says so and no pairs of LoRA do."""
    gathered = sum(node.name == "torch::autograd::AccumulateGrad" for node in rank.trace.nodes)
    weights = len({product.place for product in rank.first.products if product.place is not None})
    flat = strategy == "fsdp" and told.draft.value("software.fsdp") == 1  # a gradient a unit
    if not rank.pairs and not flat and 0 < gathered < weights * rank.counts.passes:
        told.leave("AccumulateGrad", gathered, f"{weights} matrices and {rank.counts.passes} backwards: not all "
                   "weights are trained, and all are counted as if")
