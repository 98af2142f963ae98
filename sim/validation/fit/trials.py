"""Step times of published runs with other values of free figures: each is simulated once, and only where it can differ.

A figure reaches a step through the stack alone (`sim.software.Stack`), so a run is simulated again only for a stack
that it has not seen: a figure of Composer's profile costs nothing on runs of Megatron. A repeated run leaves memory
out: what retries and paging add to its step is that of the first one, since no free figure changes what is allocated.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import Fault, UserError
from sim.scenario import Scenario
from sim.software import Stack, stack_of, trial
from sim.validation.cases.files import Case
from sim.validation.runner import as_worker

Array = NDArray[np.float64]
#: A figure: the profile that states it, and what it is called there (`sim.software.free_figures`).
Figure = tuple[str, str]
Values = Mapping[Figure, float]
#: Called with the simulations done and expected in all.
Progress = Callable[[int, int], None]

#: Runs per message to a worker: neighbours of a file share clusters and models, hence the worker's memoised parts.
_CHUNK = 3
#: Runs with more events than this (about a quarter of a second each) are not simulated with every figure.
MOST_EVENTS = 15_000


@dataclass(frozen=True, slots=True)
class Row:
    """A published run and what it can be left out with."""

    source: str
    name: str
    cluster: str
    parameters: float
    framework: str
    gpus: int = 0
    sequence: int = 0

    def group(self, by: str) -> str:
        """Its group when a source, a cluster or a model size is left out."""
        return {"source": self.source, "cluster": self.cluster, "model size": f"{self.parameters:.2g}"}[by]

    @property
    def kind(self) -> tuple[float, int, int]:
        """Runs of one source that agree in this differ in batch or layout only."""
        return float(f"{self.parameters:.3g}"), self.gpus, self.sequence


@dataclass(frozen=True, slots=True)
class First:
    """A run with the profiles' own figures.

    Attributes:
        step_s: its step.
        held_s: seconds of it that no free figure changes (allocator retries, paging).
        whole: it must be predicted whole again, since how long it waits for data depends on its step.
        scenario: what was run; its software selects the stack.
        events: of its simulation.
    """

    step_s: float
    held_s: float
    whole: bool
    scenario: Scenario
    row: Row
    events: int


def first(case: Case) -> First | None:
    """The run with the profiles' own figures; None where it is not predicted."""
    from sim.api import run
    from sim.scenario import resolve

    try:
        result = run(resolve(case.given, case.path, case.sets))
    except UserError:
        return None
    about, loading = result.features, result.data_loading
    cluster = result.scenario.cluster
    row = Row(case.file.removesuffix(".yaml"), case.id, cluster.topology.name, float(about.parameters),
              about.framework, cluster.nodes * cluster.gpus_per_node, result.scenario.training.sequence)
    waits = loading.waiting_s > 0
    return First(result.step_time_s, 0.0 if waits else result.step_time_s - result.detail.timeline.step_time_s, waits,
                 result.scenario, row, result.simulation.events)


def again(known: First, values: Values) -> float:
    """The run's step with other values of free figures, seconds."""
    from sim.api import machine_for, run
    from sim.engine import simulate
    from sim.parallel import lower

    with trial(values):
        if known.whole:
            return run(known.scenario).step_time_s
        lowered = lower(known.scenario)
        return simulate(lowered.job, machine_for(known.scenario, lowered)).step_time_s + known.held_s


