"""Micro-batches between those that a space tries: the best of a search is that of trying every one."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest
from sizing_once import Once

from sim import api
from sim.scenario import resolve
from sim.sizing import Choice, size
from sim.sizing.bounds.steps import Bounds, bounds
from sim.sizing.search.ranking import Ranking
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import build_space
from sim.sizing.wish import Wish, priced

#: 7B on 32 GPUs that hold three sequences each, of 24: 1, 2, 4, 8, 12 and 24 are tried.
FULL: dict[str, Any] = {
    "name": "full", "cluster": {"topology": "p4d"}, "model": {"preset": "llama-2-7b"},
    "training": {"micro_batch": 1, "global_batch": 768, "sequence": 1536, "precision": "fsdp-bf16"},
    "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2024}}
AXES: dict[str, Any] = {"tensor": [1], "context": [1], "pipeline": [1], "strategies": ["fsdp"],
                        "recompute": ["none", "full"], "partial_recompute": False}
NARROW: dict[str, Any] = {"gpus": [32], **AXES}
EVERY = [1, 2, 3, 4, 6, 8, 12, 24]


@pytest.mark.whole
def test_the_best_is_that_of_trying_every_micro_batch() -> None:
    found, whole = (size(resolve(FULL, ""), Choice(**NARROW, micro_batch=axis), top=3) for axis in ((), EVERY))
    best = found.best[0]
    assert found.stepped and not whole.stepped and found.raw == whole.raw and found.covered < whole.covered
    assert best["set"]["training.micro_batch"] == 3, "else the space has it anyway"
    assert best == whole.best[0] and found.proven
    assert found.covered == found.impossible + sum(found.pruned.values()) + found.simulated
    assert found.winner is not None and api.measure(found.winner).step_s == best["step_time_s"]


def test_what_was_added_under_a_time_limit_is_not_added_again() -> None:
    """The climb under a limit looks between micro-batches, and so does the end of every search."""
    found, whole = (size(resolve(FULL, ""), Choice([32], **{**AXES, "recompute": ["none"]}), top=10, seconds=limit)
                    for limit in (1e6, math.inf))
    told = [json.dumps(row["set"], sort_keys=True) for row in found.best]
    assert found.proven and len(told) == len(set(told)) and found.best[0]["set"]["training.micro_batch"] == 3
    assert found.best == whole.best and found.covered == whole.covered


def test_what_is_added_is_bounded_as_a_space_that_has_it() -> None:
    base = alone(resolve(FULL, ""), None)
    spaces = [build_space([base], Choice(**NARROW, micro_batch=axis)) for axis in ((), [3])]
    wish, _ = priced(Wish(), [base], None)
    ranking = Ranking(spaces[0], Bounds(spaces[0], until=time.monotonic()), wish)
    three = bounds(spaces[1])
    row = next(row for row in range(len(spaces[0])) if spaces[0].columns["sharding_factor"][row] == 32)
    policies = spaces[1].columns["recompute"][spaces[1].columns["sharding_factor"] == 32]
    added = ranking.add_micro_batch(row, 3, policies.tolist())
    same = spaces[1].columns["sharding_factor"] == 32
    for name in ("time_s", "memory_bytes", "work_j", "capacity_bytes"):
        assert np.array_equal(getattr(ranking.of, name)[added], getattr(three, name)[same])
    assert spaces[0].sets(added[0]) == spaces[1].sets(int(np.flatnonzero(same)[0]))
    ranking.go_on()  # to the next slice
    assert not ranking.of.unbounded[added].any() and ranking.of.unbounded.any()


@pytest.mark.whole
def test_of_every_small_layout_the_best_is_hardly_missed(once: Once) -> None:
    """Pipelines and tensor ranks: where all fits, what lies between two micro-batches is worth next to nothing."""
    batch = 60
    small = resolve({"name": "small", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2", "layers": 4},
                     "parallel": {"pipeline": 4, "strategy": "ddp"},
                     "training": {"micro_batch": 1, "global_batch": batch, "sequence": 128}}, "")
    base = alone(small, None)
    axes: dict[str, Any] = {"context": [1], "tensor": [1, 2], "recompute": ["none", "full"],
                            "partial_recompute": False, "schedules": ("1f1b", "interleaved")}
    space, plain = build_space([base], Choice([8], **axes, micro_batch=range(1, batch + 1))), following(base)
    outcomes = once.on_two_cores([("", plain, space.sets(row), 8) for row in range(len(space))])
    best_s = min(one.step_time_s for one in outcomes if one.fits)
    found = size(small, Choice([8], **axes), top=3)
    assert found.stepped and found.covered < len(space) and found.best[0]["step_time_s"] <= 1.005 * best_s
