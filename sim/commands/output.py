"""What commands share: JSON written as it comes, paths checked before anything is computed, a bar of progress."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.errors import Fault, UserError

if TYPE_CHECKING:
    from sim.scenario import Loaded

#: Exit code after Ctrl-C.
INTERRUPTED = 130


def json_option(what: str) -> Callable[[Any], Any]:
    """`--json FILE`; without a name, or with -, it goes to standard output."""
    return click.option("--json", "json_to", is_flag=False, flag_value="-", metavar="FILE",
                        help=f"Write {what} as JSON; - is standard output.")


def set_option(help_text: str = "Put a value on top, e.g. cluster.nodes=64; repeatable.", *,
               several: bool = False) -> Callable[[Any], Any]:
    """`--set PATH=VALUE`; `several`: whether one field may be given more than one value."""
    return click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help=help_text,
                        callback=None if several else _once)


def _once(ctx: click.Context, param: click.Parameter, sets: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse two values of one field, of which one would be dropped without a word."""
    said: dict[str, str] = {}
    for path, _, value in (one.partition("=") for one in sets):
        if said.setdefault(path.strip(), value.strip()) != value.strip():
            raise UserError(Fault(f"{path.strip()} is given two values, {said[path.strip()]} and {value.strip()}",
                                  "--set", hint="give one; a sweep or 'drystep compare' runs both"))
    return sets


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to start from, as they are."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


class JsonCommand(click.Command):
    """A command whose `--json` may stand before its arguments: what follows is its file only if it is - or *.json."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        spelled = [f"{arg}=-" if arg == "--json" and not (following == "-" or following.endswith(".json")) else arg
                   for arg, following in zip(args, [*args[1:], ""], strict=False)]
        return super().parse_args(ctx, spelled)


def write_json(json_to: str | None, data: Mapping[str, Any] | Sequence[Any]) -> bool:
    """Write `data` where JSON was asked for; whether standard output is taken by it."""
    if json_to is None:
        return False
    dumped = json.dumps(data, indent=1, ensure_ascii=json_to == "-" and _narrow(), allow_nan=False)
    if json_to == "-":
        click.echo(dumped)
        return True
    from sim.report.whole_file import whole_file

    with writing("--json", json_to), whole_file(json_to) as part:
        part.write_text(dumped + "\n", encoding="utf-8")
    return False


def answer(json_to: str | None, text: str, data: Mapping[str, Any]) -> None:
    """Print `text`, and write `data` as JSON where it was asked for (in place of the text on standard output)."""
    if not write_json(json_to, data):
        click.echo(text, nl=not text.endswith("\n"))


class JsonOutput:
    """Writes documents as they come, so that a sweep of any length needs no memory and Ctrl-C leaves valid JSON."""

    def __init__(self, write: Callable[[str], object], many: bool, ascii_alone: bool = False) -> None:
        self._write, self._many, self._ascii = write, many, ascii_alone
        self._documents = self._points = 0
        if many:
            write("[\n")

    def document(self, value: Mapping[str, Any]) -> None:
        """One finished result."""
        self._separate()
        self._write(_dump(value, self._ascii))

    def begin_sweep(self) -> None:
        """Opens a sweep; its points follow."""
        self._separate()
        self._points = 0
        self._write('{"points": [\n')

    def point(self, value: Mapping[str, Any]) -> None:
        """One point of the open sweep."""
        self._write((",\n" if self._points else "") + _dump(value, self._ascii))
        self._points += 1

    def end_sweep(self, rest: Mapping[str, Any]) -> None:
        """Closes the sweep with its other fields."""
        self._write("\n], " + _dump(rest, self._ascii)[1:])

    def close(self) -> None:
        """Ends the output."""
        self._write("\n]\n" if self._many else "\n")

    def _separate(self) -> None:
        if self._documents:
            self._write(",\n")
        self._documents += 1


def _dump(value: Any, ascii_alone: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ascii_alone, allow_nan=False)


def _narrow() -> bool:
    """Whether standard output lacks characters that names may have, so that JSON has to spell them out."""
    return not str(getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


@contextmanager
def json_output(path: str | None, many: bool) -> Iterator[JsonOutput | None]:
    """JSON to a file, to standard output (`-`), or nowhere (None); `many` makes a list of the documents."""
    if path is None:
        yield None
        return
    if path == "-":
        out = JsonOutput(sys.stdout.write, many, _narrow())
        yield out
        out.close()
        return
    with writing("--json", path), open(path, "w", encoding="utf-8") as file:
        out = JsonOutput(file.write, many)
        yield out
        out.close()


def writable(option: str, path: str | None, parents: bool = False) -> None:
    """Refuse a path that cannot be written before anything is computed."""
    if path is None or (path == "-" and option == "--json"):
        return
    target = Path(path)
    folder = target.parent
    while parents and not folder.exists():
        folder = folder.parent
    if not path:
        reason = "an empty name is no file"
    elif path == "-":
        reason = "only --json can go to standard output"
    elif target.is_dir():
        reason = f"{path} is a directory"
    elif not folder.is_dir():
        reason = f"{folder} is not a directory" if folder.exists() else f"there is no directory {folder}"
    elif not os.access(target if target.exists() else folder, os.W_OK):
        reason = f"no permission to write {path}"
    else:
        return
    raise UserError(Fault(reason, option))


class Finite(click.FloatRange):
    """A range of numbers without nan and inf, which no comparison with its ends would find."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a number that can be used.", param, ctx)
        return number


