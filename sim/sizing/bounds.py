"""Lower bounds of memory and of step time for all rows of a space at once, from tables of layers.

A table holds, per slice of the model (cluster, tensor, context, expert, micro-batch), what the rooms below say of
every layer: seconds of its kernels alone (`Device.times`) and of the collectives inside it alone (`Network.coflow`),
bytes it keeps (`layer_profile`). A row's bound adds them up. Nothing on the GPU is ever faster than alone, so the sum
over a rank is a lower bound of the step; in a pipeline the rank also waits for the first micro-batch to reach it and,
where backward is one piece, for its gradients to come back to the first rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.api import hardware_for
from sim.errors import UserError
from sim.hardware.outside import outside
from sim.model import build, optimizer_kernels, optimizer_state_bytes
from sim.model.architecture import Architecture, Layer
from sim.model.eager import KINDS, layer_profile
from sim.parallel.compute import Compute
from sim.parallel.lower import cut_groups, held, layout_of
from sim.parallel.model.expert import dispatched, staying
from sim.parallel.model.joints import joints
from sim.parallel.pipeline.actions import placement, split
from sim.parallel.pipeline.bubble import activations
from sim.parallel.pipeline.stages import blocks_per_stage, positions
from sim.program import InlineCall, ProgramBuilder
from sim.scenario import Scenario
from sim.sizing.alone import Alone
from sim.sizing.space import POLICIES, SCHEDULES, STRATEGIES, Space
from sim.software import stack_for
from sim.work import DTYPE_BYTES

Floats = npt.NDArray[np.float64]
_KEPT = KINDS.index("activations")

#: Columns that decide a table of layers, and those that decide what a pipeline makes of it.
_SLICE = ("cluster", "nodes", "tensor", "sequence_parallel", "context", "expert", "micro_batch", "pipeline")
_STAGED = ("virtual_stages", "schedule")


@dataclass(frozen=True)
class Bounds:
    """Of every row, shape (rows,): seconds of a step at least, bytes of the fullest rank at least, its capacity."""

    time_s: Floats
    memory_bytes: Floats
    capacity_bytes: Floats

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Whether memory does not rule the row out."""
        return self.memory_bytes <= self.capacity_bytes


@dataclass
class _Table:
    """Layers of one slice by position: elements and bytes; seconds only once a row of the slice may fit.

    Attributes:
        kept, rises: bytes a block keeps, and its backward's highest point above that, per policy and block; shape
            (policies, blocks), `kept` summed from the first block on: (policies, blocks + 1).
        head_rises: bytes the head's forward needs for a while.
        numel: elements of the layers before each position, shape (positions + 1,).
        accumulated: bytes per element of whole gradients that FSDP accumulates between reductions.
        forward_s, backward_s: of the layers before each position; again_s as `kept`.
    """

    architecture: Architecture
    parts: Any
    kept: Floats
    rises: Floats
    head_rises: float
    numel: Floats
    output_bytes: float
    widths: dict[str, float]
    fixed_bytes: float
    resident_gradients: bool
    sharded: tuple[str, ...]
    accumulated: float
    through: npt.NDArray[np.int64]
    staged: dict[Any, _Places]
    forward_s: Floats | None = None
    backward_s: Floats | None = None
    again_s: Floats | None = None


class _Places(NamedTuple):
    """Chunks of pipeline ranks as positions and as blocks, each of shape (ranks, chunks); `before`: blocks of the rank
    that come before the chunk."""

    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]


def bounds(space: Space) -> Bounds:
    """Bounds of all rows. Rows of one slice and schedule are worked out together."""
    return _Bounding(space).run()


