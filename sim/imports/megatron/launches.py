"""Which command of a launch script trains, its arguments, and what Slurm and the launcher say around it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.catalog import table
from sim.errors import Fault, UserError
from sim.imports.script.shell import TELLING, Launch, Script
from sim.imports.script.variables import Word, unresolved
from sim.imports.settings import Said, Settings

_SBATCH = re.compile(r"\s*#SBATCH\s+(.*)")
#: Short options of Slurm's and MPI's commands for the long ones.
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-np": "--ntasks"}
#: Programs that train, by the beginning of their names.
_TRAINS = re.compile(r"(pretrain|train|finetune)", re.IGNORECASE)
#: Commands that print or write what others run.
_PRINTS = ("echo", "printf", "cat", "tee")
#: What Slurm tells a job of its own `#SBATCH` lines: variable -> option.
_OF_SLURM = {"SLURM_NNODES": "--nodes", "SLURM_JOB_NUM_NODES": "--nodes", "SLURM_NTASKS": "--ntasks",
             "SLURM_NTASKS_PER_NODE": "--ntasks-per-node", "SLURM_GPUS_PER_NODE": "--gpus-per-node",
             "SLURM_GPUS_ON_NODE": "--gpus-per-node"}
#: The setting of a launcher that starts one process, since it is told of no more.
ONE_PROCESS = "without --nproc-per-node"


@dataclass(frozen=True)
class Started:
    """What a file starts.

    Attributes:
        program: the program's file, "" if none is named.
        remarks: what was taken where the script leaves it open, and why.
    """

    settings: Settings
    program: str = ""
    remarks: Sequence[tuple[Said, str]] = ()


@dataclass
class _Command:
    """A command with arguments."""

    words: list[Word]
    launch: Launch
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data, self.lines = options(self.words)

    @property
    def program(self) -> str:
        return next((word.text for word in self.words if word.text.endswith(".py")), "")

    @property
    def name(self) -> str:
        return self.program.rpartition("/")[2]

    @property
    def trains(self) -> bool:
        return _TRAINS.match(self.name) is not None

    @property
    def count(self) -> int:
        return sum(word.text.startswith("--") for word in self.words)

    @property
    def rank(self) -> tuple[bool, bool, bool, int]:
        """What makes it the command that trains, the more telling first."""
        return self.words[0].text not in _PRINTS, not self.launch.again, self.trains, self.count


def read_script(text: str, file: str) -> Started:
    """The arguments of the command that trains: a program named so before others, of several the one with most.

    `#SBATCH` lines are settings too, by the name `#SBATCH --nodes`, and so are variables that
    no argument holds.

    Raises:
        UserError: nothing in it has arguments, or it cannot be followed.
    """
    slurm, slurm_lines = _slurm(text)
    script = Script(file)
    for variable, option in _OF_SLURM.items():
        known = amount(slurm.get(f"#SBATCH {option}")) or (
            amount(slurm.get("#SBATCH --gres")) if "GPUS" in variable else "")
        if known:
            script.variables.values[variable] = [Word(known, 0)]
    script.follow(text)
    chosen, others = _chosen(script)
    data, lines = dict(chosen.data), dict(chosen.lines)
    if _one_process(chosen, script, slurm):
        data[ONE_PROCESS], lines[ONE_PROCESS] = 1, chosen.words[0].line
    data |= slurm
    lines |= slurm_lines
    for name in TELLING:
        for value in script.variables.values.get(name, [])[:1]:
            data[name], lines[name] = value.text, value.line
    remarks = [*script.remarks, *chosen.launch.loops]
    told = [(Said(file, one.name, f"line {one.line}", one.line), one.why) for one in remarks]
    return Started(Settings(file, data, lines), chosen.program, told + _skipped(chosen, others, file))


def _chosen(script: Script) -> tuple[_Command, list[_Command]]:
    """The command that trains, and all with arguments. Raises UserError."""
    launches = [Launch([word for outer in one.words for word in _within(outer)], one.again, one.loops)
                for one in script.ran]
    bare = [one for one in launches if one.words[0].text.startswith("--")]  # arguments, each at a line of its own
    found = [_Command(one.words, one) for one in launches if one not in bare]
    if bare:
        together = Launch([word for one in bare for word in one.words])
        found.append(_Command(together.words, together))
    found = [one for one in found if one.count]
    if not found:  # a file that only names arguments, for other files to use
        words = [inner for value in script.variables.values.values()
                 if value and value[0].text.lstrip().startswith("--") for outer in value for inner in _within(outer)]
        found = [_Command(words, Launch(words))] if words else []
    if not found:
        uncalled = script.uncalled
        message = f"calls none of its functions with arguments ({', '.join(uncalled)})" if uncalled else (
            "holds no arguments such as --num-layers")
        raise UserError(Fault(message, "", script.file,
                              hint="give a launch script, its arguments, or a YAML file of them"))
    return max(found, key=lambda one: one.rank), found


def _skipped(chosen: _Command, found: Sequence[_Command], file: str) -> list[tuple[Said, str]]:
    """The other commands that train, where they do it otherwise."""
    def telling(one: _Command) -> dict[str, Any]:
        return {name: value for name, value in one.data.items() if not is_idle(name.lstrip("-").replace("-", "_"))}

    others = [one for one in found if one is not chosen and one.trains and one.rank[:3] == chosen.rank[:3]
              and telling(one) != telling(chosen)]
    if not others:
        return []
    names = ", ".join(f"{one.name} of line {one.words[0].line}" for one in others)
    line = chosen.words[0].line
    return [(Said(file, chosen.name, f"line {line}", line), f"the command that was taken; skipped: {names}")]


def is_idle(name: str) -> bool:
    """Whether neither time nor memory depends on an argument, by its name with underscores."""
    return any(fnmatch.fnmatchcase(name, one) for one in table("imports/megatron/names.yaml")["idle"])


def _slurm(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Every option of every `#SBATCH` line; words that are none (`<SLURM OPTIONS>`) are gone over."""
    data: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        found = _SBATCH.match(line)
        if not found:
            continue
        name = ""
        for word in re.sub(r"\s#.*", "", f" {found[1]}").split():
            option = re.match(r"(--[A-Za-z][\w-]*|-[A-Za-z])=?(.*)\Z", word)
            if option:
                name = f"#SBATCH {_SHORT.get(option[1], option[1])}"
                data[name], lines[name] = option[2] or True, number
            elif name and data[name] is True:
                data[name] = word
    return data, lines


