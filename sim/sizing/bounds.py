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
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.api import hardware_for
from sim.errors import UserError
from sim.hardware.outside import outside
from sim.model import build, optimizer_kernels, optimizer_state_bytes
from sim.model.architecture import Architecture, Layer
from sim.model.eager import KINDS, layer_profile
from sim.parallel.compute import Compute
from sim.parallel.layout import Layout
from sim.parallel.lower import cut_groups, held, layout_of
from sim.parallel.model.expert import dispatched
from sim.parallel.model.joints import joints
from sim.parallel.pipeline.actions import placement, split
from sim.parallel.pipeline.bubble import activations
from sim.parallel.pipeline.stages import blocks_per_stage, positions
from sim.program import InlineCall, ProgramBuilder
from sim.scenario import Scenario
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


@dataclass(frozen=True)
class _Table:
    """Layers of one slice, by position: forward, backward and again[policy] seconds, kept[policy] bytes, elements."""

    architecture: Architecture
    forward_s: Floats
    backward_s: Floats
    again_s: dict[str, Floats]
    kept: dict[str, Floats]
    numel: Floats
    output_bytes: float
    widths: dict[str, float]
    fixed_bytes: float
    resident_gradients: bool
    blocks: npt.NDArray[np.bool_]
    kinds: npt.NDArray[np.int16]
    sums: dict[Any, Floats]


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
        self.layers: dict[Any, tuple[Architecture, Any]] = {}

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
        gpus = nodes * scenario.cluster.gpus_per_node
        replicas = gpus // (tensor * context * pipeline)
        steps = (scenario.training.global_batch or 0) // (replicas * micro)
        schedule = SCHEDULES[scheduled] if pipeline > 1 else ""
        chunks = self._chunks(table, pipeline, virtual, schedule)
        recompute, factor = self.space.columns["recompute"][rows], self.space.columns["sharding_factor"][rows]
        strategy = self.space.columns["strategy"][rows]
        policies, at = np.unique(recompute, return_inverse=True)
        again, kept = _by_policy(table, chunks, policies)
        busy = self._busy(table, chunks, again, steps, schedule)  # (policies,)
        time_s = busy[at]
        weights = np.array([sum(table.numel[c.start:c.stop].sum() for c in own) for own in chunks])
        shards, spread = _shares(strategy, factor, replicas * context)
        update = {part: self._update(scenario, cluster, weights[0], int(part)) for part in np.unique(spread)}
        time_s = time_s + np.array([update[part] for part in spread])
        found.time_s[rows] = time_s * _SURE
        found.memory_bytes[rows] = self._memory(table, chunks, kept, weights, schedule, steps, strategy, shards,
                                                spread, at)
        found.capacity_bytes[rows] = hardware_for(scenario)[0].gpu.usable_memory_bytes

    def _chunks(self, table: _Table, pipeline: int, virtual: int, schedule: str) -> list[list[range]]:
        """Positions of the chunks of every pipeline rank."""
        if pipeline == 1:
            return [[range(len(table.numel))]]
        placed = placement(schedule, pipeline, virtual)
        slots = self.space.clusters[0].parallel.split_slots
        counts = blocks_per_stage(len(table.numel) - 2, placed, None, slots.embedding, slots.head)
        return positions(table.architecture, counts, placed)

    def _busy(self, table: _Table, chunks: Sequence[Sequence[range]], again: list[list[Floats]], steps: int,
              schedule: str) -> Floats:
        """Seconds of the slowest way through the ranks, per policy."""
        half = 0.5 if schedule == "dualpipe" else 1.0
        one_piece = schedule != "" and not split(schedule)
        fill = np.zeros(len(again[0][0]))
        slowest = np.zeros(len(fill))
        for own, redone in zip(chunks, again, strict=True):
            work = sum((_over(table.forward_s, c) + _over(table.backward_s, c) + r
                        for c, r in zip(own, redone, strict=True)), np.zeros(len(fill)))
            slowest = np.maximum(slowest, steps * half * work + (fill if one_piece else 0.0))
            fill = fill + _over(table.forward_s, own[0]) + _over(table.backward_s, own[0]) + redone[0]
        return slowest

    def _memory(self, table: _Table, chunks: Sequence[Sequence[range]], kept: list[list[Floats]], weights: Floats,
                schedule: str, steps: int, strategy: npt.NDArray[np.int64], shards: Floats, spread: Floats,
                at: npt.NDArray[np.int64]) -> Floats:
        """Bytes of the fullest rank: states with gradients, or with the activations in flight."""
        w, highest = table.widths, np.zeros(len(at))
        whole_gradients = np.array([STRATEGIES[s] in ("none", "ddp", "zero1") for s in strategy])
        pipeline = len(chunks)
        for rank, (own, held_bytes) in enumerate(zip(chunks, kept, strict=True)):
            flying = _in_flight(schedule, pipeline, len(own), steps, rank)
            per_chunk = np.min(np.array(held_bytes), axis=0)  # (policies,)
            if pipeline > 1:
                per_chunk = per_chunk - table.output_bytes
            flight = np.maximum(0.0, flying * per_chunk)[at]
            split_over = (w["master_parameters"] + w["optimizer_states"]) / spread
            states = weights[rank] * (w["parameters"] / shards + split_over)
            gradients = weights[rank] * w["gradients"] / np.where(whole_gradients, 1.0, spread)
            resident = gradients if table.resident_gradients else 0.0
            highest = np.maximum(highest, states + np.maximum(gradients, resident + flight))
        return highest * _SURE + table.fixed_bytes

    # ------------------------------------------------------------------------------------------------------- tables
    def _table(self, key: tuple[int, ...]) -> _Table:
        if key not in self.tables:
            if len(self.tables) > 64:
                self.tables.pop(next(iter(self.tables)))
            self.tables[key] = self._make(key)
        return self.tables[key]

    def _make(self, key: tuple[int, ...]) -> _Table:
        scenario = self.scenario(key)
        software = scenario.software
        stack = stack_for(software.framework, software.year, software.compile, software.versions, software.modules,
                          fused=software.fused, cuda_graphs=software.cuda_graphs)
        layout = layout_of(scenario)
        groups = cut_groups(scenario, layout)
        sent = dispatched(scenario, stack, groups.get("expert"))
        sliced = (key[0], key[2], key[3], key[4], key[5], key[6], key[7] > 1, scenario.expert_tensor, sent)
        if sliced not in self.layers:
            if len(self.layers) > 256:
                self.layers.pop(next(iter(self.layers)))
            self.layers[sliced] = self._layers(scenario, stack, tuple(groups), sent)
        architecture, parts = self.layers[sliced]
        device, network = hardware_for(scenario)
        stage = _Stage(layout, scenario, network, self.call_s, (key[0], *(layout.sizes.values()), key[5]))
        seconds: dict[int, tuple[float, float, dict[str, float], dict[str, float]]] = {}
        for layer in {id(x): x for x in architecture.stack}.values():
            forward, backward, again, keeps = parts[id(layer)]
            seconds[id(layer)] = (self._seconds(key[0], device, stage, groups, forward),
                                  self._seconds(key[0], device, stage, groups, backward),
                                  {p: self._seconds(key[0], device, stage, groups, i) for p, i in again.items()}, keeps)
        rows = [seconds[id(layer)] for layer in architecture.stack]
        blocks = np.array([layer.kind == "block" for layer in architecture.stack])
        block = next((layer for layer in architecture.stack if layer.kind == "block"), architecture.stack[0])
        capability = device.gpu.compute_capability
        return _Table(
            architecture, np.array([r[0] for r in rows]), np.array([r[1] for r in rows]),
            {p: np.array([r[2][p] for r in rows]) * blocks for p in POLICIES},
            {p: np.array([r[3][p] for r in rows]) * blocks for p in POLICIES},
            np.array([float(layer.numel) for layer in architecture.stack]),
            block.input.elements * DTYPE_BYTES[block.input.dtype], _widths(scenario, architecture),
            outside(capability, stack.kernel_loading, ()).total_bytes, stack.gradient_path == "grad_buffer", blocks,
            _kinds(architecture), {})

    def _layers(self, scenario: Scenario, stack: Any, names: tuple[str, ...], sent: float) -> tuple[Architecture, Any]:
        """What every distinct layer runs and keeps; the same for all pipelines and numbers of GPUs."""
        architecture = build(held(scenario), stack, scenario.training.micro_batch)
        parallel = scenario.parallel
        compute = Compute(ProgramBuilder(("compute",), names), stack, joints(
            stack, names, sequence=parallel.sequence_parallel and parallel.tensor > 1, pipelined=parallel.async_tensor,
            dispatched=sent))
        parts = {}
        for layer in {id(x): x for x in architecture.stack}.values():
            again = {p: compute.recomputed(layer, p) if layer.kind == "block" else () for p in POLICIES}
            keeps = {p: _kept(layer, p) if layer.kind == "block" else 0.0 for p in POLICIES}
            parts[id(layer)] = (compute.forward_items(layer.operators), compute.backward_items(layer.operators), again,
                                keeps)
        return architecture, parts

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

    def _seconds(self, cluster: int, device: Any, stage: _Stage, groups: Any, items: Any) -> float:
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


