"""Lower bounds of memory and of step time for all rows of a space at once, from tables of layers.

Rows of one slice of the model and one schedule are a group and worked out together (`held`: bytes, `times`: seconds).
Where one micro-batch of a size is too much for any layout of a slice, larger ones are not looked at. Groups may be
shared out over processes: what comes out is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sim.api import hardware_for
from sim.errors import UserError
from sim.parallel.pipeline.actions import placement
from sim.parallel.pipeline.stages import blocks_per_stage, positions
from sim.scenario import Scenario
from sim.sizing.held import Places, flight, fullest, least, ways_of
from sim.sizing.orders import facts
from sim.sizing.space import SCHEDULES, STRATEGIES, Space
from sim.sizing.tables import SLICE, Floats, Table, Tables
from sim.sizing.times import Times

#: Columns that decide a group, beside those of its slice.
_STAGED = ("virtual_stages", "schedule")
#: Columns of what is shared out: rows of one value of all of them stay together, micro-batches ascending.
_FAMILY = ("cluster", "nodes", "tensor", "context", "pipeline")
#: Sums of floats in another order differ by rounding; a bound stays below by this much.
_SURE = 1.0 - 1e-9
#: Rows from which sharing out is worth starting for.
_MANY = 200_000


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


def bounds(space: Space, executor: Executor | None = None, shares: int = 1) -> Bounds:
    """Bounds of all rows.

    Args:
        executor: processes that work out a share each, where there are rows enough.
        shares: how many of them.
    """
    if executor is None or shares < 2 or len(space) < _MANY:
        return _Bounding(space).run()
    edges = np.flatnonzero(_changes(space, _FAMILY))
    family = np.searchsorted(edges, np.arange(len(space)), side="right")
    # larger families first would be fairer still; taking turns is enough
    parts = [np.flatnonzero(family % (4 * shares) == i) for i in range(4 * shares)]
    jobs = [(space.clusters, {name: column[rows] for name, column in space.columns.items()}) for rows in parts]
    found = Bounds(*(np.zeros(len(space)) for _ in range(3)))
    for rows, done in zip(parts, executor.map(_share, jobs), strict=True):
        for whole, part in zip((found.time_s, found.memory_bytes, found.capacity_bytes), done, strict=True):
            whole[rows] = part
    return found


def _share(job: tuple[list[Scenario], dict[str, npt.NDArray[np.int64]]]) -> tuple[Floats, Floats, Floats]:
    """Bounds of some rows of a space."""
    found = _Bounding(Space(*job)).run() if len(job[1]["cluster"]) else Bounds(*(np.zeros(0),) * 3)
    return found.time_s, found.memory_bytes, found.capacity_bytes


def _changes(space: Space, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Rows that differ from the row before in any of some columns; the first does."""
    changes = np.zeros(len(space), dtype=bool)
    changes[0] = True
    for name in names:
        changes[1:] |= space.columns[name][1:] != space.columns[name][:-1]
    return changes


class _Bounding:
    def __init__(self, space: Space) -> None:
        self.space = space
        self.tables, self.times = Tables(space.clusters), Times()
        self.capacity = [hardware_for(one)[0].gpu.usable_memory_bytes for one in space.clusters]
        self.offloads = any(place in ("cpu", "nvme") for one in space.clusters for _, place in one.parallel.offload)
        #: Slice without its micro-batch to what it holds at least, where that is too much.
        self.hopeless: dict[tuple[int, ...], float] = {}

    def run(self) -> Bounds:
        space, columns = self.space, self.space.columns
        rows = len(space)
        found = Bounds(np.full(rows, np.inf), np.zeros(rows), np.zeros(rows))
        names = (*SLICE, *_STAGED)  # rows of a group lie together, as `build_space` writes them
        starts = np.flatnonzero(_changes(space, names))
        keys = np.stack([columns[name][starts] for name in names], axis=1).tolist()
        for key, (begin, end) in zip(keys, pairwise([*starts.tolist(), rows]), strict=True):
            try:
                self._group(tuple(key), slice(begin, end), found)
            except UserError:
                continue  # what lowering refuses stays at inf
        return found

    def _group(self, key: tuple[int, ...], rows: slice, found: Bounds) -> None:
        cluster, nodes, tensor, _, context, _, micro, pipeline, virtual, scheduled = key
        scenario, capacity = self.space.clusters[cluster], self.capacity[cluster]
        found.capacity_bytes[rows] = capacity
        family = (*key[:6], pipeline)
        if family in self.hopeless:
            found.memory_bytes[rows], found.time_s[rows] = self.hopeless[family], 0.0
            return
        table = self.tables.table(key[:len(SLICE)])
        columns = self.space.columns
        replicas = nodes * scenario.cluster.gpus_per_node // (tensor * context * pipeline)
        ways = ways_of(columns["strategy"][rows], columns["sharding_factor"][rows], replicas * context)
        if not self.offloads:
            kinds = frozenset(STRATEGIES[i] for i in ways.strategy.tolist())
            one = least(table, replicas * context, kinds) * _SURE + table.fixed_bytes
            if one > capacity:
                self.hopeless[family] = one
                found.memory_bytes[rows], found.time_s[rows] = one, 0.0
                return
        steps = (scenario.training.global_batch or 0) // (replicas * micro)
        schedule = SCHEDULES[scheduled] if pipeline > 1 else ""
        places = self._places(table, pipeline, virtual, schedule)
        policies, at = np.unique(columns["recompute"][rows], return_inverse=True)
        said = facts(schedule, pipeline, virtual, steps, table.split_cost)
        if self.offloads:
            found.memory_bytes[rows] = table.fixed_bytes
        else:
            flying = flight(table, places, policies, said)
            held = fullest(table, places, flying, steps, ways) * _SURE + table.fixed_bytes
            found.memory_bytes[rows] = held[ways.at, at]
            if not (held <= capacity).any():
                found.time_s[rows] = 0.0  # never asked for: none fits
                return
        seconds = self.tables.timed(table, key[:len(SLICE)])
        steps_s = self.times.steps_s(table, seconds, places, policies, said, schedule, self.tables.alone[cluster],
                                     ways)
        found.time_s[rows] = steps_s[ways.at, at] * _SURE

    def _places(self, table: Table, pipeline: int, virtual: int, schedule: str) -> Places:
        """Where the chunks of every pipeline rank are."""
        placed = placement(schedule, pipeline, virtual) if pipeline > 1 else [[0]]
        key = tuple(map(tuple, placed))
        if key not in table.staged:
            chunks = [[range(len(table.numel) - 1)]]
            if pipeline > 1:
                slots = table.scenario.parallel.split_slots
                counts = blocks_per_stage(len(table.numel) - 3, placed, None, slots.embedding, slots.head)
                chunks = positions(table.architecture, counts, placed)
            start = np.array([[c.start for c in own] for own in chunks])
            stop = np.array([[c.stop for c in own] for own in chunks])
            first, end = table.through[start], table.through[stop]
            lower = start[:, None, :] < start[:, :, None]  # (ranks, chunks, chunks before)
            before = (lower * (end - first)[:, None, :]).sum(axis=2)
            numel = (table.numel[stop] - table.numel[start]).sum(axis=1)
            table.staged[key] = Places(start, stop, first, end, before, numel)
        return table.staged[key]
