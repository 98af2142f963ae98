"""Continuous batching: the iterations of a request's life by hand, and what they add up to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import api
from sim.errors import UserError
from sim.parallel import lower
from sim.parallel.serving.flow import Iteration, Life, life_of
from sim.report.terminal.render import as_text
from sim.scenario import resolve
from sim.scenario.fields.schema import InferenceRun, Scenario

SMALL = {"kind": "decoder", "layers": 4, "hidden": 1024, "heads": 8, "vocab": 8192, "positions": "rotary",
         "norm": "rmsnorm", "bias": False, "tied_embeddings": False}


def life(prompt: int, generate: int, batch: int, budget: int = 8192) -> Life:
    return life_of(InferenceRun(prompt=prompt, generate=generate, batch=batch, batching="continuous",
                                token_budget=budget))


def scenario(software: Any = None, model: Any = None, gpus: int = 1, parallel: Any = None, precision: Any = None,
             **run: Any) -> Scenario:
    sizes = {"prompt": 256, "generate": 65, "batch": 8, "batching": "continuous"} | run
    return resolve({
        "name": "load", "cluster": {"topology": "dgx-h100", "gpus_per_node": gpus}, "model": model or SMALL,
        "training": {"precision": precision or "pure-bf16", "mode": {"inference": sizes}}, "parallel": parallel or {},
        "software": {"year": 2025, "compile": True, "cuda_graphs": True} | (software or {})})


def test_each_of_the_others_prompts_is_read_once_beside_the_answers() -> None:
    found = life(1000, 101, 4)
    assert found.opening == (Iteration(1, 1, 1000, 0, 3, 1050),)
    assert found.answering == (Iteration(3, 1, 1000, 0, 3, 1050), Iteration(97, 0, 0, 0, 4, 1050))


def test_long_prompts_are_read_in_parts() -> None:
    found = life(1000, 101, 4, budget=503)  # 500 beside three answers
    assert found.opening == (Iteration(2, 1, 500, 250, 3, 1050),)
    assert found.answering[0] == Iteration(6, 1, 500, 250, 3, 1050)


def test_more_prompts_than_iterations_share_them() -> None:
    found = life(100, 5, 41)  # 41 requests pass in five iterations
    assert found.opening == (Iteration(1, 8, 103, 0, 33, 102),)
    assert found.answering == (Iteration(4, 8, 103, 0, 33, 102),)


def test_prompts_beyond_the_budget_are_waited_for() -> None:
    found = life(1000, 11, 50, budget=1049)  # 1,000 tokens an iteration: fifty of them for fifty prompts
    assert [one.times for one in found.opening] == [39, 1] and found.opening[0].answers == 10
    assert found.answering == (Iteration(10, 1, 1000, 0, 10, 1005),)


@given(st.integers(1, 3000), st.integers(1, 400), st.integers(1, 300), st.integers(0, 9000))
def test_as_many_tokens_as_all_requests_have(prompt: int, generate: int, batch: int, more: int) -> None:
    found = life(prompt, generate, batch, budget=batch + more)
    every = (*found.opening, *found.answering)
    read = sum(one.times * one.prompts * one.tokens for one in every)
    made = sum(one.times * one.answers for one in every)
    cycle = sum(one.times for one in every)
    largest = max(one.prompts for one in every)
    assert batch * prompt <= read <= batch * prompt + (cycle + batch) * largest  # parts in whole tokens, rounded up
    assert abs(made - batch * (generate - 1)) <= cycle / 2
    assert sum(one.times for one in found.answering) == generate - 1


def test_one_request_is_a_batch_of_one() -> None:
    alone, static = (api.run(scenario(batch=1, batching=one)) for one in ("continuous", "static"))
    assert alone.step_time_s == pytest.approx(static.step_time_s, rel=1e-3)  # the cache at its mean length throughout
    assert alone.model_flops == pytest.approx(static.model_flops, rel=1e-3)


def test_the_flops_of_a_life_are_those_of_all_requests() -> None:
    flowing, static = (api.run(scenario(batching=one)) for one in ("continuous", "static"))
    assert flowing.model_flops == pytest.approx(static.model_flops, rel=0.01)
    assert flowing.inference is not None and static.inference is not None
    assert flowing.inference.tokens_per_second == pytest.approx(8 * 65 / flowing.step_time_s)


def test_a_first_token_does_not_wait_for_the_others_prompts_but_every_further_one_does() -> None:
    flowing, static = (api.run(scenario(batching=one)).inference for one in ("continuous", "static"))
    assert flowing is not None and static is not None
    assert flowing.prompt_time_s < 0.6 * static.prompt_time_s
    assert flowing.time_per_token_s > 1.02 * static.time_per_token_s


def test_engines_read_narrow_weights_by_marlin() -> None:
    narrow = {**dict.fromkeys(("compute", "gradients", "optimizer", "gather", "reduce"), "bf16"), "parameters": "int4",
              "master": "none"}
    kernels = {batching: {kernel.kernel for program in lower(scenario(precision=narrow, batching=batching)).job.programs
                          for kernel in program.kernels if kernel.op == "gemm"}
               for batching in ("static", "continuous")}
    assert "marlin" in kernels["continuous"] and "expanding" in kernels["static"]


def test_a_longer_answer_dilutes_the_prompts() -> None:
    short, long = (api.run(scenario(generate=one)).inference for one in (17, 257))
    assert short is not None and long is not None and short.time_per_token_s > long.time_per_token_s


def test_mixtures_and_latent_attention_flow_too() -> None:
    for preset in ("mixtral-8x7b", "deepseek-v2-lite", "gemma-2-9b"):
        found = api.run(scenario(model={"preset": preset, "layers": 3}, gpus=2, parallel={"tensor": 2}))
        static = api.run(scenario(model={"preset": preset, "layers": 3}, gpus=2, parallel={"tensor": 2},
                                  batching="static"))
        assert found.model_flops == pytest.approx(static.model_flops, rel=0.02), preset


def test_it_is_told() -> None:
    assert "continuous batching" in as_text(api.run(scenario())).replace("\n", " ")
    warned = api.run(scenario(batching="static", token_budget=4096)).warnings
    assert any("token_budget changes nothing" in one for one in warned)


@pytest.mark.parametrize(("fields", "said"), [
    ({"software": {"compile": False, "cuda_graphs": False}}, "neither compiled nor an engine's"),
    ({"gpus": 2, "parallel": {"pipeline": 2}}, "over pipeline stages"),
    ({"gpus": 2, "parallel": {"strategy": "fsdp"}, "software": {"cuda_graphs": False}}, "not whole on a GPU"),
    ({"model": {"preset": "t5-11b"}}, "kind encoder-decoder"),
    ({"token_budget": 4}, "no room for a token of each of 8 answers"),
])
def test_what_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        api.run(scenario(**fields))
