"""Settings of a user's file, taken one by one, each with its line; what nobody takes can be listed."""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sim.errors import Fault, UserError, nearest
from sim.scenario.text.document import Document, parse_document, read_text

_TABLE = re.compile(r"\s*\[([\w.\"' -]+)\]\s*(#.*)?\Z")
_KEY = re.compile(r"\s*([\w.-]+)\s*=")
#: A value that is the name of another: dots in front count from the mapping it stands in.
_NAMED = re.compile(r"\$\{(\.*)([\w-]+(?:\.[\w-]+)*)\}")
#: Larger whole numbers are no setting's: readers count ranks and blocks out.
_MOST = 10**15
#: A slip of the keyboard leaves so much of a name (difflib's ratio): `seqence_len`, `enable_liger_kernal`.
_SLIP = 0.87
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Said:
    """One setting of a user's file.

    Attributes:
        file: the file as the user named it, "" for the command line.
        name: dotted name in the file, or an argument such as `--num-layers`.
        value: what it says, as plain data.
        line: 1-based, 0 if unknown.
    """

    file: str
    name: str
    value: Any
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}: {self.name}" if self.file else self.name

    def whole(self, least: int = 1) -> int:
        """The value as a whole number of at least `least`. Raises UserError."""
        value = self.value
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d[\d_]{0,30}", value.strip()):
            value = int(value.strip())
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(f"a whole number of at least {least}")
        if value > _MOST:
            raise self.wrong(f"a whole number of at most {_MOST:,}")
        return value

    def number(self) -> float:
        """The value as a number. Raises UserError."""
        try:
            if isinstance(self.value, int | float | str) and not isinstance(self.value, bool):
                return float(self.value)
        except (ValueError, OverflowError):
            pass
        raise self.wrong("a number")

    def flag(self) -> bool:
        """The value as true or false, however it is written. Raises UserError."""
        word = str(self.value).strip().lower()
        if isinstance(self.value, bool | int | str) and word in _TRUE + _FALSE:
            return word in _TRUE
        raise self.wrong("true or false")

    def word(self) -> str:
        """The value as text in lower case with underscores. Raises UserError."""
        if not isinstance(self.value, str | int) or isinstance(self.value, bool):
            raise self.wrong("a word")
        return str(self.value).strip().lower().replace("-", "_")

    def wrong(self, wanted: str, hint: str = "") -> UserError:
        """The error of a value that is not what is wanted."""
        return UserError(Fault(f"expected {wanted}, found {str(self.value)[:60]!r}", self.name, self.file, self.line,
                               hint))

    def clash(self, what: str) -> UserError:
        """The error of a setting that another one rules out."""
        return UserError(Fault(what, self.name, self.file, self.line, "leave one of them out"))


