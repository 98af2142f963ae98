"""Reads a Timeline, changes nothing: numbers (`result`), terminal (`text`), Perfetto (`trace`), bounds (`expect`)."""

from sim.report.result import Result, build_result

__all__ = ["Result", "build_result"]