class _Bounding:
    def __init__(self, space: Space) -> None:
        self.space = space
        self.tables: dict[tuple[int, ...], _Table] = {}
        self.kernel_s: dict[Any, dict[Any, float]] = {}
        self.call_s: dict[Any, float] = {}
        self.update_s: dict[Any, float] = {}
        self.layers: dict[Any, tuple[Any, ...]] = {}
        self.capacity = [hardware_for(one)[0].gpu.usable_memory_bytes for one in space.clusters]
        self.offloads = any(place in ("cpu", "nvme") for one in space.clusters for _, place in one.parallel.offload)

    def run(self) -> Bounds:
        space, columns = self.space, self.space.columns
        rows = len(space)
        found = Bounds(np.full(rows, np.inf), np.zeros(rows), np.zeros(rows))
        names = (*_SLICE, *_STAGED)
        changes = np.zeros(rows, dtype=bool)
        changes[0] = True
        for name in names:  # rows of a group lie together, as `build_space` writes them
            changes[1:] |= columns[name][1:] != columns[name][:-1]
        starts = [*np.flatnonzero(changes).tolist(), rows]
        for begin, end in pairwise(starts):
            key = tuple(int(columns[name][begin]) for name in names)
            try:
                self._group(key, slice(begin, end), found)
            except UserError:
                continue  # what lowering refuses stays at inf
        return found

    # ------------------------------------------------------------------------------------------------------- a group
    def _group(self, key: tuple[int, ...], rows: slice, found: Bounds) -> None:
        cluster, nodes, tensor, _, context, _, micro, pipeline, virtual, scheduled = key
        scenario = self.space.clusters[cluster]
        table = self._table(key[:len(_SLICE)])
        replicas = nodes * scenario.cluster.gpus_per_node // (tensor * context * pipeline)
        steps = (scenario.training.global_batch or 0) // (replicas * micro)
        schedule = SCHEDULES[scheduled] if pipeline > 1 else ""
        places = self._places(table, pipeline, virtual, schedule)
        recompute, factor = self.space.columns["recompute"][rows], self.space.columns["sharding_factor"][rows]
        strategy = self.space.columns["strategy"][rows]
        policies, at = np.unique(recompute, return_inverse=True)
        weights = (table.numel[places.stop] - table.numel[places.start]).sum(axis=1)
        shards, spread = _shares(strategy, factor, replicas * context)
        flight = _flight(table, places, policies, schedule, steps)
        found.memory_bytes[rows] = self._memory(table, flight, weights, steps, strategy, shards, spread, at)
        capacity = self.capacity[cluster]
        found.capacity_bytes[rows] = capacity
        if not (found.memory_bytes[rows] <= capacity).any():
            found.time_s[rows] = 0.0  # never asked for: none fits
            return
        self._timed(table, key)
        busy = _busy(table, places, policies, steps, schedule)  # (policies,)
        update = {part: self._update(scenario, cluster, weights[0], int(part)) for part in np.unique(spread)}
        found.time_s[rows] = (busy[at] + np.array([update[part] for part in spread])) * _SURE

    def _places(self, table: _Table, pipeline: int, virtual: int, schedule: str) -> _Places:
        """Where the chunks of every pipeline rank are."""
        key = (pipeline, virtual, schedule)
        if key not in table.staged:
            chunks = [[range(len(table.numel) - 1)]]
            if pipeline > 1:
                placed = placement(schedule, pipeline, virtual)
                slots = self.space.clusters[0].parallel.split_slots
                counts = blocks_per_stage(len(table.numel) - 3, placed, None, slots.embedding, slots.head)
                chunks = positions(table.architecture, counts, placed)
            start = np.array([[c.start for c in own] for own in chunks])
            stop = np.array([[c.stop for c in own] for own in chunks])
            first, end = table.through[start], table.through[stop]
            lower = start[:, None, :] < start[:, :, None]  # (ranks, chunks, chunks before)
            before = (lower * (end - first)[:, None, :]).sum(axis=2)
            table.staged[key] = _Places(start, stop, first, end, before)
        return table.staged[key]

    def _memory(self, table: _Table, flight: Floats, weights: Floats, steps: int, strategy: npt.NDArray[np.int64],
                shards: Floats, spread: Floats, at: npt.NDArray[np.int64]) -> Floats:
        """Bytes of the fullest rank: states with gradients, or with the activations in flight (ranks, policies)."""
        w = table.widths
        if self.offloads:
            return np.full(len(at), table.fixed_bytes)
        ways, way = np.unique(np.stack((strategy, shards, spread)), axis=1, return_inverse=True)
        highest = np.empty((ways.shape[1], flight.shape[1]))
        for i, (index, shard, part) in enumerate(ways.T.tolist()):
            name = STRATEGIES[int(index)]
            states = weights * (w["parameters"] / shard + (w["master_parameters"] + w["optimizer_states"]) / part)
            gradients = weights * w["gradients"] / (1.0 if name in ("none", "ddp", "zero1") else part)
            lasting = np.zeros(len(weights))
            if name in table.sharded:  # FSDP keeps whole gradients from micro-step to micro-step (no_sync)
                lasting = weights * table.accumulated * (steps > 1)
            elif table.resident_gradients:
                lasting = gradients
            peak = states[:, None] + np.maximum(gradients[:, None], lasting[:, None] + flight)
            highest[i] = peak.max(axis=0)
        return highest[way.reshape(-1), at] * _SURE + table.fixed_bytes

    # ------------------------------------------------------------------------------------------------------- tables
    def _table(self, key: tuple[int, ...]) -> _Table:
        if key not in self.tables:
            if len(self.tables) > 64:
                self.tables.pop(next(iter(self.tables)))
            self.tables[key] = self._make(key)
        return self.tables[key]

    def _make(self, key: tuple[int, ...]) -> _Table:
        scenario = self.scenario(key)
        stack = _stack(scenario)
        groups = cut_groups(scenario, layout_of(scenario))
        sent = dispatched(scenario, stack, groups.get("expert"))
        sliced = (key[0], key[2], key[3], key[4], key[5], key[6], key[7] > 1, scenario.expert_tensor, sent)
        if sliced not in self.layers:
            if len(self.layers) > 256:
                self.layers.pop(next(iter(self.layers)))
            self.layers[sliced] = self._layers(scenario, stack, tuple(groups), sent)
        architecture, parts, kept, rises, head, widths = self.layers[sliced]
        row = architecture.stack
        block = next((layer for layer in row if layer.kind == "block"), row[0])
        capability, precision = hardware_for(scenario)[0].gpu.compute_capability, scenario.training.precision
        every = scenario.parallel.reduce_every_micro_step
        return _Table(
            architecture, parts, kept, rises, head, _before([float(layer.numel) for layer in row]),
            block.input.elements * DTYPE_BYTES[block.input.dtype], widths,
            outside(capability, stack.kernel_loading, ()).total_bytes, stack.gradient_path == "grad_buffer",
            ("fsdp",) if stack.gradient_path == "ipg" else ("fsdp", "zero2", "zero3"),
            0.0 if every else min(DTYPE_BYTES[precision.gather], DTYPE_BYTES[precision.reduce]),
            np.concatenate(([0], np.cumsum([layer.kind == "block" for layer in row]))).astype(np.int64), {})

    def _timed(self, table: _Table, key: tuple[int, ...]) -> None:
        """Fill in a table's seconds."""
        if table.forward_s is not None:
            return
        scenario = self.scenario(key[:len(_SLICE)])
        layout = layout_of(scenario)
        groups = cut_groups(scenario, layout)
        device, network = hardware_for(scenario)
        stage = Alone(layout, scenario, network, self.call_s, (key[0], *(layout.sizes.values()), key[5]))
        seconds: dict[int, tuple[float, float, list[float]]] = {}
        for layer in {id(x): x for x in table.architecture.stack}.values():
            forward, backward, again = table.parts[id(layer)]
            seconds[id(layer)] = (self._seconds(key[0], device, stage, groups, forward),
                                  self._seconds(key[0], device, stage, groups, backward),
                                  [self._seconds(key[0], device, stage, groups, again[p]) for p in POLICIES])
        rows = [(layer, *seconds[id(layer)]) for layer in table.architecture.stack]
        table.forward_s, table.backward_s = _before([r[1] for r in rows]), _before([r[2] for r in rows])
        table.again_s = np.array([_before([r[3][i] for r in rows if r[0].kind == "block"])
                                  for i in range(len(POLICIES))])

    def _layers(self, scenario: Scenario, stack: Any, names: tuple[str, ...], sent: float) -> tuple[Any, ...]:
        """What every distinct layer runs and keeps; the same for all pipelines and numbers of GPUs."""
        architecture = build(held(scenario), stack, scenario.training.micro_batch)
        parallel = scenario.parallel
        hidden = parallel.overlap_experts or stack.expert_overlap
        compute = Compute(ProgramBuilder(("compute",), names), stack, joints(
            stack, names, sequence=parallel.sequence_parallel and parallel.tensor > 1, pipelined=parallel.async_tensor,
            dispatched=sent, shares=hidden == "shared"))
        parts, kept, rises, head = {}, {}, {}, 0.0
        for layer in {id(x): x for x in architecture.stack}.values():
            block = layer.kind == "block"
            again = {p: compute.recomputed(layer, p) if block else () for p in POLICIES}
            ahead, back = (items(layer.operators) for items in (compute.forward_items, compute.backward_items))
            if hidden == "batches":  # another micro-batch may hide what travels, under some schedules
                ahead, back, again = staying(ahead), staying(back), {p: staying(items) for p, items in again.items()}
            parts[id(layer)] = ahead, back, again
            if block:
                kept[id(layer)], rises[id(layer)] = zip(*(_held(layer, p) for p in POLICIES), strict=True)
            elif layer.kind == "head":
                head = max(0.0, min(float(sum(layer_profile(layer, "none", True, casts).forward.peak))
                                    for casts in (False, True)))
        blocks = [id(layer) for layer in architecture.stack if layer.kind == "block"]
        return (architecture, parts, np.array([_before([kept[b][i] for b in blocks]) for i in range(len(POLICIES))]),
                np.array([[rises[b][i] for b in blocks] for i in range(len(POLICIES))]).reshape(len(POLICIES), -1),
                head, _widths(scenario, architecture))

    def scenario(self, key: Sequence[int]) -> Scenario:
        """The scenario of a slice, by columns of `_SLICE`."""
        cluster, nodes, tensor, sequence, context, expert, micro, pipeline = key
        base = self.space.clusters[cluster]
        parallel = base.parallel.model_copy(update={
            "strategy": "ddp", "sharding_factor": 1, "tensor": tensor, "sequence_parallel": bool(sequence),
            "context": context, "expert": expert, "pipeline": pipeline, "virtual_stages": 1, "schedule": "1f1b"})
        return base.model_copy(update={
            "cluster": base.cluster.model_copy(update={"nodes": nodes}), "parallel": parallel,
            "training": base.training.model_copy(update={"micro_batch": micro})})

    def _seconds(self, cluster: int, device: Any, stage: Alone, groups: Any, items: Any) -> float:
        """Kernels and inline collectives alone, one after another."""
        known = self.kernel_s.setdefault(cluster, {})
        new = [k for item in items for k in (item.beside if isinstance(item, InlineCall) else (item,))
               if k not in known]
        if new:
            known.update(zip(new, device.times(new).tolist(), strict=True))
        total = 0.0
        for item in items:
            if isinstance(item, InlineCall):
                total += max(stage.alone_s(tuple(groups)[item.call.communicator], item.call),
                             sum(known[k] for k in item.beside))
            else:
                total += known[item]
        return total

    def _update(self, scenario: Scenario, cluster: int, numel: float, shards: int) -> float:
        """The optimizer's own kernels on one rank's share."""
        local = int(numel) // max(1, shards)
        key = (cluster, local)
        if key not in self.update_s:
            training = scenario.training
            kernels = optimizer_kernels(local, 1, training.precision, training.optimizer,
                                        scenario.software.optimizer_kernel, clip=False)
            times = hardware_for(scenario)[0].times(kernels)
            self.update_s[key] = 0.0 if training.optimizer_in_backward else float(times.sum())
        return self.update_s[key]