class Trials:
    """Errors of cases with any values of free figures; a context that holds the worker processes.

    Attributes:
        rows: the runs that are predicted, in the cases' order; unpredicted: how many are not.
        own: their errors, predicted / measured - 1, with the profiles' figures.
        events: of each row's simulation.
        simulations: how many were run.
    """

    def __init__(self, cases: Sequence[Case], workers: int, progress: Progress | None = None) -> None:
        self._workers, self._report = workers, progress
        self._pool: ProcessPoolExecutor | None = None
        self._before = set(multiprocessing.active_children())
        self._plan: dict[str, int] = {}
        self.simulations = 0
        self._cases = list(cases)

    def __enter__(self) -> Trials:
        if self._workers > 1:
            self._pool = ProcessPoolExecutor(self._workers, mp_context=multiprocessing.get_context("spawn"),
                                             initializer=as_worker)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._report is not None:
            self._report(self.simulations, self.simulations)
        if self._pool is None:
            return
        if kind is not None:  # what still runs may take seconds and nobody waits for it
            for child in set(multiprocessing.active_children()) - self._before:
                child.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self) -> None:
        """Predict every case with the profiles' own figures.

        Raises:
            UserError: none of them is predicted.
        """
        found = dict(self._run("profiles' figures", _first_of, [(i, case) for i, case in enumerate(self._cases)]))
        kept = [i for i in range(len(self._cases)) if found[i] is not None]
        if not kept:
            raise UserError(Fault("no case has a step time that is predicted"))
        self.unpredicted = len(self._cases) - len(kept)
        self._cases = [self._cases[i] for i in kept]
        self._first: list[First] = [one for i in kept if (one := found[i]) is not None]
        self.rows = tuple(one.row for one in self._first)
        self.events = [one.events for one in self._first]
        self._known: list[dict[Stack, float]] = [{_stack(one): one.step_s} for one in self._first]
        self._measured = np.array([case.measured["step_time_s"] for case in self._cases])
        self.own = np.array([one.step_s for one in self._first]) / self._measured - 1

    def plan(self, what: str, simulations: int) -> None:
        """Say how many simulations something will take at most, for the progress."""
        self._plan[what] = simulations

    def errors(self, what: str, asked: Sequence[tuple[int, Values]]) -> Array:
        """Errors of rows, each with values of its own; what is known is not simulated.

        Args:
            what: for the progress. asked: (place of the row, values) of each.
        """
        stacks = [self._stacks([place for place, _ in group], group[0][1]) for group in _runs(asked)]
        wanted = [(place, stack, values) for (place, values), stack
                  in zip(asked, (stack for group in stacks for stack in group), strict=True)]
        missing = {(place, stack): values for place, stack, values in wanted if stack not in self._known[place]}
        order = sorted(missing, key=lambda key: key[0])  # one row's trials in one process, after another
        jobs = [(number, (self._first[place], dict(missing[place, stack])))
                for number, (place, stack) in enumerate(order)]
        for number, step_s in self._run(what, _again_of, jobs):
            place, stack = order[number]
            self._known[place][stack] = step_s
        return np.array([self._known[place][stack] / self._measured[place] - 1 for place, stack, _ in wanted])

    def touched(self, places: Iterable[int], values: Values) -> list[int]:
        """The rows whose stack the values change."""
        listed = list(places)
        return [place for place, stack in zip(listed, self._stacks(listed, values), strict=True)
                if stack != _stack(self._first[place])]

    def _stacks(self, places: Sequence[int], values: Values) -> list[Stack]:
        with trial(values):
            return [_stack(self._first[place]) for place in places]

    def _run(self, what: str, work: Callable[[Any], Any], jobs: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """(number, answer) of every job as it ends."""
        self._plan[what] = len(jobs)
        chunks = [jobs[i:i + _CHUNK] for i in range(0, len(jobs), _CHUNK)]
        for chunk in self._chunks(work, chunks):
            self.simulations += len(chunk)
            self._plan[what] -= len(chunk)
            if self._report is not None:
                self._report(self.simulations, self.simulations + sum(self._plan.values()))
            yield from chunk

    def _chunks(self, work: Callable[[Any], Any], chunks: Sequence[Sequence[tuple[int, Any]]]
                ) -> Iterator[list[tuple[int, Any]]]:
        if self._pool is None:
            yield from (_each(work, chunk) for chunk in chunks)
            return
        futures: list[Future[list[tuple[int, Any]]]] = [self._pool.submit(_each, work, chunk) for chunk in chunks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise UserError(Fault("a worker process ended early: out of memory, or a script without "
                                  "'if __name__ == \"__main__\":'", hint="use --workers 1")) from error


def sample(rows: Sequence[Row], events: Sequence[int], most: int) -> list[int]:
    """Places of at most `most` rows of each source that stand for all, deterministically.

    Runs that differ in batch or layout only say the same about host times, so the middle run of every kind
    (`Row.kind`) comes first, evenly over the kinds where they are more than `most`; what room is left goes to the
    others, evenly too. Runs of more than `MOST_EVENTS` events are not drawn.
    """
    found: list[int] = []
    for source in dict.fromkeys(row.source for row in rows):
        kinds: dict[object, list[int]] = {}
        for place, row in enumerate(rows):
            if row.source == source and events[place] <= MOST_EVENTS:
                kinds.setdefault(row.kind, []).append(place)
        middles = [places[len(places) // 2] for places in kinds.values()]
        rest = sorted({place for places in kinds.values() for place in places} - set(middles))
        found += _evenly(middles, most) + _evenly(rest, most - min(most, len(middles)))
    return sorted(found)


def _evenly(places: Sequence[int], most: int) -> list[int]:
    count = min(most, len(places))
    return [places[(2 * i + 1) * len(places) // (2 * count)] for i in range(count)]


def _runs(asked: Sequence[tuple[int, Values]]) -> Iterator[list[tuple[int, Values]]]:
    """Neighbours with the same values."""
    group: list[tuple[int, Values]] = []
    for one in asked:
        if group and one[1] is not group[0][1]:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _stack(known: First) -> Stack:
    return stack_of(known.scenario.software)


def _first_of(case: Case) -> First | None:
    return first(case)


def _again_of(job: tuple[First, Values]) -> float:
    return again(*job)


def _each(work: Callable[[Any], Any], chunk: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    return [(number, work(job)) for number, job in chunk]
