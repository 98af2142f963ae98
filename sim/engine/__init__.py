"""The engine room: runs any Job on any Machine (`simulate`), and bounds it from below (`longest_path`).

Read `engine` first (the loop), then `host`, `streams` and `communicators` (the three actors, which call each other
back; each is a `timer` and writes on `run`s), `machine` (what things cost), `repeats` and `steady` (what need not be
simulated), `timeline` (what comes out).
"""

from __future__ import annotations

from sim.engine.engine import DeadlockError, simulate
from sim.engine.longest_path import LongestPath, longest_path
from sim.engine.machine import Machine
from sim.engine.timeline import Columns, SectionRun, Timeline

__all__ = ["Columns", "DeadlockError", "LongestPath", "Machine", "SectionRun", "Timeline", "longest_path", "simulate"]
