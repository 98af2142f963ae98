"""What a stage's host does between actions: it fetches batches, waits for exchanges, and the GPU stands meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

import sim.api as sim
from sim.parallel import lower
from sim.program import Kind
from sim.scenario import Scenario, resolve
from sim.software import stack_for


def job(schedule: str = "1f1b", year: int = 2023, micro_batches: int = 8, stages: int = 2, **parallel: Any) -> Scenario:
    virtual = {"virtual_stages": 2} if schedule == "interleaved" else {}
    return resolve({
        "name": "stages", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": stages},
        # without biases, which the products take from 2024 on
        "model": {"kind": "decoder", "layers": 8, "hidden": 4096, "heads": 32, "vocab": 32000, "bias": False},
        "training": {"micro_batch": 2, "global_batch": 2 * micro_batches, "sequence": 2048,
                     "precision": "megatron-fp16", "attention": "eager"},
        "parallel": {"strategy": "ddp" if stages == 1 else "none", "pipeline": stages, "schedule": schedule, **virtual,
                     **parallel},
        "software": {"framework": "megatron", "year": year}})


def host_tasks(scenario: Scenario) -> Counter[str]:
    """Host tasks of the first rank's step by what they do, with how often they run."""
    program = lower(scenario).job.programs[0]
    found: Counter[str] = Counter()
    for number, repeats in program.schedule:
        section = program.sections[number]
        for kind, label in zip(section.kind, section.label, strict=True):
            if kind == Kind.HOST:
                found[program.labels[label].name] += repeats
    return found


def test_every_forward_of_every_chunk_fetches_a_batch_until_2023() -> None:
    assert host_tasks(job())["fetch"] == 8
    assert host_tasks(job("interleaved"))["fetch"] == 16
    assert host_tasks(job("zb-1p"))["fetch"] == 8
    assert host_tasks(job(stages=1))["fetch"] == 8
    assert host_tasks(job(year=2024))["fetch"] == 0


def test_interleaved_stages_overlap_since_2024_unless_told_otherwise() -> None:
    assert host_tasks(job("interleaved"))["synchronise"] > 0
    assert host_tasks(job("interleaved", 2024))["synchronise"] == 0
    assert host_tasks(job("interleaved", 2024, overlap_p2p=False))["synchronise"] > 0
    assert host_tasks(job("1f1b", 2024))["synchronise"] > 0
    assert host_tasks(job("interleaved", 2024, virtual_stages=1)) == host_tasks(job("1f1b", 2024))
    assert host_tasks(job("1f1b", 2023, overlap_p2p=True))["synchronise"] == 0


def test_a_steady_micro_batch_takes_what_the_host_takes_longer() -> None:
    """1F1B, GPU-bound: per micro-batch one fetch and two exchanges (before a forward, before a backward) more."""
    stack = stack_for("megatron", 2023)
    few, many = (sim.run(job(micro_batches=count)).step_time_s for count in (16, 32))
    per_batch = (many - few) / 16
    ideal = [sim.run(job(micro_batches=count, overlap_p2p=True, year=2024)).step_time_s for count in (16, 32)]
    extra = per_batch - (ideal[1] - ideal[0]) / 16
    least = stack.host_batch_s + 2 * stack.host_exchange_s
    # a little of it hides behind what the neighbour still computes; transfers, 34 MB over NVLink, come on top
    assert 0.8 * least <= extra <= least + 0.6e-3