def apart(inputs: Sequence[str], outputs: Mapping[str, str | None]) -> None:
    """Refuse an output (option -> path) that would overwrite a file that is read, or another output."""
    taken = {os.path.realpath(name): "it is read" for name in inputs}
    for option, path in outputs.items():
        if path is None or path == "-":
            continue
        place = os.path.realpath(path)
        if place in taken:
            raise UserError(Fault(f"{path} cannot be written: {taken[place]}", option, hint="name another file"))
        taken[place] = f"{option} goes there"


@contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(Fault(f"cannot write {error.filename or path}: {error.strerror or error}", option)) from error


def load_all(names: Sequence[str], load: Callable[[str], Loaded]) -> list[Loaded]:
    """All scenarios, or the faults of all of them together."""
    loaded: list[Loaded] = []
    faults: list[Fault] = []
    for name in names:
        try:
            loaded.append(load(name))
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(faults)
    for note in (note for one in loaded for note in one.notes):
        click.echo(note, err=True)
    return loaded


def report_folders(report_to: str | None, names: Sequence[str]) -> list[Path | None]:
    """The directory itself for one scenario, one below it for each of several, equal names told apart by a number."""
    if report_to is None:
        return [None] * len(names)
    if len(names) == 1:
        return [Path(report_to)]
    taken: dict[str, int] = {}
    folders: list[Path | None] = []
    for name in names:
        stem = Path(name).stem
        taken[stem] = taken.get(stem, 0) + 1
        folders.append(Path(report_to) / (stem if taken[stem] == 1 else f"{stem}-{taken[stem]}"))
    return folders


@contextmanager
def reporting(folder: Path) -> Iterator[list[Path]]:
    """Collects what is written into a report's folder, and says so."""
    written: list[Path] = []
    with writing("--report", str(folder)):
        yield written
    click.echo(f"wrote {folder}: {', '.join(path.name for path in written)}", err=True)


def write_overview(report_to: str, titles: Sequence[str], folders: Sequence[Path | None]) -> None:
    from sim.report.folder import write_overview

    with writing("--report", report_to):
        write_overview(Path(report_to), [(t, f.name) for t, f in zip(titles, folders, strict=True) if f is not None])


@contextmanager
def progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error when that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label="points", file=sys.stderr) as bar:
        def advance(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)
        yield advance
