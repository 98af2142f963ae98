"""What is asked for in words and not done is said."""

from __future__ import annotations

from typing import Any

import pytest

from sim.report.asked import overlap_in_vain
from sim.scenario import Scenario, resolve


def scenario(year: int, **parallel: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": 4},
        "model": {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 8, "vocab": 1024},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128},
        "parallel": {"strategy": "ddp", "pipeline": 2, **parallel},
        "software": {"framework": "megatron", "year": year}})


def test_an_overlap_that_megatron_of_2021_has_not_is_said_to_change_nothing() -> None:
    (said,) = overlap_in_vain(scenario(2021, overlap=True))
    assert "megatron of 2021" in said and "when its pipeline has ended" in said


@pytest.mark.parametrize("other", [
    scenario(2021), scenario(2021, overlap=False), scenario(2024, overlap=True),
    scenario(2021, overlap=True, pipeline=1), scenario(2021, overlap=True, pipeline=4)])
def test_what_is_not_asked_or_done_is_no_news(other: Scenario) -> None:
    assert overlap_in_vain(other) == []