#: Sums of floats in another order differ by rounding; a bound stays below by this much.
_SURE = 1.0 - 1e-9


def _stack(scenario: Scenario) -> Any:
    software = scenario.software
    return stack_for(software.framework, software.year, software.compile, software.versions, software.modules,
                     fused=software.fused, cuda_graphs=software.cuda_graphs)


def _before(values: Sequence[float]) -> Floats:
    """Sums of what is before each place, and of all."""
    return np.concatenate(([0.0], np.cumsum(np.array(values, dtype=np.float64))))


def _held(layer: Layer, name: str) -> tuple[float, float]:
    """Bytes a block keeps from forward to backward, and what its backward needs above that for a while, at least."""
    profile = layer_profile(layer, name, True)
    added = layer_profile(layer, name, False)
    kept = float(profile.forward.net[_KEPT] - profile.held[_KEPT] - profile.cached[_KEPT])
    return kept, max(0.0, float(min(sum(profile.backward.peak), sum(added.backward.peak))))


def _summed(of: Floats, places: _Places, policies: npt.NDArray[np.int64]) -> Floats:
    """Sums of a table over the blocks of each chunk, by policy: shape (ranks, chunks, policies)."""
    first, end = places.first[..., None], places.end[..., None]
    named, none, full = np.minimum(policies, len(POLICIES) - 1), of[POLICIES.index("none")], of[POLICIES.index("full")]
    turn = first + np.clip(policies - len(POLICIES) + 1 - places.before[..., None], 0, end - first)
    partly = full[turn] - full[first] + none[end] - none[turn]
    found: Floats = np.where(policies < len(POLICIES), of[named, end] - of[named, first], partly)
    return found


