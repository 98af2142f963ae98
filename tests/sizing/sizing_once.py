"""What a search is held against and the searches themselves simulate the same configurations: here each once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from sim.garbage import search_seldom
from sim.sizing.search.runner import simulated
from sim.sizing.search.store import Outcome

#: Key, cluster, configuration and number of GPUs, as `simulated` takes them.
Job = tuple[str, dict[str, Any], dict[str, Any], int]


class Once:
    """`simulated`, remembered by cluster and configuration, since it depends on nothing else (the number of workers
    changing nothing is a test of its own)."""

    def __init__(self) -> None:
        self.known: dict[str, Outcome] = {}

    def __call__(self, job: Job) -> Outcome:
        return self.all([job])[0]

    def all(self, jobs: Sequence[Job], over: Callable[..., Iterable[Outcome]] = map) -> list[Outcome]:
        """Outcomes of jobs, those not known worked out by `over`, a kind of `map`."""
        keys = [json.dumps(job[1:], sort_keys=True) for job in jobs]
        new = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self.known}
        self.known.update(zip(new, over(_by_name, list(new.values())), strict=True))
        return [replace(self.known[key], key=job[0]) for key, job in zip(keys, jobs, strict=True)]

    def on_two_cores(self, jobs: Sequence[Job]) -> list[Outcome]:
        """As `all`, in two processes."""
        with ProcessPoolExecutor(2, initializer=search_seldom) as pool:
            return self.all(jobs, partial(pool.map, chunksize=50))


def _by_name(job: Job) -> Outcome:
    """Processes look up what they do by its name, under which `simulated` itself is not found while it is replaced."""
    return simulated(job)
