"""The record of errors: which published runs are like a run, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.report.numbers import neighbours
from sim.report.numbers.neighbours import Features, Validated, record, validated
from sim.scenario import resolve

RUN = Features("decoder", "train", "fsdp", "", False, "ga100", "half", "composer", 64, 7e9)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Features, float]]:
    """A record of the test's own, filled by it."""
    found: list[tuple[str, Features, float]] = []
    monkeypatch.setattr(neighbours, "record", lambda: found)
    validated.cache_clear()
    yield found
    validated.cache_clear()


def test_mean_spread_and_worst_by_hand(rows: list[tuple[str, Features, float]]) -> None:
    rows += [("a", RUN, e) for e in (0.01, 0.03, -0.04)] + [("b", RUN, 0.02), ("b", RUN, 0.03)]
    found = validated(RUN)
    assert (found.count, found.differs, found.sources) == (5, (), ("a", "b"))
    assert found.mean_error == pytest.approx(0.01)
    assert found.spread == pytest.approx((((0 + 4 + 25 + 1 + 4) * 1e-4) / 4) ** 0.5)
    assert found.worst == -0.04
    assert str(found) == "5 published runs like this: +1% ± 3% (step predicted against measured)"


@pytest.mark.parametrize("name,value", [("model", "mixture"), ("mode", "lora"), ("strategy", "ddp"), ("offload", True),
                                        ("generation", "cdna3"), ("compute", "fp8")])
def test_runs_of_another_kind_do_not_count(rows: list[tuple[str, Features, float]], name: str, value: object) -> None:
    rows += [("a", replace(RUN, **{name: value}), 0.0)] * 9
    assert validated(RUN).count == 0


def test_the_nearest_scale_is_taken_where_enough_runs_are(rows: list[tuple[str, Features, float]]) -> None:
    rows += [("near", replace(RUN, gpus=256), 0.0)] * 5 + [("far", replace(RUN, gpus=1024), 0.5)] * 9
    assert validated(RUN).sources == ("near",)
    del rows[0]
    validated.cache_clear()
    assert validated(RUN).count == 13


def test_a_wider_search_says_what_differs(rows: list[tuple[str, Features, float]]) -> None:
    rows += [("a", replace(RUN, framework="pytorch"), -0.1)]
    found = validated(RUN)
    assert str(found) == (
        "1 published run like this but for framework: −10% (step predicted against measured)")
    assert found.spread is None


def test_few_near_runs_are_not_hidden_by_many_farther_ones(rows: list[tuple[str, Features, float]]) -> None:
    rows += [("near", RUN, 0.04), ("near", RUN, 0.06)]
    rows += [("far", replace(RUN, framework="pytorch"), -0.1)] * 7
    found = validated(RUN)
    assert (found.count, found.mean_error, found.differs) == (2, pytest.approx(0.05), ())
    assert str(found) == ("2 published runs like this: +5% ± 1%; 9 like this but for framework: −7% ± 7% "
                          "(step predicted against measured)")
    assert found.to_json()["wider"]["count"] == 9


@pytest.mark.parametrize("chips,taken", [
    (("ga100", "volta", "turing", "hopper"), "ga100"), (("ga102", "volta", "hopper"), "ga102"),
    (("volta", "hopper"), "hopper"), (("volta", "blackwell"), "volta,blackwell"), (("cdna3",), "")])
def test_another_generation_counts_only_where_nothing_nearer_is(
    rows: list[tuple[str, Features, float]], chips: tuple[str, ...], taken: str
) -> None:
    """However few the nearer ones are, and however many the farther."""
    rows += [(chip, replace(RUN, generation=chip), 0.1) for chip in chips for _ in range(1 + 9 * (chip != taken))]
    found = validated(RUN)
    assert set(found.sources) == set(taken.split(",")) - {""}
    assert set(found.generations) == ({*found.sources} - {"ga100"})
    assert found.differs == (() if taken in ("ga100", "") else ("chip",) if taken == "ga102" else ("generation",))


def test_runs_of_another_generation_are_named(rows: list[tuple[str, Features, float]]) -> None:
    rows += [("v", replace(RUN, generation="volta", framework="pytorch"), e) for e in (-0.02, -0.02)]
    assert str(validated(RUN)) == ("2 published runs like this but for framework on another generation of GPU (volta): "
                                   "−2% ± 0% (step predicted against measured)")


