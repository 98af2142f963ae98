"""What is asked of a configuration: what is best, within which limits, and what a GPU-hour costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sim.errors import Fault, UserError
from sim.model import build
from sim.parallel.lower import with_parallel
from sim.report.numbers.budget import tokens_of
from sim.report.result import tokens_per_sample
from sim.report.units import seconds
from sim.scenario import Scenario
from sim.sizing.prices import prices_of
from sim.software import stack_of

OBJECTIVES = ("time", "cost", "gpus", "energy")
#: Those that requests have beside them, and the one that is meant where none is named.
SERVED_OBJECTIVES, SERVED_DEFAULT = ("latency", "first-token", "throughput"), "cost"
#: How far the worst of the limits is broken: what is sought where none can be kept.
EXCESS = "limits"
_J_PER_KWH = 3.6e6
_MILLION = 1e6


class Request(NamedTuple):
    """Of a request, or of many: seconds to the first token, seconds of each further one, and the tokens that all
    replicas generate in it (an encoder: read)."""

    prompt_s: Any
    token_s: Any
    tokens: Any


@dataclass(frozen=True)
class Wish:
    """What is asked of a configuration.

    Attributes:
        objective: time, cost (GPU-hours times price; GPU-hours where no price is given), gpus or energy (of the GPUs'
            boards, joules); of requests, whose cost and energy are those of a million tokens, also latency (seconds of
            a further token), first-token (seconds to it) and throughput (tokens/s of all replicas).
        steps: optimizer steps of the run; 1 where no tokens are given, and of requests.
        deadline_s, budget: longest run, most money; None = no limit.
        latency_s, first_token_s, throughput: of requests, most seconds of a further token and to the first, fewest
            tokens/s; None = no limit.
        margin_bytes: device memory that is to stay free.
        price_per_gpu_hour: of clusters that `prices` does not name; prices: by name of the topology.
        priced: whether that is money; else cost means GPU-hours.
    """

    objective: str = "time"
    steps: float = 1.0
    deadline_s: float | None = None
    budget: float | None = None
    margin_bytes: float = 0.0
    price_per_gpu_hour: float = 1.0
    priced: bool = False
    prices: Mapping[str, float] = field(default_factory=dict)
    latency_s: float | None = None
    first_token_s: float | None = None
    throughput: float | None = None

    @property
    def served_limits(self) -> bool:
        """Whether requests have a limit."""
        return (self.latency_s, self.first_token_s, self.throughput) != (None, None, None)

    @property
    def limited(self) -> bool:
        """Whether anything but memory rules layouts out."""
        return self.served_limits or (self.deadline_s, self.budget) != (None, None) or self.margin_bytes > 0

    @property
    def unlimited(self) -> Wish:
        """The same without limits; of requests what is nearest to them."""
        if self.served_limits:
            return replace(self, objective=EXCESS)
        return replace(self, deadline_s=None, budget=None)

    def price(self, scenario: Scenario) -> float:
        """Of one GPU-hour on a scenario's cluster."""
        return self.prices.get(scenario.cluster.topology.name, self.price_per_gpu_hour)

    def value(self, step_s: Any, gpus: Any, price: Any = None, step_j: Any = 0.0,
              request: Request | None = None) -> Any:
        """The objective at a price per GPU-hour (None = `price_per_gpu_hour`), inf where a limit is broken.

        It never falls when `step_s`, `step_j` (energy of a step) or a request's seconds rise, so bounds keep bounding.
        """
        if request is not None:
            return self._served(step_s, gpus, self.price_per_gpu_hour if price is None else price, step_j, request)
        run_s = np.asarray(step_s, dtype=np.float64) * self.steps
        cost = run_s / 3600.0 * gpus * (self.price_per_gpu_hour if price is None else price)
        broken = np.zeros(np.shape(run_s), dtype=bool)
        if self.deadline_s is not None:
            broken |= run_s > self.deadline_s
        if self.budget is not None:
            broken |= cost > self.budget
        # fewest GPUs first, and of equal numbers the fastest: time only breaks ties
        ranked = np.asarray(gpus, dtype=np.float64) + run_s / (1.0 + run_s)
        joules = np.asarray(step_j, dtype=np.float64) * self.steps
        chosen = {"time": run_s, "cost": cost, "gpus": ranked, "energy": joules}[self.objective]
        return np.where(broken, np.inf, chosen)

    def _served(self, step_s: Any, gpus: Any, price: Any, step_j: Any, request: Request) -> Any:
        """`value` of requests, which take `step_s` each."""
        prompt_s, token_s, tokens = (np.asarray(part, dtype=np.float64) for part in request)
        each_s = np.asarray(step_s, dtype=np.float64) / tokens
        limits = [(prompt_s, self.first_token_s), (token_s, self.latency_s),
                  (each_s, None if self.throughput is None else 1.0 / self.throughput)]
        broken = [part / most for part, most in limits if most is not None]
        excess = np.max([np.ones(np.shape(each_s)), *broken], axis=0)
        if self.objective == EXCESS:
            return excess
        gpu_s = each_s * gpus
        # fewest GPUs first, and of equal numbers the most tokens
        chosen = {"time": step_s, "latency": token_s, "first-token": prompt_s, "throughput": each_s,
                  "cost": gpu_s / 3600.0 * price * _MILLION, "gpus": gpus + gpu_s / (1.0 + gpu_s),
                  "energy": step_j / tokens}[self.objective]
        return np.where(excess > 1.0, np.inf, chosen)

    def served_told(self, value: float) -> str:
        """A value of a request's objective with its unit."""
        if self.objective == EXCESS:
            return f"{value:.3g} times a limit"
        if self.objective in ("time", "latency", "first-token"):
            what = {"time": "a request", "latency": "a token", "first-token": "to the first token"}[self.objective]
            return f"{seconds(value)} {what}"
        told = {"throughput": f"{1.0 / max(value, 1e-30):,.4g} tokens/s", "gpus": f"{value:,.0f} GPUs",
                "energy": f"{value:.4g} J a token"}
        return told.get(self.objective) or (
            f"{value:,.4g} {'USD' if self.priced else 'GPU-hours'} a million tokens")

    def told(self, value: float) -> str:
        """A value of the objective with its unit."""
        if self.objective == "gpus":
            return f"{value:,.0f} GPUs"
        if self.objective == "energy":
            return f"{value / self.steps / _J_PER_KWH:.4g} kWh a step"
        return f"{value / self.steps:.4g} s a step" if self.objective == "time" else (
            f"{value:,.4g} {'USD' if self.priced else 'GPU-hours'}")