def _flight(table: _Table, places: _Places, policies: npt.NDArray[np.int64], schedule: str, steps: int) -> Floats:
    """Bytes of activations of every rank when its first backward reaches its first block, shape (ranks, policies).

    All chunks of one micro-batch are there (of dualpipe, whose chunks see different ones, one chunk), those of the
    warm-up, and what the block's backward needs; or, on the rank of the head, what the head needs.
    """
    ranks, chunks = places.start.shape
    kept = np.maximum(0.0, _summed(table.kept, places, policies) - table.output_bytes)
    one = kept.max(axis=1) if schedule == "dualpipe" else kept.sum(axis=1)
    flying = np.array([_in_flight(schedule, ranks, chunks, steps, rank) for rank in range(ranks)])
    more = np.maximum(0.0, flying - chunks)[:, None] * kept.min(axis=1)
    last = np.maximum(places.end - 1, 0)[..., None]
    count = (places.end - places.first)[..., None]
    partly = policies - len(POLICIES) + 1 - places.before[..., None] >= count  # the chunk's last block is among them
    policy = np.where(policies < len(POLICIES), policies, np.where(
        partly, POLICIES.index("full"), POLICIES.index("none")))
    rises = np.where(count > 0, table.rises[policy, last], 0.0).min(axis=1) if table.rises.size else 0.0
    head = np.where((places.stop == len(table.numel) - 1).any(axis=1), table.head_rises, 0.0)[:, None]
    if schedule == "dualpipe":
        head = np.zeros_like(head)
    found: Floats = np.maximum(one + more + rises, one + head - table.output_bytes)
    return found


