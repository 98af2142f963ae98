"""`size`: the best configurations of a space, found by bounds and simulation, and what was left out why."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sim import api
from sim.errors import UserError
from sim.parallel.serving.request import run_of
from sim.report.warned.asked import autocast_alone
from sim.scenario import Loaded, Scenario, resolve
from sim.sizing.modes import aside_of, axes_of, bases_of, bounds_of, front_proven, listed_space, own_of
from sim.sizing.refused import refuse
from sim.sizing.search.best_first import PATIENCE, ROUND, Found, search
from sim.sizing.search.between import between
from sim.sizing.search.early import early
from sim.sizing.search.finer import Finer
from sim.sizing.search.front import pareto
from sim.sizing.search.numbers import Without, climb_each, each_number, without
from sim.sizing.search.precisions import OfPrecision, climb_in, of_each
from sim.sizing.search.ranking import Floats, Ranking
from sim.sizing.search.round_out import best_of_each, round_out
from sim.sizing.search.rows import kept_row, table_row
from sim.sizing.search.runner import Runner
from sim.sizing.search.store import Store
from sim.sizing.search.usual import with_usual_half
from sim.sizing.search.why import Why, explain, families, same_layout
from sim.sizing.search.workers import workers as started_workers
from sim.sizing.space.base import never_simulated, part_of_one
from sim.sizing.space.layouts import Choice, Space
from sim.sizing.space.precisions import Untried, clusters_of
from sim.sizing.space.requests import ServedSpace
from sim.sizing.wish import SERVED_DEFAULT, Wish, priced

#: Share of the time for what comes first that is for numbers of GPUs, where several are asked for.
_NUMBERS_S = 0.25


@dataclass
class Sizing:
    """What `size` found.

    Attributes:
        best: rows of a table (`sim.sizing.search.rows`), the best first.
        nearest: where the deadline or the budget leaves nothing, the best row without them; None if there is none, or
            none was proven in time.
        own: row of the scenario's own layout where it is among those covered, as in `rows`.
        nearest_cut: whether the search for `nearest` was ended before it proved one.
        raw: configurations as they can be written; covered: those that are searched (`sim.sizing.space`); stepped:
            whether of the micro-batches that divide only some are among them.
        impossible, simulated: those that lowering refuses, those simulated.
        pruned: configurations ruled out, by the bound that did it.
        front: rows that no simulated row beats in time, GPUs, cost and energy; `front_proven`: nor any of those covered
            in time, GPUs and cost, and, where energy is the objective, none takes less on as many GPUs. What is covered
            has long axes in steps, and values between beside the fastest of every number of GPUs.
        winner: the scenario that the best row stands for, and `free_bytes` what it leaves of its fullest GPU's memory;
            None where there is none.
        why: what the best has ahead of the runner-up and of the best of each family.
        refused, faults: of those simulated, rows a technique refused, and rows the simulation failed on (ours).
        first_fault: `{set, reason}` of the first row that the simulation failed on; the store has all.
        unbounded: of those covered, for which there was no time to bound them: they were not looked at.
        gap: how much better than the best an unsimulated row could be; `best_proven`: rows of `best`, from the first
            on, above which no such row can come.
        rows: every simulated row, with its outcome and why it has no time, in the order of the space.
        price_origin: where the price of each cluster comes from.
        schedules: of pipelines, those that were tried.
        not_offloaded: what was asked to be tried on the host and no technique of the framework keeps there.
        precisions: where several are tried, each as `sim.sizing.search.precisions` says it; untried: those asked for
            that a cluster has not, or that others equal.
        hints: of the nodes that are searched in place of the file's, and of the precision that all layouts have, where
            hardly a run has it.
        without: numbers of GPUs asked for of which nothing that fits was simulated, and why.
        seconds: of wall clock, by part.
        served: whether rows are requests: GPU-hours, cost and energy are then of a million tokens; batches: tried.
    """

    wish: Wish
    best: list[dict[str, Any]] = field(default_factory=list)
    nearest: dict[str, Any] | None = None
    nearest_cut: bool = False
    own: dict[str, Any] | None = None
    raw: int = 0
    covered: int = 0
    stepped: bool = False
    impossible: int = 0
    simulated: int = 0
    unbounded: int = 0
    refused: int = 0
    faults: int = 0
    first_fault: dict[str, Any] | None = None
    pruned: dict[str, int] = field(default_factory=dict)
    front: list[dict[str, Any]] = field(default_factory=list)
    front_proven: bool = False
    winner: Scenario | None = None
    free_bytes: float | None = None
    why: Why = field(default_factory=Why)
    rows: list[dict[str, Any]] = field(default_factory=list)
    price_origin: dict[str, str] = field(default_factory=dict)
    gap: float = 0.0
    best_proven: int = 0
    schedules: list[str] = field(default_factory=list)
    not_offloaded: list[str] = field(default_factory=list)
    precisions: list[dict[str, Any]] = field(default_factory=list)
    untried: list[Untried] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    without: list[Without] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    served: bool = False
    batches: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"objective": self.wish.objective, "prices_usd_per_gpu_hour": dict(self.wish.prices),
                "price_origin": self.price_origin, "best": self.best, "nearest": self.nearest,
                "nearest_cut": self.nearest_cut, "own": self.own, "front": self.front,
                "front_proven": self.front_proven, "why": self.why.to_json(), "raw": self.raw, "covered": self.covered,
                "stepped": self.stepped, "impossible": self.impossible, "pruned": self.pruned,
                "simulated": self.simulated, "unbounded": self.unbounded, "refused": self.refused,
                "faults": self.faults,
                "first_fault": self.first_fault, "gap": self.gap, "best_proven": self.best_proven,
                "proven": self.proven,
                "schedules": self.schedules, "not_offloaded": self.not_offloaded,
                "precisions": self.precisions, "untried": [one._asdict() for one in self.untried], "hints": self.hints,
                "without": [one._asdict() for one in self.without], "seconds": self.seconds,
                **(self._of_requests() if self.served else {})}

    def _of_requests(self) -> dict[str, Any]:
        wish = self.wish
        return {"inference": {"batches": self.batches, "limits": {
            "time_per_token_s": wish.latency_s, "prompt_time_s": wish.first_token_s,
            "tokens_per_second": wish.throughput}}}

    def told(self, value: float) -> str:
        """A value of the objective with its unit."""
        return self.wish.served_told(value) if self.served else self.wish.told(value)

    @property
    def proven(self) -> bool:
        """Whether nothing better can be among what was covered; a row that failed might be."""
        return self.gap == 0.0 and not self.faults

    def table(self) -> Any:
        """`best` as a pandas DataFrame where pandas is installed, else as it is."""
        try:
            import pandas
        except ImportError:
            return self.best
        return pandas.DataFrame(self.best)


def size(source: Scenario | Loaded | str | Path, choice: Choice, wish: Wish | None = None, *,
         clusters: Sequence[str] = (), offload: Sequence[str] = (), overlap_p2p: bool = False, top: int = 10,
         out: Path | None = None, resume: bool = False, workers: int = 1, dask: str | None = None,
         seconds: float = math.inf, price: str | None = None,
         interrupted: Callable[[], bool] = lambda: False,
         progress: Callable[[int, float, float], None] | None = None) -> Sizing:
    """Search the layouts of a scenario's model for the best.

    Args:
        source: gives the model, batch and precision; its own layout, if it is among those asked for, is simulated
            first and reported, and changes nothing else.
        clusters: topologies, default the scenario's.
        offload: of `sim.sizing.space.offloads.OFFLOADS`, what to try outside the GPUs; default what the scenario says.
        overlap_p2p: whether to try transfers between stages beside compute too; default what the scenario says.
        top: how many of the best are proven and returned.
        out: SQLite file of outcomes (see `sim.sizing.search.store`); `resume` goes on with one that is there.
        workers: processes; they do not change what is found or simulated.
        dask: address of a Dask scheduler, whose workers simulate instead.
        seconds: of wall clock from this call, a third for bounding layouts: then stop; what is found is the best so
            far, with its gap. Listing and a round of simulations are not cut.
        price: what a GPU-hour costs, as `--price` says it (`sim.sizing.prices`); a wish with a price keeps its own.
        interrupted: asked between rounds of simulations; True ends the search as `seconds` does.
        progress: told (simulated, next bound, best value) after every round.

    Raises:
        UserError: the scenario is wrong, or nothing is possible.
    """
    started = time.monotonic()
    loaded = source if isinstance(source, Scenario | Loaded) else api.load(source)
    scenario = loaded if isinstance(loaded, Scenario) else loaded.scenario
    served = run_of(scenario) is not None
    wish = wish or Wish(SERVED_DEFAULT if served else "time")
    refuse(scenario, choice, wish, overlap_p2p)
    bases, untried = bases_of(scenario, clusters or (None,), choice, offload)
    _refuse_never_simulated(bases, None if isinstance(loaded, Scenario) else loaded)
    wish, origin = priced(wish, bases, price)
    space, plain, dropped = listed_space(scenario, bases, choice, wish, offload, overlap_p2p)
    listed = time.monotonic()
    store = Store(out, {"clusters": plain}, resume)
    found = Sizing(wish, raw=space.raw, price_origin=origin, not_offloaded=dropped, served=served, untried=untried,
                   schedules=space.schedules, hints=_whole_nodes(scenario, clusters, choice), batches=space.batches)
    with ExitStack() as stack:
        stack.callback(store.close)
        pool = stack.enter_context(started_workers(workers, dask))
        of = bounds_of(space, pool.executor if dask is None else None, workers, started + seconds)
        bounded = time.monotonic()
        ranking, runner = Ranking(space, of, wish), Runner(space, plain, wish, store, pool)
        free = Runner(space, plain, wish.unlimited, store, pool)
        own, hurried = own_of(space, scenario), not served and math.isfinite(seconds)

        def stop() -> bool:
            if progress is not None:
                progress(len(runner.rows), math.nan, math.nan)
            return interrupted() or time.monotonic() - started > seconds

        first = _first(space, ranking, runner, own, started + seconds, hurried, stop)
        result = _searched(space, ranking, runner, first, top, stop, 1 if hurried else PATIENCE)
        if not interrupted():
            _round_off(space, ranking, runner, result, top, stop, own, choice.partial_recompute and not served)
        kinds = of_each(space, ranking, runner, result, top, stop, choice.partial_recompute, interrupted)
        if result.complete and not result.best and free.wish != wish:
            found.nearest, found.nearest_cut = _nearest(space, Ranking(space, of, free.wish), free, stop)
        found.front_proven = front_proven(space, ranking, runner, stop, choice.partial_recompute, result)
        _families(ranking, runner, result, top, stop)
    _count(found, ranking, runner)
    found.without = without(space, ranking, runner, choice.gpus, found.front_proven)
    _fill(found, space, result, runner, own, scenario, kinds)
    found.why = _why(found, space, result, runner, np.where(of.unbounded, 0.0, ranking.values))
    found.seconds = {"space": listed - started, "bounds": bounded - listed, "simulation": time.monotonic() - bounded}
    return found


def _first(space: Space, ranking: Ranking, runner: Runner, own: int | None, until: float, hurried: bool,
           stop: Callable[[], bool]) -> list[int]:
    """Rows that come before a search: the scenario's own; under a time limit, which ends at `until`, also what half of
    the time that is left is enough for, or all where not all rows are bounded and nothing can be proven."""
    rows = [] if own is None else [own]
    if not hurried:
        return rows
    _climbs(space, ranking, runner, rows, until, stop)
    each = (clusters_of(space) or {"": list(range(len(space.clusters)))}).values() if space.stepped else ()
    for turn, numbers in enumerate(each):
        now = time.monotonic()
        between(space, ranking, runner, partial(_over, stop, now + (until - now) / 4 / (len(each) - turn)),
                np.isin(space.columns["cluster"], numbers))
    return list(runner.rows)


def _climbs(space: Space, ranking: Ranking, runner: Runner, rows: Sequence[int], until: float,
            stop: Callable[[], bool]) -> None:
    """What a search under a time limit simulates first: of each number of GPUs something that fits, the best near that
    of each family, in every precision for itself, and then of the other numbers of GPUs."""
    now = time.monotonic()
    each_number(ranking, runner, stop, partial(_over, stop, now + (until - now) * _NUMBERS_S))
    now, each = time.monotonic(), clusters_of(space) or {"": list(range(len(space.clusters)))}
    climb_s = (until - now) / (1 if ranking.of.unbounded.any() else 2)
    families_s = climb_s * (1 - _NUMBERS_S) if len(set(space.gpus.tolist())) > 1 else climb_s
    for turn, (name, numbers) in enumerate(each.items(), 1):
        climb_in(space, ranking, runner, name, numbers, rows, stop,
                 partial(_over, stop, now + families_s * turn / len(each)))
    began = time.monotonic()
    climb_each(ranking, runner, lambda share: _over(stop, began + max(0.0, now + climb_s - began) * share))


def _over(stop: Callable[[], bool], ends: float) -> bool:
    return stop() or time.monotonic() > ends


def _searched(space: Space, ranking: Ranking, runner: Runner, first: Sequence[int], top: int,
              stop: Callable[[], bool], patience: int) -> Found:
    """The search over what is bounded, and again over more of it while there is time and any is left.

    Args:
        first: rows that are evaluated before all others; patience: rounds before some are tried out of turn.
    """
    while True:
        result = search(ranking.values, runner.values, top, stop=stop, tighten=ranking.tighten,
                        first=list(dict.fromkeys(first)), aside=aside_of(space, ranking), patience=patience)
        if not ranking.of.unbounded.any():
            return result
        if not result.complete or stop():
            result.complete, result.next_bound = False, 0.0
            return result
        ranking.go_on()


def _round_off(space: Space, ranking: Ranking, runner: Runner, result: Found, top: int, stop: Callable[[], bool],
               own: int | None, blocks: bool) -> None:
    """What is best by the bounds that there are, where there was no time for a search; then what lies between the
    micro-batches and, where any are tried, the numbers of recomputed blocks next to the best."""
    if not runner.rows.keys() - {own}:
        served = isinstance(space, ServedSpace)
        rows = ([] if served else early(ranking, stop)) or ranking.at_hand(ROUND, runner.rows)
        values = np.full(len(ranking.values), np.inf)
        values[rows] = ranking.values[rows]
        some = search(values, runner.values, top, first=list(runner.rows))
        result.best, result.values = some.best, some.values
    if result.best and space.stepped:
        result.add(between(space, ranking, runner, stop), top)
    if result.best and blocks:
        Finer(space, ranking, runner)(result, np.ones(len(space), dtype=bool), top, stop)


def _whole_nodes(scenario: Scenario, clusters: Sequence[str], choice: Choice) -> list[str]:
    """A hint where more GPUs are searched than the part of one node that the file takes."""
    cluster = scenario.cluster
    if clusters or not part_of_one(scenario, choice.gpus):
        return []
    return [f"cluster: the file takes {cluster.gpus_per_node} of the {cluster.topology.gpus_per_node} GPUs of one "
            f"{cluster.topology.name}; the search has whole ones"]


def _refuse_never_simulated(bases: Sequence[Scenario], loaded: Loaded | None) -> None:
    """What no layout makes possible, with its place in the file.

    Raises:
        UserError: as `sim.parallel.support.check` says it.
    """
    faults = dict.fromkeys(fault for base in bases for fault in never_simulated(base))
    if faults:
        raise UserError([fault if loaded is None else api.placed(fault, loaded) for fault in faults])


def _nearest(space: Space, ranking: Ranking, runner: Runner,
             stop: Callable[[], bool]) -> tuple[dict[str, Any] | None, bool]:
    """The best row of a wish without limits, if the search for it came to its end, and whether it was ended before."""
    result = search(ranking.values, runner.values, 1, stop=stop, tighten=ranking.tighten)
    if not result.complete or not result.best:
        return None, not result.complete
    return table_row(space, runner, result.best[0][1], runner.wish), False


def _families(ranking: Ranking, runner: Runner, result: Found, top: int, stop: Callable[[], bool]) -> None:
    """A layout that fits of every family, behind a search that came to its end; then `result` has the best of all that
    was simulated, whatever for."""
    if result.complete and result.best:
        (best_of_each if isinstance(ranking.space, ServedSpace) else round_out)(ranking, runner, stop)
    result.add([(runner.value(row), row) for row in runner.rows if row not in result.values], top)


def _count(found: Sizing, ranking: Ranking, runner: Runner) -> None:
    """What became of the configurations that were not simulated."""
    found.impossible, found.pruned = ranking.impossible, ranking.pruned()
    found.unbounded = int(ranking.of.unbounded.sum())
    found.pruned["time"] -= int(np.isfinite(ranking.values[list(runner.rows)]).sum())  # the scenario's own may be late


def _fill(found: Sizing, space: Space, result: Found, runner: Runner, own: int | None, scenario: Scenario,
          kinds: Sequence[OfPrecision]) -> None:
    """Tables of the result, and what the best would gain by its kind's precision."""
    found.precisions = [one.to_json(lambda row: table_row(space, runner, row, found.wish),
                                    scenario.training.precision.name) for one in kinds]
    if own is not None:
        found.own = kept_row(table_row(space, runner, own, found.wish), runner.rows[own])
    found.first_fault = next(({"set": space.sets(row), "reason": one.reason} for row, one in runner.rows.items()
                              if one.outcome == "fault"), None)
    outcomes = [one.outcome for one in runner.rows.values()]
    found.refused, found.faults = outcomes.count("refused"), outcomes.count("fault")
    found.covered, found.stepped, found.simulated = len(space), space.stepped, len(runner.rows)
    if not result.complete:
        found.pruned.pop("time")
        found.gap = min(1.0, result.gap)
    found.best = [table_row(space, runner, row, found.wish) for _, row in result.best]
    found.best_proven = result.proven
    if result.best:
        number = int(space.columns["cluster"][result.best[0][1]])
        found.winner = resolve(runner.plain[number], "", found.best[0]["set"])
        found.free_bytes = runner.capacity[number] - found.best[0]["device_used_bytes"]
    found.hints += autocast_alone(scenario) if found.winner is None else with_usual_half(
        found.winner, found.best[0], [one["precision"] for one in found.precisions])
    found.rows = [kept_row(table_row(space, runner, row, found.wish), runner.rows[row]) for row in sorted(runner.rows)]
    fitting = [table_row(space, runner, row, found.wish) for row in sorted(runner.rows)
               if math.isfinite(runner.value(row))]
    found.front = [fitting[i] for i in pareto(fitting, axes_of(space))]
    found.front_proven = found.front_proven and not found.faults


