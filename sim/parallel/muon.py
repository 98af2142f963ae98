"""Muon among ranks: which matrices a rank orthogonalises, what it keeps of them, and the update as a task.

Where states are whole every rank does everything. Megatron's layer-wise optimizer (strategy zero1) deals whole
parameters out to the data ranks, smallest first, back and forth; gradients are all-reduced as without it, and behind
the update every rank's parameters are gathered into lists (`gather_dealt`). All ranks wait for one another there, so
the program is that of the rank with most products, and its memory that of the rank with most elements.

Source: megatron-core 0.16.1 optimizer/muon.py and layer_wise_optimizer.py (shard_params, allgather_params), which
refuses the distributed optimizer beside Muon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sim.model.architecture import Layer
from sim.model.update.muon import Matrix, Recipe, matrices_of, newton_schulz_flops
from sim.model.update.newton_schulz import Call, muon_update
from sim.model.update.optimizer import gradient_dtype, master_copy
from sim.parallel.compute import traffic_kernel
from sim.parallel.step import COMPUTE, Plan, collective
from sim.program import InlineCall, Label, SectionBuilder
from sim.work import DTYPE_BYTES, Kernel

_NCCL = 1


class Share(NamedTuple):
    """What one rank updates.

    Attributes:
        matrices: that it orthogonalises.
        others: elements of each tensor that AdamW updates.
    """

    matrices: tuple[Matrix, ...]
    others: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return sum(self.each)

    @property
    def each(self) -> list[int]:
        """Elements of each tensor."""
        return [*(matrix.numel for matrix in self.matrices), *self.others]

    @property
    def tensors(self) -> int:
        """Tensors."""
        return len(self.each)


class Dealt(NamedTuple):
    """Shares of the rank whose products take longest, and of the rank that holds most."""

    slowest: Share
    fullest: Share


class _One(NamedTuple):
    """A parameter as it is dealt out."""

    numel: int
    matrix: Matrix | None
    routed: bool


def is_muon(plan: Plan) -> bool:
    """Whether the job's optimizer is Muon."""
    return plan.scenario.training.optimizer == "muon"


def recipe_of(plan: Plan) -> Recipe:
    """How the job's matrices are orthogonalised."""
    training, stack = plan.scenario.training, plan.stack
    asked, precision = training.muon, training.precision
    assert asked is not None
    nesterov = stack.muon_nesterov if asked.nesterov is None else asked.nesterov
    wide = precision.master if precision.master != "none" else precision.parameters
    return Recipe(stack.muon, asked.ns_steps, nesterov, plan.scenario.parallel.tensor, asked.tensor or "blockwise",
                  wide, gradient_dtype(precision), precision.optimizer)


def whole(plan: Plan) -> Share:
    """Everything this rank holds."""
    ones = _ones(plan)
    return _share(ones)


def dealt(plan: Plan) -> Dealt:
    """Shares of data ranks among which whole parameters are dealt out."""
    ones = _ones(plan)
    experts = "expert_data" in plan.groups
    ranks = [[list[_One]() for _ in range(count)] for count in (
        plan.replicas, plan.expert_replicas if experts else 1)]
    turn = [0, 0]
    for one in sorted(ones, key=lambda one: one.numel):
        group = int(one.routed and experts)
        count = len(ranks[group])
        at = turn[group] % (2 * count)
        ranks[group][at if at < count else 2 * count - 1 - at].append(one)
        turn[group] += 1
    steps = recipe_of(plan).steps

    def flops(share: Share) -> float:
        return sum(newton_schulz_flops(matrix, steps) for matrix in share.matrices)
    shares = [[_share(of) for of in group] for group in ranks]
    slowest = [max(group, key=flops) for group in shares]
    fullest = [max(group, key=lambda share: share.numel) for group in shares]
    return Dealt(_joined(slowest), _joined(fullest))


def shares(plan: Plan, split: bool) -> Dealt:
    """Shares of the rank with most work and of the one with most elements."""
    if split:
        return dealt(plan)
    everything = whole(plan)
    return Dealt(everything, everything)


def state_sizes(share: Share, width: float) -> list[float]:
    """Bytes of each optimizer state: momentum of a matrix, two moments of everything else."""
    return [width * matrix.numel for matrix in share.matrices] + [
        width * numel for numel in share.others for _ in range(2)]


