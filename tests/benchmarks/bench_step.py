"""What one prediction costs in a warm process, part by part, beside SimPy's raw callback rate.

    python tests/benchmarks/bench_step.py [--runs 15]

No result is cached: lowering, engine and result are done anew each time. `run()` is all of it as a user calls it, with
a new Machine, whose answers about kernels and collectives the single parts find memoised. Prints medians in ms, events,
and events per ms relative to SimPy running bare timeouts; then the same job over growing rank counts, which must cost
the same. Times are CPU times: a busy machine stretches them less than the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import simpy

from sim.api import machine_for, run
from sim.engine import simulate
from sim.parallel import lower
from sim.report import build_result
from sim.scenario import resolve

BASE: dict[str, Any] = {"cluster": {"topology": "dgx-a100-80g"}, "software": {"framework": "pytorch", "year": 2023}}


def fsdp_70b(nodes: int = 64) -> dict[str, Any]:
    """80 layers, every one of them gathered, reduced and recomputed."""
    return {**BASE, "name": f"llama-2-70b fsdp, {8 * nodes} GPUs", "model": {"preset": "llama-2-70b"},
            "cluster": {"topology": "dgx-a100-80g", "nodes": nodes}, "parallel": {"strategy": "fsdp"},
            "training": {"micro_batch": 1, "global_batch": 8 * nodes, "sequence": 4096, "precision": "fsdp-bf16",
                         "recompute": "full"}}


def ddp_13b() -> dict[str, Any]:
    """13B parameters in DDP's buckets on 1,024 GPUs."""
    return {**BASE, "name": "llama-2-13b ddp, 1024 GPUs", "model": {"preset": "llama-2-13b"},
            "cluster": {"topology": "dgx-a100-80g", "nodes": 128}, "parallel": {"strategy": "ddp"},
            "training": {"micro_batch": 1, "global_batch": 1024, "sequence": 4096, "precision": "pure-bf16",
                         "recompute": "full"}}


def simpy_events_per_ms(events: int = 100_000) -> float:
    """SimPy's own speed here: a chain of timeouts, each scheduling the next from a callback."""
    environment = simpy.Environment()
    left = events

    def again(_: simpy.Event) -> None:
        nonlocal left
        left -= 1
        if left:
            environment.timeout(1.0).callbacks.append(again)

    environment.timeout(1.0).callbacks.append(again)
    start = time.process_time()
    environment.run()
    return events / (1e3 * (time.process_time() - start))


def timed(work: Callable[[], Any], runs: int) -> tuple[float, Any]:
    """Median CPU milliseconds of `work`, and its last value."""
    value, spent = work(), []
    for _ in range(runs):
        start = time.process_time()
        value = work()
        spent.append(1e3 * (time.process_time() - start))
    return statistics.median(spent), value


def measure(mapping: dict[str, Any], runs: int, raw: float) -> None:
    """Print one job's row."""
    scenario = resolve(mapping)
    lower_ms, lowered = timed(lambda: lower(scenario), runs)
    machine = machine_for(scenario, lowered)
    engine_ms, timeline = timed(lambda: simulate(lowered.job, machine), runs)
    result_ms, _ = timed(lambda: build_result(scenario, lowered, machine, timeline), runs)
    whole_ms, _ = timed(lambda: run(scenario), runs)
    rate = timeline.events / engine_ms / raw
    print(f"{mapping['name']:34}{lower_ms:9.2f}{engine_ms:9.2f}{result_ms:9.2f}{lower_ms + engine_ms + result_ms:9.2f}"
          f"{whole_ms:9.2f}{timeline.tasks:8d}{timeline.events:9d}{rate:14.2f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    raw = simpy_events_per_ms()
    print(f"SimPy alone: {raw:.0f} callback events per ms. Goals: engine 2 ms, sum 8 ms.\n")
    print(f"{'warm process, ms':34}{'lower':>9}{'engine':>9}{'result':>9}{'sum':>9}{'run()':>9}{'tasks':>8}"
          f"{'events':>9}{'rate / SimPy':>14}")
    for mapping in (fsdp_70b(), ddp_13b(), *(fsdp_70b(nodes) for nodes in (128, 256, 512, 1024, 2048))):
        measure(mapping, runs, raw)


if __name__ == "__main__":
    main()
