"""Lower bounds of memory and of step time for the rows of a space, from tables of layers.

In two passes. A slice of the model (`tables.SLICE`) first gets a coarse bound, what its layers alone take a mean rank;
rows of the slices that a search comes to are then bounded finely, schedule by schedule (`held`: bytes, `times`:
seconds). Where one micro-batch of a size is too much for any layout of a slice, larger ones are not looked at. Slices
may be shared out over processes: what comes out is the same. Where time is limited, slices that it did not suffice for
have no bound yet; they are taken in an order that spreads them over the space.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.errors import UserError
from sim.parallel.pipeline.actions import placement
from sim.parallel.pipeline.stages import positions, split_of
from sim.scenario import Scenario
from sim.scenario.fields.schema import TWO_CHUNKS
from sim.sizing.bounds.held import Places, flight, fullest, least, summed, ways_of
from sim.sizing.bounds.orders import facts
from sim.sizing.bounds.outside import kept_widths, of
from sim.sizing.bounds.tables import SLICE, Floats, Ints, Table, Tables
from sim.sizing.bounds.times import Times
from sim.sizing.space.layouts import SCHEDULES, STRATEGIES, Space
from sim.sizing.wish import Request

#: Numbers of rows.
Rows = npt.NDArray[np.int64] | slice

#: Columns that decide a group of rows, beside those of its slice.
_STAGED = ("virtual_stages", "schedule")
#: Columns of a slice that are shared out together: micro-batches and pipelines of one cut have layers in common.
_CUT = 5
#: Sums of floats in another order differ by rounding; a bound stays below by this much.
_SURE = 1.0 - 1e-9
#: Groups from which sharing out is worth it, and slices of which few have layers in common.
_MANY, _SEVERAL = 500, 20
#: Tokens of a micro-batch on one rank beyond which kernels have long had all they gain, and little fits.
_MANY_TOKENS = 65_536
#: A step of the fine pass goes at least this far beyond the lowest coarse bound that is left.
_STRIDE = 1.04


class _Group(NamedTuple):
    """Rows that share a slice and a schedule: every way of data parallelism with every policy, in this order."""

    key: tuple[int, ...]
    strategy: Ints
    factor: Ints
    policies: Ints


class Bounds:
    """Lower bounds of all rows, the finer the more was asked of them.

    Args:
        executor: processes that work out a share each, where there is enough to do; shares: how many of them.
        until: of `time.monotonic`, when there is no time left to bound anything; the coarse pass takes a third of it.

    Attributes:
        time_s, memory_bytes, capacity_bytes: of every row, shape (rows,): seconds of a step at least (inf: lowering
            refuses it), bytes of the fullest rank at least, its capacity. Memory is 0 where the fine pass has not been.
        work_j: energy of a step's kernels on all GPUs at least, beside the GPUs' constant power.
        coarse: rows where it has not.
        unbounded: rows that not even the coarse pass has been at; their bounds are 0.
    """

    def __init__(self, space: Space, executor: Executor | None = None, shares: int = 1,
                 until: float = math.inf) -> None:
        self.space, self.executor, self.shares, self.until = space, executor, shares, until
        columns = space.columns
        self.clusters = _least(space)
        starts = np.flatnonzero(_changes(space, (*SLICE, *_STAGED)))  # rows of a group lie together
        self.edges = np.concatenate((starts, [len(space)]))
        keys = np.stack([columns[name][starts] for name in (*SLICE, *_STAGED)], axis=1)
        self._keys = [tuple(key) for key in keys.tolist()]
        slices, of = np.unique(keys[:, :len(SLICE)], axis=0, return_inverse=True)
        self._slices, self._slice_of = [tuple(key) for key in slices.tolist()], of.reshape(-1)
        self._unknown = np.ones(len(self._slices), dtype=bool)
        self._group_s, self._left = np.zeros(len(starts)), np.zeros(len(starts), dtype=bool)
        self.time_s, self.memory_bytes, self.work_j = (np.zeros(len(space)) for _ in range(3))
        self.coarse, self.unbounded = np.zeros(len(space), dtype=bool), np.ones(len(space), dtype=bool)
        self.go_on()
        devices = _tables(self.clusters).devices
        self._constant_w = np.array([device.energy_j((), (), 1.0) for device in devices])
        capacity = [device.gpu.usable_memory_bytes for device in devices]
        self.capacity_bytes = np.array(capacity, dtype=np.float64)[columns["cluster"]]

    def go_on(self) -> None:
        """Coarse bounds of slices that have none, as many as a third of the time is enough for; one at least."""
        now = time.monotonic()
        self._coarsely(np.flatnonzero(self._unknown), now + (self.until - now) / 3)

    def bound_at(self, rows: npt.NDArray[np.int64]) -> None:
        """Coarse bounds of the slices of some rows alone, as many as there is time for."""
        groups = np.unique(np.searchsorted(self.edges, rows[self.unbounded[rows]], side="right") - 1)
        self._coarsely(np.unique(self._slice_of[groups]), self.until, _SEVERAL, len(SLICE) - 1)

    def _coarsely(self, todo: npt.NDArray[np.intp], until: float, shared: int = _MANY, cut: int = _CUT) -> None:
        """Bound slices; so many are shared out, those alike in the first columns together."""
        found = self._shared(_coarse, [self._slices[number] for number in todo.tolist()], until, shared, cut)
        reached = np.array([one is not None for one in found], dtype=bool)
        figures = np.zeros((len(self._slices), 2))
        figures[todo[reached]] = [one for one in found if one is not None]
        self._unknown[todo[reached]] = False
        new = np.isin(self._slice_of, todo[reached])
        seconds, joules = figures[self._slice_of].T
        self._group_s[new], self._left[new] = seconds[new], np.isfinite(seconds[new])
        sizes = np.diff(self.edges)
        rows = np.flatnonzero(np.repeat(new, sizes))
        self.time_s[rows], self.work_j[rows] = np.repeat(seconds, sizes)[rows], np.repeat(joules, sizes)[rows]
        self.coarse[rows], self.unbounded[rows] = np.isfinite(self.time_s[rows]), False

    def bound(self, rows: Sequence[int]) -> None:
        """Bound finely rows that were added, which differ in what they recompute alone."""
        columns = self.space.columns
        strategy, factor, recompute = (columns[name][list(rows)].astype(np.int64)
                                       for name in ("strategy", "sharding_factor", "recompute"))
        key = tuple(int(columns[name][rows[0]]) for name in (*SLICE, *_STAGED))
        found = _fine((self.clusters, [_Group(key, strategy[:1], factor[:1], recompute)], math.inf))[0]
        assert found is not None
        self.time_s[rows], self.memory_bytes[rows], self.work_j[rows] = found
        self.unbounded[rows] = False

    def add(self, fewer: int | None, more: int, count: int) -> None:
        """So many rows between two that recompute fewer and more: they take as long as the one, and hold as much as the
        other, at least. Without one that recomputes fewer nothing is said of their time."""
        for name, row in (("time_s", fewer), ("work_j", fewer), ("memory_bytes", more), ("capacity_bytes", more),
                          ("unbounded", more)):
            column = getattr(self, name)
            value = np.zeros(1, dtype=column.dtype) if row is None else column[row]
            setattr(self, name, np.concatenate((column, np.repeat(value, count))))
        self.coarse = np.concatenate((self.coarse, np.zeros(count, dtype=bool)))

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Whether memory does not rule the row out."""
        return self.memory_bytes <= self.capacity_bytes

    def energy_j(self, rows: Rows) -> Floats:
        """Energy of a step of rows that takes no longer than `time_s`, joules."""
        found: Floats = self.work_j[rows] + self._constant_w[self.space.columns["cluster"][rows]] * (
            self.space.gpus[rows] * self.time_s[rows] * _SURE)
        return found

    def request(self, rows: Rows) -> Request | None:
        """What training has none of."""
        return None

    def refine(self, level_s: float = np.inf, among: npt.NDArray[np.bool_] | None = None) -> Rows:
        """Bound finely what may take `level_s` or less, and some more at once.

        Args:
            among: rows that are asked for, all if not given; coarse rows of a group are asked for together.

        Returns:
            rows whose bounds have changed.
        """
        left = self._left if among is None else self._left & among[self.edges[:-1]]
        if not left.any():
            return np.zeros(0, dtype=np.int64)
        return self._refined(np.flatnonzero(
            left & (self._group_s <= max(level_s, self._group_s[left].min() * _STRIDE))))

    def _refined(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Bound groups finely, as many as there is time for; the rows that they are."""
        if not len(chosen):
            return np.zeros(0, dtype=np.int64)
        found = self._shared(_fine, [self._group(number) for number in chosen.tolist()], self.until)
        chosen = chosen[[one is not None for one in found]]
        figures = [one for one in found if one is not None]
        for number, (seconds, size_bytes, joules) in zip(chosen.tolist(), figures, strict=True):
            rows = slice(self.edges[number], self.edges[number + 1])
            self.time_s[rows], self.memory_bytes[rows], self.work_j[rows] = seconds, size_bytes, joules
            self.coarse[rows] = False
        self._left[chosen] = False
        sizes = np.diff(self.edges)[chosen]
        begins = np.repeat(self.edges[chosen] - np.concatenate(([0], np.cumsum(sizes)[:-1])), sizes)
        return begins + np.arange(len(begins))

    def refine_at(self, rows: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bound finely the groups of some rows alone; the rows whose bounds have changed."""
        groups = np.unique(np.searchsorted(self.edges, rows, side="right") - 1)
        return self._refined(groups[self._left[groups]])

    def _group(self, number: int) -> _Group:
        rows = slice(self.edges[number], self.edges[number + 1])
        strategy, factor, recompute = (self.space.columns[name][rows]
                                       for name in ("strategy", "sharding_factor", "recompute"))
        turns = np.flatnonzero((strategy != strategy[0]) | (factor != factor[0]))
        width = int(turns[0]) if len(turns) else len(strategy)
        whole = np.int64
        return _Group(self._keys[number], strategy[::width].astype(whole), factor[::width].astype(whole),
                      recompute[:width].astype(whole))

    def _shared(self, work: Callable[[Any], list[Any]], items: list[Any], until: float,
                shared: int = _MANY, cut: int = _CUT) -> list[Any]:
        """What `work` makes of items, slices or groups, in their order; None of those it had no time for."""
        if self.executor is None or self.shares < 2 or len(items) < shared:
            return work((self.clusters, items, until))
        cuts: dict[tuple[int, ...], list[int]] = {}
        for number, item in enumerate(items):
            key = item.key if isinstance(item, _Group) else item
            cuts.setdefault(key[:cut], []).append(number)
        many = 4 if math.isinf(until) else 1  # parts behind the first of a process would find the time over
        parts: list[list[int]] = [[] for _ in range(many * self.shares)]
        for numbers in sorted(cuts.values(), key=len, reverse=True):  # the largest to whom has least
            min(parts, key=len).extend(numbers)
        found: list[Any] = [None] * len(items)
        jobs = [(self.clusters, [items[number] for number in part], until) for part in parts]
        for part, done in zip(parts, self.executor.map(work, jobs), strict=True):
            for number, one in zip(part, done, strict=True):
                found[number] = one
        return found


def bounds(space: Space) -> Bounds:
    """Fine bounds of all rows."""
    found = Bounds(space)
    found.refine()
    return found


def _least(space: Space) -> list[Scenario]:
    """The clusters with as many nodes as the smallest of their rows has: the more GPUs, the slower the slowest."""
    found = []
    for number, one in enumerate(space.clusters):
        nodes = space.columns["nodes"][space.columns["cluster"] == number]
        cluster = one.cluster.model_copy(update={"nodes": int(nodes.min()) if len(nodes) else 1})
        found.append(one.model_copy(update={"cluster": cluster}))
    return found


def _changes(space: Space, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Rows that differ from the row before in any of some columns; the first does."""
    changes = np.zeros(len(space), dtype=bool)
    changes[:1] = True
    for name in names:
        changes[1:] |= space.columns[name][1:] != space.columns[name][:-1]
    return changes


#: Tables of the last search of this process: its passes share them.
_TABLES: dict[str, Tables] = {}


def _tables(clusters: Sequence[Scenario]) -> Tables:
    key = "".join(one.model_dump_json() for one in clusters)
    if key not in _TABLES:
        _TABLES.clear()
        _TABLES[key] = Tables(clusters)
    return _TABLES[key]


def _in_turn(keys: Sequence[tuple[int, ...]]) -> list[int]:
    """Slices of one cut one after another, micro-batches ascending, then pipelines: neighbours have layers in common,
    and a micro-batch that is too large rules out those behind it."""
    return sorted(range(len(keys)), key=lambda number: keys[number])


def _spread(keys: Sequence[tuple[int, ...]], clusters: Sequence[Scenario]) -> list[int]:
    """The same, but what has layers in common in an order of which every beginning is spread over all: that of numbers
    with their bits read backwards (van der Corput's). What cuts the sequence, which few jobs need, tensor ranks of
    several nodes and micro-batches of very many tokens come behind."""
    nodes = [one.cluster.gpus_per_node for one in clusters]
    sequences = [_MANY_TOKENS // max(1, one.training.sequence) for one in clusters]
    alike: dict[tuple[int, ...], list[int]] = {}
    for number in _in_turn(keys):
        *cut, pipeline = keys[number]
        alike.setdefault((*cut, pipeline > 1), []).append(number)
    own = list(alike.values())
    cluster, context, tensor, micro = (SLICE.index(name) for name in ("cluster", "context", "tensor", "micro_batch"))
    cuts = [cut[context] > 1 or cut[tensor] > nodes[cut[cluster]] or cut[micro] > max(1, sequences[cut[cluster]])
            for cut in alike]
    width = max(1, (len(own) - 1).bit_length())
    backwards = sorted(range(len(own)), key=lambda number: (cuts[number], f"{number:0{width}b}"[::-1]))
    return [number for place in backwards for number in own[place]]


def _coarse(job: tuple[Sequence[Scenario], list[tuple[int, ...]], float]) -> list[tuple[float, float] | None]:
    """What all layers alone take a mean rank, in every slice: the slowest rank takes no less. inf: refused. Their
    energy beside it."""
    clusters, slices, until = job
    tables, found = _tables(clusters), list[tuple[float, float] | None]([None] * len(slices))
    for done, number in enumerate(_in_turn(slices) if math.isinf(until) else _spread(slices, clusters)):
        if done and time.monotonic() > until:
            break
        key = slices[number]
        found[number] = np.inf, 0.0
        try:
            table = tables.table(key)
        except UserError:
            continue  # what lowering refuses stays at inf
        found[number] = table.work_s * _micro_steps(table) / key[-1] * _SURE, _energy(table, table.layers.work_j)
    return found


def _micro_steps(table: Table) -> int:
    training, layout = table.scenario.training, table.layout
    return (training.global_batch or 0) // (layout.sizes["data"] * training.micro_batch)


def _energy(table: Table, work_j: float) -> float:
    """Of a step: every layer runs on as many ranks as there are for one stage, in every micro-step."""
    return work_j * _micro_steps(table) * table.layout.ranks / table.layout.sizes["pipeline"] * _SURE


#: Seconds, bytes and joules of a group's rows, or one figure for all.
_Figures = tuple[Floats | float, Floats | float, Floats | float]


def _fine(job: tuple[Sequence[Scenario], list[_Group], float]) -> list[_Figures | None]:
    """Figures of every group."""
    clusters, groups, until = job
    bounding = _Bounding(_tables(clusters))
    found = list[_Figures | None]([None] * len(groups))
    for done, number in enumerate(_in_turn([group.key for group in groups])):
        if done and time.monotonic() > until:
            break
        found[number] = np.inf, 0.0, 0.0
        try:
            found[number] = bounding.group(groups[number])
        except UserError:
            continue
    return found


class _Bounding:
    def __init__(self, tables: Tables) -> None:
        self.tables, self.times = tables, Times()
        #: Slice without its micro-batch, and strategies, to what they hold at least, where that is too much.
        self.hopeless: dict[tuple[tuple[int, ...], frozenset[str]], float] = {}
        self._last: tuple[tuple[tuple[int, ...], str], Table] | None = None

    def group(self, group: _Group) -> _Figures:
        """Figures of a group; 0 seconds where memory rules all rows out."""
        key, (virtual, scheduled) = group.key[:len(SLICE)], group.key[len(SLICE):]
        *cut, _, pipeline = key  # whatever the micro-batch
        kinds = frozenset(STRATEGIES[i] for i in group.strategy.tolist())
        family = (*cut, pipeline), kinds
        if family in self.hopeless:
            return 0.0, self.hopeless[family], 0.0
        schedule = SCHEDULES[scheduled] if pipeline > 1 else ""
        two = schedule if schedule in TWO_CHUNKS else "1f1b"
        if self._last is None or self._last[0] != (key, two):
            self._last = (key, two), self.tables.table(key, two)
        table = self._last[1]
        ranks = table.layout.sizes["data"] * table.layout.sizes["context"]
        ways = ways_of(group.strategy, group.factor, ranks)
        if schedule == "dualpipe":  # twice as many ranks hold each stage
            ways = ways._replace(spread=np.where(ways.spread > 1, 2 * ways.spread, 1))
        capacity, steps = table.device.gpu.usable_memory_bytes, _micro_steps(table)
        outside = of(table)
        if not (outside.moves_parameters or outside.moves_optimizer or outside.moves_activations):
            one = least(table, ranks, kinds) * _SURE + table.fixed_bytes
            if one > capacity:
                self.hopeless[family] = one
                return 0.0, one, 0.0
        places = _places(table, pipeline, virtual, schedule)
        said = facts(schedule, pipeline, virtual, steps, table.layers.split_cost,
                     table.stack.all_forwards_first)
        flying = flight(table.layers, places, group.policies, said)
        if outside.moves_activations:
            flying = np.zeros_like(flying[0]), np.zeros_like(flying[1])
        held: Floats = fullest(table, places, flying, steps, ways, kept_widths(table),
                               schedule) * _SURE + table.fixed_bytes
        if not (held <= capacity).any():
            return 0.0, held.reshape(-1), 0.0  # never asked for: none fits
        steps_s = self.times.steps_s(table, places, group.policies, said, schedule, ways)
        again_j = summed(table.layers.again_j, places, group.policies).sum(axis=(0, 1)) * (
            0.5 if schedule == "dualpipe" else 1.0)
        joules = [_energy(table, table.layers.work_j + again) for again in again_j.tolist()]
        return steps_s.reshape(-1) * _SURE, held.reshape(-1), np.tile(joules, len(ways.strategy))


def _places(table: Table, pipeline: int, virtual: int, schedule: str) -> Places:
    """Where the chunks of every pipeline rank are."""
    placed = placement(schedule, pipeline, virtual) if pipeline > 1 else [[0]]
    key, numel = tuple(map(tuple, placed)), table.layers.numel
    if key not in table.staged:
        chunks = [[range(len(numel) - 1)]]
        if pipeline > 1:
            counts = split_of(table.scenario, table.stack, len(numel) - 3, placed)
            chunks = positions(table.layers.architecture, counts, placed)
        start = np.array([[c.start for c in own] for own in chunks])
        stop = np.array([[c.stop for c in own] for own in chunks])
        first, end = table.layers.through[start], table.layers.through[stop]
        lower = start[:, None, :] < start[:, :, None]  # (ranks, chunks, chunks before)
        before = (lower * (end - first)[:, None, :]).sum(axis=2)
        of = table.layers
        table.staged[key] = Places(start, stop, first, end, before, *(
            (sums[stop] - sums[start]).sum(axis=1) for sums in (numel, of.routed, of.frozen, of.whole)))
    found: Places = table.staged[key]
    return found
