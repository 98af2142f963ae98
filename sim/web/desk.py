"""What the page asks for, without a web server: predictions of edited scenarios, kept for as long as the page runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sim.api import Sweep, run, run_sweep
from sim.catalog import folder, names
from sim.errors import UserError
from sim.report.folder import write_run, write_sweep
from sim.report.result import Result
from sim.report.text import as_text, sweep_as_text
from sim.report.units import seconds, size
from sim.scenario.document import parse_document, read_text
from sim.scenario.load import load_document
from sim.sizing.compare import compare
from sim.sizing.compare_text import lines, write_picture

#: Predictions kept in memory for comparisons; the reports of all stay on disk.
_KEPT = 50
_EDITED = "scenario"


@dataclass(frozen=True, slots=True)
class Entry:
    """One prediction of the page.

    Attributes:
        number: counted from 1; title: the scenario's name; line: the main figures in a line.
        text: the terminal's report; pictures, files: names in the entry's folder.
        comparable: a single run, which another can be put beside.
    """

    number: int
    title: str
    line: str
    text: str
    pictures: tuple[str, ...]
    files: tuple[str, ...]
    comparable: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data for the page."""
        return {"number": self.number, "title": self.title, "line": self.line, "text": self.text,
                "pictures": list(self.pictures), "files": list(self.files), "comparable": self.comparable}


@dataclass
class Desk:
    """Predictions made so far.

    Attributes:
        reports: folder that their reports go into, one below it for each.
        base: folder that relative paths inside an edited scenario are relative to.
    """

    reports: Path
    base: Path
    _results: dict[int, Result] = field(default_factory=dict)
    _count: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def predict(self, text: str, sets: Sequence[str] = ()) -> Entry:
        """Predict a scenario as it stands in the editor; a sweep is run over its whole product.

        Raises:
            UserError: with every fault, lines counted in `text`.
        """
        loaded = load_document(parse_document(text, _EDITED, self.base), sets)
        with self._turn:
            if loaded.sweep:
                return self._sweep(run_sweep(loaded), loaded.scenario.name)
            return self._run(run(loaded))

    def compare(self, first: int, second: int) -> dict[str, Any]:
        """Two predictions side by side: text, and the picture's name in the folder of the second.

        Raises:
            KeyError: there is no such single run, or no longer.
        """
        found = compare([self._results[first], self._results[second]])
        with self._turn:
            picture = write_picture(self._folder(second), found)
        return {"text": "\n".join(lines(found)), "picture": picture.name, "number": second}

    def _run(self, result: Result) -> Entry:
        number = self._next()
        text = as_text(result)
        written = write_run(self._folder(number), result, text, result.to_json())
        self._results[number] = result
        for old in sorted(self._results)[:-_KEPT]:
            del self._results[old]
        memory = result.memory
        fits = "fits" if memory.fits else "does not fit"
        line = f"{seconds(result.step_time_s)} a step, {size(memory.device_used_bytes)} a GPU, {fits}"
        return _entry(number, result.scenario.name, line, text, written, comparable=True)

    def _sweep(self, sweep: Sweep, name: str) -> Entry:
        number = self._next()
        text = sweep_as_text(sweep.points, sweep.skipped, sweep.axes)
        written = write_sweep(self._folder(number), sweep.points, sweep.axes, text, sweep.to_json())
        line = f"{len(sweep.points)} {'point' if len(sweep.points) == 1 else 'points'}"
        line += f", {len(sweep.skipped)} impossible" if sweep.skipped else ""
        return _entry(number, name, line, text, written, comparable=False)

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _folder(self, number: int) -> Path:
        return self.reports / str(number)


def _entry(number: int, title: str, line: str, text: str, written: Sequence[Path], comparable: bool) -> Entry:
    shown = [path.name for path in written]
    return Entry(number, title, line, text, tuple(name for name in shown if name.endswith(".png")),
                 tuple(name for name in shown if not name.endswith((".png", ".html"))), comparable)


def examples() -> list[str]:
    """Names of the scenarios that come with the product."""
    return names("scenarios")


def example(name: str) -> str:
    """The text of one of them. Raises UserError where there is none."""
    path = folder("scenarios") / f"{name}.yaml"
    return read_text(path, f"{name}.yaml")


def faults_of(error: UserError) -> list[dict[str, Any]]:
    """Faults as the page shows them, each with its line in the editor (0 where it has none there)."""
    found = []
    for fault in error.faults:
        line = fault.line if fault.file == _EDITED else 0
        own = replace(fault, file="", line=0) if fault.file == _EDITED else fault
        found.append({"text": f"line {line}: {own}" if line else str(own), "line": line})
    return found
