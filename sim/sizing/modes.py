"""What a search over training steps and one over requests do each in their own way: the rows there are, their bounds,
and the front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.parallel.serving.request import run_of
from sim.scenario import Scenario
from sim.sizing.bounds.requests import ServedBounds
from sim.sizing.bounds.steps import Bounds
from sim.sizing.search.best_first import Aside, Found
from sim.sizing.search.between import between
from sim.sizing.search.finer import Finer
from sim.sizing.search.front import AXES, SERVED_AXES, complete, complete_served
from sim.sizing.search.nearby import Nearby, own_row
from sim.sizing.search.ranking import Floats, Ranking
from sim.sizing.search.rows import table_row
from sim.sizing.search.runner import Runner
from sim.sizing.space.base import following
from sim.sizing.space.layouts import Choice, Space, build_space, with_own, with_parts
from sim.sizing.space.offloads import both_ways, narrowed, nowhere, variants
from sim.sizing.space.precisions import Untried, with_precisions
from sim.sizing.space.requests import ServedSpace, build_served, own_served, served, served_bases
from sim.sizing.space.requests import plain as plain_served
from sim.sizing.wish import Wish

#: Layouts of every number of GPUs that are refined for the front.
_BESIDE = 4


def bases_of(scenario: Scenario, topologies: Sequence[str | None], choice: Choice,
             offload: Sequence[str]) -> tuple[list[Scenario], list[Untried]]:
    """The scenario on one node of every topology (None: its own), in every precision that is tried there, and those
    that are not; of a request also with all that is varied of it.

    Raises:
        UserError: one is not possible.
    """
    if run_of(scenario) is not None:
        return served_bases(scenario, topologies, choice, offload), []
    return with_precisions(scenario, topologies, choice)


def listed_space(scenario: Scenario, bases: list[Scenario], choice: Choice, wish: Wish, offload: Sequence[str],
            overlap_p2p: bool) -> tuple[Space, list[dict[str, Any]], list[str]]:
    """The space, each of its clusters as plain data that rows are put on top of, and what of `offload` is not tried.

    Raises:
        UserError: nothing is possible.
    """
    if run_of(scenario) is not None:
        several = wish.throughput is not None or wish.objective == "throughput"
        space: Space = build_served(with_parts(bases, choice), choice, several)
        return space, [plain_served(base) for base in space.clusters], []
    choice = with_own(choice, scenario)
    bases, dropped = _varied(with_parts(bases, choice), choice, offload, overlap_p2p)
    return build_space(bases, choice, partial(narrowed, both=overlap_p2p)), [following(base) for base in bases], dropped


def _varied(bases: list[Scenario], choice: Choice, offload: Sequence[str],
            overlap_p2p: bool) -> tuple[list[Scenario], list[str]]:
    """Bases with what is to be tried beside layouts, and what of `offload` is not tried."""
    dropped = nowhere(bases, offload, choice)
    varied = variants(bases, [name for name in offload if name not in dropped])
    return both_ways(varied) if overlap_p2p else varied, dropped


def bounds_of(space: Space, executor: Executor | None, shares: int, until: float) -> Bounds | ServedBounds:
    """Lower bounds of all rows; see `Bounds` for the arguments."""
    return ServedBounds(space, until) if isinstance(space, ServedSpace) else Bounds(space, executor, shares, until)


def own_of(space: Space, scenario: Scenario) -> int | None:
    """The row that is the scenario's own layout; None if it is not among them."""
    return own_served(space, scenario) if isinstance(space, ServedSpace) else own_row(space, scenario)


def aside_of(space: Space, ranking: Ranking) -> Aside | None:
    """Rows to try out of turn; bounds of requests are so close that none is worth it."""
    return None if isinstance(space, ServedSpace) else Nearby(space, ranking)


def front_proven(space: Space, ranking: Ranking, runner: Runner, stop: Callable[[], bool], blocks: bool,
                 result: Found) -> bool:
    """Whether no row left out is on the front, which energy counts for where it is the objective.

    Args:
        blocks: whether the first k recomputed blocks are tried.
        result: of the search for the best, beside which values between steps were tried already.
    """
    if isinstance(space, ServedSpace):
        return _served_front_proven(space, ranking, runner, stop)
    best = result.best[0][1] if result.best else None
    proven = complete(space, lambda: ranking.times, runner.steps, stop, ranking.tighten_times,
                      partial(_beside, space, ranking, runner, stop, blocks, True,
                              None if runner.wish.objective == "energy" else best))
    if runner.wish.objective == "energy":
        proven &= complete(space, lambda: ranking.values, runner.values, stop, ranking.tighten,
                           partial(_beside, space, ranking, runner, stop, blocks, False, best))
    return proven


def _beside(space: Space, ranking: Ranking, runner: Runner, stop: Callable[[], bool], blocks: bool, times: bool,
            best: int | None, found: Found, mine: Callable[[], npt.NDArray[np.bool_]]) -> bool:
    """Values between the steps of long axes beside the best of a number of GPUs, or the quickest; `found` takes them
    in. What comes before the limit of the search is as good by time as by the objective, but for energy."""
    if best is not None and mine()[best]:
        return True
    if space.stepped:
        new = [row for _, row in between(space, ranking, runner, stop, mine())]
        found.add(list(zip((runner.steps if times else runner.values)(new), new, strict=True)), 1)
    return not stop() and (not blocks or Finer(space, ranking, runner, times)(found, mine(), 1, stop, _BESIDE))


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
        return np.where(fits[:, None], [[float(one[axis]) for axis in axes_of(space)] for one in told], np.inf)

    return complete_served(bounds, values, stop, ranking.tighten_only)


def _one_pass(space: ServedSpace) -> bool:
    """Whether no token is generated behind the first."""
    return served(space.clusters[0]).generate < 2


def axes_of(space: Space) -> tuple[str, ...]:
    """What the front trades off."""
    if not isinstance(space, ServedSpace):
        return AXES
    return ("step_time_s", *SERVED_AXES[1:]) if _one_pass(space) else SERVED_AXES
