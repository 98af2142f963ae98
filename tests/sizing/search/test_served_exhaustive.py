"""Searches over requests: what simulating every way to serve says, whatever is asked for and within whatever limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sizing_once import Once

from sim.scenario import Scenario, resolve
from sim.sizing import Choice, Sizing, Wish, size
from sim.sizing.search.store import Outcome
from sim.sizing.space.layouts import with_parts
from sim.sizing.space.requests import ServedSpace, build_served, plain, served_bases
from sim.sizing.wish import SERVED_OBJECTIVES

TOP = 5
CHOICE = Choice([1, 2, 4, 8], batch=[1, 3, 48], weights=["bf16", "int4"], kv_cache=["same", "fp8"])
CLUSTERS = ("dgx-h100", "dgx-a100-40g")


def scenario(**model: Any) -> Scenario:
    return resolve({"name": "small", "cluster": {"topology": "dgx-h100"},
                    "model": {"preset": "llama-3-8b", "layers": 4, **model},
                    "training": {"micro_batch": 1, "sequence": 512, "precision": "pure-bf16",
                                 "mode": {"inference": {"prompt": 200, "generate": 4, "batch": 2}}},
                    "software": {"year": 2024, "compile": True, "cuda_graphs": True}}, "small")


def every(one: Scenario, choice: Choice, replicas: bool, once: Once) -> tuple[ServedSpace, list[Outcome]]:
    space = build_served(with_parts(served_bases(one, CLUSTERS, choice, ()), choice), choice, replicas)
    data = [plain(base) for base in space.clusters]
    jobs = [("", data[space.columns["cluster"][row]], space.sets(row), int(space.gpus[row]))
            for row in range(len(space))]
    return space, once.on_two_cores(jobs)


def values(space: ServedSpace, outcomes: list[Outcome], wish: Wish) -> list[float]:
    return [float(wish.value(o.step_time_s, o.gpus, wish.prices.get(cluster, 1.0), o.step_energy_j,
                             space.request(row, o.prompt_time_s, o.time_per_token_s))) if o.fits else math.inf
            for row, o in enumerate(outcomes)
            for cluster in [space.clusters[space.columns["cluster"][row]].cluster.topology.name]]


PRICES = {"dgx-h100": 2.5, "dgx-a100-40g": 1.0}
#: Objective, limits as shares of the way from the least to the most of what is simulated, and whether nothing is left.
ASKED = [*((objective, {}) for objective in ("time", "cost", "gpus", "energy", *SERVED_OBJECTIVES)),
         ("cost", {"latency_s": 0.3}), ("throughput", {"latency_s": 0.2, "first_token_s": 0.4}),
         ("gpus", {"throughput": 0.5}), ("latency", {"throughput": 0.3}), ("energy", {"first_token_s": 0.1}),
         ("cost", {"latency_s": -0.1})]


@pytest.mark.whole
@pytest.mark.parametrize(("objective", "shares"), ASKED)
def test_the_answer_is_that_of_simulating_everything(objective: str, shares: dict[str, float], once: Once) -> None:
    one, replicas = scenario(), objective == "throughput" or "throughput" in shares
    space, outcomes = every(one, CHOICE, replicas, once)
    figures = {"latency_s": [o.time_per_token_s for o in outcomes if o.fits],
               "first_token_s": [o.prompt_time_s for o in outcomes if o.fits],
               "throughput": [space.tokens[row] / o.step_time_s for row, o in enumerate(outcomes) if o.fits]}
    limits = {name: min(figures[name]) ** (1 - share) * max(figures[name]) ** share for name, share in shares.items()}
    wish = Wish(objective, prices=PRICES, priced=True, **limits)
    known = values(space, outcomes, wish)
    ordered = sorted((value, row) for row, value in enumerate(known) if math.isfinite(value))
    found = size(one, CHOICE, wish, clusters=CLUSTERS, top=TOP)
    assert found.proven and found.front_proven and found.covered == len(space) and not found.faults
    assert [row["set"] for row in found.best] == [space.sets(row) for _, row in ordered[:TOP]]
    assert found.simulated < len(space)
    if not ordered:
        assert min(shares.values()) < 0 and found.nearest is not None
        nearest = values(space, outcomes, wish.unlimited)
        assert found.nearest["set"] == space.sets(int(np.argmin(nearest))) and min(nearest) > 1
        return
    _check_front(found, space, outcomes, known)
    _check_families(found, space, known)


def _check_front(found: Sizing, space: ServedSpace, outcomes: list[Outcome], known: list[float]) -> None:
    """The rows that nothing within the limits equals or beats in latency, GPUs and cost."""
    kept = [row for row, value in enumerate(known) if math.isfinite(value)]
    axes = np.array([[outcomes[row].time_per_token_s, outcomes[row].gpus, outcomes[row].step_time_s * outcomes[row].gpus
                      / space.tokens[row] * PRICES[space.clusters[space.columns["cluster"][row]].cluster.topology.name]]
                     for row in kept])
    front = {tuple(map(float, one)) for i, one in enumerate(axes)
             if not ((axes <= one).all(axis=1) & (axes < one).any(axis=1)).any()}
    told = [(row["time_per_token_s"], float(row["gpus"]), row["cost"] * 3600 / 1e6) for row in found.front]
    assert sorted(told) == [pytest.approx(one, rel=1e-9) for one in sorted(front)]


def _check_families(found: Sizing, space: ServedSpace, known: list[float]) -> None:
    """Of each the best but for the winner."""
    kinds, winner = space.kinds(), found.best[0]["set"]
    assert {one.name for one in found.why.families} == set(kinds)
    for family in found.why.families:
        mine = [(known[row], row) for row in np.flatnonzero(kinds[family.name]).tolist() if math.isfinite(known[row])]
        if not family.holds_best:
            best = space.sets(min(mine)[1]) if mine else None
            assert (family.best and family.best["set"]) == best and family.settled
        else:
            assert any(space.sets(row) == winner for _, row in mine)


def test_workers_change_nothing_and_a_search_goes_on_where_it_was(tmp_path: Any) -> None:
    choice = Choice([2, 4], batch=[1, 8], weights=["bf16", "fp8"])
    alone = size(scenario(), choice, Wish("cost", latency_s=0.01))
    file = tmp_path / "runs.db"
    two = size(scenario(), choice, Wish("cost", latency_s=0.01), workers=2, out=file)
    again = size(scenario(), choice, Wish("throughput"), out=file, resume=True)
    assert two.best == alone.best and two.front == alone.front and two.simulated == alone.simulated
    assert again.best[0]["tokens_per_second"] == max(row["tokens_per_second"] for row in again.rows if row["fits"])
    assert {"prompt_time_s", "time_per_token_s"} <= set(again.rows[0])
    assert again.to_json()["inference"]["batches"] == [1, 8]
