"""What the page asks for, without a web server: predictions of edited scenarios, kept for as long as the page runs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sim.api import Sweep, run, run_sweep
from sim.catalog import folder, names
from sim.errors import Fault, UserError
from sim.report.folder import write_run, write_sweep
from sim.report.result import Result
from sim.report.terminal.render import as_text, sweep_as_text
from sim.report.units import seconds, size
from sim.scenario import Loaded
from sim.scenario.load import load_document
from sim.scenario.text.document import parse_document, read_text
from sim.sizing.compare import compare
from sim.sizing.words.compare import lines, write_picture
from sim.web.faults import EDITED

#: Predictions kept in memory for comparisons; the reports of all stay on disk.
_KEPT = 50
#: Collectives that a file of a prediction lists one by one; some 200 bytes each.
_COLLECTIVES = 100_000
#: Characters of a title in the history.
_TITLE = 160
#: Seconds that the end of the server waits for a picture that is being drawn.
_LAST_PICTURE_S = 5.0


class Dropped(Exception):  # noqa: N818 (nothing went wrong)
    """A prediction whose result nobody wants any more."""


class Watch:
    """A prediction as who waits for it sees it.

    Attributes:
        state: waiting (for its turn), running, drawing.
        done, total: points of a sweep; `total` is 0 until it is known, and for a single run.
    """

    def __init__(self) -> None:
        self.state = "waiting"
        self.done = self.total = 0
        self._stopped = threading.Event()
        self._began = time.monotonic()

    def stop(self) -> None:
        """A sweep ends after the point it is at and shows what is finished; a single run's result is dropped."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether it is to stop."""
        return self._stopped.is_set()

    def progress(self, done: int, total: int) -> None:
        """For `run_sweep`, which takes a KeyboardInterrupt as the wish to end early."""
        self.done = done
        if self.stopped and done < total:
            raise KeyboardInterrupt

    def enter(self, state: str) -> None:
        """The next state. Raises Dropped if it is to stop."""
        if self.stopped:
            raise Dropped
        self.state = state

    def to_json(self) -> dict[str, Any]:
        """Plain data for the page."""
        return {"state": self.state, "done": self.done, "total": self.total, "stopping": self.stopped,
                "seconds": time.monotonic() - self._began}


