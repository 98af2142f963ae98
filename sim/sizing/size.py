"""`size`: the best configurations of a space, found by bounds and simulation, and what was left out why."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sim import api
from sim.errors import Fault, UserError
from sim.report.troubles import troubled
from sim.scenario import Loaded, Scenario, resolve
from sim.scenario.dump import dump
from sim.sizing.bounds import Bounds, bounds
from sim.sizing.front import complete, pareto
from sim.sizing.prices import prices_of
from sim.sizing.search import Found, search
from sim.sizing.space import Choice, Space, build_space
from sim.sizing.store import Outcome, Store
from sim.sizing.why import Why, explain, families
from sim.sizing.workers import Workers
from sim.sizing.workers import workers as started_workers

Floats = npt.NDArray[np.float64]
OBJECTIVES = ("time", "cost", "gpus")


@dataclass(frozen=True)
class Wish:
    """What is asked of a configuration.

    Attributes:
        objective: time, cost (GPU-hours times price; GPU-hours where no price is given) or gpus.
        steps: optimizer steps of the run; 1 where no tokens are given.
        deadline_s, budget: longest run, most money; None = no limit.
        price_per_gpu_hour: of clusters that `prices` does not name; prices: by name of the topology.
        priced: whether that is money; else cost means GPU-hours.
    """

    objective: str = "time"
    steps: float = 1.0
    deadline_s: float | None = None
    budget: float | None = None
    price_per_gpu_hour: float = 1.0
    priced: bool = False
    prices: Mapping[str, float] = field(default_factory=dict)

    def price(self, scenario: Scenario) -> float:
        """Of one GPU-hour on a scenario's cluster."""
        return self.prices.get(scenario.cluster.topology.name, self.price_per_gpu_hour)

    def value(self, step_s: Any, gpus: Any, price: Any = None) -> Any:
        """The objective at a price per GPU-hour (None = `price_per_gpu_hour`), inf where a limit is broken.

        It never falls when `step_s` rises, so bounds keep bounding.
        """
        run_s = np.asarray(step_s, dtype=np.float64) * self.steps
        cost = run_s / 3600.0 * gpus * (self.price_per_gpu_hour if price is None else price)
        broken = np.zeros(np.shape(run_s), dtype=bool)
        if self.deadline_s is not None:
            broken |= run_s > self.deadline_s
        if self.budget is not None:
            broken |= cost > self.budget
        # fewest GPUs first, and of equal numbers the fastest: time only breaks ties
        ranked = np.asarray(gpus, dtype=np.float64) + run_s / (1.0 + run_s)
        chosen = {"time": run_s, "cost": cost, "gpus": ranked}[self.objective]
        return np.where(broken, np.inf, chosen)

    def told(self, value: float) -> str:
        """A value of the objective with its unit."""
        if self.objective == "gpus":
            return f"{value:,.0f} GPUs"
        return f"{value / self.steps:.4g} s a step" if self.objective == "time" else (
            f"{value:,.4g} {'USD' if self.priced else 'GPU-hours'}")


