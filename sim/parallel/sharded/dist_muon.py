"""torchtitan's DistMuon: ranks that share parameters row by row exchange shards so that one has each matrix whole.

Matrices go in buckets of two blocks, the first block by itself; in each, owners are picked by the longest product
first. On a stream of their own momentum is updated on shards, packed and sent to owners by one all-to-all; an owner
orthogonalises what it got on the compute stream; a second all-to-all brings updates back, which are applied to shards.
The next bucket is on its way while one computes, a third waits for the first one's way back. Tensors of experts are
whole on the ranks that hold them and are not sent, nor are heads' parts of latent attention where every rank holds
whole ones.

What limits a bucket is the rank with most to do, and another one in the next; the program is that of the chain of ranks
that wait for one another longest, counted in FLOPs (`critical`). An all-to-all is counted as large as its busiest end
has it: one owner may get more than each rank sends.

Source: torchtitan 0.3.0 distributed/flex_shard/dist_muon.py (_assign_balanced_owner_ranks),
_optimizer_reshard_runtime.py (run, reserve_buffers), models/kimi_k2_7/config_registry.py (_dist_muon_optimizer).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sim.model.architecture import Layer, Parameter
from sim.model.update.muon import Matrix, Recipe, matrices_of, newton_schulz_flops
from sim.model.update.newton_schulz import muon_update, owned_shard
from sim.parallel.compute import traffic_kernel
from sim.parallel.muon import recipe_of
from sim.parallel.step import COMPUTE, Plan, blocks, collective
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES, Kernel

#: The stream that gathers use in forward and backward, idle at this time: transfers have one of their own.
_TRANSFER = 1
#: Buckets in flight.
_SLOTS = 2
#: Latent attention's matrices that are taken apart by heads.
_BY_HEAD = ("self_attn.q_proj.weight", "self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight")


class _Taken(NamedTuple):
    """A parameter that Muon takes.

    Attributes:
        matrix: whole; of a tensor of several, those that this rank orthogonalises.
        shard: elements of it that this rank keeps.
        way: owned (sent whole to one rank), spread (sent so that every rank has some whole ones) or local (not sent).
    """

    matrix: Matrix
    shard: int
    way: str


@dataclass(frozen=True)
class _Bucket:
    """Matrices that travel together: owned ones with their owners, spread ones, and those computed where they are."""

    owned: tuple[_Taken, ...]
    owners: tuple[int, ...]
    spread: tuple[_Taken, ...]
    local: tuple[_Taken, ...]

    @property
    def sent(self) -> tuple[_Taken, ...]:
        """What travels."""
        return (*self.owned, *self.spread)

    @property
    def all(self) -> tuple[_Taken, ...]:
        """Everything."""
        return (*self.sent, *self.local)

    def of(self, rank: int) -> list[Matrix]:
        """Matrices that a rank owns."""
        return [taken.matrix for taken, owner in zip(self.owned, self.owners, strict=True) if owner == rank]

    def loads(self, ranks: int) -> list[int]:
        """Elements that each rank is sent."""
        found = [sum(taken.matrix.numel for taken in self.spread)] * ranks
        for taken, owner in zip(self.owned, self.owners, strict=True):
            found[owner] += taken.matrix.numel
        return found


class DistMuon:
    """The optimizer's matrices of one rank.

    Args:
        factor: ranks that share parameters; `routed`: those that share a routed expert's, 0 = the same.
    """

    def __init__(self, plan: Plan, factor: int, routed: int) -> None:
        self.plan, self.ranks, self.recipe = plan, factor, recipe_of(plan)
        self.others: list[int] = []
        self.width = DTYPE_BYTES[self.recipe.parameters]
        known: dict[int, tuple[list[_Taken], list[int]]] = {}
        of_block: list[list[_Taken]] = []
        for layer in plan.architecture.stack:
            if id(layer) not in known:
                known[id(layer)] = _split(layer, factor, routed or factor)
            taken, others = known[id(layer)]
            self.others += others
            if taken:
                of_block.append(taken)
        self.buckets = self._filled(of_block)
        self.chain = critical([[sum(newton_schulz_flops(m, 1) for m in bucket.of(rank)) for rank in range(factor)]
                               for bucket in self.buckets])

    @property
    def shards(self) -> list[int]:
        """Elements of each matrix's shard."""
        return [taken.shard for bucket in self.buckets for taken in bucket.all]

    def state_sizes(self, width: float) -> list[float]:
        """Bytes of each state: momentum of matrices' shards, AdamW's two moments of the rest."""
        return [width * n for n in self.shards] + [width * n for n in self.others for _ in range(2)]

    def buffers(self) -> list[int]:
        """Bytes of tensors that are reserved for good, twice: shards of a bucket, what an owner gets of it, its largest
        matrix, the largest shard."""
        found = []
        for slot in range(_SLOTS):
            here = self.buckets[slot::_SLOTS]
            sent = max((sum(t.shard for t in b.sent) for b in here), default=0)
            got = max((max(b.loads(self.ranks)) for b in here), default=0)
            largest = max((t.matrix.numel for b in here for t in b.all), default=0)
            shard = max((t.shard for b in here for t in b.sent), default=0)
            found += [blocks(n * self.width) for n in (sent, got, largest, shard) if n]
        return found

    def run(self, section: SectionBuilder, joins: Sequence[int]) -> int:
        """All buckets; returns the task with which the compute stream goes on, when shards are updated."""
        self.section = section
        peak = max((muon_update(t.matrix, self.recipe).peak_bytes for b in self.buckets for t in b.all), default=0)
        section.allocate("orthogonalisation", peak, "workspace")
        computed, back = -1, -1
        arrived = self._send(0, joins)
        for number in range(len(self.buckets)):
            if number > 0:
                back = self._bring_back(number - 1, computed)
            computed = self._compute(number, arrived, joins if number == 0 else ())
            if number + 1 < len(self.buckets):
                arrived = self._send(number + 1, ())
        back = self._bring_back(len(self.buckets) - 1, computed)
        section.free("orthogonalisation", peak, "workspace")
        done = traffic_kernel("updates applied", self.recipe.parameters, 1, 1.0)
        label = Label("optimizer", "optimizer", "wait")
        return section.kernels(COMPUTE, self.plan.compute.own((done,)), label, (back,))

    def _filled(self, of_block: Sequence[list[_Taken]]) -> list[_Bucket]:
        """Buckets of blocks: the first, then pairs."""
        groups = [of_block[:1], *(of_block[i:i + 2] for i in range(1, len(of_block), 2))]
        totals, found = [0.0] * self.ranks, []
        for group in groups:
            taken = [one for block in group for one in block]
            owned, spread, local = (tuple(one for one in taken if one.way == way) for way in (
                "owned", "spread", "local"))
            owners, totals = dealt_in_bucket([(newton_schulz_flops(one.matrix, 1), one.matrix.numel) for one in owned],
                                             totals)
            found.append(_Bucket(owned, tuple(owners), spread, local))
        return found

    def _moved(self, number: int, label: str, waits: Sequence[int], joins: Sequence[int] = ()) -> int:
        bucket = self.buckets[number]
        size = max(sum(taken.shard for taken in bucket.sent), *bucket.loads(self.ranks))
        call = collective(self.plan, "all_to_all", size * self.width, self.recipe.parameters, "shard")
        return self.section.collective(_TRANSFER, call, self.plan.stack.host_collective_s,
                                       Label(f"muon{number}", "optimizer", label), waits, joins)

    def _send(self, number: int, joins: Sequence[int]) -> int:
        """Momentum on shards, packed, to their owners."""
        bucket = self.buckets[number]
        if not bucket.sent:
            return -1
        kernels = [kernel for taken in bucket.sent for kernel in owned_shard(taken.shard, self.recipe)[0]]
        task = self.section.kernels(_TRANSFER, self.plan.compute.own(kernels),
                                    Label(f"muon{number}", "optimizer", "momentum"), joins=(*joins, COMPUTE)
                                    if number == 0 else ())
        return self._moved(number, "to owners", (task,))

    def _compute(self, number: int, arrived: int, joins: Sequence[int]) -> int:
        """What stays where it is, then what this rank of the chain owns."""
        bucket, rank = self.buckets[number], self.chain[number]
        apart = [kernel for taken in bucket.local for kernel in self._in_place(taken)]
        label = Label(f"muon{number}", "optimizer", "muon")
        if apart:
            self.section.kernels(COMPUTE, self.plan.compute.own(apart), label, joins=joins)
        kernels: list[Kernel] = []
        owned = bucket.of(rank) if rank >= 0 else []
        for matrix in (*owned, *(taken.matrix for taken in bucket.spread)):
            kernels += _copied(matrix, self.recipe, self.ranks, "unpacked")
            kernels += muon_update(matrix, self.recipe).kernels
            kernels += _copied(matrix, self.recipe, self.ranks, "packed")
        waits = () if arrived < 0 else (arrived,)
        if not kernels:  # a rank of another chain is at work: this one's stream waits, as its next bucket does
            kernels = [traffic_kernel("another's turn", self.recipe.parameters, 1, 1.0)]
        return self.section.kernels(COMPUTE, self.plan.compute.own(kernels), label, waits, joins)

    def _bring_back(self, number: int, computed: int) -> int:
        """Updates to their shards, which take them."""
        bucket = self.buckets[number]
        if not bucket.sent:
            return computed
        task = self._moved(number, "to shards", (computed,))
        kernels = [kernel for taken in bucket.sent for kernel in owned_shard(taken.shard, self.recipe)[1]]
        return self.section.kernels(_TRANSFER, self.plan.compute.own(kernels),
                                    Label(f"muon{number}", "optimizer", "step"), (task,))

    def _in_place(self, taken: _Taken) -> list[Kernel]:
        before, behind = owned_shard(taken.shard, self.recipe)
        return [*before[:-1], *muon_update(taken.matrix, self.recipe).kernels, *behind[1:]]


