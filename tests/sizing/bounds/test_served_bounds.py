"""Bounds of requests against what is simulated: random models, stacks, cuts, places and formats."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from sim import api
from sim.errors import UserError
from sim.scenario import Scenario, resolve
from sim.sizing.bounds.requests import ServedBounds
from sim.sizing.space.layouts import Choice, with_parts
from sim.sizing.space.requests import KV_CACHES, WEIGHTS, ServedSpace, build_served, plain, served_bases

MODELS: tuple[dict[str, Any], ...] = (
    {"preset": "llama-2-7b", "layers": 3}, {"preset": "llama-3-70b", "layers": 5}, {"preset": "gpt2", "layers": 4},
    {"preset": "mixtral-8x7b", "layers": 3}, {"preset": "deepseek-v2-lite", "layers": 4},
    {"preset": "gemma-2-9b", "layers": 4}, {"preset": "bert-large", "layers": 4},
    {"preset": "t5-11b", "layers": 3, "decoder_layers": 3}, {"preset": "mpt-7b", "layers": 3})
TOPOLOGIES = ("dgx-a100-80g", "dgx-h100", "dgx-a100-40g", "p4d")
STACKS: tuple[dict[str, Any], ...] = (
    {"year": 2024, "compile": True, "cuda_graphs": True}, {"year": 2024, "compile": True},
    {"year": 2024, "modules": "transformers"}, {"framework": "deepspeed", "year": 2024}, {"year": 2024, "fsdp": 2})
#: Draws of a seed, and rows simulated of each.
DRAWS, ROWS = 12, 4


def drawn(rng: random.Random) -> tuple[Scenario, Choice, tuple[str, ...]]:
    model, software = rng.choice(MODELS), dict(rng.choice(STACKS))
    run: dict[str, Any] = {"prompt": rng.choice([7, 64, 300]), "generate": rng.choice([1, 2, 3, 9, 33]),
                           "batch": rng.choice([1, 2, 3, 5])}
    training: dict[str, Any] = {"micro_batch": 1, "sequence": 512,
                                "precision": rng.choice(["pure-bf16", "pure-fp16", "amp-bf16"])}
    if model["preset"].startswith("bert"):
        run["generate"] = 0
    if model["preset"].startswith("t5"):
        training["attention"], software = "eager", {"modules": "transformers", **software}
    if software.get("compile") and rng.random() < 0.3:
        run["all_reduce"] = "peers"
    if software.get("compile") and rng.random() < 0.3:
        run |= {"batching": "continuous", "token_budget": rng.choice([64, 300, 8192])}
    scenario = resolve({"name": "r", "cluster": {"topology": rng.choice(TOPOLOGIES)}, "model": model,
                        "training": {**training, "mode": {"inference": run}}, "software": software}, "r")
    choice = Choice(sorted(rng.sample([1, 2, 3, 4, 6, 8, 16], 3)), batch=rng.sample([1, 2, 3, 4, 7, 16], 2),
                    weights=rng.sample(WEIGHTS, 1) if rng.random() < 0.4 else (),
                    kv_cache=rng.sample(KV_CACHES, 1) if rng.random() < 0.4 else ())
    return scenario, choice, ("parameters",) if rng.random() < 0.3 else ()


@pytest.mark.parametrize("seed", range(4))
def test_no_bound_is_above_what_is_simulated(seed: int) -> None:
    rng, compared, close = random.Random(seed), 0, []
    for _ in range(DRAWS):
        try:
            scenario, choice, offload = drawn(rng)
            space = build_served(with_parts(served_bases(scenario, (None,), choice, offload), choice), choice, True)
        except UserError:
            continue
        of = ServedBounds(space)
        coarse = of.time_s.copy()
        of.refine(0.0, of.coarse.copy())
        assert not of.coarse.any() and (coarse <= of.time_s * (1 + 1e-9)).all()
        energy_j = of.energy_j(slice(None))
        for row in rng.sample(range(len(space)), min(ROWS, len(space))):
            try:
                found = api.measure(resolve(plain(space.clusters[space.columns["cluster"][row]]), "", space.sets(row)))
            except UserError:
                continue
            said = f"{scenario.model} {scenario.software.framework} {space.sets(row)} {choice} {offload}"
            compared += 1
            if found.step_s is None or found.step_j is None or found.served is None:
                assert of.memory_bytes[row] <= (found.memory.use.peak_allocated_bytes
                                                + found.memory.use.at_peak["context"]), said
                continue
            assert of.memory_bytes[row] <= min(found.memory.device_used_bytes, of.capacity_bytes[row]), said
            assert of.prompt_s[row] <= found.served.prompt_time_s, said
            assert of.token_s[row] <= found.served.time_per_token_s, said
            assert of.time_s[row] <= found.step_s, said
            assert energy_j[row] <= found.step_j, said
            layout = space.layouts[space.columns["layout"][row]].parallel
            if layout.strategy == "ddp" and layout.pipeline == 1 and layout.offload.parameters == "none":
                close.append(of.time_s[row] / found.step_s)
    assert compared >= DRAWS and np.median(close) > 0.85  # what bounds nothing would hold too


def _one(batch: int, **parallel: int) -> tuple[ServedSpace, ServedBounds]:
    training = {"micro_batch": 1, "sequence": 512, "precision": "pure-bf16",
                "mode": {"inference": {"prompt": 100, "generate": 28, "batch": 1}}}
    scenario = resolve({
        "name": "one", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-2-7b"}, "training": training,
        "software": {"year": 2024, "compile": True, "cuda_graphs": True}}, "one")
    choice = Choice([8], batch=[batch], tensor=[parallel["tensor"]], pipeline=[parallel["pipeline"]])
    space = build_served(served_bases(scenario, (None,), choice, ()), choice, True)
    return space, ServedBounds(space)


def test_memory_is_weights_cache_tokens_and_what_a_pass_holds() -> None:
    """Llama-2-7B over eight slices: 13.48 GB of weights, of a token 2 x 32 x 4,096 elements of cache."""
    (_, small), (_, large) = _one(1, tensor=8, pipeline=1), _one(5, tensor=8, pipeline=1)
    cache, tokens = 128 * 2 * 32 * 4096 // 8 * 2, 128 * 8
    assert 6_738_415_616 * 2 / 8 + cache < small.memory_bytes[0] < 6_738_415_616 * 2 / 8 + cache + 2.5e9
    # a prompt of five takes five times the activations too: their least is the stream itself, read and written
    assert large.memory_bytes[0] - small.memory_bytes[0] > 4 * (cache + tokens + 2 * 100 * 4096 * 2) - 1024


def test_a_token_of_a_pipeline_passes_every_stage() -> None:
    """One sequence in eight stages: each of its tokens waits for the whole model, as on one GPU."""
    (_, staged), (_, whole) = _one(1, tensor=1, pipeline=8), _one(1, tensor=1, pipeline=1)
    for of in (staged, whole):
        of.refine(0.0, of.coarse.copy())
    assert staged.token_s[0] == pytest.approx(whole.token_s[0], rel=0.01)
    assert staged.prompt_s[0] == pytest.approx(whole.prompt_s[0], rel=0.01)
