"""Arguments of Megatron-LM wherever they stand: a launch script, a list of them, YAML, or what a run has logged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sim.catalog import table
from sim.errors import Fault, UserError
from sim.imports.draft import Draft
from sim.imports.megatron.launches import Started, read_script
from sim.imports.script.variables import unresolved
from sim.imports.settings import Said, Settings, read_settings
from sim.scenario.text.document import read_text

#: A line of the list that Megatron-LM prints when it starts (arguments.py, _print_args).
_LOGGED = re.compile(r"(?:^|\s)([a-z]\w*) \.{3,} ?(.*)")
#: So many of them make a log.
_FEW_LOGGED = 5
_WORDS = {"True": True, "False": False}


class Open(Said):
    """A setting whose value only a running shell knows (`$1`)."""

    def wrong(self, wanted: str, hint: str = "") -> UserError:
        """The error of such a value, and how to go on."""
        path = table("imports/megatron/names.yaml")["fields"].get(plain(self.name))
        kind = "N" if "number" in wanted else "VALUE"
        hint = hint or "give the variable a value in the script" + (f", or --set {path}={kind}" if path else "")
        return UserError(replace(fault, hint=hint) for fault in super().wrong(wanted).faults)


@dataclass
class Args:
    """Arguments of one or several files, by their names with underscores.

    Attributes:
        settings: of each file.
        draft: what the command line sets.
        programs: the programs that launch scripts start, "" for other files.
    """

    settings: Sequence[Settings]
    draft: Draft
    programs: Sequence[str] = ()
    _keys: dict[str, list[tuple[Settings, str]]] = field(default_factory=dict)
    _open: list[Said] = field(default_factory=list)

    def __post_init__(self) -> None:
        for one in self.settings:
            for key in one.data if not is_config(one) else ():
                self._keys.setdefault(plain(key), []).append((one, key))

    def get(self, *names: str) -> Said | None:
        """The first of these arguments that has a value; all of them count as read.

        Raises:
            UserError: two files say different things.
        """
        found = None
        for name in names:
            said = self._said(name)
            if said is not None and isinstance(said.value, str) and unresolved(said.value):
                said = self._given(said)
            found = said if found is None else found
        return found

    def _said(self, name: str) -> Said | None:
        """An argument as files have it; one that has a value before one that only a running shell knows."""
        found: list[Said] = []
        for file in self.settings:
            file.seek(f"--{name.replace('_', '-')}" if any(key.startswith("--") for key in file.data) else name)
        for settings, key in self._keys.get(name, ()):
            said = settings.get(key)
            if said is not None and all(said.file != one.file for one in found):
                found.append(said)
        known = [one for one in found if not (isinstance(one.value, str) and unresolved(one.value))]
        for one in known[1:]:
            if str(one.value).lower() != str(known[0].value).lower():
                line = f" (line {known[0].line})" if known[0].line else ""
                raise UserError(Fault(f"says {one.value!r}, but {known[0]}{line} says {known[0].value!r}", one.name,
                                      one.file, one.line, "leave one of them out"))
        return known[0] if known else found[0] if found else None

    def _given(self, said: Said) -> Said | None:
        """What the command line has in place of a value that only a running shell knows."""
        path = table("imports/megatron/names.yaml")["fields"].get(plain(said.name), "")
        if not path or not self.draft.overridden(path):
            return Open(said.file, said.name, said.value, said.line)
        if said not in self._open:
            self.draft.leave(said, f"has no value in the script; the command line says {path}")
            self._open.append(said)
        value = self.draft.given(path)
        return replace(said, value=value) if isinstance(value, int) and not isinstance(value, bool) else None

    def on(self, *names: str) -> Said | None:
        """The first of these switches that is on."""
        found = None
        for name in names:
            said = self._said(name)
            if said is not None and found is None and _is_on(said):
                found = said
        return found

    def off(self, name: str, *stopped_by: str) -> Said | None:
        """What switches something off: one of the arguments `stopped_by`, or a file that has the switch as false."""
        said = self._said(name)
        stopped = self.on(*stopped_by)
        return stopped if stopped is not None else said if said is not None and not _is_on(said) else None

    def names(self) -> list[str]:
        """All names, with underscores."""
        return list(self._keys)


def plain(key: str) -> str:
    """An argument's name with underscores, however a file writes it (`--num-layers`, `language_model.num_layers`)."""
    return key if key.startswith(("#", "$")) else key.rpartition(".")[2].lstrip("-").replace("-", "_")


def _is_on(said: Said) -> bool:
    """Whether a switch is on. `--bf16 $MORE` is on: what follows it are other arguments, which nobody knows here."""
    value = said.value[0] if isinstance(said.value, list) and said.value else said.value
    return True if isinstance(value, str) and unresolved(value) else said.flag()


def is_config(settings: Settings) -> bool:
    """Whether a file is a model's config.json."""
    kind = settings.data.get("model_type", "")
    return "architectures" in settings.data or (  # axolotl's files have a model_type beside their base_model
        "model_type" in settings.data and not str(kind).startswith("ModelType") and "base_model" not in settings.data)


def read_arguments(files: Iterable[str], draft: Draft) -> Args:
    """The arguments that files hold together. What a script leaves open is noted in the draft.

    Raises:
        UserError: a file that cannot be read, or that holds no arguments.
    """
    started = [_read(file) for file in files]
    for one in started:
        for said, why in one.remarks:
            draft.leave(said, why)
    return Args([one.settings for one in started], draft, [one.program for one in started])


def _read(file: str) -> Started:
    path = Path(file)
    if path.suffix in (".yaml", ".yml", ".json", ".toml"):
        return Started(flat(read_settings(file)))
    text = read_text(path, file)
    if text.lstrip()[:1] == "{" and '"' in text:
        return Started(flat(read_settings(file)))
    logged = [(number, found) for number, line in enumerate(text.splitlines(), 1) if (found := _LOGGED.search(line))]
    if len(logged) >= _FEW_LOGGED:
        values = {found[1]: found[2].strip() for _, found in logged}
        data = {name: _WORDS.get(value, value) for name, value in values.items() if value not in ("None", "")}
        return Started(Settings(file, data, {found[1]: number for number, found in logged}))
    return read_script(text, file)


def flat(settings: Settings) -> Settings:
    """The same with every setting under its full dotted name."""
    return Settings(settings.file, dict(_leaves(settings.data, "")), settings.lines)


def _leaves(data: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        elif value is not None:
            yield name, value
