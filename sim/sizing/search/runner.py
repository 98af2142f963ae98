"""Simulates rows of a space, in this process or in others; what the store knows is not simulated again."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from sim import api
from sim.errors import UserError
from sim.hardware import gpu
from sim.scenario import resolve
from sim.sizing.search.store import Outcome, Store
from sim.sizing.search.workers import Workers
from sim.sizing.space.layouts import Space
from sim.sizing.wish import Wish


class Runner:
    """Outcomes of rows by number; see the module."""

    def __init__(self, space: Space, plain: list[dict[str, Any]], wish: Wish, store: Store,
                 pool: Workers) -> None:
        self.space, self.plain, self.wish, self.store, self.pool = space, plain, wish, store, pool
        self.heads = [hashlib.sha256(json.dumps(p, sort_keys=True).encode()).hexdigest()[:12] for p in plain]
        self.rows: dict[int, Outcome] = {}
        self.capacity = [gpu(one.cluster.topology.gpu, None if one.cluster.gpu is None else one.cluster.gpu.model_dump()
                             ).usable_memory_bytes for one in space.clusters]

    def values(self, rows: Sequence[int]) -> list[float]:
        """The objective of rows; inf for what does not fit or is refused."""
        found = self.outcomes([(int(self.space.columns["cluster"][row]), self.space.sets(row),
                                int(self.space.gpus[row])) for row in rows])
        self.rows.update(zip(rows, found, strict=True))
        return [self.value(row) for row in rows]

    def outcomes(self, asked: Sequence[tuple[int, dict[str, Any], int]]) -> list[Outcome]:
        """Outcomes of configurations, which need not be rows: number of the cluster, dotted fields, GPUs."""
        jobs = [(f"{self.heads[cluster]} {json.dumps(sets, sort_keys=True)}", self.plain[cluster], sets, gpus)
                for cluster, sets, gpus in asked]
        new = [job for job in jobs if job[0] not in self.store.known]
        for one in self.pool.each(simulated, new):
            self.store.add([one])
        return [self.store.known[job[0]] for job in jobs]

    def price(self, row: int) -> float:
        """Of one GPU-hour of a row's cluster."""
        return self.wish.price(self.space.clusters[int(self.space.columns["cluster"][row])])

    def value(self, row: int) -> float:
        """The objective of a row that was simulated."""
        one = self.rows[row]
        if not self.fits(row):
            return math.inf
        return float(self.wish.value(one.step_time_s, one.gpus, self.price(row), one.step_energy_j,
                                     self.space.request(row, one.prompt_time_s, one.time_per_token_s)))

    def fits(self, row: int) -> bool:
        """Whether a row that was simulated fits, with the memory that is to stay free."""
        return self.has_room(self.rows[row], int(self.space.columns["cluster"][row]))

    def has_room(self, one: Outcome, cluster: int) -> bool:
        """The same of an outcome on a cluster."""
        return one.fits and one.device_used_bytes <= self.capacity[cluster] - self.wish.margin_bytes if (
            self.wish.margin_bytes) else one.fits

    def steps(self, rows: Sequence[int]) -> list[float]:
        """Seconds of a step of rows; inf for what breaks a limit, does not fit or is refused."""
        return [self.rows[row].step_time_s if math.isfinite(value) else math.inf
                for row, value in zip(rows, self.values(rows), strict=True)]


def simulated(job: tuple[str, dict[str, Any], dict[str, Any], int]) -> Outcome:
    """One configuration, whatever comes of it."""
    key, plain, sets, gpus = job
    try:
        found = api.measure(resolve(plain, "", sets))
    except UserError as error:
        return Outcome(key, gpus, "refused", math.inf, False, 0, math.inf, str(error)[:500])
    except (ValueError, ArithmeticError, AssertionError, LookupError) as error:  # one fault of ours spoils no search
        return Outcome(key, gpus, "fault", math.inf, False, 0, math.inf, f"{type(error).__name__}: {error}"[:500])
    memory, served = found.memory, found.served
    if found.step_s is None or found.step_j is None:
        used = memory.use.peak_allocated_bytes + memory.use.at_peak["context"]
        return Outcome(key, gpus, "ok", math.inf, False, used, math.inf)
    latencies = (0.0, 0.0) if served is None else (served.prompt_time_s, served.time_per_token_s)
    return Outcome(key, gpus, "ok", found.step_s, True, memory.device_used_bytes, found.step_j, "", *latencies)
