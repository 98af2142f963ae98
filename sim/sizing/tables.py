"""Tables of layers: what a slice of the model costs, layer by layer, from which the bounds of all its rows are added up.

A slice is what rows with one cluster, tensor, context, expert and micro-batch share. Its table holds what the rooms
below say of every layer: seconds of its kernels alone (`Device.times`) and of the collectives inside it alone
(`Network.coflow`), bytes it keeps (`layer_profile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.api import hardware_for
from sim.hardware.outside import outside
from sim.model import build, optimizer_state_bytes
from sim.model.architecture import Architecture, Layer
from sim.model.eager import KINDS, layer_profile
from sim.parallel.compute import Compute, is_weight_gradient
from sim.parallel.layout import Layout
from sim.parallel.lower import cut_groups, held, layout_of
from sim.parallel.model.expert import dispatched
from sim.parallel.model.joints import joints
from sim.parallel.pipeline.weights import kept_for_weights
from sim.program import InlineCall, ProgramBuilder
from sim.scenario import Scenario
from sim.sizing.alone import Alone
from sim.sizing.space import POLICIES
from sim.software import Stack, stack_for
from sim.work import DTYPE_BYTES

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_KEPT = KINDS.index("activations")

#: Columns that decide a table of layers.
SLICE = ("cluster", "nodes", "tensor", "sequence_parallel", "context", "expert", "micro_batch", "pipeline")


@dataclass
class Seconds:
    """Kernels and collectives of the layers before each position, alone, one after another; shape (positions + 1,).

    Attributes:
        forward, backward: of layers; `inputs` and `weights`: its parts where a schedule splits it.
        again: what recomputation runs again, per policy and block, summed from the first block on.
    """

    forward: Floats
    backward: Floats
    inputs: Floats
    weights: Floats
    again: Floats


@dataclass
class Table:
    """Layers of one slice by position: elements and bytes; seconds only once a row of the slice may fit.

    Attributes:
        scenario, stack, layout: of the slice, without data parallelism's strategy.
        kept, rises: bytes a block keeps, and its backward's highest point above that, per policy and block; shape
            (policies, blocks), `kept` summed from the first block on: (policies, blocks + 1).
        head_rises: bytes the head's forward needs for a while.
        for_weights: bytes the layers before each position keep between "B" and "W", shape (positions + 1,).
        numel: elements of the layers before each position, shape (positions + 1,).
        through: blocks before each position.
        accumulated: bytes per element of whole gradients that FSDP accumulates between reductions.
        split_cost: time of a block's backward without its weights in its forwards', counted in FLOPs.
    """

    scenario: Scenario
    stack: Stack
    layout: Layout
    architecture: Architecture
    parts: Any
    kept: Floats
    rises: Floats
    head_rises: float
    for_weights: Floats
    numel: Floats
    output_bytes: float
    widths: dict[str, float]
    fixed_bytes: float
    through: Ints
    accumulated: float
    split_cost: float
    staged: dict[Any, Any] = field(default_factory=dict)
    seconds: Seconds | None = None


class Tables:
    """Tables of slices, made when first asked for.

    Args:
        clusters: scenario of each cluster.
    """

    def __init__(self, clusters: Sequence[Scenario]) -> None:
        self.clusters = clusters
        self.kernel_s: dict[Any, dict[Any, float]] = {}
        self.alone = [Alone(hardware_for(one, _stack(one).rank_jitter_s)[1]) for one in clusters]
        self.layers: dict[Any, tuple[Any, ...]] = {}
        self._key: tuple[int, ...] | None = None
        self._table: Table | None = None

    def table(self, key: tuple[int, ...]) -> Table:
        """The table of a slice, by columns of `SLICE`; slices are asked for one after another."""
        if self._key != key or self._table is None:
            self._key, self._table = key, self._make(key)
        return self._table

    def scenario(self, key: Sequence[int]) -> Scenario:
        """The scenario of a slice, by columns of `SLICE`."""
        cluster, nodes, tensor, sequence, context, expert, micro, pipeline = key
        base = self.clusters[cluster]
        parallel = base.parallel.model_copy(update={
            "strategy": "ddp", "sharding_factor": 1, "tensor": tensor, "sequence_parallel": bool(sequence),
            "context": context, "expert": expert, "pipeline": pipeline, "virtual_stages": 1, "schedule": "1f1b"})
        return base.model_copy(update={
            "cluster": base.cluster.model_copy(update={"nodes": nodes}), "parallel": parallel,
            "training": base.training.model_copy(update={"micro_batch": micro})})

    def _make(self, key: tuple[int, ...]) -> Table:
        scenario = self.scenario(key)
        stack, layout = _stack(scenario), layout_of(scenario)
        groups = cut_groups(scenario, layout)
        sent = dispatched(scenario, stack, groups.get("expert"))
        sliced = (key[0], key[2], key[3], key[4], key[5], key[6], key[7] > 1, scenario.expert_tensor, sent)
        if sliced not in self.layers:
            if len(self.layers) > 256:
                self.layers.pop(next(iter(self.layers)))
            self.layers[sliced] = _layers(scenario, stack, tuple(groups), sent)
        architecture, parts, kept, rises, head, for_weights, widths, cost = self.layers[sliced]
        row = architecture.stack
        block = next((layer for layer in row if layer.kind == "block"), row[0])
        capability = hardware_for(scenario)[0].gpu.compute_capability
        return Table(
            scenario, stack, layout, architecture, parts, kept, rises, head, for_weights,
            _before([float(layer.numel) for layer in row]), block.input.elements * DTYPE_BYTES[block.input.dtype],
            widths, outside(capability, stack.kernel_loading, ()).total_bytes,
            np.concatenate(([0], np.cumsum([layer.kind == "block" for layer in row]))).astype(np.int64),
            _accumulated(scenario), cost)

    def timed(self, table: Table, key: tuple[int, ...]) -> Seconds:
        """A table's seconds."""
        if table.seconds is None:
            groups = cut_groups(table.scenario, table.layout)
            seconds = {id(layer): self._layer_s(key, table, groups, layer)
                       for layer in {id(x): x for x in table.architecture.stack}.values()}
            rows = [(layer, *seconds[id(layer)]) for layer in table.architecture.stack]
            again = [_before([r[5][i] for r in rows if r[0].kind == "block"]) for i in range(len(POLICIES))]
            table.seconds = Seconds(*(_before([r[i] for r in rows]) for i in range(1, 5)), np.array(again))
        return table.seconds

    def _layer_s(self, key: tuple[int, ...], table: Table, groups: Any, layer: Layer) -> tuple[Any, ...]:
        forward, backward, inputs, weights, again = table.parts[id(layer)]
        return (*(self._seconds(key, table, groups, items) for items in (forward, backward, inputs, weights)),
                [self._seconds(key, table, groups, again[p]) for p in POLICIES])

    def _seconds(self, key: tuple[int, ...], table: Table, groups: Any, items: Any) -> float:
        """Kernels and inline collectives alone, one after another."""
        known, device = self.kernel_s.setdefault(key[0], {}), hardware_for(table.scenario)[0]
        new = [k for item in items for k in (item.beside if isinstance(item, InlineCall) else (item,))
               if k not in known]
        if new:
            known.update(zip(new, device.times(new).tolist(), strict=True))
        total, names = 0.0, tuple(groups)
        for item in items:
            if isinstance(item, InlineCall):
                call = item.call
                total += max(
                    self.alone[key[0]].group_s(table.layout, table.scenario, names[call.communicator], call.kind,
                                               call.size_bytes, key[5]),
                    sum(known[k] for k in item.beside))
            else:
                total += known[item]
        return total