def test_an_a100_is_no_a10_though_of_one_generation(rows: list[tuple[str, Features, float]]) -> None:
    rows += [("a", RUN, e) for e in (-0.02, -0.02)]
    assert "on another chip of this generation (ga100): −2%" in str(validated(replace(RUN, generation="ga102")))


def test_a_run_like_none_says_so(rows: list[tuple[str, Features, float]]) -> None:
    assert validated(RUN) == Validated(0)
    assert str(Validated(0)) == "no published run like this has been compared"
    json = Validated(0).to_json()
    assert (json["count"], json["mean_error"], json["spread"]) == (0, None, None)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 50_000), st.floats(0, 2e12), st.sampled_from(["fsdp", "ddp", "zero3", "none"]))
def test_any_run_can_be_asked_about(gpus: int, parameters: float, strategy: str) -> None:
    found = validated(replace(RUN, gpus=gpus, parameters=parameters, strategy=strategy))
    assert found.count == 0 or abs(found.mean_error) <= abs(found.worst)


def test_the_shipped_record_is_large_and_its_rows_are_features() -> None:
    assert len(record()) > 500
    assert {of.generation for _, of, _ in record()} >= {"volta", "ga100", "hopper"}
    assert all(abs(error) < 3 for *_, error in record())


def test_a_cut_model_counts_whole() -> None:
    def parameters(**parallel: object) -> float:
        return sim.run(resolve({
            "name": "t", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt3-6.7b", "layers": 4},
            "training": {"micro_batch": 1, "global_batch": 8, "sequence": 512},
            "parallel": {"strategy": "ddp", **parallel}, "software": {"framework": "megatron", "year": 2022}})
        ).features.parameters
    assert parameters() == parameters(tensor=4) == parameters(tensor=2, pipeline=2)


def test_a_result_carries_its_record_and_warns_without_one() -> None:
    def result(gpu: str) -> sim.Result:
        return sim.run(resolve({
            "name": "t", "cluster": {"topology": gpu, "nodes": 4}, "model": {"preset": "mpt-7b"},
            "training": {"micro_batch": 1, "global_batch": 32, "sequence": 2048}, "parallel": {"strategy": "fsdp"},
            "software": {"framework": "composer", "year": 2023}}))
    known, unknown, elsewhere = result("hgx-a100-80g-1600"), result("mi300x-8"), result("pcie-8x-rtx3090")
    assert known.to_json()["validated"]["count"] >= neighbours.ENOUGH
    assert not [w for w in known.warnings if w.startswith("validation:")]
    assert unknown.to_json()["validated"]["count"] == 0
    assert [w for w in unknown.warnings if w.startswith("validation:")]
    assert elsewhere.validated.generations == ("ga100",)
    assert [w for w in elsewhere.warnings if w.startswith("validation:")]


def test_a_record_of_other_gpus_and_the_warning_do_not_contradict_each_other() -> None:
    result = sim.run(resolve({
        "name": "x", "cluster": {"topology": "pcie-8x-l40s", "gpus_per_node": 4}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "global_batch": 4, "sequence": 1024, "precision": "fsdp-bf16"},
        "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2025}}))
    assert result.validated.count and result.validated.generations
    (said,) = [text for text in result.warnings if text.startswith("validation: ")]
    others = ", ".join(result.validated.generations)
    assert said.startswith(f"validation: what the record holds is of other GPUs ({others}); no published run")
    assert said.endswith("the error is not known")


def test_requests_of_inference_have_a_recalled_record_of_their_own() -> None:
    def result(**software: object) -> sim.Result:
        return sim.run(resolve({
            "name": "t", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "llama-2-7b"},
            "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 512, "precision": "pure-bf16",
                         "mode": {"inference": {"prompt": 64, "generate": 8, "batch": 4}}}, "software": software}))
    engine, eager = result(cuda_graphs=True).validated, result().validated
    assert engine.count >= neighbours.ENOUGH and all(s.endswith("(recalled)") for s in engine.sources)
    assert str(engine).endswith("(predicted against published, figures recalled)")
    assert eager.count == 1 and eager.sources == ("gptfast (recalled)",)
