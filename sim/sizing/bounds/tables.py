"""Tables of layers: what a slice of the model costs, layer by layer, from which bounds of all its rows are added up.

A slice is what rows with one cluster, tensor, context, expert, pipeline and micro-batch share. Its table holds what the
rooms below say of every layer: seconds of its kernels alone (`Device.times`) and of the collectives inside it alone
(`Network.coflow`), and, once asked for, bytes it keeps (`layer_profile`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.api import hardware_for
from sim.hardware import Device, gpu
from sim.hardware.outside import outside
from sim.model import build, layers_state_bytes
from sim.model.architecture import Architecture, Layer
from sim.model.eager import KINDS, layer_profile
from sim.model.tuning import QUANTISED
from sim.parallel.compute import Compute, is_weight_gradient
from sim.parallel.layout import Layout
from sim.parallel.lower import context_groups, cut_groups, held, layout_of, wired
from sim.parallel.model.expert import dispatched, overlap_habit, pairs, staying
from sim.parallel.model.joints import joints
from sim.parallel.pipeline.weights import kept_for_weights
from sim.parallel.support.check import like_fsdp
from sim.program import InlineCall, ProgramBuilder
from sim.scenario import Scenario
from sim.sizing.bounds.alone import Alone
from sim.sizing.space.policies import POLICIES, possible
from sim.software import Stack, stack_of
from sim.work import DTYPE_BYTES, Kernel

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: What stays from a block's forward to its backward: saved tensors, autocast's copies of weights among them.
_KEPT = [KINDS.index(kind) for kind in ("activations", "gathered_parameters")]

#: Columns that decide a table of layers.
SLICE = ("cluster", "nodes", "tensor", "sequence_parallel", "context", "expert", "expert_tensor", "micro_batch",
         "pipeline")
#: Parts of a layer that take time: forward, backward, its inputs' and its weights' part where a schedule splits it.
_PARTS = 4


class Span(NamedTuple):
    """A row of kernels and collectives: seconds of the kernels, joules of all of them, of each collective (group, kind,
    bytes) how long the kernels beside it take, and seconds in which the host launches all."""

    kernels_s: float
    work_j: float
    calls: tuple[tuple[str, str, int, float], ...]
    host_s: float


class Kept(NamedTuple):
    """Bytes of layers.

    Attributes:
        kept, rises: bytes a block keeps, and its backward's highest point above that, per policy and block; shape
            (policies, blocks), `kept` summed from the first block on: (policies, blocks + 1).
        head_rises: bytes the head's forward needs for a while.
        for_weights: bytes the layers before each position keep between "B" and "W", shape (positions + 1,).
    """

    kept: Floats
    rises: Floats
    head_rises: float
    for_weights: Floats


class Seconds(NamedTuple):
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


class Layers:
    """The layers of a slice, which are the same for all pipelines and numbers of GPUs.

    Attributes:
        index: number of every position's layer among the distinct ones.
        spans: of every distinct layer the parts of `Seconds`, then recomputation by policy.
        numel: elements of the layers before each position, shape (positions + 1,); `through`: blocks; `frozen`: bytes
            of what is not trained; `whole`: bytes of all parameters as FSDP gathers them and keeps them until backward,
            at least; `routed`: elements of routed experts.
        work_j: energy of forward and backward of all layers beside a GPU's constant part; again_j: of recomputation,
            per policy and block, summed from the first block on.
    """

    def __init__(self, scenario: Scenario, stack: Stack, names: tuple[str, ...], sent: float, device: Device) -> None:
        self.architecture = build(held(_gathering(scenario, stack)), stack, scenario.training.micro_batch)
        row, parallel = self.architecture.stack, scenario.parallel
        #: What is tried under each of `POLICIES`: nothing, where a policy cannot be.
        self.policies = [p if possible(p, scenario, stack) else "none" for p in POLICIES]
        self.distinct = list({id(x): x for x in row}.values())
        number = {id(layer): i for i, layer in enumerate(self.distinct)}
        self.index = np.array([number[id(layer)] for layer in row])
        hidden = parallel.overlap_experts or overlap_habit(scenario, stack)
        compute = Compute(ProgramBuilder(("compute",), names), stack, joints(
            stack, names, sequence=parallel.sequence_parallel and parallel.tensor > 1, pipelined=parallel.async_tensor,
            dispatched=sent, shares=hidden == "shared", parts=parallel.tensor,
            sms=gpu(scenario.cluster.topology.gpu).sms, sequences=scenario.training.micro_batch))
        items = [[compute.forward_items(layer.operators), *(
            compute.backward_items(layer.operators, weights) for weights in ("with", "without", "only")), *(
            _again(compute, layer, p) if layer.kind == "block" else () for p in self.policies)]
            for layer in self.distinct]
        kernels = list(dict.fromkeys(k for of in items for part in of for item in part for k in _kernels(item)))
        known = dict(zip(kernels, zip(device.times(kernels).tolist(), device.work_j(kernels).tolist(), strict=True),
                         strict=True))
        self.names, self._items = names, items
        launched = [compute.launched_s if i in (1, 2, 3) else compute.called_s for i in range(len(items[0]))]
        self.spans = [[_span(part, names, known, cost) for part, cost in zip(of, launched, strict=True)]
                      for of in items]
        #: The same without tokens on their way, where another micro-batch may hide them.
        self.staying = self.spans if hidden != "batches" or "expert" not in names else [
            [_span(staying(part, names.index("expert")), names, known, cost)
             for part, cost in zip(of, launched, strict=True)] for of in items]
        joules = np.array([[span.work_j for span in of] for of in self.spans])[self.index]
        self.blocks = np.array([layer.kind == "block" for layer in row])
        self.work_j = float(joules[:, :2].sum())
        self.again_j = np.concatenate((np.zeros((1, len(POLICIES))),
                                       np.cumsum(joules[self.blocks, _PARTS:], axis=0))).T
        self.through = np.concatenate(([0], np.cumsum(self.blocks))).astype(np.int64)
        self.numel = before([float(layer.numel) for layer in row])
        self.frozen = before([float(sum(tensor.size_bytes for tensor in layer.frozen)) for layer in row])
        self.routed = before([float(layer.routed) for layer in row])
        wire = DTYPE_BYTES[scenario.training.precision.gather]
        tuned = any(layer.frozen for layer in row)  # an embedding without a backward goes with its last forward
        self.whole = before([layer.numel * wire + sum(
            tensor.pieces[0] if tensor.dtype in QUANTISED else tensor.numel * wire for tensor in layer.frozen)
            if layer.kind == "block" or not tuned else 0.0 for layer in row])
        self._scenario = scenario
        self.block = next((layer for layer in row if layer.kind == "block"), row[0])
        self.output_bytes = self.block.input.elements * DTYPE_BYTES[self.block.input.dtype]

    @cached_property
    def host(self) -> Seconds:
        """Seconds in which the host launches layers, one after another."""
        return _added(self, [[span.host_s for span in of] for of in self.spans])

    @cached_property
    def widths(self) -> dict[str, float]:
        """Bytes per parameter by category, at least."""
        return _widths(self._scenario, self.architecture)

    @cached_property
    def split_cost(self) -> float:
        """Time of a block's backward without its weights in its forwards', counted in FLOPs as for searched orders
        (`sim.parallel.pipeline.lower`)."""
        block = self.block
        if not block.forward_flops:
            return 1.0
        weight = sum(k.flops for op in block.operators for k in op.backward if is_weight_gradient(k))
        return max(0.0, block.backward_flops - weight) / block.forward_flops

    @cached_property
    def kernel_counts(self) -> tuple[Counter[Kernel], list[Counter[Kernel]]] | None:
        """How often kernels outside collectives run in forward and backward of all layers, and in recomputing one
        block, by policy; None where blocks differ."""
        base: Counter[Kernel] = Counter()
        for i, often in Counter(self.index.tolist()).items():
            for part in self._items[i][:2]:
                for item in part:
                    if isinstance(item, Kernel):
                        base[item] += often
        kinds = {i for i, layer in enumerate(self.distinct) if layer.kind == "block"}
        if len(kinds) != 1:
            return None
        return base, [Counter(item for item in part if isinstance(item, Kernel))
                      for part in self._items[kinds.pop()][_PARTS:]]

    @cached_property
    def kept(self) -> Kept:
        """What layers keep."""
        kept, rises, head = {}, {}, 0.0
        for layer in self.distinct:
            if layer.kind == "block":
                kept[id(layer)], rises[id(layer)] = zip(*(_held(layer, p) for p in self.policies), strict=True)
            elif layer.kind == "head":
                policies = ("none", "full") if layer.further else ("none",)
                head = max(0.0, min(float(sum(layer_profile(layer, policy, True, casts).forward.peak))
                                    for casts in (False, True) for policy in policies))
        blocks = [id(layer) for layer in self.architecture.stack if layer.kind == "block"]
        waiting = np.array([float(kept_for_weights(layer)) for layer in self.distinct])
        return Kept(np.array([before([kept[b][i] for b in blocks]) for i in range(len(POLICIES))]),
                    np.array([[rises[b][i] for b in blocks] for i in range(len(POLICIES))]).reshape(len(POLICIES), -1),
                    head, before(waiting[self.index]))


@dataclass
class Table:
    """A slice.

    Attributes:
        scenario, stack, layout: of the slice, without data parallelism's strategy.
        device, alone: of its cluster.
        seconds, staying: see there; all that is in line, and without tokens on their way where they may be hidden.
        staged: places of chunks, by what decides them.
    """

    scenario: Scenario
    stack: Stack
    layout: Layout
    device: Device
    alone: Alone
    layers: Layers
    seconds: Seconds
    staying: Seconds
    staged: dict[Any, Any] = field(default_factory=dict)
    _pairs: dict[tuple[str, str], tuple[bool, bool]] = field(default_factory=dict)

    @cached_property
    def precision(self) -> Any:
        """Dtypes of a strategy that gathers parameters."""
        return _gathering(self.scenario, self.stack).training.precision

    @property
    def accumulated(self) -> float:
        """Bytes per element of whole gradients that FSDP accumulates between reductions."""
        precision = self.precision
        if self.scenario.parallel.reduce_every_micro_step:
            return 0.0
        return min(DTYPE_BYTES[precision.gather], DTYPE_BYTES[precision.reduce])

    def shards(self, strategy: str) -> bool:
        """Whether a strategy shards parameters as FSDP does in this stack."""
        return like_fsdp(strategy, self.stack.gradient_path == "ipg")

    def apart(self, ranks: float) -> float:
        """Of so many ranks that share states at most those that hold the same routed experts."""
        parallel = self.scenario.parallel
        wide = parallel.tensor if self.scenario.expert_tensor < parallel.tensor else 1
        return max(1.0, ranks * wide / parallel.expert)

    @cached_property
    def fixed_bytes(self) -> float:
        """What a GPU holds beside tensors for certain: NCCL's buffers depend on where a layout's ranks lie."""
        return float(outside(self.device.gpu.compute_capability, self.stack.kernel_loading, 0).total_bytes)

    @cached_property
    def work_s(self) -> float:
        """All layers' forward and backward of one micro-batch at least, whatever the schedule: of the GPUs or of the
        hosts that launch them."""
        whole, staying = (float(one.forward[-1] + one.backward[-1]) for one in (self.seconds, self.staying))
        paired = self.paired("none", "interleaved", np.zeros(1, dtype=np.int64)).any()
        host = float(self.layers.host.forward[-1] + self.layers.host.backward[-1])
        return max(host, staying, whole - staying) if paired else max(host, whole)

    def paired(self, strategy: str, schedule: str, policies: Ints) -> npt.NDArray[np.bool_]:
        """Of policies whether the backward of another micro-batch hides tokens on their way."""
        if self.staying is self.seconds:
            return np.zeros(len(policies), dtype=bool)
        if (strategy, schedule) not in self._pairs:
            scenario = self.scenario
            parallel = scenario.parallel.model_copy(update={"strategy": strategy, "schedule": schedule or "1f1b"})
            some, blocks = (pairs(scenario.model_copy(update={
                "parallel": parallel, "training": scenario.training.model_copy(update={"recompute": policy})}),
                self.stack) for policy in ("none", "full"))
            self._pairs[strategy, schedule] = some, blocks
        some, blocks = self._pairs[strategy, schedule]
        blockwise = (policies == POLICIES.index("full")) | (policies >= len(POLICIES))
        return np.where(blockwise, blocks, some)


class Tables:
    """Tables of slices, made when first asked for.

    Args:
        clusters: scenario of each cluster, with the fewest nodes that are asked for.
    """

    def __init__(self, clusters: Sequence[Scenario]) -> None:
        self.clusters = clusters
        self.stacks = [_stack(one) for one in clusters]
        jitters_s = [stack.rank_jitter_s for stack in self.stacks]
        self.devices = [hardware_for(one, jitter_s)[0] for one, jitter_s in zip(clusters, jitters_s, strict=True)]
        self.alone = [Alone(hardware_for(_on_one_node(one), jitter_s)[1])
                      for one, jitter_s in zip(clusters, jitters_s, strict=True)]
        self._layers: dict[Any, Layers] = {}

    def table(self, key: tuple[int, ...], schedule: str = "1f1b") -> Table:
        """The table of a slice, by columns of `SLICE`.

        Args:
            schedule: stages of some are on one rank, which then holds a tied table once.

        Raises:
            UserError: the model cannot be cut so.
        """
        cluster, scenario = key[0], self._scenario(key, schedule)
        stack, layout = self.stacks[cluster], layout_of(scenario)
        groups = cut_groups(scenario, layout) if scenario.parallel.expert > 1 else None
        names = tuple(groups) if groups is not None else (
            "data", *(["tensor"] if scenario.parallel.tensor > 1 else ()), *context_groups(scenario, layout))
        sent = dispatched(scenario, stack, groups.get("expert") if groups is not None else None)
        cut = (cluster, *key[2:-1], key[-1] > 1)  # all but how many nodes and stages
        same = (cut, sent, held(scenario).model.tied_embeddings)
        if same not in self._layers:
            if len(self._layers) > 4096:
                self._layers.pop(next(iter(self._layers)))
            self._layers[same] = Layers(scenario, stack, names, sent, self.devices[cluster])
        layers, alone = self._layers[same], self.alone[cluster]
        seconds = _seconds(layers, layers.spans, alone, layout, scenario)
        staying = seconds if layers.staying is layers.spans else _seconds(layers, layers.staying, alone, layout,
                                                                          scenario)
        return Table(scenario, stack, layout, self.devices[cluster], alone, layers, seconds, staying)

    def _scenario(self, key: Sequence[int], schedule: str) -> Scenario:
        cluster, nodes, tensor, sequence, context, expert, slices, micro, pipeline = key
        base = self.clusters[cluster]
        parallel = base.parallel.model_copy(update={
            "strategy": "ddp", "sharding_factor": 1, "tensor": tensor, "sequence_parallel": bool(sequence),
            "context": context, "expert": expert, "expert_tensor": slices if expert > 1 else None,
            "pipeline": pipeline, "virtual_stages": 1, "schedule": schedule})
        return base.model_copy(update={
            "cluster": base.cluster.model_copy(update={"nodes": nodes}), "parallel": parallel,
            "training": base.training.model_copy(update={"micro_batch": micro})})


def _again(compute: Compute, layer: Layer, policy: str) -> tuple[Kernel | InlineCall, ...]:
    """What recomputation of a layer runs for certain: only ZeRO-3 shares out the inputs it begins with."""
    items = compute.recomputed(layer, policy)
    return items[len(compute.checkpoint(layer)):] if policy == "full" else items


def _gathering(scenario: Scenario, stack: Stack) -> Scenario:
    """The scenario under a strategy that gathers parameters: where these are narrowed on the wire there are no casts in
    the layers, so that no other strategy's layers take less."""
    sharded = scenario.model_copy(update={"parallel": scenario.parallel.model_copy(update={"strategy": "fsdp"})})
    return wired(sharded, stack)