def _why(found: Sizing, space: Space, result: Found, runner: Runner, bound: Floats) -> Why:
    """The best against others: they are simulated once more, for their terms."""
    values = {row: runner.value(row) for row in runner.rows}
    bases = {_name(space, row): int(space.columns["cluster"][row]) for row in values}
    kinds = families(space, bound, values, lambda row: table_row(space, runner, row, found.wish),
                     result.best[0][1] if result.best else None)
    fitting = [row for row in sorted(values, key=lambda row: (values[row], row)) if math.isfinite(values[row])]
    ordered = [table_row(space, runner, row, found.wish) for row in _to_another(space, fitting)]
    return explain(ordered, kinds, lambda row: api.run(resolve(
        runner.plain[bases[row["cluster"], json.dumps(row["set"])]], "", row["set"])))


def _to_another(space: Space, rows: Sequence[int]) -> Sequence[int]:
    """Rows up to the first whose layout is not that of the first; the first two where there is none."""
    for place, row in enumerate(rows):
        if space.columns["cluster"][row] != space.columns["cluster"][rows[0]] or not same_layout(
                space.sets(row), space.sets(rows[0])):
            return rows[:place + 1]
    return rows[:2]


def _name(space: Space, row: int) -> tuple[str, str]:
    """What tells a row of a table from all others."""
    return space.clusters[int(space.columns["cluster"][row])].cluster.topology.name, json.dumps(space.sets(row))