def _layers(scenario: Scenario, stack: Stack, names: tuple[str, ...], sent: float) -> tuple[Any, ...]:
    """What every distinct layer runs and keeps; the same for all pipelines and numbers of GPUs."""
    architecture = build(held(scenario), stack, scenario.training.micro_batch)
    parallel = scenario.parallel
    compute = Compute(ProgramBuilder(("compute",), names), stack, joints(
        stack, names, sequence=parallel.sequence_parallel and parallel.tensor > 1, pipelined=parallel.async_tensor,
        dispatched=sent))
    parts, kept, rises, waiting, head = {}, {}, {}, {}, 0.0
    for layer in {id(x): x for x in architecture.stack}.values():
        block = layer.kind == "block"
        again = {p: compute.recomputed(layer, p) if block else () for p in POLICIES}
        parts[id(layer)] = (compute.forward_items(layer.operators), *(
            compute.backward_items(layer.operators, weights) for weights in ("with", "without", "only")), again)
        waiting[id(layer)] = float(kept_for_weights(layer))
        if block:
            kept[id(layer)], rises[id(layer)] = zip(*(_held(layer, p) for p in POLICIES), strict=True)
        elif layer.kind == "head":
            head = max(0.0, min(float(sum(layer_profile(layer, "none", True, casts).forward.peak))
                                for casts in (False, True)))
    blocks = [id(layer) for layer in architecture.stack if layer.kind == "block"]
    return (architecture, parts, np.array([_before([kept[b][i] for b in blocks]) for i in range(len(POLICIES))]),
            np.array([[rises[b][i] for b in blocks] for i in range(len(POLICIES))]).reshape(len(POLICIES), -1),
            head, _before([waiting[id(layer)] for layer in architecture.stack]), _widths(scenario, architecture),
            _split_cost(architecture))


def _accumulated(scenario: Scenario) -> float:
    precision = scenario.training.precision
    if scenario.parallel.reduce_every_micro_step:
        return 0.0
    return min(DTYPE_BYTES[precision.gather], DTYPE_BYTES[precision.reduce])


def _split_cost(architecture: Architecture) -> float:
    """As `sim.parallel.pipeline.lower` counts it for searched orders."""
    block = next((layer for layer in architecture.stack if layer.kind == "block"), None)
    if block is None or not block.forward_flops:
        return 1.0
    weight = sum(k.flops for op in block.operators for k in op.backward if is_weight_gradient(k))
    return max(0.0, block.backward_flops - weight) / block.forward_flops


def _stack(scenario: Scenario) -> Stack:
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
