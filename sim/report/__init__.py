"""Reads a Timeline, changes nothing: numbers (`result`), terminal (`text`), Perfetto (`trace`), bounds (`expect`)."""

from sim.report.build import build_result
from sim.report.result import Result

__all__ = ["Result", "build_result"]
