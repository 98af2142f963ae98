"""Lower bounds of memory and time for requests: kernels, collectives and copies alone, layer by layer.

Of every forward of a request (the prompt's, and one token's in each piece of the generation) the kernels are those that
a simulation runs (`sim.model.inference`), each alone on the GPU; what is left out is waiting. A stage works through all
parts of the batch in every forward, and a part through all stages, so both bound a token. Weights that are elsewhere
have to arrive in every forward. Memory counts what is held throughout, and the most a forward needs beside it.

In two passes: a row first gets a token without attention, which alone depends on what is in the cache, and all pieces
of the generation once a search comes to it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.api import hardware_for
from sim.hardware import Device, gpu, pageable_bps
from sim.hardware.outside import outside
from sim.model.architecture import Layer
from sim.model.inference.kinds import rank_of
from sim.model.inference.mixed import mixed_rank
from sim.model.inference.rank import Rank, Sum
from sim.parallel.layout import REPLICAS, Layout
from sim.parallel.lower import layout_of
from sim.parallel.serving.flow import Iteration, life_of
from sim.parallel.serving.request import Cut, Piece, cut_of, first_tokens, parts_of, pieces_of
from sim.parallel.sharded.coordinator import Limits
from sim.scenario import Scenario
from sim.sizing.bounds.alone import Alone
from sim.sizing.bounds.steps import Rows
from sim.sizing.space.requests import ServedSpace, served
from sim.sizing.wish import Request
from sim.software import Stack, stack_of
from sim.work import DTYPE_BYTES

Floats = npt.NDArray[np.float64]
#: Sums of floats in another order differ by rounding; a bound stays below by this much.
_SURE = 1.0 - 1e-9
_TOKEN_BYTES = 8


class Forward(NamedTuple):
    """One pass of some sequences through all layers of a slice, by position in the stack, shape (layers,).

    Attributes:
        kernels_s: of the kernels alone; work_j: their energy beside the GPU's constant power.
        host_s: in which the host launches them.
        calls: exchanges of slices, (kind, bytes) to how many of them each layer has.
    """

    kernels_s: Floats
    work_j: Floats
    host_s: Floats
    calls: dict[tuple[str, int], Floats]


class ServedBounds:
    """Lower bounds of all rows of a space of requests.

    Attributes:
        time_s, prompt_s, token_s: seconds of a request, to its first token and of each further one at least.
        memory_bytes, capacity_bytes: of the fullest rank at least, and its capacity. What does not fit has no times.
        work_j: energy of a request's kernels on all GPUs at least, beside the GPUs' constant power.
        coarse: rows whose tokens are still without attention.
        unbounded: rows that not even that is known of yet.
    """

    def __init__(self, space: ServedSpace, until: float = math.inf) -> None:
        """See `sim.sizing.bounds.steps.Bounds` for `until`."""
        self.space, self.until, count = space, until, len(space)
        self.time_s, self.prompt_s, self.token_s = np.zeros(count), np.zeros(count), np.zeros(count)
        self.memory_bytes, self.capacity_bytes, self.work_j = np.zeros(count), np.zeros(count), np.zeros(count)
        self.coarse = np.zeros(count, dtype=bool)
        self._constant_w = np.zeros(count)
        known = _Known({}, {})
        devices = _devices(space)
        of, batches = space.columns["layout"], space.columns["batch"]
        self._layouts: list[_Layout] = []
        for number, scenario in enumerate(space.layouts):
            rows = np.flatnonzero(of == number)
            base = int(space.columns["cluster"][rows[0]])
            one = _Layout(scenario, devices[base], known, _alike(space.clusters[base]))
            self._layouts.append(one)
            self.capacity_bytes[rows] = gpu(scenario.cluster.topology.gpu, None if scenario.cluster.gpu is None else
                                            scenario.cluster.gpu.model_dump()).usable_memory_bytes
            self._constant_w[rows] = devices[base].energy_j((), (), 1.0)
            self.memory_bytes[rows] = [one.memory_bytes(batch) * _SURE for batch in batches[rows].tolist()]
        self.unbounded, self.coarse = self.memory_bytes <= self.capacity_bytes, np.zeros(count, dtype=bool)
        self.go_on()

    def go_on(self) -> None:
        """Bound rows that have none yet, as many as half of the time is enough for; one at least."""
        now = time.monotonic()
        for done, row in enumerate(np.flatnonzero(self.unbounded).tolist()):
            if done and time.monotonic() > now + (self.until - now) / 2:
                break
            self._bound(row, fine=False)
            self.unbounded[row], self.coarse[row] = False, True

    def _bound(self, row: int, fine: bool) -> None:
        columns = self.space.columns
        found = self._layouts[columns["layout"][row]].seconds(int(columns["batch"][row]), fine)
        self.prompt_s[row], self.token_s[row] = found.prompt_s * _SURE, found.token_s * _SURE
        self.time_s[row], self.work_j[row] = found.request_s * _SURE, found.work_j * _SURE

    def energy_j(self, rows: Rows) -> Floats:
        """Energy of a request of rows that takes no longer than `time_s`, joules."""
        found: Floats = self.work_j[rows] + self._constant_w[rows] * self.space.gpus[rows] * self.time_s[rows] * _SURE
        return found

    def request(self, rows: Rows) -> Request:
        """Latencies and tokens of rows."""
        return self.space.request(rows, self.prompt_s[rows], self.token_s[rows])

    def refine(self, _level_s: float, among: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Bound finely what is asked for; the rows whose bounds have changed."""
        return self.refine_at(np.flatnonzero(among & self.coarse).tolist())

    def refine_at(self, rows: Sequence[int]) -> npt.NDArray[np.int64]:
        """The same of rows by number."""
        coarse = [row for row in rows if self.coarse[row]]
        for row in coarse:
            self._bound(row, fine=True)
        self.coarse[coarse] = False
        return np.array(coarse, dtype=np.int64)