def _busy(table: _Table, places: _Places, policies: npt.NDArray[np.int64], steps: int, schedule: str) -> Floats:
    """Seconds of the slowest way through the ranks, per policy."""
    assert table.forward_s is not None and table.backward_s is not None and table.again_s is not None
    both = table.forward_s + table.backward_s
    each = (both[places.stop] - both[places.start])[..., None] + _summed(table.again_s, places, policies)
    work = each.sum(axis=1) * steps * (0.5 if schedule == "dualpipe" else 1.0)
    if schedule and not split(schedule):
        work[1:] += np.cumsum(each[:-1, 0], axis=0)
    slowest: Floats = work.max(axis=0)
    return slowest


def _shares(strategy: npt.NDArray[np.int64], factor: npt.NDArray[np.int64], ranks: int) -> tuple[Floats, Floats]:
    """Over how many ranks parameters, and optimizer states, are split at most."""
    parameters, optimizer = np.ones(len(strategy)), np.ones(len(strategy))
    for index, name in enumerate(STRATEGIES):
        chosen = strategy == index
        if name == "fsdp":
            parameters[chosen] = optimizer[chosen] = factor[chosen]
        elif name in ("zero1", "zero2", "zero3"):
            optimizer[chosen] = ranks
            if name == "zero3":
                parameters[chosen] = ranks
    return parameters, optimizer


def _in_flight(schedule: str, pipeline: int, chunks: int, steps: int, rank: int) -> float:
    """Chunks whose forward a rank has run when its first backward begins, at least."""
    if schedule in ("gpipe", "1f1b", "interleaved"):
        return float(activations(schedule, pipeline, chunks, steps, rank))
    if schedule in ("zb-h1", "zb-h2"):
        return float(activations(schedule, pipeline, chunks, steps, rank, kept_for_weights=0.0))
    return float(chunks)


def _widths(scenario: Scenario, architecture: Architecture) -> dict[str, float]:
    """Bytes per parameter by category, at least (factored states differ from matrix to matrix: none are counted)."""
    precision, optimizer = scenario.training.precision, scenario.training.optimizer
    tensors = [(p.shape, layer.kind == "embedding") for layer in architecture.stack for p in layer.parameters]
    states = 0.0 if optimizer == "adafactor" else min(
        optimizer_state_bytes(tensors, precision, optimizer, flat) for flat in (False, True))
    return {
        "parameters": DTYPE_BYTES[precision.parameters],
        "master_parameters": 0.0 if precision.master == "none" else DTYPE_BYTES[precision.master],
        "gradients": 0.0 if scenario.training.optimizer_in_backward else DTYPE_BYTES[precision.gradients],
        "optimizer_states": states / max(1, architecture.parameters),
    }