@dataclass
class Sizing:
    """What `size` found.

    Attributes:
        best: rows of a table, the best first: fields, step time, run time, GPUs, GPU-hours, cost, memory.
        covered, impossible, simulated: configurations in all, those that lowering refuses, those simulated.
        pruned: configurations ruled out, by the bound that did it.
        front: rows that no simulated row beats in time, GPUs and cost; `front_proven`: nor any row left out.
        why: what the best has ahead of the runner-up and of the best of each family.
        refused, faults: of those simulated, rows a technique refused, and rows the simulation failed on (ours).
        first_fault: `{set, reason}` of the first row that the simulation failed on; the store has all.
        gap: how much better than the best an unsimulated row could be.
        rows: every simulated row, with its outcome and why it has no time, in the order of the space.
        price_origin: where the price of each cluster comes from.
        seconds: of wall clock, by part.
    """

    wish: Wish
    best: list[dict[str, Any]] = field(default_factory=list)
    covered: int = 0
    impossible: int = 0
    simulated: int = 0
    refused: int = 0
    faults: int = 0
    first_fault: dict[str, Any] | None = None
    pruned: dict[str, int] = field(default_factory=dict)
    front: list[dict[str, Any]] = field(default_factory=list)
    front_proven: bool = False
    why: Why = field(default_factory=Why)
    rows: list[dict[str, Any]] = field(default_factory=list)
    price_origin: dict[str, str] = field(default_factory=dict)
    gap: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"objective": self.wish.objective, "prices_usd_per_gpu_hour": dict(self.wish.prices),
                "price_origin": self.price_origin, "best": self.best, "front": self.front,
                "front_proven": self.front_proven, "why": self.why.to_json(), "covered": self.covered,
                "impossible": self.impossible, "pruned": self.pruned, "simulated": self.simulated,
                "refused": self.refused, "faults": self.faults,
                "first_fault": self.first_fault, "gap": self.gap, "proven": self.proven,
                "seconds": self.seconds}

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
         clusters: Sequence[str] = (), top: int = 10, out: Path | None = None, resume: bool = False,
         workers: int = 1, dask: str | None = None, seconds: float = math.inf, price: str | None = None,
         progress: Callable[[int, float, float], None] | None = None) -> Sizing:
    """Search the layouts of a scenario's model for the best.

    Args:
        source: gives the model, batch and precision; its own layout does not matter.
        clusters: topologies, default the scenario's.
        top: how many of the best are proven and returned.
        out: SQLite file of outcomes (see `sim.sizing.store`); `resume` goes on with one that is there.
        workers: processes; they do not change what is found or simulated.
        dask: address of a Dask scheduler, whose workers simulate instead.
        seconds: simulate no longer than this; what is found then is the best so far, with its gap.
        price: what a GPU-hour costs, as `--price` says it (`sim.sizing.prices`); a wish with a price keeps its own.
        progress: told (simulated, next bound, best value) after every round.

    Raises:
        UserError: the scenario is wrong, or nothing is possible.
    """
    wish, started = wish or Wish(), time.monotonic()
    scenario = source if isinstance(source, Scenario) else (
        source if isinstance(source, Loaded) else api.load(source)).scenario
    if troubled(scenario):
        raise UserError(Fault("sizing looks for layouts of a cluster whose GPUs and links are alike: its bounds do not "
                              "hold where some differ", "cluster", hint="take slow_gpus, other_gpus, clock_spread and "
                              "degraded out, size, then 'drystep run' the best with them"))
    bases = [_alone(scenario, name) for name in clusters] or [_alone(scenario, None)]
    wish, origin = _priced(wish, bases, price)
    space = build_space(bases, choice)
    listed = time.monotonic()
    of = bounds(space)
    bounded = time.monotonic()
    plain = [dump(base) for base in bases]
    store = Store(out, {"clusters": plain}, resume)
    found = Sizing(wish, covered=len(space), price_origin=origin)
    value = _bound_values(space, of, wish, found)
    with ExitStack() as stack:
        stack.callback(store.close)
        pool = stack.enter_context(started_workers(workers, dask))
        runner = _Runner(space, plain, wish, store, pool)

        def stop() -> bool:
            if progress is not None:
                progress(len(runner.rows), math.nan, math.nan)
            return time.monotonic() - bounded > seconds

        result = search(value, runner.values, top, stop=stop)
        found.front_proven = complete(space, np.where(np.isfinite(value), of.time_s, np.inf), runner.steps, stop)
    _fill(found, space, result, runner)
    found.why = _why(found, space, result, runner, value)
    found.first_fault = next(({"set": space.sets(row), "reason": one.reason} for row, one in runner.rows.items()
                              if one.outcome == "fault"), None)
    found.seconds = {"space": listed - started, "bounds": bounded - listed, "simulation": time.monotonic() - bounded}
    return found


def _alone(scenario: Scenario, topology: str | None) -> Scenario:
    """The scenario on one node of a cluster, without parallelism: what every row starts from."""
    plain = dump(scenario)
    batch = scenario.training.global_batch
    cluster = plain["cluster"] if topology is None else {"topology": topology}
    sets = {"cluster": {**cluster, "nodes": 1}, "parallel.strategy": "ddp", "parallel.sharding_factor": 1,
            "parallel.tensor": 1, "parallel.sequence_parallel": False, "parallel.context": 1, "parallel.expert": 1,
            "parallel.pipeline": 1, "parallel.virtual_stages": 1, "parallel.schedule": "1f1b", "parallel.split": None,
            "training.micro_batch": 1}
    base = resolve(plain, scenario.name, {**sets, "training.global_batch": _multiple(batch, plain, cluster)})
    if batch is None or batch == base.training.global_batch:
        return base
    return base.model_copy(update={"training": base.training.model_copy(update={"global_batch": batch})})


