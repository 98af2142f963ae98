"""Reads a Timeline, changes nothing: the result, what it says and its pictures."""

from sim.report.build import build_result
from sim.report.result import Result

__all__ = ["Result", "build_result"]