def _alike(base: Scenario) -> str:
    """What a base's slices depend on: not on how many GPUs of a node there are."""
    return base.model_dump_json(exclude={"cluster": {"nodes", "gpus_per_node"}, "name": True})


def _devices(space: ServedSpace) -> list[Device]:
    """Of each cluster the GPU of its fewest GPUs in the space: the more there are, the slower the slowest."""
    fewest: dict[str, tuple[int, Device]] = {}
    for number, base in enumerate(space.clusters):
        mine = space.columns["cluster"] == number
        if not mine.any():
            continue
        row = int(np.flatnonzero(mine)[space.gpus[mine].argmin()])
        count, one = int(space.gpus[row]), space.layouts[space.columns["layout"][row]]
        if count < fewest.get(_alike(base), (1 << 60, None))[0]:
            fewest[_alike(base)] = count, hardware_for(one, stack_of(one.software).rank_jitter_s)[0]
    none: list[Device] = [next(iter(fewest.values()))[1]]
    return [fewest[_alike(base)][1] if _alike(base) in fewest else none[0] for base in space.clusters]


class _Known(NamedTuple):
    """Forwards, and bytes of layers, that layouts have in common."""

    forwards: dict[object, Forward]
    sizes: dict[object, Floats]


class _Seconds(NamedTuple):
    prompt_s: float
    token_s: float
    request_s: float
    work_j: float