def amount(value: Any) -> str:
    """A count as Slurm writes it (`8`, `gpu:8`, `gpu:a100:8`), "" if it is none."""
    found = re.fullmatch(r"(?:gpu:)?(?:\w+:)?(\d+)(?:\(.*|,.*)?", str(value))
    return found[1] if found else ""


def _one_process(chosen: _Command, script: Script, slurm: Mapping[str, Any]) -> bool:
    """Whether a command starts one process on a node: torchrun and plain python do where nothing says more."""
    several = slurm or "WORLD_SIZE" in script.variables.values or set(chosen.data) & {
        "--nproc-per-node", "--world-size", "--ntasks", "--num-gpus", "--gpus"}
    first = chosen.words[0].text.rpartition("/")[2]
    return not several and bool(chosen.program) and re.fullmatch(r"torchrun|python[\d.]*", first) is not None


def _within(word: Word) -> Iterator[Word]:
    """A word, or those within it where it is a command of its own (`bash -c "torchrun ..."`, `eval`)."""
    return word.split() if re.search(r"(^|\s)--\w", word.text) and re.search(r"\s", word.text) else iter((word,))


def options(words: Iterable[Word]) -> tuple[dict[str, Any], dict[str, int]]:
    """Name -> value and line of a command's options.

    An option without a value is true, one with several is a list, the last one of a name counts (argparse). Names have
    hyphens, however they are written.
    """
    found: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    name, single = "", False
    for word in words:
        start = re.match(r"--([A-Za-z][\w.-]*)(?:=(.*))?\Z", word.text, re.DOTALL)
        if start:
            name = "--" + start[1].replace("_", "-")
            found[name], lines[name], single = [] if start[2] is None else [start[2]], word.line, False
        elif word.text.endswith(".py") or re.fullmatch(r"-[A-Za-z]|-np", word.text):
            name = _SHORT.get(word.text, "")
            if name:
                found[name], lines[name], single = [], word.line, True
        elif name and word.text:  # quotes that are left are for the shell within (`bash -c "..."`)
            found[name].append(re.sub(r"\A(['\"])(.*)\1\Z", r"\2", word.text))
            name = "" if single else name
    data: dict[str, Any] = {}
    for one, values in found.items():
        known = [value for value in values if not unresolved(value)]
        known = values[:1] if values and unresolved(values[0]) else known
        for value in values:
            if unresolved(value) and value not in known:  # `--seq-length 2048 $MORE`: more arguments, not known here
                data[value], lines[value] = "", lines[one]
        data[one] = True if not known else known[0] if len(known) == 1 else known
    return data, lines