def orthogonalise(plan: Plan, section: SectionBuilder, matrices: Sequence[Matrix], joins: Sequence[int]) -> int:
    """Muon on whole matrices, one after another, and their half copies where masters are apart; returns the task."""
    recipe, precision = recipe_of(plan), plan.scenario.training.precision
    updates = [muon_update(matrix, recipe) for matrix in matrices]
    items: list[Kernel | InlineCall] = [
        item if isinstance(item, Kernel) else _inline(plan, item)
        for update in updates for item in update.row]
    numel = sum(matrix.numel for matrix in matrices)
    items += master_copy(numel, len(matrices), precision, str(plan.scenario.software.optimizer_kernel))
    peak = max((update.peak_bytes for update in updates), default=0)
    if peak:
        section.allocate("orthogonalisation", peak, "workspace")
    task = section.kernels(COMPUTE, plan.compute.own(items), Label("optimizer", "optimizer", "muon"), joins=joins)
    if peak:
        section.free("orthogonalisation", peak, "workspace")
    return task


def gather_dealt(plan: Plan, section: SectionBuilder, updated: int) -> None:
    """Updated parameters of all ranks, first the dense ones, then experts: each rank's are flattened, gathered into a
    tensor for each rank, and copied to their places. Unequal parts go as grouped broadcasts round the same ring (c10d
    ProcessGroupNCCL.cpp, allgather: _broadcast_oop), which moves as much over every link as one gather of all of them.
    """
    share, stack, wire = dealt(plan).slowest, plan.stack, plan.scenario.training.precision.parameters
    routed, tensors = plan.routed, sum(len(layer.parameters) for layer in plan.architecture.stack)
    for group, numel in (("data", plan.architecture.parameters - routed), ("expert_data", routed)):
        ranks = plan.expert_replicas if group == "expert_data" else plan.replicas
        if not numel or ranks == 1:
            continue
        size, own = round(numel * DTYPE_BYTES[wire]), round(numel / ranks * DTYPE_BYTES[wire])
        label = Label("parameters", "optimizer", "all_gather")
        section.allocate("gathered lists", size + own, "workspace")
        flat = traffic_kernel("flattened parameters", wire, round(numel / ranks), 2 * own)
        packed = section.kernels(COMPUTE, plan.compute.own((flat,)), label._replace(name="flatten"), waits=(updated,))
        call = collective(plan, "all_gather", size, wire, group)
        gathered = section.collective(_NCCL, call, stack.host_collective_s, label, (packed,))
        count = max(1, round(tensors * numel / plan.architecture.parameters) - share.tensors)
        copied = replace(traffic_kernel("parameters into place", wire, numel, 2 * (size - own)), launches=count)
        updated = section.kernels(COMPUTE, plan.compute.own((copied,)), label._replace(name="copy"), waits=(gathered,))
        section.free("gathered lists", size + own, "workspace")


def _inline(plan: Plan, call: Call) -> InlineCall:
    """A collective of the tensor ranks inside the row of kernels."""
    return InlineCall(collective(plan, call.kind, call.size_bytes, call.dtype, "tensor"))


def _ones(plan: Plan) -> list[_One]:
    stack = plan.architecture.stack
    splits = plan.stack.muon_splits_qkv
    asked = plan.scenario.training.muon
    if asked is not None and asked.split_qkv is not None:
        splits = asked.split_qkv
    known: dict[int, list[_One]] = {}
    for layer in stack:
        if id(layer) not in known:
            known[id(layer)] = _of_layer(layer, splits)
    return [one for layer in stack for one in known[id(layer)]]


def _of_layer(layer: Layer, splits: bool) -> list[_One]:
    found = matrices_of(layer, splits)
    return [_One(p.numel, found.get(p.name), p.routed) for p in layer.parameters]


def _share(ones: Sequence[_One]) -> Share:
    return Share(tuple(one.matrix for one in ones if one.matrix is not None),
                 tuple(one.numel for one in ones if one.matrix is None))


def _joined(parts: Sequence[Share]) -> Share:
    return Share(tuple(m for part in parts for m in part.matrices), tuple(n for part in parts for n in part.others))