class _Layout:
    """One layout, whatever its batch.

    Args:
        device: that its kernels run on at best.
        known: of all layouts; `alike` says which of them have slices in common.
    """

    def __init__(self, scenario: Scenario, device: Device, known: _Known, alike: str) -> None:
        self.scenario, self.device, self.run = scenario, device, served(scenario)
        self.stack: Stack = stack_of(scenario.software)
        self.launching = stack_of(scenario.software.model_copy(update={"cuda_graphs": False}))
        self.cut: Cut = cut_of(scenario, self.stack)
        self.first = first_tokens(self.run, scenario)
        self.pieces: tuple[Piece, ...] = pieces_of(self.first, self.run.generate)
        self.layout: Layout = layout_of(scenario)
        network = hardware_for(scenario, self.stack.rank_jitter_s)[1]
        self.alone = Alone(network)
        self._forwards, self._sizes = known.forwards, known.sizes
        self._alike = alike, scenario.parallel.tensor, scenario.parallel.expert
        self._elsewhere_s = self._arriving_s()

    # ---------------------------------------------------------------------------------------------------------- time
    def seconds(self, batch: int, fine: bool) -> _Seconds:
        """Bounds of a request of `batch` sequences.

        Args:
            fine: with the attention of every piece of the generation, else without any.
        """
        if self.run.batching == "continuous":
            return self._in_flight(batch)
        parts = parts_of(batch, self.scenario.parallel.pipeline)
        prompt_s, prompt_j = self._prompt(parts)
        steps = sum(piece.tokens for piece in self.pieces)
        pieces = self.pieces if fine else [piece._replace(tokens=steps) for piece in self.pieces[:1]]
        tokens = [self._token(parts, piece.cached, fine) for piece in pieces]
        whole_s = sum(piece.tokens * one[0] for piece, one in zip(pieces, tokens, strict=True))
        if steps and self._staged:  # of a stage's first forward all parts but one may run beside the prompt's last
            busy = sum(piece.tokens * one[1] for piece, one in zip(pieces, tokens, strict=True))
            whole_s = max(whole_s, float((busy - tokens[0][1]).max()))
        joules = prompt_j + sum(piece.tokens * one[2] for piece, one in zip(pieces, tokens, strict=True))
        ranks = self.layout.ranks / self.scenario.parallel.pipeline
        return _Seconds(prompt_s, whole_s / steps if steps else 0.0, prompt_s + whole_s, joules * ranks)

    def _in_flight(self, batch: int) -> _Seconds:
        """The same under continuous batching, attention and all: the iterations of one request's life."""
        life = life_of(self.run.model_copy(update={"batch": batch}))
        (prompt_s, prompt_j), (whole_s, joules) = (
            np.sum([self._iterations(one) for one in some], axis=0) if some else np.zeros(2)
            for some in (life.opening, life.answering))
        steps = self.run.generate - 1
        return _Seconds(float(prompt_s), float(whole_s) / steps if steps else 0.0, float(prompt_s + whole_s),
                        float(prompt_j + joules) * self.layout.ranks)

    def _iterations(self, one: Iteration) -> tuple[float, float]:
        """Seconds of iterations that are alike, and joules of a rank."""
        key = self._alike, *one[1:]
        if key not in self._forwards:
            self._forwards[key] = self._made(mixed_rank(self.cut.style, self.cut.weights, *one[1:]), attends=True)
        found = self._forwards[key]
        least_s = float(self._seconds_of(found).sum())
        if self.stack.step_sync:
            least_s = max(least_s, float(found.host_s.sum()))
        return one.times * least_s, one.times * float(found.work_j.sum())

    @property
    def _staged(self) -> bool:
        return self.scenario.parallel.pipeline > 1

    def _prompt(self, parts: list[int]) -> tuple[float, float]:
        """Seconds until every part is through all stages, and joules of a rank of every stage."""
        found = [self._forward(part, self.first, 0) for part in parts]
        stages = np.array([self._by_stage(self._seconds_of(one)) for one in found])  # (parts, stages)
        behind = stages[-1][::-1].cumsum()[::-1] - stages[-1]
        least_s = float((stages[0].cumsum() - stages[0] + stages.sum(axis=0) + behind).max())
        host_s = float(self._by_stage(np.sum([one.host_s for one in found], axis=0)).max())
        return self._with_arriving(max(least_s, host_s)), float(sum(one.work_j.sum() for one in found))

    def _token(self, parts: list[int], cached: int, fine: bool) -> tuple[float, Floats, float]:
        """Of one token of every sequence: seconds of a part's way through all stages, seconds of each stage, joules."""
        found = [self._forward(part, 1, cached, fine) for part in parts]
        stages = np.array([self._by_stage(self._seconds_of(one)) for one in found])
        each_s, joules = float(stages.sum(axis=1).min()), float(sum(one.work_j.sum() for one in found))
        if self._staged:
            return each_s, stages.sum(axis=0), joules
        if self.stack.step_sync:  # the host launches nothing before it has read the token
            each_s = max(each_s, float(found[0].host_s.sum()))
        return self._with_arriving(each_s), stages.sum(axis=0), joules

    def _by_stage(self, layers: Floats) -> Floats:
        return np.array([layers[own.start:own.stop].sum() for own in self.cut.own])

    def _seconds_of(self, one: Forward) -> Floats:
        """Kernels and exchanges of every layer."""
        found = one.kernels_s
        for (kind, size), counts in one.calls.items():
            found = found + counts * self.alone.group_s(self.layout, self._uncut_experts, "tensor", kind, size)
        return found

    @property
    def _uncut_experts(self) -> Scenario:
        """Experts of a request are over the tensor ranks, whose communicator is that of the slices."""
        parallel = self.scenario.parallel.model_copy(update={"expert": 1})
        return self.scenario.model_copy(update={"parallel": parallel})

    def _forward(self, part: int, new: int, cached: int, attends: bool = True) -> Forward:
        key = (self._alike, part, new, cached, attends)
        if key not in self._forwards:
            self._forwards[key] = self._made(rank_of(self.cut.style, part, new, cached, self.cut.weights), attends)
        return self._forwards[key]

    def _made(self, rank: Rank, attends: bool) -> Forward:
        stack = rank.architecture().stack
        items = {name: [item for item in rank.forward(layer)
                        if attends or isinstance(item, Sum) or item.category != "attention"]
                 for name, layer in {id(layer): layer for layer in stack}.items()}
        kernels = list(dict.fromkeys(item for of in items.values() for item in of if not isinstance(item, Sum)))
        seconds = dict(zip(kernels, self.device.times(kernels).tolist(), strict=True))
        joules = dict(zip(kernels, self.device.work_j(kernels).tolist(), strict=True))
        software = self.stack if rank.cached or rank.style.kind == "encoder" else self.launching
        launched_s = software.host_forward_s + software.host_module_s
        sums: dict[int, tuple[float, float, float]] = {}
        calls: dict[int, Counter[tuple[str, int]]] = {}
        for layer, of in items.items():
            own = [item for item in of if not isinstance(item, Sum)]
            sums[layer] = (sum(seconds[one] for one in own), sum(joules[one] for one in own),
                           launched_s * sum(one.launches for one in own))
            calls[layer] = Counter((one.kind, round(one.elements * DTYPE_BYTES[one.dtype])) for one in of
                                   if isinstance(one, Sum))
        columns = np.array([sums[id(layer)] for layer in stack]).T
        names = {name for counts in calls.values() for name in counts}
        return Forward(columns[0], columns[1], columns[2], {
            name: np.array([float(calls[id(layer)][name]) for layer in stack]) for name in sorted(names)})

    # ------------------------------------------------------------------------------------------- weights elsewhere
    def _with_arriving(self, seconds: float) -> float:
        """A forward whose weights arrive beside it; what hooks copy is waited for."""
        parallel = self.scenario.parallel
        hooked = parallel.offload.parameters != "none" and parallel.strategy == "ddp"
        return seconds + self._elsewhere_s if hooked else max(seconds, self._elsewhere_s)

    def _arriving_s(self) -> float:
        """Seconds in which the weights that a forward needs can arrive at best."""
        parallel, device = self.scenario.parallel, hardware_for(self.scenario, self.stack.rank_jitter_s)[0]
        place, factor = parallel.offload.parameters, int(parallel.sharding_factor)
        if place == "none" and factor == 1:
            return 0.0
        rank = rank_of(self.cut.style, 1, 1, 1, self.cut.weights)
        blocks = [layer for layer in rank.architecture().stack if layer.kind == "block"]
        size = sum(map(rank.weight_bytes, blocks))
        if parallel.strategy == "ddp":
            return size / pageable_bps() if self.scenario.model.kind == "decoder" else 0.0
        if parallel.strategy == "zero3":  # what is used again soon stays, and what is small is never shared out
            limits, width = Limits(), DTYPE_BYTES[self.scenario.training.precision.parameters]
            small = sum(p.numel for layer in blocks for p in layer.parameters if p.numel <= _SMALL)
            size = max(0.0, size - (limits.live + limits.prefetch + small) * width)
        wire_s = size / self.alone.fastest_bps("all_gather", self.layout.group(REPLICAS, factor)) if factor > 1 else 0.0
        if place == "none":
            return wire_s
        copied_s = device.copy_s("nvme_read" if place == "nvme" else "h2d", size / factor)
        return max(wire_s, copied_s)

    # -------------------------------------------------------------------------------------------------------- memory
    def memory_bytes(self, batch: int) -> float:
        """Bytes of the fullest stage's rank at least."""
        part = parts_of(batch, self.scenario.parallel.pipeline)[0]
        fixed = outside(gpu(self.scenario.cluster.topology.gpu).compute_capability, self.stack.kernel_loading, 0)
        tokens = batch * (self.run.prompt + self.run.generate) * _TOKEN_BYTES
        held = self._weights + self._layers("cache", batch, self.first, 0)
        passes = [(self.first, 0), *((1, piece.cached) for piece in self.pieces[-1:])]
        # an encoder's transients are gone when the cache of what it read is there
        least = (self.scenario.model.kind == "encoder-decoder" or self._elsewhere_s > 0
                 or self.run.batching == "continuous")
        beside = [] if least else [self._layers("transients", part, new, cached) for new, cached in passes]
        found = [held[own.start:own.stop].sum() + max((one[own.start:own.stop].max() for one in beside), default=0.0)
                 for own in self.cut.own]
        return float(max(found)) + tokens + fixed.total_bytes

    @cached_property
    def _weights(self) -> Floats:
        """Bytes of every layer's weights on a GPU of its stage."""
        parallel = self.scenario.parallel
        if parallel.offload.parameters != "none":
            return np.zeros(len(self.cut.architecture.stack))
        found = self._layers("weights", self.run.batch, self.first, 0) / int(parallel.sharding_factor)
        if self._staged:
            head = self.cut.architecture.stack[-1]
            found[-1] += rank_of(self.cut.style, 1, 1, 0, self.cut.weights).shared_bytes(head)
        return found

    def _layers(self, what: str, batch: int, new: int, cached: int) -> Floats:
        """Bytes of every layer: its weights, its cache at the end (but for rounding), what a forward holds in it."""
        key = (what, self._alike, batch, new, cached)
        if key not in self._sizes:
            rank = rank_of(self.cut.style, batch, new, cached, self.cut.weights)
            fed = self.first + self.run.generate - (self.scenario.model.kind == "encoder-decoder")
            of: dict[str, Callable[[Layer], float]] = {
                "weights": rank.weight_bytes, "cache": lambda layer: max(0, rank.cache_bytes(fed, (layer,)) - 1),
                "transients": lambda layer: rank.transient_bytes((layer,))}
            stack = rank.architecture().stack
            known = {name: of[what](layer) for name, layer in {id(layer): layer for layer in stack}.items()}
            self._sizes[key] = np.array([float(known[id(layer)]) for layer in stack])
        return self._sizes[key]


#: Elements below which ZeRO-3 may keep a parameter whole, at most (DeepSpeed config, stage3_param_persistence_threshold
#: is 100,000 by default).
_SMALL = 1_000_000