def critical(work: Sequence[Sequence[float]]) -> list[int]:
    """The rank of the longest chain in each bucket; -1 where the chain waits for none of it.

    A rank begins a bucket when it is through with the one before, and when the bucket before that is back from every
    rank.

    Args:
        work: of every bucket and rank.
    """
    table = np.array(work)
    done = np.zeros_like(table)
    for number, row in enumerate(table):
        before = done[number - 1] if number else np.zeros_like(row)
        everywhere = done[number - _SLOTS].max() if number >= _SLOTS else 0.0
        done[number] = np.maximum(before, everywhere) + row
    found = [-1] * len(table)
    number = len(table) - 1
    rank = int(done[number].argmax())
    while number >= 0:
        found[number] = rank
        everywhere = done[number - _SLOTS].max() if number >= _SLOTS else -1.0
        if number and done[number - 1, rank] >= everywhere:
            number -= 1
        else:
            number -= _SLOTS
            rank = int(done[number].argmax()) if number >= 0 else rank
    return found


def dealt_in_bucket(loads: Sequence[tuple[float, int]], totals: Sequence[float]) -> tuple[list[int], list[float]]:
    """Owners of a bucket's matrices, heaviest first to who has least of the bucket, then fewest elements of it, then
    least in all.

    Args:
        loads: work and elements of each matrix.
        totals: work that each rank has from buckets before.

    Returns: owners, and totals behind this bucket.
    """
    heap = [(0.0, 0, total, rank) for rank, total in enumerate(totals)]
    heapq.heapify(heap)
    owners = [0] * len(loads)
    for index, (work, numel) in sorted(enumerate(loads), key=lambda one: (-one[1][0], -one[1][1])):
        here, elements, total, rank = heapq.heappop(heap)
        owners[index] = rank
        heapq.heappush(heap, (here + work, elements + numel, total + work, rank))
    after = list(totals)
    for _, _, total, rank in heap:
        after[rank] = total
    return owners, after


