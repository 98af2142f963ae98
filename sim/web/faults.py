"""Faults as the page shows them: with their line in the editor or in the box of changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sim.errors import Fault, UserError
from sim.scenario.paths import apply_sets
from sim.scenario.text.document import Document

#: The editor's text, as the file of faults; the changes are the command line's `--set`.
EDITED, CHANGES = "scenario", "--set"


def faults_of(error: UserError, sets: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The faults as plain data: text, `line` (0: none), and `box`, which of the two it is a line of ("": neither).

    Args:
        sets: the lines of the box of changes, empty ones included.
    """
    found: list[dict[str, Any]] = []
    alone = {fault: number for number, text in enumerate(sets, 1) for fault in _alone(text)}
    for fault in error.faults:
        line, box, place = 0, "", ""
        own = fault
        if fault.file == EDITED:
            line, own = fault.line, replace(fault, file="", line=0)
            box, place = ("scenario", f"line {line}: ") if line else ("", "" if fault.field else "the scenario ")
        elif fault.file == CHANGES:
            line = alone.get(fault) or _line_of(fault.field, sets)
            own = replace(fault, file="", line=0, hint=fault.hint.replace("--set ", ""))
            box, place = ("changes", f"changes, line {line}: ") if line else ("", "changes: ")
        found.append({"text": f"{place}{own}", "line": line, "box": box})
    return sorted(found, key=lambda one: (one["box"], one["line"]))


def _line_of(name: str, sets: Sequence[str]) -> int:
    """The line of the last change that gives a field, or all around it, or something inside it."""
    exact, near = 0, 0
    for number, text in enumerate(sets, 1):
        path = text.partition("=")[0].strip()
        if path and path == name:
            exact = number
        elif path and (name.startswith(f"{path}.") or path.startswith(f"{name}.")):
            near = number
    return exact or near


def _alone(text: str) -> list[Fault]:
    """What is wrong with a change as it is written, whatever the scenario."""
    faults: list[Fault] = []
    if text.strip():
        apply_sets(Document({}, {}, "", Path()), [text.strip()], faults)
    return faults
