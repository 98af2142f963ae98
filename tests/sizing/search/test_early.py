"""What a search under a time limit simulates first."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.scenario import resolve
from sim.sizing import Choice, size
from sim.sizing.bounds.steps import Bounds
from sim.sizing.search.best_first import ROUND, Found
from sim.sizing.search.early import climb, early
from sim.sizing.search.ranking import Ranking
from sim.sizing.space.base import alone
from sim.sizing.space.families import kinds_of
from sim.sizing.space.layouts import build_space
from sim.sizing.wish import Wish, priced

#: 13B on eight GPUs of 40 GB: what is fastest by its bound does not fit.
TIGHT: dict[str, Any] = {
    "name": "tight", "cluster": {"topology": "dgx-a100-40g"}, "model": {"preset": "llama-2-13b"},
    "training": {"micro_batch": 1, "global_batch": 64, "sequence": 2048, "recompute": "full", "precision": "fsdp-bf16"},
    "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2025}}
CHOICE = Choice([8], context=[1], schedules=["1f1b"])


def ranking() -> Ranking:
    space = build_space([alone(resolve(TIGHT), None)], CHOICE)
    wish, _ = priced(Wish(), space.clusters, None)
    return Ranking(space, Bounds(space), wish)


def test_of_every_family_the_fastest_that_leaves_room() -> None:
    of = ranking()
    rows = early(of, lambda: False)
    families = [name for row in rows for name, mine in kinds_of(of.space).items() if mine[row]]
    assert 2 <= len(rows) == len(set(families)) <= ROUND and "FSDP" in families
    assert not of.of.coarse[rows].any() and (of.of.memory_bytes[rows] <= 0.9 * of.of.capacity_bytes[rows]).all()
    assert (np.diff(of.values[rows]) >= 0).all()
    without_time = early(ranking(), lambda: True)
    assert without_time  # a few are bounded all the same


def test_a_search_that_is_over_at_once_tells_something_that_fits_and_is_no_worse_than_the_files_own() -> None:
    found = size(resolve(TIGHT), CHOICE, seconds=0.0)
    assert found.best and found.own is not None and not found.proven
    assert found.simulated > 1 and all(row["fits"] for row in found.rows)  # none was simulated in vain
    assert found.best[0]["step_time_s"] <= found.own["step_time_s"]


class _Counted:
    """A runner whose values are given."""

    def __init__(self, values: dict[int, float]) -> None:
        self.given, self.asked = values, list[int]()

    def values(self, rows: list[int]) -> list[float]:
        self.asked += rows
        return [self.given[row] for row in rows]


def test_every_family_is_climbed_in_turn_unless_it_is_far_from_the_best() -> None:
    of = ranking()
    kinds = kinds_of(of.space)
    fsdp, pipeline, tensor = (np.flatnonzero(kinds[name])[:2].tolist() for name in ("FSDP", "pipeline", "tensor"))
    runner = _Counted({fsdp[0]: 3.0, fsdp[1]: 2.0, pipeline[0]: 4.0, pipeline[1]: 3.5, tensor[0]: 9.0, tensor[1]: 1.0})
    seen = list[tuple[float, int]]()

    def near(found: Found) -> tuple[list[int], None]:
        seen.append(found.best[0])
        rows = next(rows for rows in (fsdp, pipeline, tensor) if found.best[0][1] in rows)
        return [row for row in rows if row not in found.values], None

    climb(of, runner, near, [fsdp[0], pipeline[0], tensor[0]], lambda: False)  # type: ignore[arg-type]
    assert tensor[1] not in runner.asked  # its family's best is three times the best: not looked at closely
    assert {fsdp[1], pipeline[1]} <= set(runner.asked) and len(runner.asked) == len(set(runner.asked))
    assert set(seen) == {(3.0, fsdp[0]), (2.0, fsdp[1]), (4.0, pipeline[0]), (3.5, pipeline[1])}
    stopped = _Counted(runner.given)
    climb(of, stopped, near, [fsdp[0]], lambda: True)  # type: ignore[arg-type]
    assert stopped.asked == [fsdp[0]]
