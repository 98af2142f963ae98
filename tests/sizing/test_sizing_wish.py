"""Limits and objectives: tokens by rule, memory that stays free, energy; what is canonical is the same program."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.cli import main
from sim.hardware import gpu
from sim.parallel import lower
from sim.scenario import resolve
from sim.sizing import Choice, Wish, size
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import STRATEGIES, build_space
from sim.sizing.wish import steps_of

PLAIN: dict[str, Any] = {
    "name": "small", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
    "training": {"micro_batch": 1, "global_batch": 64, "sequence": 1024}}
NARROW = Choice([8], tensor=[1, 2], context=[1], pipeline=[1], micro_batch=[1, 8], partial_recompute=False)

#: Searches of one space, over and over: what they simulate is shared.
pytestmark = pytest.mark.usefixtures("once")


def test_chinchilla_is_twenty_tokens_per_parameter() -> None:
    asked = resolve({**PLAIN, "budget": {"tokens": "chinchilla"}})
    parameters = lower(asked).architecture.parameters
    steps = steps_of(asked)
    assert steps is not None and 0 <= steps - 20 * parameters / (64 * 1024) < 1
    assert steps_of(resolve(PLAIN)) is None
    assert steps_of(resolve({**PLAIN, "budget": {"tokens": 65536 * 7}})) == 7


@pytest.mark.whole
def test_a_deadline_for_chinchilla_tokens(tmp_path: Path) -> None:
    file, told = tmp_path / "s.yaml", tmp_path / "f.json"
    file.write_text(json.dumps({**PLAIN, "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 2},
                                "budget": {"tokens": "chinchilla"}}))
    common = ["size", str(file), "--gpus", "2", "--top", "1", "--json", str(told)]
    runs = []
    for more in ([], ["--deadline", "1000 days"], ["--deadline", "1 s"]):
        with pytest.raises(SystemExit) as done:
            main([*common, *more])
        assert done.value.code == 0
        runs.append(json.loads(told.read_text()))
    free, kept, late = runs
    assert free["best"][0]["run_s"] > 100 * free["best"][0]["step_time_s"]
    assert kept["best"] == free["best"] and not late["best"] and late["pruned"]["deadline"] > 0
    assert min(late["pruned"].values()) >= 0  # the scenario's own layout is simulated, and late too
    assert late["nearest"] == free["best"][0] and kept["nearest"] is free["nearest"] is None


def test_memory_that_is_to_stay_free_rules_layouts_out() -> None:
    model = resolve({**PLAIN, "model": {"preset": "llama-7b"}})
    choice = replace(NARROW, tensor=[1], strategies=["fsdp", "zero2"], recompute=["none", "full"])
    free = size(model, choice, top=100)
    ordered = sorted(row["device_used_bytes"] for row in free.best)
    assert ordered[0] < ordered[-1]
    whole = gpu(model.cluster.topology.gpu).usable_memory_bytes
    margin = whole - ordered[len(ordered) // 2]  # half of them leave as much free
    kept = size(model, choice, Wish(margin_bytes=margin), top=100)
    assert kept.best == [row for row in free.best if row["device_used_bytes"] <= whole - margin]
    assert 0 < len(kept.best) < len(free.best) and kept.proven
    assert not size(model, choice, Wish(margin_bytes=whole), top=1).best


@pytest.mark.whole
def test_least_energy_is_what_simulating_all_says() -> None:
    everything = size(resolve(PLAIN), NARROW, top=10**6)
    least = sorted(everything.best, key=lambda row: row["step_energy_j"])[:3]
    found = size(resolve(PLAIN), NARROW, Wish("energy"), top=3)
    assert [row["step_energy_j"] for row in found.best] == [row["step_energy_j"] for row in least] and found.proven
    # 8 A100 at 400 W or less, above their constant power
    watts = found.best[0]["step_energy_j"] / found.best[0]["step_time_s"] / 8
    assert 50 < watts <= 400 and found.best[0]["energy_kwh"] == found.best[0]["step_energy_j"] / 3.6e6


@pytest.mark.parametrize("fsdp", [1, 2])
def test_zero_3_is_fsdp_over_all_ranks_program_for_program(fsdp: int) -> None:
    plain = {**PLAIN, "software": {"framework": "pytorch", "fsdp": fsdp}}
    base = alone(resolve(plain), None)
    sets = {"parallel.sharding_factor": 8, "training.micro_batch": 2}
    zero, own, kept = (lower(resolve(following(base), "", {**sets, "parallel.strategy": name})).job
                       for name in ("zero3", "fsdp", "zero2"))
    assert repr(zero.programs) == repr(own.programs) != repr(kept.programs)
    assert repr(zero.classes) == repr(own.classes) and repr(zero.communicators) == repr(own.communicators)
    names = {STRATEGIES[i] for i in build_space([base], Choice([8])).columns["strategy"]}
    assert "zero3" not in names and {"fsdp", "zero2"} <= names
    speedy = alone(resolve({**PLAIN, "software": {"framework": "deepspeed"}}), None)
    assert "zero3" in {STRATEGIES[i] for i in build_space([speedy], Choice([8])).columns["strategy"]}


def test_configurations_that_can_be_written_are_counted() -> None:
    """One rank a replica of 12 blocks: 5 schedules (PyTorch of 2026) are one, 12 is all blocks; FSDP of 2 is ZeRO-3."""
    base = alone(resolve({**PLAIN, "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 2},
                           "software": {"framework": "pytorch", "year": 2026}}), None)
    space = build_space([base], Choice([2], tensor=[1], context=[1], pipeline=[1], micro_batch=[1]))
    # ddp, zero1, zero2, fsdp (and zero3); four policies and the first 1 to 11 (and 12) blocks
    assert len(space) == 4 * (4 + 11) and space.raw == 5 * (4 + 12) * 5
