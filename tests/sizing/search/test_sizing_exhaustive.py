"""Over five thousand real layouts, with ties, pipelines and hybrid sharding: what simulating every one of them says."""

from __future__ import annotations

import numpy as np
import pytest
from sizing_once import Once

from sim.scenario import resolve
from sim.sizing import Choice, Wish, size
from sim.sizing.bounds.steps import bounds
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import SCHEDULES, STRATEGIES, build_space

GPUS, TOP = 8, 10
SMALL = {"name": "small", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2", "layers": 4},
         "training": {"micro_batch": 1, "global_batch": 16, "sequence": 128}}


@pytest.mark.whole
def test_the_answer_is_that_of_simulating_everything(once: Once) -> None:
    small = resolve(SMALL, "small")
    base, choice = alone(small, None), Choice([GPUS], schedules=SCHEDULES, context=[1, 2, 4, 8])
    space, plain = build_space([base], choice), following(base)
    factor, pipeline = space.columns["sharding_factor"], space.columns["pipeline"]
    assert len(space) >= 5000 and (pipeline > 1).any()
    assert ((factor > 1) & (factor < GPUS // pipeline) & (space.columns["tensor"] == 1)).any()
    outcomes = once.on_two_cores([("", plain, space.sets(row), GPUS) for row in range(len(space))])
    times = [one.step_time_s for one in outcomes if one.fits]
    assert len(set(times)) < len(times)  # ties
    assert {"zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "dualpipe"} <= {
        SCHEDULES[i] for i in space.columns["schedule"][pipeline > 1]}
    for objective in ("time", "cost", "gpus", "energy"):
        wish = Wish(objective)
        values = np.array([float(wish.value(one.step_time_s, one.gpus, None, one.step_energy_j)) if one.fits else np.inf
                           for one in outcomes])
        every = sorted((value, row) for row, value in enumerate(values) if np.isfinite(value))
        found = size(small, choice, wish, top=TOP)
        assert found.proven and found.covered == len(space)
        assert [row["set"] for row in found.best] == [space.sets(row) for _, row in every[:TOP]]
        assert [row["step_time_s"] for row in found.best] == [outcomes[row].step_time_s for _, row in every[:TOP]]


@pytest.mark.whole
def test_sharded_stages_and_stages_that_straddle_nodes_too(once: Once) -> None:
    """FSDP inside pipelines; three nodes of four GPUs, so that two stages share a node."""
    model = {"preset": "gpt2", "layers": 6, "tied_embeddings": False}
    cluster = {"topology": "dgx-a100-80g", "gpus_per_node": 4}
    small = resolve({**SMALL, "model": model, "cluster": cluster,
                     "training": {"micro_batch": 1, "global_batch": 24, "sequence": 128}}, "small")
    gpus = 12
    base, choice = alone(small, None), Choice(
        [gpus], strategies=["zero1", "fsdp"], schedules=["1f1b", "interleaved", "zb-2p", "dualpipe"], context=[1],
        tensor=[1], micro_batch=[1, 2], recompute=["none"], partial_recompute=False)
    space, plain = build_space([base], choice), following(base)
    strategy, pipeline, schedule = (space.columns[name] for name in ("strategy", "pipeline", "schedule"))
    sharded = (strategy == STRATEGIES.index("fsdp")) & (pipeline > 1)
    assert sharded.sum() > 30 and not (sharded & (schedule == SCHEDULES.index("dualpipe"))).any()
    outcomes = [once(("", plain, space.sets(row), gpus)) for row in range(len(space))]
    assert {one.outcome for one in outcomes} == {"ok"}
    every = sorted((one.step_time_s, row) for row, one in enumerate(outcomes) if one.fits)
    found = size(small, choice, top=TOP)
    assert found.proven and found.covered == len(space)
    assert [row["set"] for row in found.best] == [space.sets(row) for _, row in every[:TOP]]
    below = bounds(space)
    assert all(below.time_s[row] <= one.step_time_s and below.memory_bytes[row] <= one.device_used_bytes
               for row, one in enumerate(outcomes))