def _multiple(batch: int | None, plain: dict[str, Any], cluster: dict[str, Any]) -> int:
    """A global batch that one node can take, whatever the run's."""
    return 4608 if batch is None else batch * 4608


def _priced(wish: Wish, clusters: Sequence[Scenario], price: str | None) -> tuple[Wish, dict[str, str]]:
    """The wish with the prices of all clusters, where all have one, and where they come from.

    Raises:
        UserError: money is asked for, and a cluster has no price.
    """
    if price is None and (wish.priced or wish.prices or wish.price_per_gpu_hour != 1.0):
        return wish, {}
    prices, origin = prices_of(clusters, price)
    without = [name for one in clusters if (name := one.cluster.topology.name) not in prices]
    if without and (wish.budget is not None or (wish.objective == "cost" and prices)):
        raise UserError(Fault(f"nothing says what a GPU-hour of {', '.join(without)} costs", "--price",
                              hint="give --price, e.g. --price 2.5, or budget.price_per_gpu_hour"))
    return (wish, {}) if without else (replace(wish, priced=True, prices=prices), origin)


def _bound_values(space: Space, of: Bounds, wish: Wish, found: Sizing) -> Floats:
    """Bounds in units of the objective; what is ruled out is counted by what does it, and inf."""
    possible = np.isfinite(of.time_s)
    found.impossible = int((~possible).sum())
    alive = possible & of.fits
    found.pruned["memory"] = int(possible.sum() - alive.sum())
    run_s = of.time_s * wish.steps
    price = np.array([wish.price(one) for one in space.clusters])[space.columns["cluster"]]
    if wish.deadline_s is not None:
        late = alive & (run_s > wish.deadline_s)
        found.pruned["deadline"], alive = int(late.sum()), alive & ~late
    if wish.budget is not None:
        dear = alive & (run_s / 3600 * space.gpus * price > wish.budget)
        found.pruned["budget"], alive = int(dear.sum()), alive & ~dear
    values: Floats = np.where(alive, wish.value(np.where(possible, of.time_s, 0.0), space.gpus, price), np.inf)
    found.pruned["time"] = int(np.isfinite(values).sum())
    return values


class _Runner:
    """Simulates rows, in this process or in others; what the store knows is not simulated again."""

    def __init__(self, space: Space, plain: list[dict[str, Any]], wish: Wish, store: Store,
                 pool: Workers) -> None:
        self.space, self.plain, self.wish, self.store, self.pool = space, plain, wish, store, pool
        self.heads = [hashlib.sha256(json.dumps(p, sort_keys=True).encode()).hexdigest()[:12] for p in plain]
        self.rows: dict[int, Outcome] = {}

    def values(self, rows: Sequence[int]) -> list[float]:
        """The objective of rows; inf for what does not fit or is refused."""
        jobs = []
        for row in rows:
            cluster, sets = int(self.space.columns["cluster"][row]), self.space.sets(row)
            key = f"{self.heads[cluster]} {json.dumps(sets, sort_keys=True)}"
            jobs.append((key, self.plain[cluster], sets, int(self.space.gpus[row])))
        new = [job for job in jobs if job[0] not in self.store.known]
        for one in self.pool.each(_simulated, new):
            self.store.add([one])
        self.rows.update((row, self.store.known[job[0]]) for row, job in zip(rows, jobs, strict=True))
        return [self.value(row) for row in rows]

    def price(self, row: int) -> float:
        """Of one GPU-hour of a row's cluster."""
        return self.wish.price(self.space.clusters[int(self.space.columns["cluster"][row])])

    def value(self, row: int) -> float:
        """The objective of a row that was simulated."""
        one = self.rows[row]
        return float(self.wish.value(one.step_time_s, one.gpus, self.price(row))) if one.fits else math.inf

    def steps(self, rows: Sequence[int]) -> list[float]:
        """Seconds of a step of rows; inf for what breaks a limit, does not fit or is refused."""
        return [self.rows[row].step_time_s if math.isfinite(value) else math.inf
                for row, value in zip(rows, self.values(rows), strict=True)]


