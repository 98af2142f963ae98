"""What the slowest published cases cost: the step, its memory, and the advice where a job does not fit.

    python tests/benchmarks/bench_cases.py [--runs 3] [--select PATTERN]

`first` is a prediction whose schedules, devices and networks nothing has asked for yet, `run()` one that finds them
known; `engine` is the steady step (an event in units of a SimPy callback), `infinite` the one on a network of infinite
speed that `slowdown` needs, `peak` the ledger of all stages, `replay` the allocator's of the fullest. `advice` is what
would make a job fit and the largest sizes that do: how many changed scenarios are lowered for it, how many of them are
simulated, and its time over that of the prediction. CPU times, the shortest of the runs, in ms; a ratio can be compared
between computers, a time cannot.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from pathlib import Path

from bench_pipeline import least
from bench_step import simpy_events_per_ms

from sim.api import Trial, machine_for, run
from sim.catalog import folder
from sim.engine import simulate
from sim.memory.ledger import peak
from sim.memory.reserved import fragmentation_bytes
from sim.parallel import lower
from sim.report.advice.largest import largest
from sim.report.advice.single import advise
from sim.report.result import Result
from sim.scenario import Scenario, resolve
from sim.validation.cases.files import read

#: Deep pipelines with many micro-batches, many virtual stages, thousands of units: file and id of a published case.
CASES = (
    ("fsdp_aws.yaml", "fsdp-aws-gpt1t-128"),
    ("nemo.yaml", "nemo2407c-nemotron-340b-128gpu-gbs32-fp8"),
    ("megatron_bridge.yaml", "bridge-25.09-qwen3-30b-a3b-h100-16gpu-gbs512-fp8"),
    ("megatron_bridge.yaml", "bridge-26.04.01-deepseekv3-b200-256gpu-gbs4096-mxfp8"),
    ("megatron_sc21_paper.yaml", "megatron-sc21-t2-ptdp-529.6b-560gpu"),
    ("megatron_sc21.yaml", "megatron-sc21-table1-1t"),
    ("bigscience_v100.yaml", "bigscience-v100-104b-l80"),
    ("nanotron.yaml", "nanotron-70b-config-n16"),
)


class Counted(Trial):
    """A changed scenario, counted."""

    lowered_all = simulated_all = 0

    def __init__(self, scenario: Scenario) -> None:
        Counted.lowered_all += 1
        super().__init__(scenario)

    def step_time_s(self) -> float:
        """Simulates."""
        Counted.simulated_all += 1
        return super().step_time_s()


def advice(result: Result, runs: int) -> tuple[float, int, int]:
    """Milliseconds of what is said of a job that does not fit, scenarios lowered and steps simulated for it."""
    if result.memory.fits:
        return 0.0, 0, 0

    def say() -> None:
        Counted.lowered_all = Counted.simulated_all = 0
        advise(result.scenario, result.memory, Counted, result.step_time_s)
        largest(result.scenario, lambda scenario: Counted(scenario).memory, result.memory)

    spent, _ = least(say, max(1, runs - 2))
    return spent, Counted.lowered_all, Counted.simulated_all


def measure(file: str, name: str, runs: int, raw: float) -> None:
    """Print one case's row."""
    case = next(case for case in read(Path(folder("scenarios")) / "published" / file).cases if case.id == name)
    scenario = resolve(case.given, case.path, case.sets, Path(case.path).parent)
    start = time.process_time()
    result = run(scenario)
    first_ms = 1e3 * (time.process_time() - start)
    run_ms, _ = least(lambda: run(scenario), runs)
    lowered = lower(scenario)
    lower_ms, _ = least(lambda: lower(scenario), runs)
    machine = machine_for(scenario, lowered)
    infinite = machine.infinite()
    engine_ms, timeline = least(lambda: simulate(lowered.job, machine), runs)
    infinite_ms, _ = least(lambda: simulate(lowered.job, infinite), runs)
    peak_ms, _ = least(lambda: [peak(program) for program in lowered.job.programs], runs)
    replay_ms, _ = least(lambda: fragmentation_bytes(result.memory.program), runs)
    advice_ms, tried, simulated = advice(result, runs)
    print(f"{name[:44]:46}{first_ms:8.0f}{run_ms:8.0f}{lower_ms:8.1f}{engine_ms:8.1f}{timeline.events:9d}"
          f"{engine_ms / timeline.events * raw:10.1f}{infinite_ms:10.1f}{peak_ms:8.1f}{replay_ms:8.1f}{advice_ms:8.0f}"
          f"{tried:8d}{simulated:7d}{advice_ms / run_ms:9.1f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--select", default="*", help="only cases whose id matches")
    given = parser.parse_args()
    raw = simpy_events_per_ms()
    print(f"SimPy alone: {raw:.0f} callback events per ms\n")
    print(f"{'CPU ms':46}{'first':>8}{'run()':>8}{'lower':>8}{'engine':>8}{'events':>9}{'callbacks':>10}"
          f"{'infinite':>10}{'peak':>8}{'replay':>8}{'advice':>8}{'lowered':>8}{'steps':>7}{'/ run()':>9}")
    for file, name in CASES:
        if fnmatch.fnmatch(name, given.select):
            measure(file, name, given.runs, raw)


if __name__ == "__main__":
    main()
