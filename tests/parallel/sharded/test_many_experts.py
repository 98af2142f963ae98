"""FSDP 2 of a mixture: a unit of hundreds of experts has thousands of tensors in a few sizes."""

from __future__ import annotations

import pytest

from sim.parallel import lower
from sim.parallel.sharded import fsdp2
from sim.parallel.sharded.units import Unit
from sim.parallel.step import blocks
from sim.scenario import Scenario, resolve

EXPERTS, LAYERS = 128, 4


def scenario() -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-h100"},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": 512, "heads": 8, "vocab": 1024, "gated_mlp": True,
                  "moe": {"experts": EXPERTS, "top_k": 2, "expert_ffn": 256}},
        "training": {"global_batch": 8, "micro_batch": 1, "sequence": 128, "precision": "fsdp-bf16"},
        "parallel": {"strategy": "fsdp"}, "software": {"fsdp": 2, "year": 2025}})


def test_a_size_that_many_experts_share_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def counted(size_bytes: float) -> int:
        asked.append(size_bytes)
        return blocks(size_bytes)

    monkeypatch.setattr(fsdp2, "blocks", counted)
    lower(scenario())
    assert asked and len(asked) < EXPERTS * LAYERS


def test_gathered_bytes_are_those_of_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    whole = fsdp2.Fsdp2.gathered_bytes

    def kept(self: fsdp2.Fsdp2, unit: Unit, parts: int = 1) -> int:
        found = whole(self, unit, parts)
        beside = self.whole_bytes(unit, unit.padded) - unit.padded * self.gather_bytes
        each = sum(blocks(numel * self.gather_bytes / parts) for numel in unit.wholes)
        sizes.append((found, each + round(beside / parts)))
        return found

    monkeypatch.setattr(fsdp2.Fsdp2, "gathered_bytes", kept)
    lower(scenario())
    assert sizes and all(found == each for found, each in sizes)
