"""`size`: the best configurations of a space, found by bounds and simulation, and what was left out why."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sim import api
from sim.errors import Fault, UserError
from sim.parallel.serving.request import run_of
from sim.parallel.support.check import on_any_ranks
from sim.report.asked import autocast_alone
from sim.scenario import Loaded, Scenario, resolve
from sim.sizing.base import alone, following
from sim.sizing.bounds import Bounds
from sim.sizing.front import AXES, SERVED_AXES, complete, complete_served, pareto
from sim.sizing.nearby import Nearby, own_row
from sim.sizing.offloads import both_ways, narrowed, nowhere, variants
from sim.sizing.ranking import Floats, Ranking
from sim.sizing.refused import refuse
from sim.sizing.round_out import best_of_each, round_out
from sim.sizing.rows import kept_row, table_row
from sim.sizing.runner import Runner
from sim.sizing.search import Found, search
from sim.sizing.served_bounds import ServedBounds
from sim.sizing.served_space import ServedSpace, build_served, own_served, served, served_bases
from sim.sizing.served_space import plain as plain_served
from sim.sizing.space import Choice, Space, build_space, with_parts, with_schedules
from sim.sizing.store import Store
from sim.sizing.why import Why, explain, families
from sim.sizing.wish import SERVED_DEFAULT, Wish, priced
from sim.sizing.workers import workers as started_workers
from sim.software import stack_of


@dataclass
class Sizing:
    """What `size` found.

    Attributes:
        best: rows of a table (`sim.sizing.rows`), the best first.
        nearest: where the deadline or the budget leaves nothing, the best row without them; None if there is none, or
            none was proven in time.
        own: row of the scenario's own layout where it is among those covered, as in `rows`.
        nearest_cut: whether the search for `nearest` was ended before it proved one.
        raw: configurations as they can be written; covered: those that differ in effect.
        impossible, simulated: those that lowering refuses, those simulated.
        pruned: configurations ruled out, by the bound that did it.
        front: rows that no simulated row beats in time, GPUs, cost and energy; `front_proven`: nor any row left out in
            time, GPUs and cost, and, where energy is the objective, none left out takes less on as many GPUs.
        winner: the scenario that the best row stands for, and `free_bytes` what it leaves of its fullest GPU's memory;
            None where there is none.
        why: what the best has ahead of the runner-up and of the best of each family.
        refused, faults: of those simulated, rows a technique refused, and rows the simulation failed on (ours).
        first_fault: `{set, reason}` of the first row that the simulation failed on; the store has all.
        gap: how much better than the best an unsimulated row could be; `best_proven`: rows of `best`, from the first
            on, above which no such row can come.
        rows: every simulated row, with its outcome and why it has no time, in the order of the space.
        price_origin: where the price of each cluster comes from.
        schedules: of pipelines, those that were tried.
        not_offloaded: what was asked to be tried on the host and no technique of the framework keeps there.
        hints: of the precision that all layouts have, where hardly a run has it.
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
    impossible: int = 0
    simulated: int = 0
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
    hints: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    served: bool = False
    batches: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"objective": self.wish.objective, "prices_usd_per_gpu_hour": dict(self.wish.prices),
                "price_origin": self.price_origin, "best": self.best, "nearest": self.nearest,
                "nearest_cut": self.nearest_cut, "own": self.own, "front": self.front,
                "front_proven": self.front_proven, "why": self.why.to_json(), "raw": self.raw, "covered": self.covered,
                "impossible": self.impossible, "pruned": self.pruned, "simulated": self.simulated,
                "refused": self.refused, "faults": self.faults,
                "first_fault": self.first_fault, "gap": self.gap, "best_proven": self.best_proven,
                "proven": self.proven,
                "schedules": self.schedules, "not_offloaded": self.not_offloaded, "hints": self.hints,
                "seconds": self.seconds}

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
        offload: of `sim.sizing.offloads.OFFLOADS`, what to try outside the GPUs; default what the scenario says.
        overlap_p2p: whether to try transfers between stages beside compute too; default what the scenario says.
        top: how many of the best are proven and returned.
        out: SQLite file of outcomes (see `sim.sizing.store`); `resume` goes on with one that is there.
        workers: processes; they do not change what is found or simulated.
        dask: address of a Dask scheduler, whose workers simulate instead.
        seconds: of wall clock from this call: then stop simulating; what is found by then is the best so far, with its
            gap. Listing layouts and bounding them cannot be cut short, nor can a round of simulations; one always runs.
        price: what a GPU-hour costs, as `--price` says it (`sim.sizing.prices`); a wish with a price keeps its own.
        interrupted: asked between rounds of simulations; True ends the search as `seconds` does.
        progress: told (simulated, next bound, best value) after every round.

    Raises:
        UserError: the scenario is wrong, or nothing is possible.
    """
    started = time.monotonic()
    loaded = source if isinstance(source, Scenario | Loaded) else api.load(source)
    scenario = loaded if isinstance(loaded, Scenario) else loaded.scenario
    request = run_of(scenario)
    wish = wish or Wish("time" if request is None else SERVED_DEFAULT)
    refuse(scenario, choice, wish, overlap_p2p)
    bases = [alone(scenario, name) for name in clusters] or [alone(scenario, None)] if request is None else (
        served_bases(scenario, clusters or (None,), choice, offload))
    _refuse_never_simulated(bases, None if isinstance(loaded, Scenario) else loaded)
    wish, origin = priced(wish, bases, price)
    space, plain, dropped = _listed(scenario, bases, choice, wish, offload, overlap_p2p)
    listed = time.monotonic()
    store = Store(out, {"clusters": plain}, resume)
    found = Sizing(wish, raw=space.raw, covered=len(space), price_origin=origin, not_offloaded=dropped,
                   schedules=space.schedules, hints=autocast_alone(scenario) if request is None else [],
                   served=request is not None, batches=space.batches)
    with ExitStack() as stack:
        stack.callback(store.close)
        pool = stack.enter_context(started_workers(workers, dask))
        of = ServedBounds(space) if isinstance(space, ServedSpace) else Bounds(
            space, pool.executor if dask is None else None, workers)
        bounded = time.monotonic()
        ranking, runner = Ranking(space, of, wish), Runner(space, plain, wish, store, pool)
        free = Runner(space, plain, wish.unlimited, store, pool)
        own = own_served(space, scenario) if isinstance(space, ServedSpace) else own_row(space, scenario)

        def stop() -> bool:
            if progress is not None:
                progress(len(runner.rows), math.nan, math.nan)
            begun = len(runner.rows) + len(free.rows) > (own is not None)
            return interrupted() or (begun and time.monotonic() - started > seconds)

        result = search(ranking.values, runner.values, top, stop=stop, tighten=ranking.tighten,
                        first=[] if own is None else [own], aside=None if found.served else Nearby(space, ranking))
        if result.complete and not result.best and free.wish != wish:
            found.nearest, found.nearest_cut = _nearest(space, Ranking(space, of, free.wish), free, stop)
        found.front_proven = _front_proven(space, ranking, runner, stop)
        if result.complete and result.best:
            (best_of_each if found.served else round_out)(ranking, runner, stop)
    found.impossible, found.pruned = ranking.impossible, ranking.pruned()
    found.pruned["time"] -= int(np.isfinite(ranking.values[list(runner.rows)]).sum())  # the scenario's own may be late
    _fill(found, space, result, runner, own)
    found.why = _why(found, space, result, runner, ranking.values)
    found.seconds = {"space": listed - started, "bounds": bounded - listed, "simulation": time.monotonic() - bounded}
    return found


def _listed(scenario: Scenario, bases: list[Scenario], choice: Choice, wish: Wish, offload: Sequence[str],
            overlap_p2p: bool) -> tuple[Space, list[dict[str, Any]], list[str]]:
    """The space, each of its clusters as plain data that rows are put on top of, and what of `offload` is not tried."""
    if run_of(scenario) is not None:
        several = wish.throughput is not None or wish.objective == "throughput"
        space: Space = build_served(with_parts(bases, choice), choice, several)
        return space, [plain_served(base) for base in space.clusters], []
    choice = with_schedules(choice, scenario)
    bases, dropped = _varied(with_parts(bases, choice), choice, offload, overlap_p2p)
    return build_space(bases, choice, partial(narrowed, both=overlap_p2p)), [following(base) for base in bases], dropped


def _varied(bases: list[Scenario], choice: Choice, offload: Sequence[str],
            overlap_p2p: bool) -> tuple[list[Scenario], list[str]]:
    """Bases with what is to be tried beside layouts, and what of `offload` is not tried."""
    dropped = nowhere(bases, offload, choice)
    varied = variants(bases, [name for name in offload if name not in dropped])
    return both_ways(varied) if overlap_p2p else varied, dropped


def _refuse_never_simulated(bases: Sequence[Scenario], loaded: Loaded | None) -> None:
    """What no layout makes possible, with its place in the file.

    Raises:
        UserError: as `sim.parallel.support.check` says it.
    """
    faults = dict.fromkeys(fault for base in bases for fault in on_any_ranks(base, stack_of(base.software)))
    if faults:
        raise UserError([fault if loaded is None else api.placed(fault, loaded) for fault in faults])


def _front_proven(space: Space, ranking: Ranking, runner: Runner, stop: Callable[[], bool]) -> bool:
    """Whether no row left out is on the front, which energy counts for where it is the objective."""
    if isinstance(space, ServedSpace):
        return _served_front_proven(space, ranking, runner, stop)
    proven = complete(space, ranking.times, runner.steps, stop, ranking.tighten_times)
    if runner.wish.objective == "energy":
        proven &= complete(space, ranking.values, runner.values, stop, ranking.tighten)
    return proven


def _served_front_proven(space: ServedSpace, ranking: Ranking, runner: Runner, stop: Callable[[], bool]) -> bool:
    """Whether no row left out is on the front over latency, GPUs and cost, within the limits."""
    of, cost = ranking.of, replace(runner.wish, objective="cost")
    assert isinstance(of, ServedBounds)

    def bounds() -> Floats:
        latency_s = of.time_s if _one_pass(space) else of.token_s
        left = np.isfinite(ranking.values)
        return np.stack([np.where(left, axis, np.inf) for axis in (
            latency_s, space.gpus.astype(np.float64), Ranking(space, of, cost).values)], axis=1)

    def values(rows: Sequence[int]) -> Floats:
        fits = np.isfinite(runner.values(rows))
        told = [table_row(space, runner, row, cost) for row in rows]
        return np.where(fits[:, None], [[float(one[axis]) for axis in _axes(space)] for one in told], np.inf)

    return complete_served(bounds, values, stop, ranking.tighten_only)


def _one_pass(space: ServedSpace) -> bool:
    """Whether no token is generated behind the first."""
    return served(space.clusters[0]).generate < 2


def _axes(space: Space) -> tuple[str, ...]:
    """What the front trades off."""
    if not isinstance(space, ServedSpace):
        return AXES
    return ("step_time_s", *SERVED_AXES[1:]) if _one_pass(space) else SERVED_AXES


def _nearest(space: Space, ranking: Ranking, runner: Runner,
             stop: Callable[[], bool]) -> tuple[dict[str, Any] | None, bool]:
    """The best row of a wish without limits, if the search for it came to its end, and whether it was ended before."""
    result = search(ranking.values, runner.values, 1, stop=stop, tighten=ranking.tighten)
    if not result.complete or not result.best:
        return None, not result.complete
    return table_row(space, runner, result.best[0][1], runner.wish), False


def _fill(found: Sizing, space: Space, result: Found, runner: Runner, own: int | None) -> None:
    """Tables of the result."""
    if own is not None:
        found.own = kept_row(table_row(space, runner, own, found.wish), runner.rows[own])
    found.first_fault = next(({"set": space.sets(row), "reason": one.reason} for row, one in runner.rows.items()
                              if one.outcome == "fault"), None)
    outcomes = [one.outcome for one in runner.rows.values()]
    found.refused, found.faults = outcomes.count("refused"), outcomes.count("fault")
    found.simulated = len(runner.rows)
    if not result.complete:
        found.pruned.pop("time")
        found.gap = min(1.0, result.gap)
    found.best = [table_row(space, runner, row, found.wish) for _, row in result.best]
    found.best_proven = result.proven
    if result.best:
        number = int(space.columns["cluster"][result.best[0][1]])
        found.winner = resolve(runner.plain[number], "", found.best[0]["set"])
        found.free_bytes = runner.capacity[number] - found.best[0]["device_used_bytes"]
    found.rows = [kept_row(table_row(space, runner, row, found.wish), runner.rows[row]) for row in sorted(runner.rows)]
    fitting = [table_row(space, runner, row, found.wish) for row in sorted(runner.rows)
               if math.isfinite(runner.value(row))]
    found.front = [fitting[i] for i in pareto(fitting, _axes(space))]
    found.front_proven = found.front_proven and not found.faults


def _why(found: Sizing, space: Space, result: Found, runner: Runner, bound: Floats) -> Why:
    """The best against others: they are simulated once more, for their terms."""
    values = {row: runner.value(row) for row in runner.rows}
    bases = {_name(space, row): int(space.columns["cluster"][row]) for row in values}
    kinds = families(space, bound, values, lambda row: table_row(space, runner, row, found.wish),
                     result.best[0][1] if result.best else None)
    second = [row for row in sorted(values, key=lambda row: (values[row], row)) if math.isfinite(values[row])][:2]
    ordered = [table_row(space, runner, row, found.wish) for row in second]
    return explain(ordered, kinds, lambda row: api.run(resolve(
        runner.plain[bases[row["cluster"], json.dumps(row["set"])]], "", row["set"])))


def _name(space: Space, row: int) -> tuple[str, str]:
    """What tells a row of a table from all others."""
    return space.clusters[int(space.columns["cluster"][row])].cluster.topology.name, json.dumps(space.sets(row))
