"""Inference: hand-computed sizes, what is exchanged, and how latency and throughput move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import api
from sim.engine import simulate
from sim.errors import UserError
from sim.parallel import lower
from sim.parallel.serving import request
from sim.parallel.serving.request import PIECES, pieces_of
from sim.report.result import Result
from sim.scenario import resolve
from sim.scenario.fields.schema import Scenario

SMALL = {"kind": "decoder", "layers": 4, "hidden": 1024, "heads": 8, "vocab": 8192, "positions": "rotary",
         "norm": "rmsnorm", "bias": False, "tied_embeddings": False}
ENGINE = {"compile": True, "cuda_graphs": True}


def scenario(model: Any = None, gpus: int = 1, prompt: int = 64, generate: int = 20, batch: int = 1,
             precision: Any = "pure-bf16", software: Any = None, topology: str = "dgx-a100-80g",
             **parallel: Any) -> Scenario:
    return resolve({
        "name": "test", "cluster": {"topology": topology, "gpus_per_node": gpus}, "model": model or SMALL,
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 512, "precision": precision,
                     "mode": {"inference": {"prompt": prompt, "generate": generate, "batch": batch}}},
        "parallel": parallel, "software": {"year": 2024, **(software or {})}})


def weights(dtype: str) -> dict[str, str]:
    fields = ("compute", "gradients", "optimizer", "gather", "reduce")
    return {**dict.fromkeys(fields, "bf16"), "parameters": dtype, "master": "none"}


def predicted(*args: Any, **fields: Any) -> Result:
    return api.run(scenario(*args, **fields))


def served(result: Result) -> Any:
    assert result.inference is not None
    return result.inference


def test_cache_of_llama_2_7b() -> None:
    run = predicted({"preset": "llama-2-7b"}, prompt=512, generate=200, batch=3)
    assert served(run).kv_cache_bytes == 3 * 2 * 32 * 4096 * 712 * 2
    assert run.memory.use.at_peak["kv_cache"] == served(run).kv_cache_bytes


def test_cache_of_grouped_heads_latents_and_windows() -> None:
    grouped = lower(scenario({"preset": "llama-3-8b"}, prompt=100, generate=28)).serving
    assert grouped is not None and grouped.cache_bytes == 2 * 32 * 8 * 128 * 128 * 2
    latent = lower(scenario({"preset": "deepseek-v3"}, prompt=100, generate=28)).serving
    assert latent is not None and latent.cache_bytes == 61 * (512 + 64) * 128 * 2  # DeepSeek-V3: 70 KB a token
    windowed = lower(scenario({**SMALL, "window": 50}, prompt=100, generate=28)).serving
    assert windowed is not None and windowed.cache_bytes == 2 * 4 * 1024 * 50 * 2


@pytest.mark.parametrize(("dtype", "per_weight"), [
    ("bf16", 2.0), ("int8", 1 + 4 / 1024), ("int4", 0.5 + 2.5 / 128), ("nf4", 0.5625), ("nf4-dq", 0.516)])
def test_weights_in_fewer_bits(dtype: str, per_weight: float) -> None:
    held = predicted(precision=weights(dtype)).memory.use.at_peak["parameters"]
    matrices, rest = 4 * 12 * 1024**2, 2 * 8192 * 1024 + 9 * 1024
    assert held == pytest.approx(matrices * per_weight + rest * 2, rel=2e-3)


def test_a_token_takes_at_least_the_weights_through_memory() -> None:
    run = predicted({"preset": "llama-2-7b"}, software=ENGINE)
    read = 6.74e9 - 32000 * 4096  # all but the embedding's table
    floor = 2 * read / 2.039e12
    assert floor < served(run).time_per_token_s < 1.6 * floor
    assert run.bound == "memory_bandwidth"


def test_eager_tokens_wait_for_python() -> None:
    """A 7B model of Hugging Face's modules: 25 us for each launch, 7 of them the operator's own, is more than the
    weights take through memory; compiled code has no modules to call."""
    from sim.software import stack_for

    eager, compiled = ({"modules": "transformers", "compile": way} for way in (False, True))
    program = lower(scenario({"preset": "llama-2-7b"}, software=eager)).job.programs[0]
    token = program.sections[1]
    launches = sum(program.kernels[row].launches for kind, payload in zip(token.kind, token.payload, strict=True)
                   if kind == 0 for row in program.segments[payload].kernels)
    stack = stack_for("pytorch", 2024, modules="transformers")
    each = stack.host_forward_s + stack.host_module_s
    slow, fast = (served(predicted({"preset": "llama-2-7b"}, software=way)).time_per_token_s
                  for way in (eager, compiled))
    assert slow == pytest.approx(launches * each, rel=0.01)
    assert slow > 2 * fast
    assert stack_for("pytorch", 2024, True).host_module_s == 0


def test_many_sequences_hide_python() -> None:
    """The cache of 128 sequences, read and written anew with every token, takes longer than the launches."""
    times = [served(predicted({"preset": "llama-2-7b"}, batch=batch, prompt=512,
                              software={"modules": "transformers"})).time_per_token_s for batch in (1, 8, 128)]
    assert times[1] == pytest.approx(times[0], rel=0.02)
    assert times[2] > 2 * times[0]


def test_tensor_ranks_sum_twice_per_block() -> None:
    program = lower(scenario(gpus=4, tensor=4, generate=2, batch=3)).job.programs[0]
    token = program.sections[1]
    found: Counter[tuple[str, int]] = Counter()
    for kind, payload in zip(token.kind, token.payload, strict=True):
        for row in program.segments[payload].kernels if kind == 0 else ():
            if row < 0:
                call = program.collectives[program.inlines[-1 - row].collective]
                found[call.kind, call.size_bytes] += 1
    # two sums per block and one of the embedding; the logits of three sequences
    assert found == {("all_reduce", 3 * 1024 * 2): 2 * 4 + 1, ("all_gather", 3 * 8192 * 2): 1}


def test_ranks_hold_their_share() -> None:
    whole = predicted().memory.use.at_peak
    for split in ({"tensor": 4}, {"pipeline": 2, "tensor": 2}):
        part = predicted(gpus=4, **split).memory.use.at_peak
        assert part["parameters"] == pytest.approx(whole["parameters"] / 4, rel=0.01)
        assert part["kv_cache"] == whole["kv_cache"] / 4


def test_stages_work_in_sequence() -> None:
    one, two = predicted(software=ENGINE), predicted(gpus=2, pipeline=2, software=ENGINE)
    assert served(two).time_per_token_s > served(one).time_per_token_s
    assert served(two).prompt_time_s > served(one).prompt_time_s
    alone = served(predicted(gpus=2, pipeline=2, batch=1, software=ENGINE)).tokens_per_second
    parts = served(predicted(gpus=2, pipeline=2, batch=2, software=ENGINE)).tokens_per_second
    assert parts > 1.5 * alone  # one sequence in each stage


def test_tied_head_is_held_by_the_last_stage_too() -> None:
    tied = lower(scenario({**SMALL, "tied_embeddings": True}, gpus=2, pipeline=2)).job
    loose = lower(scenario(gpus=2, pipeline=2)).job
    held = [sum(size for _, size, category in p.resident if category == "parameters")
            for job in (tied, loose) for p in job.programs]
    assert held[:2] == held[2:]


def test_one_token_needs_no_generation() -> None:
    for split in ({}, {"gpus": 2, "pipeline": 2}):
        run = predicted(generate=1, **split)
        assert served(run).time_per_token_s == 0 and served(run).lengths == ()
        assert served(run).prompt_time_s == pytest.approx(run.step_time_s)


@given(prompt=st.integers(1, 5000), generate=st.integers(1, 3000))
def test_pieces_cover_the_generation(prompt: int, generate: int) -> None:
    pieces = pieces_of(prompt, generate)
    assert sum(p.tokens for p in pieces) == generate - 1 and len(pieces) <= PIECES
    assert all(p.tokens > 0 for p in pieces)
    mean = sum(p.tokens * p.cached for p in pieces) / max(1, generate - 1)
    if pieces:  # the mean cache length is that of the tokens, to half a token
        assert abs(mean - (prompt + (generate - 2) / 2)) <= 0.5


def test_pieces_stand_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces = served(predicted(generate=120, batch=8)).time_per_token_s
    monkeypatch.setattr(request, "PIECES", 10_000)
    assert in_pieces == pytest.approx(served(predicted(generate=120, batch=8)).time_per_token_s, rel=1e-3)


@pytest.mark.parametrize("split", [{}, {"gpus": 4, "tensor": 2, "pipeline": 2}])
def test_skipped_repeats_change_nothing(split: dict[str, int]) -> None:
    wanted = scenario(generate=40, batch=2, **split)
    lowered = lower(wanted)
    machine = api.machine_for(wanted, lowered)
    whole = simulate(lowered.job, machine, skip_repeats=False).step_time_s
    assert simulate(lowered.job, machine).step_time_s == pytest.approx(whole, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 24), more=st.integers(1, 24), prompt=st.integers(1, 600), engine=st.booleans(),
       split=st.sampled_from([{}, {"gpus": 2, "tensor": 2}]))
def test_more_sequences_never_slow_throughput_nor_hasten_tokens(
    batch: int, more: int, prompt: int, engine: bool, split: dict[str, int],
) -> None:
    software = ENGINE if engine else {}
    few = served(predicted(batch=batch, prompt=prompt, software=software, **split))
    many = served(predicted(batch=batch + more, prompt=prompt, software=software, **split))
    assert many.time_per_token_s >= few.time_per_token_s * 0.98  # kernels have steps
    assert many.tokens_per_second >= few.tokens_per_second * 0.98
    assert many.kv_cache_bytes > few.kv_cache_bytes


@settings(max_examples=25, deadline=None)
@given(prompt=st.integers(1, 1500), longer=st.integers(64, 1500), batch=st.integers(1, 8))
def test_a_longer_prompt_takes_longer(prompt: int, longer: int, batch: int) -> None:
    short, long = (served(predicted(batch=batch, prompt=p, software=ENGINE)) for p in (prompt, prompt + longer))
    assert long.prompt_time_s >= short.prompt_time_s * 0.98
    assert long.time_per_token_s >= short.time_per_token_s * (1 - 1e-9)


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 16), software=st.sampled_from([{}, ENGINE, {"compile": True}]),
       tensor=st.sampled_from([1, 2, 4]))
def test_fewer_bits_never_need_more_memory(batch: int, software: dict[str, bool], tensor: int) -> None:
    def device(dtype: str) -> int:
        run = predicted(batch=batch, gpus=4, tensor=tensor, software=software, precision=weights(dtype))
        assert run.memory.use.steady
        return run.memory.use.at_peak["parameters"]

    assert device("int4") < device("int8") < device("bf16")


def test_an_engine_with_graphs_beats_launching_kernel_by_kernel() -> None:
    eager = served(predicted({"preset": "gpt2"}, software={"modules": "transformers"}, topology="single-h100-80g-sxm"))
    graph = served(predicted({"preset": "gpt2"}, software=ENGINE, topology="single-h100-80g-sxm"))
    assert graph.time_per_token_s < eager.time_per_token_s / 2


def test_what_is_not_simulated_is_refused() -> None:
    for fields, field in (({"gpus": 4, "strategy": "zero2"}, "parallel.strategy"),
                          ({"model": {"preset": "t5-small"}, "gpus": 2, "pipeline": 2}, "parallel.pipeline"),
                          ({"gpus": 2, "tensor": 2, "sequence_parallel": True}, "parallel.sequence_parallel"),
                          ({"offload": {"activations": "cpu"}}, "parallel.offload"),
                          ({"precision": "fp8", "topology": "single-h100-80g-sxm"}, "training.precision.parameters"),
                          ({"precision": weights("fp8") | {"compute": "fp8"}}, "training.precision"),
                          ({"precision": weights("int8") | {"compute": "int4"}}, "training.precision"),
                          ({"precision": weights("bf16") | {"compute": "int8"}}, "training.precision.parameters"),
                          ({"precision": weights("int8") | {"compute": "int8"}, "topology": "dgx-1v-16g"},
                           "training.precision")):
        with pytest.raises(UserError) as raised:
            lower(scenario(**fields))
        assert field in [fault.field for fault in raised.value.faults]


@pytest.mark.parametrize("dtype", ["int4", "fp8", "nvfp4"])
def test_training_with_quantised_weights_is_refused(dtype: str) -> None:
    with pytest.raises(UserError, match=f"{dtype} weights"):
        lower(resolve({"name": "t", "cluster": {"topology": "single-a100-80g-sxm"}, "model": SMALL,
                       "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128,
                                    "precision": weights(dtype)}}))


def test_weights_in_fp8_halve_what_a_token_reads_and_products_in_fp8_the_prompt() -> None:
    def run(precision: dict[str, str]) -> Result:
        return predicted({"preset": "llama-2-7b"}, prompt=2048, software=ENGINE, precision=precision,
                         topology="single-h100-80g-sxm")

    half, stored = run(weights("bf16")), run(weights("fp8"))
    narrow = run(weights("fp8") | {"compute": "fp8"})
    assert stored.memory.use.at_peak["parameters"] == narrow.memory.use.at_peak["parameters"]
    assert stored.memory.use.at_peak["parameters"] < 0.53 * half.memory.use.at_peak["parameters"]
    assert served(stored).time_per_token_s < 0.75 * served(half).time_per_token_s
    assert served(stored).prompt_time_s == pytest.approx(served(half).prompt_time_s, rel=0.02)
    assert served(narrow).prompt_time_s < 0.75 * served(half).prompt_time_s


def test_products_in_int8_shorten_the_prompt() -> None:
    def run(precision: dict[str, str]) -> Result:
        return predicted({"preset": "llama-2-7b"}, prompt=2048, software=ENGINE, precision=precision,
                         topology="single-a100-80g-sxm")

    half, stored, narrow = (run(p) for p in (weights("bf16"), weights("int8"), weights("int8") | {"compute": "int8"}))
    assert stored.memory.use.at_peak["parameters"] == narrow.memory.use.at_peak["parameters"]
    assert served(narrow).prompt_time_s < 0.8 * served(half).prompt_time_s < 0.9 * served(stored).prompt_time_s
    assert served(narrow).time_per_token_s == pytest.approx(served(stored).time_per_token_s, rel=0.1)
    assert {k.dtype for k in narrow.detail.lowered.job.programs[0].kernels if k.op == "attention"} == {"bf16"}
    assert narrow.peak_flops_per_gpu == 624e12


PAIR = {"preset": "t5-base"}


def test_the_encoder_is_gone_when_the_cache_is_made() -> None:
    """A stack that appends to its cache has none while the encoder runs; one that writes in place has it throughout."""
    growing, standing = (predicted(PAIR, prompt=512, generate=20, batch=32, software=software).memory.use
                         for software in ({"modules": "transformers"}, ENGINE))
    cache = 12 * 2 * 768 * (512 + 20) * 32 * 2
    assert standing.category_peaks["kv_cache"] == growing.category_peaks["kv_cache"] == cache
    assert growing.phases["after_init"]["kv_cache"] == 0 and standing.phases["after_init"]["kv_cache"] == cache
    assert growing.steady and standing.steady


@settings(max_examples=20, deadline=None)
@given(prompt=st.integers(8, 300), generate=st.integers(1, 40), batch=st.integers(1, 8), tensor=st.sampled_from([1, 4]),
       software=st.sampled_from([{"modules": "transformers"}, ENGINE]))
def test_requests_of_an_encoder_decoder(prompt: int, generate: int, batch: int, tensor: int,
                                        software: dict[str, bool]) -> None:
    run = predicted(PAIR, gpus=4, tensor=tensor, prompt=prompt, generate=generate, batch=batch, software=software)
    found, replicas = served(run), 4 // tensor
    assert run.memory.use.steady
    assert found.kv_cache_bytes * tensor == 12 * 2 * 768 * (prompt + generate) * batch * 2
    assert found.crossing_cache_bytes * tensor == 12 * 2 * 768 * prompt * batch * 2
    assert found.prompt_time_s + (generate - 1) * found.time_per_token_s == pytest.approx(run.step_time_s)
    assert found.tokens_per_second == pytest.approx(replicas * batch * generate / run.step_time_s)
    assert sum(t.time_per_token_s > 0 for t in found.lengths) == min(PIECES, generate - 1)


def test_a_longer_prompt_costs_an_encoder_decoder_once_and_a_little_with_every_token() -> None:
    short, long = (served(predicted(PAIR, prompt=prompt, batch=32, software=ENGINE)) for prompt in (64, 1024))
    assert long.prompt_time_s > 4 * short.prompt_time_s
    assert short.time_per_token_s < long.time_per_token_s < 4 * short.time_per_token_s


def test_an_encoder_makes_one_pass() -> None:
    """BERT-large on 512 tokens: 0.67 GFLOP a token and attention's."""
    run = predicted({"preset": "bert-large"}, gpus=2, prompt=512, generate=0, batch=8)
    tokens, found = 8 * 512, served(run)
    blocks = 24 * (2 * 12 * 1024**2 * tokens + 4 * 8 * 512**2 * 1024)
    assert run.model_flops == 2 * (blocks + 2 * 8 * 1024**2)
    assert found.prompt_time_s == run.step_time_s and found.time_per_token_s == found.kv_cache_bytes == 0
    assert run.samples_per_second == pytest.approx(16 / run.step_time_s)
    assert found.tokens_per_second == run.tokens_per_second == pytest.approx(512 * run.samples_per_second)
    halved = predicted({"preset": "bert-large"}, gpus=2, tensor=2, prompt=512, generate=0, batch=8)
    assert halved.memory.use.at_peak["parameters"] < 0.6 * run.memory.use.at_peak["parameters"]