@dataclass
class Settings:
    """All settings of one file.

    Attributes:
        file: the file as the user named it.
        data: nested plain data, keys as written.
        lines: dotted name -> line.
        elsewhere: whether the file as a whole is read by others, as a model's config.json is: no setting is left over.
    """

    file: str
    data: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    elsewhere: bool = False
    _read: set[str] = field(default_factory=set)
    _idle: list[str] = field(default_factory=list)
    _sought: set[str] = field(default_factory=set)

    def get(self, *names: str) -> Said | None:
        """The first of these dotted names that the file has with a value; all of them count as read."""
        self._read.update(names)
        self._sought.update(names)
        for name in names:
            value = self._at(name)
            if value is not None:
                return Said(self.file, name, value, self.line(name))
        return None

    def seek(self, name: str) -> None:
        """Notes a name as one that readers look for; it does not count as read."""
        self._sought.add(name)

    def has(self, name: str) -> bool:
        """Whether the file says anything of a dotted name; it does not count as read."""
        return self._at(name) is not None

    def line(self, name: str) -> int:
        """Line of a dotted name, or of the nearest parent that has one; 0 if unknown."""
        while name:
            if name in self.lines:
                return self.lines[name]
            name = name.rpartition(".")[0]
        return 0

    def idle(self, *patterns: str) -> None:
        """Names (or shell patterns of dotted names) on which neither time nor memory depends."""
        self._idle += patterns

    def rest(self) -> Iterator[tuple[Said, bool]]:
        """Each leaf that nobody read, and whether it is without effect."""
        for name, value in self._leaves(self.data, ""):
            if name not in self._read and not self.elsewhere:
                yield (Said(self.file, name, value, self.line(name)),
                       any(fnmatch.fnmatchcase(name, one) for one in self._idle))

    def near(self, name: str) -> str:
        """A hint at the setting that a name nobody knows is a slip of: one readers look for, as the file writes it."""
        known = {self._shown(one) for one in (*self._sought, *self._idle) if "*" not in one}
        alike = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_SLIP)
        return f"did you mean '{alike[0]}'?" if alike else ""

    def _shown(self, name: str) -> str:
        """A name as users write it."""
        return name

    def read(self) -> Iterator[Said]:
        """Each leaf that somebody read."""
        for name, value in self._leaves(self.data, ""):
            if name in self._read and not self.elsewhere:
                yield Said(self.file, name, value, self.line(name))

    def _at(self, name: str) -> Any:
        here: Any = self.data
        if name in self.data:
            return self.data[name]
        for part in name.split("."):
            if not isinstance(here, Mapping) or part not in here:
                return None
            here = here[part]
        return here

    def _leaves(self, data: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
        for key, value in data.items():
            name = f"{above}.{key}" if above else str(key)
            if isinstance(value, Mapping) and value:
                yield from self._leaves(value, name)
            elif value is not None:
                yield name, value


@dataclass
class Told(Settings):
    """Settings whose names in their file are others than the ones they are asked for by; the file's are told.

    Attributes:
        tell: the name asked for -> the file's.
    """

    tell: Callable[[str], str] = str

    def get(self, *names: str) -> Said | None:
        said = super().get(*names)
        return self._full(said) if said is not None else None

    def rest(self) -> Iterator[tuple[Said, bool]]:
        for said, idle in super().rest():
            yield self._full(said), idle

    def read(self) -> Iterator[Said]:
        return map(self._full, super().read())

    def _full(self, said: Said) -> Said:
        return replace(said, name=self.tell(said.name))

    def _shown(self, name: str) -> str:
        return self.tell(name)


def peek(settings: Settings, *names: str) -> Said | None:
    """As `Settings.get`, but nothing counts as read."""
    return replace(settings, _read=set()).get(*names)


def switch(settings: Settings, *names: str) -> Said | None:
    """A setting that is on; where it is off, it is without effect."""
    said = peek(settings, *names)
    if said is None:
        return None
    if said.flag():
        return settings.get(*names)
    settings.idle(*names)
    return None


def word_of(settings: Settings, *names: str) -> Said | None:
    """A setting that is a word other than none; none, no and null say nothing."""
    said = peek(settings, *names)
    if said is None:
        return None
    if said.value is not False and said.word() not in ("", "none", "no", "null", "false"):
        return settings.get(*names)
    settings.idle(*names)
    return None


def one_of(said: Said, allowed: Mapping[str, Any]) -> Any:
    """What a word stands for. Raises UserError with the words allowed."""
    word = said.word()
    if word not in allowed:
        raise said.wrong(f"one of {', '.join(allowed)}", nearest(word, allowed))
    return allowed[word]


def mapping_at(settings: Settings, *names: str) -> None:
    """Raises UserError where one of these names holds something other than a mapping."""
    for name in names:
        said = peek(settings, name)
        if said is not None and not isinstance(said.value, Mapping):
            raise said.wrong("a mapping")


def take_whole(settings: Settings, name: str) -> None:
    """Takes a setting out, so that none of what stands under it is listed: it is told as one, or others read it."""
    settings.get(name)
    settings.data = _without(settings.data, name)


def _without(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    first, _, rest = name.partition(".")
    below = data.get(first)
    if rest and isinstance(below, Mapping):
        left = _without(below, rest)
        return {**data, first: left} if left or not below else _without(data, first)
    return {key: value for key, value in data.items() if key != first}


def resolved(settings: Settings) -> Settings:
    """The same, a value that is another setting's name (`${max_seq_len}`, OmegaConf's) in the place of the name.

    Names of what is not there, resolvers (`${oc.env:…}`) and parts of texts stay as they are.

    Raises:
        UserError: names that name each other.
    """
    def value_of(name: str, value: Any, seen: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: value_of(f"{name}.{key}" if name else str(key), one, seen) for key, one in value.items()}
        found = _NAMED.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            return value
        dots = len(found[1])
        above = name.split(".")[:-dots] if dots else []
        wanted = ".".join([*above, found[2]])
        if wanted in seen:
            raise Said(settings.file, name, value, settings.line(name)).wrong("a name that leads to a value")
        there = settings._at(wanted)
        return value if there is None else value_of(wanted, there, (*seen, wanted))

    return replace(settings, data=value_of("", settings.data, ()))


def read_settings(file: str) -> Settings:
    """The settings of a JSON, YAML or TOML file (by its ending; others are tried as JSON, then YAML).

    Raises:
        UserError: it cannot be read, is no such file, or its root is no mapping.
    """
    path = Path(file)
    text = read_text(path, file)
    if not text.strip():
        raise UserError(Fault("is empty", "", file))
    if path.suffix == ".toml":
        return Settings(file, _toml(text, file), _toml_lines(text))
    if path.suffix == ".json" or text.lstrip()[:1] == "{":
        return Settings(file, _json(text, file), _lines(text, file))
    document = _yaml(text, file)
    return Settings(file, document.data, {name: line for name, (_, line) in document.places.items()})


def _yaml(text: str, file: str) -> Document:
    """YAML whose root is a mapping. Raises UserError."""
    document = parse_document(text, file, Path(file).parent, "settings")
    if document.faults:
        raise UserError(document.faults)
    return document


def _json(text: str, file: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(Fault(f"is not JSON: {error.msg}", "", file, error.lineno)) from None
    except RecursionError:
        raise UserError(Fault("is nested too deep", "", file)) from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(Fault(f"is not JSON that can be read: {error}", "", file)) from None
    if not isinstance(data, dict):
        raise UserError(Fault("holds no mapping of settings", "", file, 1))
    return data


def _lines(text: str, file: str) -> dict[str, int]:
    """Lines of a JSON text's settings; none where it is no YAML too."""
    try:
        return {name: line for name, (_, line) in parse_document(text, file, Path()).places.items()}
    except UserError:
        return {}


def _toml(text: str, file: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        message = re.sub(r"\s*\(at .*\)", "", str(error))
        line = int(found[1]) if found else text.count("\n") + 1  # "at end of document"
        raise UserError(Fault(f"is not TOML: {message}", "", file, line)) from None
    except RecursionError:
        raise UserError(Fault("is nested too deep", "", file)) from None


def _toml_lines(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TABLE.match(line):
            table = found[1].strip().replace('"', "")
            lines.setdefault(table, number)
        elif found := _KEY.match(line):
            lines.setdefault(f"{table}.{found[1]}" if table else found[1], number)
    return lines
