"""What the files of one Hugging Face or DeepSpeed job say, gathered before anything is decided.

Dtypes, batch and layout follow from several files at once (DeepSpeed's "auto" is filled by the Trainer's arguments,
accelerate's precision by those too), so readers keep facts here and `hugging` settles them at the end.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sim.errors import Fault, UserError
from sim.imports.draft import Draft
from sim.imports.settings import Said, Settings, Told, read_settings, take_whole

#: Who splits the job over GPUs: nobody or DDP, FSDP, ZeRO, Megatron-LM.
Engine = Literal["plain", "fsdp", "zero", "core"]
AUTO = "auto"
#: What axolotl and LLaMA-Factory call 8-bit gathers of FSDP 2.
FP8_GATHER = "fp8_enable_fsdp_float8_all_gather"

_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "half": "fp16", "fp16": "fp16", "float32": "fp32",
           "float": "fp32", "fp32": "fp32"}
#: Fact -> fields with which the command line decides it, whatever files say.
_DECIDED_BY = {"micro": ("training.micro_batch",), "steps": ("training.micro_steps", "training.global_batch"),
               "total": ("training.micro_steps", "training.global_batch"), "engine": ("parallel.strategy",)}


@dataclass
class Job:
    """One job in the reading.

    Attributes:
        draft: the scenario in the making.
        facts: name -> value and the setting that says it.
        files: settings to close once all is settled.
        zeros: DeepSpeed's JSON files that the user gave.
        hugging: whether a file of Hugging Face's is among them, whose modules run then.
        config: the model's config.json.
        arguments: the Trainer's arguments.
        trl: whether they are those of a script of TRL's, which has other defaults.
        tool: whose arguments they are where a tool of its own reads them (axolotl), "" elsewhere: its reader has said
            all that it does otherwise before `trainer` reads the rest.
        defaults: settings among the facts that no file has.
    """

    draft: Draft
    facts: dict[str, tuple[Any, Said]] = field(default_factory=dict)
    files: list[Settings] = field(default_factory=list)
    zeros: list[Settings] = field(default_factory=list)
    hugging: bool = False
    config: Settings | None = None
    arguments: Settings | None = None
    trl: bool = False
    tool: str = ""
    defaults: set[Said] = field(default_factory=set)

    def keep(self, name: str, value: Any, said: Said) -> None:
        """A fact. Raises UserError where another setting says something else."""
        earlier = self.facts.get(name)
        decided = any(self.draft.overridden(path) for path in _DECIDED_BY.get(name, ()))
        if earlier is not None and earlier[0] != value and not decided:
            line = f" (line {earlier[1].line})" if earlier[1].line else ""
            raise UserError(Fault(f"says {said.value!r}, but {earlier[1]}{line} says {earlier[1].value!r}",
                                  said.name, said.file, said.line))
        self.facts.setdefault(name, (value, said))

    def default(self, settings: Settings, name: str, value: Any) -> Said:
        """What a tool takes where a file has no setting of this name; fields that follow from it are assumed."""
        said = Said(settings.file, f"{name} (default)", value)
        self.defaults.add(said)
        return said

    def of(self, name: str) -> Any:
        """A fact's value, None without one."""
        return self.facts[name][0] if name in self.facts else None

    def said(self, name: str) -> Said | None:
        """The setting that says a fact, None without one."""
        return self.facts[name][1] if name in self.facts else None

    @property
    def trl_half(self) -> bool:
        """Whether bf16 is on because TRL's arguments say nothing of it (base_config.py)."""
        return self.trl and self.said("amp") is None and self.said("amp off") is None

    @property
    def engine(self) -> Engine:
        """Who splits the job."""
        engine: Engine = self.of("engine") or "plain"
        return engine


def dtype_of(said: Said) -> str | None:
    """A torch dtype's name as ours; None for "auto"."""
    word = said.word().removeprefix("torch.")
    if word == AUTO:
        return None
    if word not in _DTYPES:
        raise said.wrong("one of bfloat16, float16, float32, auto")
    return _DTYPES[word]


def set_apart(settings: Settings, job: Job, names: Collection[str]) -> Settings:
    """What is left of a file for another reader, which would read these names otherwise; both are closed."""
    rest = replace(settings, data={key: value for key, value in settings.data.items() if key not in names})
    settings.data = {key: value for key, value in settings.data.items() if key in names}
    job.files.append(rest)
    return rest


def renamed(settings: Settings, names: Mapping[str, str]) -> Settings:
    """The same file under other names, so that one reader does for tools that call a setting otherwise.

    Args:
        settings: a file of one tool.
        names: its first parts of dotted names -> the ones they are asked for by. What has such a name already, and is
            another thing there, cannot be asked for.
    """
    back = {new: old for old, new in names.items()}

    def turned(name: str, by: Mapping[str, str]) -> str:
        first, dot, rest = name.partition(".")
        return by[name] if name in by else f"{by.get(first, first)}{dot}{rest}"

    data = {names.get(key, key): value for key, value in settings.data.items() if key in names or key not in back}
    lines = {turned(name, names): line for name, line in settings.lines.items()}
    return Told(settings.file, data, lines, tell=lambda name: turned(name, back))


def inner(settings: Settings, name: str, given: Sequence[Settings] = ()) -> Settings | None:
    """Settings that stand under a name: a mapping, its JSON, or the path of a file.

    A path is relative to this file's folder or to the working directory, which is where the tools look
    (transformers' training_args.py, accelerate's utils/deepspeed.py).

    Args:
        given: files of that kind that the user gave: None where the path is one of theirs, or is not here.
    """
    said = settings.get(name)
    if said is None:
        return None
    value = said.value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise said.wrong("JSON") from None
    if isinstance(value, Mapping):
        start = f"{name}."
        lines = {key.removeprefix(start): line for key, line in settings.lines.items() if key.startswith(start)}
        take_whole(settings, name)
        return Told(settings.file, value, lines or {str(key): said.line for key in value},
                     tell=lambda below: f"{said.name}.{below}")
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise said.wrong("a mapping or the path of a file")
    path = os.path.expanduser(value)
    beside = os.path.join(os.path.dirname(settings.file), path)
    found = next((one for one in (beside, path) if os.path.isfile(one)), None)
    if given and (found is None or any(os.path.realpath(one.file) == os.path.realpath(found) for one in given)):
        return None
    if found is None:
        hint = "" if os.path.isabs(path) else "looked for in this file's folder and in the working directory"
        raise UserError(Fault(f"no such file: {value}", said.name, said.file, said.line, hint))
    return read_settings(found)