def test_graphs_replay_an_encoder() -> None:
    slow, fast = (predicted({"preset": "bert-base"}, prompt=32, generate=0, software=software).step_time_s
                  for software in ({}, {"cuda_graphs": True}))
    assert fast < 0.3 * slow


def test_a_cache_of_transformers_is_refused_in_8_bits_behind_an_encoder() -> None:
    asked = scenario(PAIR, software={"modules": "transformers"}).model_dump(exclude_none=True)
    with pytest.raises(UserError) as raised:
        lower(resolve(asked, "x", {"training.mode.inference.kv_cache": "fp8"}))
    assert [fault.field for fault in raised.value.faults] == ["training.mode.inference.kv_cache"]


def test_a_cache_in_8_bits() -> None:
    caches = {}
    for cache in ("same", "fp8"):
        run = resolve(scenario({"preset": "llama-2-7b"}, prompt=512, generate=200, batch=8, software=ENGINE).model_dump(
            exclude_none=True), "x", {"training.mode.inference.kv_cache": cache})
        caches[cache] = api.run(run)
    half, full = caches["fp8"], caches["same"]
    assert 2 * served(half).kv_cache_bytes == served(full).kv_cache_bytes
    assert half.memory.use.at_peak["kv_cache"] == served(half).kv_cache_bytes
    assert served(half).time_per_token_s < served(full).time_per_token_s