def _kernels(item: Kernel | InlineCall) -> tuple[Kernel, ...]:
    return item.beside if isinstance(item, InlineCall) else (item,)


def _span(items: Sequence[Kernel | InlineCall], names: tuple[str, ...], known: dict[Kernel, tuple[float, float]],
          cost: Callable[[Kernel | InlineCall], float]) -> Span:
    calls = tuple((names[item.call.communicator], item.call.kind, item.call.size_bytes,
                   sum(known[k][0] for k in item.beside)) for item in items if isinstance(item, InlineCall))
    return Span(sum(known[item][0] for item in items if isinstance(item, Kernel)),
                sum(known[k][1] for item in items for k in _kernels(item)), calls, sum(map(cost, items)))


def _seconds(layers: Layers, spans: list[list[Span]], alone: Alone, layout: Layout, scenario: Scenario) -> Seconds:
    """Spans on the links of a slice."""
    return _added(layers, [[span.kernels_s + sum(max(beside, alone.group_s(layout, scenario, group, kind, size))
                                                 for group, kind, size, beside in span.calls) for span in of]
                           for of in spans])


def _added(layers: Layers, of: list[list[float]]) -> Seconds:
    """What distinct layers take, as sums along the stack."""
    rows = np.array(of)[layers.index]
    sums = np.concatenate((np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0))).T
    again = np.cumsum(rows[layers.blocks, _PARTS:], axis=0)
    forward, backward, inputs, weights = sums[:_PARTS]
    return Seconds(forward, backward, inputs, weights, np.concatenate((np.zeros((1, len(POLICIES))), again)).T)