def _split(layer: Layer, factor: int, routed: int) -> tuple[list[_Taken], list[int]]:
    """What Muon takes of a layer, and shards of the rest; experts of one shape are one tensor (torchtitan 0.3.0
    models/common/moe: w1_EFD and its like)."""
    matrices = matrices_of(layer, False)
    taken: list[_Taken] = []
    others: list[int] = []
    experts: dict[tuple[int, int, str], int] = {}
    for parameter in layer.parameters:
        matrix = matrices.get(parameter.name)
        if matrix is None:
            others.append(_shard(parameter, factor))
        elif parameter.routed:
            kind = (matrix.rows, matrix.cols, parameter.name.removesuffix(".weight").rpartition(".")[2])
            experts[kind] = experts.get(kind, 0) + matrix.batch
        else:
            taken.append(_dense(layer, parameter, matrix, factor))
    for (rows, cols, _), held in experts.items():
        own = -(-held // routed)
        taken.append(_Taken(Matrix(rows, cols, own, routed=True), own * rows * cols, "local"))
    return taken, others


def _dense(layer: Layer, parameter: Parameter, matrix: Matrix, factor: int) -> _Taken:
    """A matrix that one rank owns; of latent attention's heads each is a matrix, which lie whole on ranks if these
    divide them, else are sent to ranks that have them whole."""
    style = layer.program.style if layer.program is not None else None
    latent = style.latent if style is not None else None
    if style is not None and latent is not None and parameter.name in _BY_HEAD:
        rows = matrix.rows // style.heads
        own = Matrix(rows, matrix.cols, -(-style.heads // factor))
        return _Taken(own, _shard(parameter, factor), "spread" if style.heads % factor else "local")
    return _Taken(matrix, _shard(parameter, factor), "owned" if factor > 1 else "local")


def _shard(parameter: Parameter, factor: int) -> int:
    return -(-parameter.shape[0] // factor) * (parameter.numel // parameter.shape[0])


def _copied(matrix: Matrix, recipe: Recipe, pieces: int, name: str) -> Iterable[Kernel]:
    """A whole matrix written from, or into, the pieces that travel: a copy for each."""
    size = 2 * matrix.numel * DTYPE_BYTES[recipe.parameters]
    return (replace(Kernel("elementwise", recipe.parameters, (matrix.numel,), name, 0.0, size, "optimizer"),
                    launches=pieces),)
