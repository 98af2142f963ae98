"""YAML text to plain data that remembers its lines.

Scalars follow the YAML 1.2 core schema (`1.4e12` is a number, `yes` and `on` are text, `12:30` is text), which is what
people expect of a scenario and what PyYAML's own 1.1 rules are not. Built from parser events with an explicit stack, so
that neither nesting nor aliases can exhaust anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from sim.errors import Fault, UserError, nearest

#: Limits on what is read: larger inputs are no scenario a person or a tool wrote on purpose.
MAX_FILE_BYTES = 1 << 20
MAX_NODES = 200_000
MAX_DEPTH = 40
MAX_FAULTS = 50

_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep"
_INT = re.compile(r"[-+]?[0-9]+\Z")
_RADIX = re.compile(r"0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")
_WORDS: dict[str, bool | None] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_PLAIN_TAGS = frozenset({"!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})

#: Where a value was written: file as the user gave it and 1-based line (0 = unknown).
Place = tuple[str, int]


@dataclass
class Document:
    """Plain data with the place of every dotted path.

    Attributes:
        data: what the file says, as dicts, lists and scalars.
        places: dotted path (list items by index: `sweep.cluster.nodes.0`) -> place.
        file: as the user gave it.
        folder: what relative paths inside are relative to.
        faults: what was wrong with the text but did not stop the reading (duplicate keys, tags, NaN).
        moved: dotted path that values are read at -> the one they are written at, where that is another.
    """

    data: dict[str, Any]
    places: dict[str, Place]
    file: str
    folder: Path
    faults: list[Fault] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)

    def place(self, path: str) -> Place:
        """Place of a dotted path, or of the nearest parent that was written."""
        while path:
            if path in self.places:
                return self.places[path]
            path = path.rpartition(".")[0]
        return self.places.get("", (self.file, 0))

    def fault(self, path: str, message: str, hint: str = "") -> Fault:
        """A fault at the place of `path`."""
        file, line = self.place(path)
        return Fault(message, field=self._as_written(path), file=file, line=line, hint=hint)

    def _as_written(self, path: str) -> str:
        for read, written in self.moved.items():
            if path == read or path.startswith(f"{read}."):
                return written + path.removeprefix(read)
        return path


#: What a file of a kind holds, for who gave an empty one or another.
_NEEDS = {
    "scenario": "a scenario needs at least name, cluster, model and training",
    "topology": "a topology needs at least gpu and gpus_per_node",
    "gpu": "a GPU's profile needs at least 'like', the GPU of the catalogue it resembles",
}


def read_document(path: Path, shown: str, kind: str = "scenario") -> Document:
    """Read a YAML file whose root is a mapping.

    Args:
        kind: scenario, topology or gpu; of others nothing is said that they need.

    Raises:
        UserError: when it cannot be read, is too large or is not YAML; lesser faults are collected in the document.
    """
    return parse_document(read_text(path, shown), shown, path.parent, kind)


def beside(folder: Path, written: str) -> Path:
    """A path as a user wrote it in a file of `folder`; `~` is their home."""
    return folder / os.path.expanduser(written)


#: Paths in a scenario are relative to its file, so there has to be one.
_FROM_A_FILE = "standard input and pipes are not read: save it to a file"


def read_text(path: Path, shown: str) -> str:
    """The UTF-8 text of a user's file of at most 1 MiB; raises UserError with what is wrong with it."""
    try:
        if path.is_dir():
            _refuse("is a folder, not a file", shown, hint="name a file inside it")
        if not path.exists():
            _refuse("no such file", shown, hint=_FROM_A_FILE if shown == "-" else _similar_file(path))
        if not path.is_file():
            _refuse("is not a regular file", shown, hint=_FROM_A_FILE)
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        _refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}", shown)
    if len(raw) > MAX_FILE_BYTES:
        _refuse("is larger than 1 MiB", shown)
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        _refuse("is UTF-16 text", shown, hint="save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        _refuse("is not UTF-8 text", shown, line, "save it as UTF-8")


def parse_document(text: str, file: str, folder: Path, kind: str = "scenario") -> Document:
    """Parse YAML text whose root must be a mapping. Raises UserError where there is nothing to go on with."""
    builder = _Builder(file)
    try:
        data = builder.build(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark is not None else 0
        message, hint = _yaml_problem(error, text, line)
        _refuse(message, file, line + 1, hint)
    except yaml.YAMLError as error:
        _refuse(f"is not YAML: {_first_line(error)}", file)
    if data is None and not builder.faults:
        _refuse("is empty", file, hint=_NEEDS.get(kind, ""))
    if not isinstance(data, dict):
        if builder.faults:
            raise UserError(builder.faults)
        _refuse(f"holds {describe(data)} where a mapping of fields was expected", file, 1, _NEEDS.get(kind, ""))
    return Document(data, builder.places, file, folder, builder.faults)


def parse_value(text: str, file: str) -> Any:
    """A value as written after `--set path=`: YAML, so `8`, `true`, `80 GB`, `[1, 2]` mean what they do in a file."""
    builder = _Builder(file)
    try:
        value = builder.build(text)
    except yaml.YAMLError as error:
        problem = _TOO_DEEP if "nesting depth" in str(error) else f"is not YAML: {_first_line(error)}"
        _refuse(f"the value {text[:60]!r} {problem}", file)
    if builder.faults:
        raise UserError(Fault(f.message, file=file, hint=f.hint) for f in builder.faults)
    return value


def describe(value: Any) -> str:
    """A value in a sentence: "the text 'eight'", "a list", "true"."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text '{_short(value)}'" if value else "an empty text"
    if isinstance(value, int | float):
        return f"{_short(_number(value))}"
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list | tuple) else "something else"


def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every (dotted path, value) below and including `value`."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from walk(item, f"{path}.{key}" if path else str(key))


def _number(value: float) -> str:
    try:
        return str(value)
    except ValueError:
        return "a number of thousands of digits"


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _first_line(error: Exception) -> str:
    return str(getattr(error, "problem", None) or error).strip().splitlines()[0]


def _refuse(message: str, file: str, line: int = 0, hint: str = "") -> NoReturn:
    raise UserError(Fault(message, file=file, line=line, hint=hint))


def _similar_file(path: Path) -> str:
    try:
        return (
            nearest(path.name, (p.name for p in path.parent.iterdir()))
            if path.parent.is_dir()
            else (f"there is no folder '{path.parent}'")
        )
    except OSError:
        return ""


def _yaml_problem(error: yaml.MarkedYAMLError, text: str, line: int) -> tuple[str, str]:
    problem = str(error.problem or error.context or "unreadable")
    if "nesting depth" in problem:  # PyYAML from 6.0.4 on has a limit of its own, which it meets while it looks ahead
        return _TOO_DEEP, ""
    lines = text.splitlines()
    written = lines[line] if line < len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())]:
        return "is not YAML: a tab used for indentation", "indent with spaces"
    if "undefined alias" in problem:
        return f"is not YAML: {problem}", "write '&name' before the value that '*name' repeats"
    if "mapping values are not allowed" in problem:
        return (
            "is not YAML: a second ':' on one line",
            "put each 'field: value' on its own line, and quote text with ': ' in it",
        )
    if "did not find expected" in problem or "could not find expected" in problem:
        return f"is not YAML: {problem}", "check indentation, brackets and quotes here and on the line before"
    return f"is not YAML: {problem}", ""


class _Builder:
    """Builds plain data from parser events."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.faults: list[Fault] = []
        self.places: dict[str, Place] = {}
        self._nodes = 0
        self._anchors: dict[str, Any] = {}
        self._open: set[str] = set()

    def build(self, text: str) -> Any:
        """The one document of `text`. Raises yaml.YAMLError, or UserError beyond the limits."""
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        root: Any = None
        stack: list[_Frame] = []
        documents = 0
        for event in yaml.parse(text, Loader=loader):
            line = event.start_mark.line + 1 if event.start_mark is not None else 0
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    _refuse("holds more than one document", self.file, line, "remove the line '---'")
            elif isinstance(event, yaml.CollectionStartEvent):
                self._tag(event, line, stack)
                self._start(event, line, stack)
            elif isinstance(event, yaml.CollectionEndEvent):
                frame = stack.pop()
                self._open.discard(frame.anchor)
                root = self._put(stack, frame.value, frame.line, root)
            elif isinstance(event, yaml.ScalarEvent):
                value = self._scalar(event, line, stack)
                if event.anchor:
                    self._anchors[event.anchor] = value
                root = self._put(stack, value, line, root)
            elif isinstance(event, yaml.AliasEvent):
                root = self._put(stack, self._alias(event, line), line, root)
        return root

    def _start(self, event: Any, line: int, stack: list[_Frame]) -> None:
        if len(stack) >= MAX_DEPTH:
            _refuse(_TOO_DEEP, self.file, line)
        self._count(1, line)
        value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        if stack and isinstance(stack[-1].value, dict) and not stack[-1].has_key:
            _refuse(f"has {describe(value)} as the name of a field", self.file, line)
        frame = _Frame(value, self._path(stack), line, event.anchor or "")
        if frame.path not in self.places:
            self.places[frame.path] = (self.file, line)
        if frame.anchor:
            self._anchors[frame.anchor] = value
            self._open.add(frame.anchor)
        stack.append(frame)

    def _put(self, stack: list[_Frame], value: Any, line: int, root: Any) -> Any:
        if not stack:
            return value
        self._count(1, line)
        frame = stack[-1]
        if isinstance(frame.value, list):
            self.places[f"{frame.path}.{len(frame.value)}"] = (self.file, line)
            frame.value.append(value)
        elif not frame.has_key:
            self._key(frame, value, line)
        else:
            if frame.key is not None:
                frame.value[frame.key] = value
            frame.has_key, frame.key = False, None
        return root

    def _key(self, frame: _Frame, key: Any, line: int) -> None:
        frame.has_key, frame.key = True, None
        path = f"{frame.path}.{key}" if frame.path else str(key)
        if not isinstance(key, str):
            self._fault(f"the name of a field is {describe(key)}; it must be text", frame.path, line)
        elif key == "<<":
            self._fault("merge keys ('<<') are not part of YAML 1.2", path, line, "write the fields out")
        elif key in frame.value:
            first = self.places.get(path, ("", 0))[1]
            self._fault(f"'{_short(key)}' is given twice (first on line {first})", path, line, "remove one of the two")
        else:
            frame.key = key
            self.places[path] = (self.file, line)

    def _alias(self, event: Any, line: int) -> Any:
        if event.anchor in self._open:
            _refuse(f"'*{event.anchor}' contains itself", self.file, line)
        if event.anchor not in self._anchors:
            _refuse(f"'*{event.anchor}' repeats a value that has no '&{event.anchor}'", self.file, line)
        return self._copy(self._anchors[event.anchor], line)

    def _copy(self, value: Any, line: int) -> Any:
        self._count(1, line)
        if isinstance(value, dict):
            return {k: self._copy(v, line) for k, v in value.items()}
        return [self._copy(v, line) for v in value] if isinstance(value, list) else value

    def _scalar(self, event: Any, line: int, stack: list[_Frame]) -> Any:
        text: str = event.value
        if not event.implicit[0] and not event.implicit[1]:
            self._tag(event, line, stack)
            return text
        if not event.implicit[0] or event.style:
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INT.match(text) or _RADIX.match(text):
            return self._integer(text, line, stack)
        if _FLOAT.match(text):
            number = float(text)
            if number in (float("inf"), float("-inf")):
                self._fault(f"{_short(text)} is too large a number", self._path(stack), line)
                return 0.0
            return number
        if _NOT_FINITE.match(text):
            self._fault(f"{text} is not a number that can be used", self._path(stack), line, "write a finite number")
            return 0.0
        return text

    def _integer(self, text: str, line: int, stack: list[_Frame]) -> int:
        if len(text) > 40:
            self._fault(f"a number of {len(text)} digits is too large", self._path(stack), line)
            return 0
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)

    def _tag(self, event: Any, line: int, stack: list[_Frame]) -> None:
        if event.tag and event.tag not in _PLAIN_TAGS:
            shown = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._fault(f"the YAML tag '{_short(shown)}' is refused", self._path(stack), line, "write the plain value")

    def _path(self, stack: list[_Frame]) -> str:
        if not stack:
            return ""
        frame = stack[-1]
        if isinstance(frame.value, list):
            return f"{frame.path}.{len(frame.value)}"
        return (f"{frame.path}.{frame.key}" if frame.path else str(frame.key)) if frame.key is not None else frame.path

    def _count(self, n: int, line: int) -> None:
        self._nodes += n
        if self._nodes > MAX_NODES:
            _refuse(f"expands to more than {MAX_NODES:,} values", self.file, line, "repeat less with aliases")

    def _fault(self, message: str, path: str, line: int, hint: str = "") -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(Fault(message, field=path, file=self.file, line=line, hint=hint))


@dataclass(slots=True)
class _Frame:
    """A mapping or list being built; `key` waits for its value (None = the value is thrown away)."""

    value: Any
    path: str
    line: int
    anchor: str
    has_key: bool = False
    key: str | None = None