def _stack(scenario: Scenario) -> Stack:
    return stack_of(scenario.software)


def before(values: Sequence[float] | Floats) -> Floats:
    """Sums of what is before each place, and of all."""
    return np.concatenate(([0.0], np.cumsum(np.array(values, dtype=np.float64))))


def _held(layer: Layer, name: str) -> tuple[float, float]:
    """Bytes a block keeps from forward to backward, and what its backward needs above that for a while, at least."""
    profile = layer_profile(layer, name, True)
    added = layer_profile(layer, name, False)
    kept = float(sum(profile.forward.net[kind] - profile.held[kind] - profile.cached[kind] for kind in _KEPT))
    return kept, max(0.0, float(min(sum(profile.backward.peak), sum(added.backward.peak))))


def _widths(scenario: Scenario, architecture: Architecture) -> dict[str, float]:
    """Bytes per parameter by category, at least (factored states differ from matrix to matrix: none are counted; of
    Muon's, one of every parameter: a stage may hold nothing but matrices)."""
    precision, optimizer = scenario.training.precision, scenario.training.optimizer
    least = "sgd-momentum" if optimizer == "muon" else optimizer
    states = 0.0 if optimizer == "adafactor" else min(
        layers_state_bytes(architecture.stack, precision, least, flat) for flat in (False, True))
    return {
        "parameters": DTYPE_BYTES[precision.parameters],
        "master_parameters": 0.0 if precision.master == "none" else DTYPE_BYTES[precision.master],
        "gradients": 0.0 if scenario.training.optimizer_in_backward else DTYPE_BYTES[precision.gradients],
        "optimizer_states": states / max(1, architecture.parameters),
    }


def _on_one_node(scenario: Scenario) -> Scenario:
    return scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update={"nodes": 1})})
