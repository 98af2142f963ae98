"""What an inference run reports."""

from __future__ import annotations

from typing import Any

import pytest

from sim import api
from sim.report.terminal.render import as_text
from sim.scenario import resolve


def run(**fields: Any) -> Any:
    gpus = fields.pop("gpus", 1)
    return api.run(resolve({
        "name": "asks", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": gpus},
        "model": {"preset": "gpt3-125m"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 512, "precision": "pure-bf16",
                     "mode": {"inference": {"prompt": 32, "generate": 33, "batch": 2} | fields}}}))


def test_fields_add_up() -> None:
    result = run()
    found = result.to_json()["inference"]
    assert found["prompt_time_s"] + 32 * found["time_per_token_s"] == pytest.approx(result.step_time_s)
    assert found["tokens_per_second"] == pytest.approx(2 * 33 / result.step_time_s)
    assert found["tokens_per_second"] == result.tokens_per_second
    weighted = [t["time_per_token_s"] for t in found["lengths"]]  # eight pieces of four tokens
    assert sum(weighted) / len(weighted) == pytest.approx(found["time_per_token_s"])
    assert result.samples_per_second == pytest.approx(2 / result.step_time_s)


def test_flops_are_two_per_weight_and_token() -> None:
    result = run(batch=1)
    blocks = 12 * 12 * 768**2
    head = 50257 * 768
    exact = 2 * (blocks * (32 + 32) + head * 33)
    attention = result.model_flops - exact
    assert 0 < attention < 0.1 * exact


def test_replicas_serve_side_by_side() -> None:
    one, four = run(), run(gpus=4)
    assert four.step_time_s == pytest.approx(one.step_time_s)
    assert four.tokens_per_second == pytest.approx(4 * one.tokens_per_second)


def test_terminal_report_names_the_times() -> None:
    text = as_text(run())
    for words in ("to the first token", "per further token", "cache per GPU", "tokens in the cache"):
        assert words in text
    assert "per further token" not in as_text(run(generate=1))  # there is none


def of_kind(preset: str, **fields: Any) -> Any:
    return api.run(resolve({
        "name": "asks", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": preset},
        "training": {"precision": "pure-bf16", "mode": {"inference": {"prompt": 256, "batch": 4} | fields}}}))


def test_an_encoder_decoder_tells_its_two_caches_apart() -> None:
    result = of_kind("t5-base", generate=33)
    found = result.to_json()["inference"]
    assert found["crossing_cache_bytes"] == 12 * 2 * 768 * 256 * 4 * 2
    assert found["kv_cache_bytes"] == found["crossing_cache_bytes"] // 256 * (256 + 33)
    text = as_text(result)
    for words in ("4 prompts of 256 tokens, 33 tokens generated each", "is for cross attention",
                  "tokens of the decoder"):
        assert words in text
    assert "crossing_cache_bytes" not in run().to_json()["inference"]


def test_an_encoder_is_told_by_sequences() -> None:
    result = of_kind("bert-base")
    assert result.to_json()["inference"]["tokens_per_second"] == pytest.approx(4 * 256 / result.step_time_s)
    text = as_text(result)
    for words in ("4 sequences of 256 tokens, read in one pass", "per pass", "sequences/s"):
        assert words in text
    assert "first token" not in text and "cache" not in text
    assert of_kind("bert-base", kv_cache="fp8").warnings[0].startswith("inference: kv_cache changes nothing")


def test_the_stages_of_a_request_hold_its_blocks() -> None:
    result = api.run(resolve({
        "name": "cut", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 2}, "model": {"preset": "gpt3-125m"},
        "training": {"precision": "pure-bf16", "mode": {"inference": {"prompt": 32, "generate": 2, "batch": 2}}},
        "parallel": {"pipeline": 2}}))
    assert [stage.blocks for stage in result.stages] == [6, 6]
    assert result.detail.lowered.layers_of(1)[-1] == "head"


def test_training_has_no_inference_fields() -> None:
    result = api.run(resolve({
        "name": "trains", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "gpt3-125m"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}}))
    assert "inference" not in result.to_json()


def test_advice_names_fewer_bits() -> None:
    result = api.run(resolve({
        "name": "too large", "cluster": {"topology": "single-a100-40g-sxm"}, "model": {"preset": "llama-33b"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 512, "precision": "pure-bf16",
                     "mode": {"inference": {"prompt": 32, "generate": 8, "batch": 1}}}}))
    assert not result.memory.fits
    assert [c.what for c in result.changes if c.fits] != []
    assert {c.what for c in result.changes if c.fits} == {
        "weights in int8", "weights in host memory, copied as they are needed"}


def test_a_narrow_cache_is_named_and_advised() -> None:
    assert "fp8 cache" in as_text(run(kv_cache="fp8")) and "cache ·" not in as_text(run())
    short = api.run(resolve({
        "name": "asks", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "llama-2-7b"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 4096, "precision": "pure-bf16",
                     "mode": {"inference": {"prompt": 2048, "generate": 2048, "batch": 40}}},
        "software": {"compile": True}}))
    assert not short.memory.fits
    assert {"training.mode.inference.kv_cache": "fp8"} in [one.set for one in short.changes if one.fits]


@pytest.mark.parametrize(("parameters", "batch", "bound"), [("bf16", 1, "memory_bandwidth"), ("int4", 64, "compute")])
def test_the_bound_is_where_a_tenth_more_helps_most(parameters: str, batch: int, bound: str) -> None:
    """Products of 4-bit weights with many rows wait for arithmetic, though their bytes over their FLOPs would not."""
    asked = resolve({
        "name": "asks", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 1}, "model": {"preset": "llama-2-7b"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 512,
                     "precision": {"name": "pure-bf16", "parameters": parameters},
                     "mode": {"inference": {"prompt": 8, "generate": 33, "batch": batch}}},
        "software": {"framework": "pytorch", "compile": True, "cuda_graphs": True}})
    assert api.run(asked).bound == bound
