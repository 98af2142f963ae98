"""What pipelined jobs cost in a warm process: lowering, machine and engine, beside SimPy's raw callback rate.

    python tests/benchmarks/bench_pipeline.py [--runs 9] [--large]

`fresh` lowers with the memo of schedules (order lists and their patterns) emptied each time, `lower` keeps it as any
second run or sweep does; `machine` compiles sections, `engine` simulates on a machine that has answered before, `new`
on one that has not. CPU times, the shortest of the runs, in ms; `callbacks` is lowering and engine in units of one
SimPy callback, which can be compared between computers. Goals: 175B 20 ms (lower + engine); 1T 1.2 s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from bench_step import simpy_events_per_ms

from sim.api import machine_for
from sim.engine import simulate
from sim.parallel import lower
from sim.parallel.pipeline import orders, patterns
from sim.scenario import resolve


def gpt(name: str, preset: str, nodes: int, pipeline: int, micro_batches: int, **parallel: Any) -> dict[str, Any]:
    """GPT-3 or a trillion parameters, eight-way tensor parallel within nodes."""
    replicas = nodes // pipeline
    return {"name": name, "cluster": {"topology": "dgx-a100-80g", "nodes": nodes}, "model": {"preset": preset},
            "training": {"micro_batch": 1, "global_batch": micro_batches * replicas, "sequence": 2048,
                         "precision": "megatron-bf16", "optimizer": "adam", "recompute": "full", "attention": "flash"},
            "parallel": {"strategy": "zero1", "tensor": 8, "pipeline": pipeline, **parallel},
            "software": {"framework": "megatron", "year": 2023}}


def least(work: Callable[[], Any], runs: int) -> tuple[float, Any]:
    """Shortest CPU milliseconds of `work`, and its last value."""
    value, best = work(), float("inf")
    for _ in range(runs):
        start = time.process_time()
        value = work()
        best = min(best, 1e3 * (time.process_time() - start))
    return best, value


def measure(mapping: dict[str, Any], runs: int, raw: float) -> None:
    """Print one job's row."""
    scenario = resolve(mapping)

    def fresh() -> Any:
        patterns.rows.cache_clear()
        orders.forget()
        return lower(scenario)

    fresh_ms, _ = least(fresh, min(runs, 3))
    lower_ms, lowered = least(lambda: lower(scenario), runs)
    machine_ms, machine = least(lambda: machine_for(scenario, lowered), runs)
    new_ms, _ = least(lambda: simulate(lowered.job, machine_for(scenario, lowered)), min(runs, 3))
    engine_ms, timeline = least(lambda: simulate(lowered.job, machine), runs)
    callbacks = (lower_ms + engine_ms) * raw
    print(f"{mapping['name']:34}{fresh_ms:9.1f}{lower_ms:9.1f}{machine_ms:9.1f}{engine_ms:9.1f}{new_ms:9.1f}"
          f"{lower_ms + engine_ms:9.1f}{timeline.tasks:9d}{timeline.events:9d}{callbacks:11.0f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--large", action="store_true", help="a trillion parameters on 3,072 GPUs as well")
    given = parser.parse_args()
    raw = simpy_events_per_ms()
    print(f"SimPy alone: {raw:.0f} callback events per ms\n")
    print(f"{'warm process, ms':34}{'fresh':>9}{'lower':>9}{'machine':>9}{'engine':>9}{'new':>9}{'sum':>9}{'tasks':>9}"
          f"{'events':>9}{'callbacks':>11}")
    jobs = [gpt("175B 1f1b, sequence parallel", "gpt3-175b", 8, 8, 64, sequence_parallel=True),
            gpt("175B 1f1b", "gpt3-175b", 8, 8, 64),
            gpt("175B interleaved x3", "gpt3-175b", 8, 8, 64, schedule="interleaved", virtual_stages=3),
            gpt("175B zb-h1", "gpt3-175b", 8, 8, 64, schedule="zb-h1"),
            gpt("175B zb-v", "gpt3-175b", 8, 8, 64, schedule="zb-v", virtual_stages=2)]
    for mapping in jobs:
        measure(mapping, given.runs, raw)
    if given.large:
        measure(gpt("1T 1f1b, 3,072 GPUs", "megatron-1t", 384, 64, 512), min(given.runs, 3), raw)


if __name__ == "__main__":
    main()
