"""What the whole command costs: `drystep run` against a process that only imports its libraries.

    python tests/benchmarks/bench_command.py [SCENARIO] [--runs 7]

Prints CPU time (user + system) and peak resident memory of both, and their ratios: the medians of alternating runs, so
that a busy machine disturbs both alike. Goal: at most 1.5 times the floor's CPU time (0.45 s where the floor costs
0.30 s) and 90 MiB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FLOOR = [sys.executable, "-c", "import simpy, numpy, networkx, pydantic"]
#: ru_maxrss is in bytes on macOS and in KiB elsewhere (getrusage(2)).
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def measure(command: Sequence[str]) -> tuple[float, float]:
    """CPU seconds and peak resident MiB of one run of `command`."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * RSS_UNIT / 2**20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", nargs="?", default="scenarios/llama2-7b-fsdp.yaml")
    parser.add_argument("--runs", type=int, default=7)
    given = parser.parse_args()
    command = [sys.executable, "-m", "sim", "run", given.scenario, "--json", os.devnull]
    measure(command)  # byte code and file caches warm, as on any second run
    pairs = [(measure(FLOOR), measure(command)) for _ in range(given.runs)]
    floor, ours = ([statistics.median(p[side][i] for p in pairs) for i in range(2)] for side in range(2))
    print(f"{'':34}{'CPU s':>8}{'MiB':>8}")
    print(f"{'imports alone':34}{floor[0]:8.3f}{floor[1]:8.1f}")
    print(f"{'drystep run ' + Path(given.scenario).name:34}{ours[0]:8.3f}{ours[1]:8.1f}")
    print(f"{'ratio':34}{ours[0] / floor[0]:8.2f}{ours[1] / floor[1]:8.2f}   (goal: at most 1.50, and 90 MiB)")


if __name__ == "__main__":
    main()