class _Stage:
    """Collectives inside layers, alone on the links, among the ranks of the first pipeline stage."""

    def __init__(self, layout: Layout, scenario: Scenario, network: Any, known: dict[Any, float], key: Any) -> None:
        self.layout, self.scenario, self.network, self.known, self.key = layout, scenario, network, known, key

    def alone_s(self, group: str, call: Any) -> float:
        key = (self.key, group, call.kind, call.size_bytes, call.dtype)
        if key not in self.known:
            ranks = cut_groups(self.scenario, self.layout)[group]
            coordinate = self.layout.coordinate("pipeline")
            own = ranks[coordinate[ranks[:, 0]] == 0]
            per = self.scenario.cluster.gpus_per_node
            width = self.layout.ranks // self.layout.sizes["pipeline"]
            if width % per and per % width:
                own = own[:1]  # stages begin anywhere within a node: fewer neighbours than the first has are possible
            coflow = self.network.coflow(call.kind, call.size_bytes, own, call.dtype)
            bps = coflow.cap_bps
            for link, load in zip(coflow.links, coflow.loads, strict=True):
                if load > 0:
                    bps = min(bps, self.network.capacity(link) / load)
            self.known[key] = coflow.latency_s + (coflow.size_bytes / bps if coflow.size_bytes else 0.0)
        return self.known[key]