def _simulated(job: tuple[str, dict[str, Any], dict[str, Any], int]) -> Outcome:
    """One configuration, whatever comes of it."""
    key, plain, sets, gpus = job
    try:
        result = api.run(resolve(plain, "", sets))
    except UserError as error:
        return Outcome(key, gpus, "refused", math.inf, False, 0, str(error)[:500])
    except (ValueError, ArithmeticError, AssertionError, LookupError) as error:  # one fault of ours spoils no search
        return Outcome(key, gpus, "fault", math.inf, False, 0, f"{type(error).__name__}: {error}"[:500])
    return Outcome(key, gpus, "ok", result.step_time_s, result.memory.fits, result.memory.device_used_bytes)


def _fill(found: Sizing, space: Space, result: Found, runner: _Runner) -> None:
    """Tables of the result."""
    outcomes = [one.outcome for one in runner.rows.values()]
    found.refused, found.faults = outcomes.count("refused"), outcomes.count("fault")
    found.simulated = len(runner.rows)
    found.pruned["time"] -= found.simulated
    if not result.complete:
        found.pruned.pop("time")
        found.gap = min(1.0, result.gap)
    found.best = [_row(space, runner, row, found.wish) for _, row in result.best]
    found.rows = [_kept(_row(space, runner, row, found.wish), runner.rows[row]) for row in sorted(runner.rows)]
    fitting = [_row(space, runner, row, found.wish) for row in sorted(runner.rows)
               if math.isfinite(runner.value(row))]
    found.front = [fitting[i] for i in pareto(fitting)]
    found.front_proven = found.front_proven and not found.faults


def _why(found: Sizing, space: Space, result: Found, runner: _Runner, bound: Floats) -> Why:
    """The best against others: they are simulated once more, for their terms."""
    values = {row: runner.value(row) for row in runner.rows}
    ranks = {scenario.cluster.topology.name: i for i, scenario in enumerate(space.clusters)}
    kinds = families(space, bound, values, lambda row: _row(space, runner, row, found.wish),
                     result.best[0][1] if result.best else None)
    second = [row for row in sorted(values, key=lambda row: (values[row], row)) if math.isfinite(values[row])][:2]
    ordered = [_row(space, runner, row, found.wish) for row in second]
    return explain(ordered, kinds, lambda row: api.run(resolve(runner.plain[ranks[row["cluster"]]], "", row["set"])))


def _kept(row: dict[str, Any], one: Outcome) -> dict[str, Any]:
    """A row of `Sizing.rows`; what is not finite is None."""
    plain = {name: None if value == math.inf else value for name, value in row.items()}
    return {**plain, "fits": one.fits, "outcome": one.outcome, "reason": one.reason}


def _row(space: Space, runner: _Runner, row: int, wish: Wish) -> dict[str, Any]:
    one = runner.rows[row]
    run_s = one.step_time_s * wish.steps
    return {"cluster": space.clusters[int(space.columns["cluster"][row])].cluster.topology.name, "gpus": one.gpus,
            "step_time_s": one.step_time_s, "run_s": run_s, "gpu_hours": run_s / 3600 * one.gpus,
            "cost": run_s / 3600 * one.gpus * runner.price(row),
            "usd": run_s / 3600 * one.gpus * runner.price(row) if wish.priced else None,
            "device_used_bytes": one.device_used_bytes, "set": space.sets(row)}


def counts(text: str) -> list[int]:
    """GPU counts of `8..512` (every power of two between, and both ends), `8,16,24`, or both joined.

    Raises:
        UserError: text that says neither.
    """
    found: set[int] = set()
    for part in text.split(","):
        low, dots, high = part.strip().partition("..")
        try:
            first, last = int(low), int(high) if dots else int(low)
        except ValueError:
            raise UserError(Fault(f"'{text}' is no number of GPUs", "--gpus", hint="write 8..512 or 8,16")) from None
        if not 0 < first <= last <= 1_000_000:
            raise UserError(Fault(f"'{part}' is no range of 1 to 1,000,000 GPUs", "--gpus", hint="write 8..512"))
        found |= {first, last}
        value = 1
        while value <= last:
            if value >= first:
                found.add(value)
            value *= 2
    return sorted(found)
