"""NCCL's release: PyTorch's own, unless the scenario names one."""

from __future__ import annotations

import pytest

from sim.api import hardware_for
from sim.scenario import resolve
from sim.software import stack_for


@pytest.mark.parametrize(("year", "torch", "release"), [
    (2020, "", "2.4"), (2020, "1.7.1", "2.7"), (2021, "", "2.7"), (2022, "", "2.10"), (2023, "", "2.14"),
    (2023, "2.1.2", "2.18"), (2024, "2.5.1", "2.21"),
    (2026, "", "2.27")])
def test_it_came_with_pytorch(year: int, torch: str, release: str) -> None:
    assert stack_for("pytorch", year, versions={"torch": torch} if torch else {}).nccl_release == release


@pytest.mark.parametrize(("named", "release"), [(None, "2.14"), ("2.21.5", "2.21.5")])
def test_a_named_release_wins(named: str | None, release: str) -> None:
    of = resolve({"name": "t", "cluster": {"topology": "dgx-a100-80g", "nodes": 2}, "model": {"preset": "gpt3-125m"},
                  "training": {"micro_batch": 1, "global_batch": 16, "sequence": 512, "precision": "amp-bf16"},
                  "parallel": {"strategy": "ddp"},
                  "software": {"framework": "pytorch", "year": 2023, "nccl": {"version": named} if named else {}}},
                 "t", {})
    assert hardware_for(of)[1].nccl["version"] == release