def test_graphs_replay_tokens_and_prompts_are_launched() -> None:
    lowered = {graphs: lower(scenario(software={"cuda_graphs": graphs}, gpus=2, tensor=2)) for graphs in (False, True)}
    hosts = {graphs: [sum(sum(one.job.programs[0].segments[p].host_s) for p in set(section.payload) if p >= 0)
                      for section in one.job.programs[0].sections] for graphs, one in lowered.items()}
    prompt, *tokens = hosts[True]
    assert prompt == hosts[False][0] > 0.0 and not any(tokens) and all(hosts[False])


def test_an_engines_own_sums_shorten_tokens_of_tensor_ranks() -> None:
    def run(all_reduce: str, tensor: int = 8, topology: str = "dgx-a100-80g") -> Result:
        plain = scenario({"preset": "llama-2-7b"}, gpus=tensor, tensor=tensor, software=ENGINE, topology=topology)
        return api.run(resolve(plain.model_dump(exclude_none=True), "x", {
            "training.mode.inference.all_reduce": all_reduce}))
    own, nccl = run("peers"), run("nccl")
    assert served(own).time_per_token_s < 0.85 * served(nccl).time_per_token_s
    assert not [w for w in own.warnings if "all_reduce" in w]
    vain = run("peers", 4, "pcie-8x-a10")
    assert len([w for w in vain.warnings if "all_reduce peers changes nothing" in w]) == 1
