"""What is said of tensor ranks, stages and buckets that are not there, and FSDP before there was one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sim
from sim.report.warned.unused import buckets_in_vain, fsdp_of_another, without_ranks
from sim.scenario import Scenario, load_scenario, resolve


def scenario(**sets: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g"},
        "model": {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 8, "vocab": 1024},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128},
        "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2025}},
        sets={name.replace("__", "."): value for name, value in sets.items()})


@pytest.mark.parametrize(("sets", "said"), [
    ({"parallel__bucket_mb": 100}, "bucket_mb 100 changes nothing: fsdp reduces the gradients of each unit"),
    ({"parallel__async_tensor": True}, "async_tensor true changes nothing: there are no tensor ranks"),
    ({"parallel__sequence_parallel": True}, "sequence_parallel true changes nothing: there are no tensor ranks"),
    ({"parallel__schedule": "zb-h1"}, "schedule zb-h1 changes nothing: there is no pipeline"),
])
def test_what_changes_nothing_is_told_and_changes_nothing(sets: dict[str, Any], said: str) -> None:
    plain, asked = sim.run(scenario()), sim.run(scenario(**sets))
    assert asked.step_time_s == plain.step_time_s
    assert [text for text in asked.warnings if said in text]
    assert not [text for text in plain.warnings if "changes nothing" in text]


def test_what_is_read_is_not_warned_of() -> None:
    assert buckets_in_vain(scenario(parallel__strategy="ddp", parallel__bucket_mb=100)) == []
    assert buckets_in_vain(scenario(parallel__strategy="zero1", parallel__bucket_mb=100)) == []
    assert without_ranks(scenario(parallel__tensor=2, parallel__sequence_parallel=True)) == []
    assert without_ranks(scenario(parallel__pipeline=2, parallel__schedule="gpipe")) == []
    alone = scenario(parallel__strategy="ddp", parallel__bucket_mb=100, cluster__topology="single-a100-80g-sxm")
    assert "between replicas" in buckets_in_vain(alone)[0]
    plain = scenario(parallel__strategy="ddp", parallel__bucket_mb=100, software__framework="deepspeed")
    assert "buckets of its own" in buckets_in_vain(plain)[0]


@pytest.mark.parametrize(("software", "said"), [
    ({"versions": {"torch": "1.4"}}, "torch 1.4 has no FSDP, which came with torch 1.11"),
    ({"year": 2018}, "pytorch of 2018 has no FSDP"), ({"year": 2021}, "no FSDP"), ({"year": 2022}, ""),
    ({"fsdp": 2, "versions": {"torch": "2.0.1"}}, "torch 2.0.1 has no FSDP 2, which came with torch 2.3"),
    ({"fsdp": 2, "versions": {"torch": "2.4"}}, ""), ({"fsdp": 1, "versions": {"torch": "1.11"}}, ""),
    ({"framework": "torchtitan", "year": 2024, "fsdp": 2}, ""), ({"framework": "ideal", "year": 2018}, ""),
])
def test_fsdp_of_a_release_that_has_none_is_a_forks(software: dict[str, Any], said: str) -> None:
    sets = {f"software__{name}": value for name, value in software.items()}
    found = fsdp_of_another(scenario(**sets))
    assert bool(found) == bool(said) and all(said in text for text in found)
    assert fsdp_of_another(scenario(**sets, parallel__strategy="ddp")) == []


def test_no_scenario_of_the_guide_asks_in_vain() -> None:
    for path in sorted(Path("scenarios").glob("*.yaml")):
        one = load_scenario(str(path)).scenario
        assert without_ranks(one) + buckets_in_vain(one) + fsdp_of_another(one) == [], path