def steps_of(scenario: Scenario) -> float | None:
    """Optimizer steps of a scenario's run; None where its budget names no tokens.

    Args:
        scenario: resolved; its own layout does not matter.
    """
    asked, training = scenario.budget, scenario.training
    if asked is None or asked.tokens is None:
        return None
    stack = stack_of(scenario.software)
    whole = build(with_parallel(scenario, tensor=1, context=1, expert=1), stack, 1)
    tokens = tokens_of(asked.tokens, whole.parameters + whole.frozen_parameters)
    return float(math.ceil(tokens / ((training.global_batch or 1) * tokens_per_sample(scenario))))


def priced(wish: Wish, clusters: Sequence[Scenario], price: str | None) -> tuple[Wish, dict[str, str]]:
    """The wish with the prices of all clusters, where all have one, and where they come from.

    Raises:
        UserError: money is asked for, and a cluster has no price.
    """
    if price is None and (wish.priced or wish.prices or wish.price_per_gpu_hour != 1.0):
        return wish, {}
    prices, origin = prices_of(clusters, price)
    without = list(dict.fromkeys(name for one in clusters if (name := one.cluster.topology.name) not in prices))
    if without and (wish.budget is not None or (wish.objective == "cost" and prices)):
        raise UserError(Fault(f"nothing says what a GPU-hour of {', '.join(without)} costs", "--price",
                              hint="give --price, e.g. --price 2.5, or budget.price_per_gpu_hour"))
    return (wish, {}) if without else (replace(wish, priced=True, prices=prices), origin)


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
