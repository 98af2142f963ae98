"""Arguments of Megatron-LM wherever they stand: a launch script, a list of them, YAML, or what a run has logged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.errors import Fault, UserError
from sim.imports.settings import Said, Settings, read_settings
from sim.imports.shell import Script, Word
from sim.scenario.document import read_text

_SBATCH = re.compile(r"#SBATCH\s+(--?[A-Za-z][\w-]*)(?:[=\s]+(\S+))?")
#: Short options of Slurm's commands for the long ones.
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}
#: A line of the list that Megatron-LM prints when it starts (arguments.py, _print_args).
_LOGGED = re.compile(r"(?:^|\s)([a-z]\w*) \.{3,} ?(.*)")
#: So many of them make a log.
_FEW_LOGGED = 5
_WORDS = {"True": True, "False": False}


@dataclass
class Args:
    """Arguments of one or several files, by their names with underscores.

    Attributes:
        settings: of each file.
        programs: the programs that launch scripts start, "" for other files.
    """

    settings: Sequence[Settings]
    programs: Sequence[str] = ()
    _keys: dict[str, list[tuple[Settings, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for one in self.settings:
            for key in one.data:
                self._keys.setdefault(plain(key), []).append((one, key))

    def get(self, *names: str) -> Said | None:
        """The first of these arguments that has a value; all of them count as read."""
        found = None
        for name in names:
            for settings, key in self._keys.get(name, ()):
                said = settings.get(key)
                found = said if found is None else found
        return found

    def on(self, *names: str) -> Said | None:
        """The first of these switches that is on."""
        found = None
        for name in names:
            said = self.get(name)
            if said is not None and found is None and _is_on(said):
                found = said
        return found

    def off(self, name: str, *stopped_by: str) -> Said | None:
        """What switches something off: one of the arguments `stopped_by`, or a file that has the switch as false."""
        said = self.get(name)
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
    return True if isinstance(value, str) and value.startswith(("$", "`")) else said.flag()


def read_arguments(files: Iterable[str]) -> Args:
    """The arguments that files hold together.

    Raises:
        UserError: a file that cannot be read, or that holds no arguments.
    """
    settings, programs = [], []
    for file in files:
        one, program = _read(file)
        settings.append(one)
        programs.append(program)
    return Args(settings, programs)


def _read(file: str) -> tuple[Settings, str]:
    path = Path(file)
    if path.suffix in (".yaml", ".yml", ".json", ".toml"):
        return _flat(read_settings(file)), ""
    text = read_text(path, file)
    if text.lstrip()[:1] == "{" and '"' in text:
        return _flat(read_settings(file)), ""
    logged = [(number, found) for number, line in enumerate(text.splitlines(), 1) if (found := _LOGGED.search(line))]
    if len(logged) >= _FEW_LOGGED:
        values = {found[1]: found[2].strip() for _, found in logged}
        data = {name: _WORDS.get(value, value) for name, value in values.items() if value not in ("None", "")}
        return Settings(file, data, {found[1]: number for number, found in logged}), ""
    return _script(text, file)


def _flat(settings: Settings) -> Settings:
    """The same with every setting under its full dotted name."""
    return Settings(settings.file, dict(_leaves(settings.data, "")), settings.lines)


def _leaves(data: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        elif value is not None:
            yield name, value


def _script(text: str, file: str) -> tuple[Settings, str]:
    """The arguments of the command with most of them, and the program it starts ("" if none is named).

    `#SBATCH` lines are settings too, by the name `#SBATCH --nodes`, and so is CUDA_DEVICE_MAX_CONNECTIONS.
    """
    script = Script(file)
    script.follow(text)
    options = [[word for outer in words for word in _within(outer)] for words in script.ran]
    bare = [words for words in options if words[0].text.startswith("--")]  # arguments, each at a line of its own
    options = [words for words in options if words not in bare] + [[word for words in bare for word in words]]
    counts = [sum(word.text.startswith("--") for word in words) for words in options]
    if not any(counts):  # a file that only names arguments, for other files to use
        options = [[inner for value in script.variables.values() if value and value[0].text.lstrip().startswith("--")
                    for outer in value for inner in _within(outer)]]
        counts = [len(options[0])]
    if not any(counts):
        raise UserError(Fault("holds no arguments such as --num-layers", "", file,
                              hint="give a launch script, its arguments, or a YAML file of them"))
    words = options[len(counts) - 1 - counts[::-1].index(max(counts))]
    data, lines = _options(words)
    for number, line in enumerate(text.splitlines(), 1):
        if found := _SBATCH.match(line.strip()):
            name = f"#SBATCH {_SHORT.get(found[1], found[1])}"
            data[name], lines[name] = found[2] or True, number
    for value in script.variables.get("CUDA_DEVICE_MAX_CONNECTIONS", [])[:1]:
        data["CUDA_DEVICE_MAX_CONNECTIONS"], lines["CUDA_DEVICE_MAX_CONNECTIONS"] = value.text, value.line
    program = next((word.text for word in words if word.text.endswith(".py")), "")
    return Settings(file, data, lines), program


def _within(word: Word) -> Iterator[Word]:
    """A word, or those within it where it is a command of its own (`bash -c "torchrun ..."`, `eval`)."""
    return word.split() if re.search(r"(^|\s)--\w", word.text) and re.search(r"\s", word.text) else iter((word,))


def _options(words: Iterable[Word]) -> tuple[dict[str, Any], dict[str, int]]:
    """Name -> value and line. An option without a value is true, one with several is a list, the last one of a name
    counts (argparse). Names have hyphens, however they are written."""
    found: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    name = ""
    for word in words:
        start = re.match(r"--([A-Za-z][\w.-]*)(?:=(.*))?\Z", word.text, re.DOTALL)
        if start:
            name = "--" + start[1].replace("_", "-")
            found[name], lines[name] = [] if start[2] is None else [start[2]], word.line
        elif word.text.endswith(".py") or re.fullmatch(r"-[A-Za-z]", word.text):
            name = _SHORT.get(word.text, "")
            if name:
                found[name], lines[name] = [], word.line
        elif name and word.text:
            found[name].append(word.text)
    data: dict[str, Any] = {}
    for one, values in found.items():
        known = [value for value in values if not value.startswith(("$", "`"))] or values
        for value in values:
            if value not in known:  # `--seq-length 2048 $MORE`: more arguments, which nobody knows here
                data[value], lines[value] = "", lines[one]
        data[one] = True if not known else known[0] if len(known) == 1 else known
    return data, lines