@dataclass(frozen=True, slots=True)
class Entry:
    """One prediction of the page.

    Attributes:
        number: counted from 1; title: the scenario's name and its changes; line: the main figures in a line.
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
        entries: by number.
    """

    reports: Path
    base: Path
    entries: dict[int, Entry] = field(default_factory=dict)
    _results: dict[int, Result] = field(default_factory=dict)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def predict(self, text: str, sets: Sequence[str] = (), watch: Watch | None = None) -> Entry:
        """Predict a scenario as it stands in the editor; a sweep is run over its whole product.

        Args:
            sets: lines `dotted.path=value`; empty ones are passed over.
            watch: told how far it is; may stop it.

        Raises:
            UserError: with every fault, lines counted in `text`.
            Dropped: `watch` stopped it before there was anything to show.
        """
        watch = watch or Watch()
        changes = [one.strip() for one in sets if one.strip()]
        loaded = load_document(parse_document(text, EDITED, self.base), changes)
        title = loaded.scenario.name + (f" ({', '.join(changes)})" if changes else "")
        watch.total = math.prod(len(values) for values in loaded.sweep.values()) if loaded.sweep else 0
        with self._turn:
            watch.enter("running")
            if loaded.sweep:
                return self._sweep(loaded, title, watch)
            return self._run(loaded, title, watch)

    def compare(self, first: int, second: int) -> dict[str, Any]:
        """Two predictions side by side: title, text, and the picture's folder and name.

        Raises:
            UserError: there is no such single run, or no longer.
        """
        with self._writing:
            found = compare([self._result(first), self._result(second)])
            titles = [f"{one}: {name}" for one, name in zip((first, second), found.names, strict=True)]
            found = replace(found, names=titles)
            picture = write_picture(self.reports / f"{first}-{second}", found)
        return {"title": " against ".join(reversed(titles)), "text": "\n".join(lines(found)),
                "picture": f"{picture.parent.name}/{picture.name}"}

    def close(self) -> None:
        """Write nothing from now on."""
        self._writing.acquire(timeout=_LAST_PICTURE_S)

    def _result(self, number: int) -> Result:
        if number in self._results:
            return self._results[number]
        entry = self.entries.get(number)
        raise UserError(Fault(f"there is no prediction {number}" if entry is None else
                              f"prediction {number} is no longer kept: only the last {_KEPT} single runs are"
                              if entry.comparable else
                              f"prediction {number} is a sweep: only single runs are put side by side"))

    def _run(self, loaded: Loaded, title: str, watch: Watch) -> Entry:
        result = run(loaded)
        watch.enter("running")
        listed = _Listed()
        as_json = listed.to_json(result)
        text = _noted(loaded) + as_text(result) + listed.note
        memory = result.memory
        fits = "fits" if memory.fits else "does not fit"
        line = f"{seconds(result.step_time_s)} a step, {size(memory.shown_bytes)} a GPU, {fits}"
        with self._writing:
            watch.enter("drawing")
            number = len(self.entries) + 1
            written = write_run(self._folder(number), result, text, as_json)
            self._results[number] = result
            for old in sorted(self._results)[:-_KEPT]:
                del self._results[old]
            return self._enter(number, title, line, text, written, comparable=True)

    def _sweep(self, loaded: Loaded, title: str, watch: Watch) -> Entry:
        listed = _Listed()
        points: list[dict[str, Any]] = []
        sweep = run_sweep(loaded, progress=watch.progress, each=lambda one: points.append(listed.to_json(one)))
        text = _noted(loaded) + sweep_as_text(sweep.points, sweep.skipped, sweep.axes) + listed.note
        line = _line(sweep, watch.total)
        if sweep.interrupted:
            text = f"{line}\n\n{text}"
        with self._writing:
            watch.state = "drawing"
            number = len(self.entries) + 1
            written = write_sweep(self._folder(number), sweep.points, sweep.axes, text,
                                  {"points": points, **sweep.summary()})
            return self._enter(number, title, line, text, written, comparable=False)

    def _enter(self, number: int, title: str, line: str, text: str, written: Sequence[Path], comparable: bool) -> Entry:
        shown = [path.name for path in written]
        pictures = tuple(name for name in shown if name.endswith(".png"))
        others = tuple(name for name in shown if not name.endswith((".png", ".html")))
        entry = self.entries[number] = Entry(number, _short(title, _TITLE), line, text, pictures, others, comparable)
        return entry

    def _folder(self, number: int) -> Path:
        return self.reports / str(number)


class _Listed:
    """Results as result.json has them, collectives one by one while those are not too many: the page would not answer
    while millions are written."""

    def __init__(self) -> None:
        self._room, self._left_out = _COLLECTIVES, 0

    def to_json(self, result: Result) -> dict[str, Any]:
        """One result as plain data."""
        count = result.collectives
        listed = count <= self._room
        if listed:
            self._room -= count
        else:
            self._left_out += count
        return result.to_json(traffic=listed)

    @property
    def note(self) -> str:
        """What is left out, as a line of the report; "" where nothing is."""
        said = f"\nresult.json lacks {self._left_out:,} collectives, which drystep run --json lists\n"
        return said if self._left_out else ""


def _noted(loaded: Loaded) -> str:
    """How scenario and changes were read together, where that needs saying."""
    said = [note.removeprefix(f"{EDITED}: ").replace("by --set", "by the changes") for note in loaded.notes]
    return "".join(f"{note}\n" for note in said) + "\n" * bool(said)


def _line(sweep: Sweep, total: int) -> str:
    line = f"{len(sweep.points)} {'point' if len(sweep.points) == 1 else 'points'}"
    line += f", {len(sweep.skipped)} impossible" if sweep.skipped else ""
    return f"{line}, stopped after {len(sweep.points) + len(sweep.skipped)} of {total}" if sweep.interrupted else line


def _short(text: str, limit: int) -> str:
    """A text without its middle where it is long: a name's changes stand at its end."""
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[1 - limit + limit // 2:]}"


def examples() -> list[str]:
    """Names of the scenarios that come with the product."""
    return names("scenarios")


def example(name: str) -> str:
    """The text of one of them. Raises UserError where there is none."""
    path = folder("scenarios") / f"{name}.yaml"
    return read_text(path, f"{name}.yaml")