#: Sums of floats in another order differ by rounding; a bound stays below by this much.
_SURE = 1.0 - 1e-9


def _kept(layer: Layer, name: str) -> float:
    """Bytes a block keeps from forward to backward."""
    profile = layer_profile(layer, name, True)
    return float(profile.forward.net[_KEPT] - profile.held[_KEPT] - profile.cached[_KEPT])


def _over(values: Floats, chunk: range) -> Any:
    return values[chunk.start:chunk.stop].sum()


def _by_policy(table: _Table, chunks: Sequence[Sequence[range]], policies: npt.NDArray[np.int64]
               ) -> tuple[list[list[Floats]], list[list[Floats]]]:
    """Seconds run again and bytes kept per chunk of each rank, each of shape (policies,)."""
    through = np.concatenate(([0], np.cumsum(table.blocks)))
    again: list[list[Floats]] = []
    kept: list[list[Floats]] = []
    for own in chunks:
        number = {c: sum(int(through[o.stop] - through[o.start]) for o in own if o.start < c.start) for c in own}
        again.append([_first_blocks(table, table.again_s, c, number[c], policies) for c in own])
        kept.append([_first_blocks(table, table.kept, c, number[c], policies) for c in own])
    return again, kept


def _first_blocks(table: _Table, of: dict[str, Floats], chunk: range, before: int,
                  policies: npt.NDArray[np.int64]) -> Floats:
    """Sum over a chunk for every policy; `before` blocks of the rank come before it."""
    own = slice(chunk.start, chunk.stop)
    key = (id(of), table.kinds[own].tobytes(), before, policies.tobytes())
    if key in table.sums:
        return table.sums[key]
    blocks = table.blocks[own]
    full = np.concatenate(([0.0], np.cumsum(of["full"][own][blocks])))
    none = np.concatenate(([0.0], np.cumsum(of["none"][own][blocks])))
    named = np.array([of[name][own].sum() for name in POLICIES])
    k = np.clip(policies - len(POLICIES) + 1 - before, 0, len(full) - 1)
    partly = full[k] + none[-1] - none[k]
    table.sums[key] = np.where(policies < len(POLICIES), named[np.minimum(policies, len(POLICIES) - 1)], partly)
    return table.sums[key]


def _kinds(architecture: Architecture) -> npt.NDArray[np.int16]:
    """A number per position; equal layers have equal numbers."""
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(id(layer), len(numbers)) for layer in architecture.stack], dtype=np.int16)


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
    """Chunks whose activations a rank holds at once, at least."""
    if schedule in ("gpipe", "1f1b", "interleaved"):
        return float(activations(schedule, pipeline, chunks, steps, rank)) - (1.0 if pipeline > 1 else 0.0)
    return 1.0


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
