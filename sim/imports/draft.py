"""A scenario in the making: what other tools' files say, field by field, and where each value came from."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sim.errors import Fault, UserError
from sim.imports.settings import Said, Settings, read_settings
from sim.scenario.fields.schema import Scenario
from sim.scenario.load import resolve_document
from sim.scenario.named.topologies import find_topology
from sim.scenario.paths import apply_sets
from sim.scenario.text.document import Document, parse_value

Kind = Literal["taken", "assumed", "left", "default", "idle", "unknown"]

#: Settings that were not taken, told where something is missing: one of them may say why.
_FEW = 5
_DOCUMENT = "training.document"
#: What a scenario cannot do without, and how a user who has no file that says it can say it.
_WANTED = {
    "cluster.topology": "--cluster NAME, a name of 'drystep list topologies' or a path",
    "model": "give the model's config.json too, or --set model.preset=NAME ('drystep list models')",
    "training.micro_batch": "--set training.micro_batch=N, sequences per forward of one GPU",
    "training.sequence": "--set training.sequence=N, tokens per sequence",
}


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one setting.

    Attributes:
        kind: taken (a field says it), assumed (no file says it), left (it matters and no field says it), default (read,
            and it changes nothing beside the others), idle (neither time nor memory depends on it), unknown (not known
            here).
        said: the setting, as text; "" where no file says it.
        field: dotted field of the scenario, "" if none.
        value: the field's value, or the setting's.
        text: why, in a few words.
    """

    kind: Kind
    said: str
    field: str
    value: Any
    text: str = ""


@dataclass(frozen=True, slots=True)
class Ranks:
    """GPUs of a job: of a node, in all, and the degrees of its layout."""

    of_node: int
    gpus: int
    tensor: int
    pipeline: int
    context: int

    def shared_by(self, replicas: Said) -> int:
        """Ranks that share the shards of one of so many replicas, context ranks included. Raises UserError."""
        over, rest = divmod(self.gpus, self.tensor * self.pipeline * replicas.whole())
        if rest or not over:
            raise replicas.wrong(f"a number that divides {self.gpus} GPUs over {self.tensor} tensor and "
                                 f"{self.pipeline} pipeline ranks")
        return over


@dataclass
class Draft:
    """Fields of a scenario by dotted path.

    Attributes:
        name: what the scenario is called.
        sets: texts `dotted.path=value` of the command line, which go over all that files say.
        gpus, nodes, per_node: how many GPUs in all, nodes, and GPUs of each node, where a file says so.
    """

    name: str = ""
    sets: Sequence[str] = ()
    gpus: Said | None = None
    nodes: Said | None = None
    per_node: Said | None = None
    _fields: dict[str, Any] = field(default_factory=dict)
    _from: dict[str, Said] = field(default_factory=dict)
    _notes: dict[str, Note] = field(default_factory=dict)
    _others: list[Note] = field(default_factory=list)
    _later: dict[str, tuple[Callable[[Ranks], int], Said, str]] = field(default_factory=dict)
    _closed: list[Settings] = field(default_factory=list)
    _told: set[tuple[str, str]] = field(default_factory=set)

    def take(self, path: str, value: Any, said: Said, text: str = "") -> None:
        """A field's value as `said` has it. Raises UserError where another setting says something else."""
        self._told.add((said.file, said.name))
        earlier = self._from.get(path)
        if earlier is None:
            self._fields[path], self._from[path] = value, said
            self._notes[path] = Note("taken", str(said), path, value, text)
        elif self._fields[path] != value and not self.overridden(path):
            place = f" (line {earlier.line})" if earlier.line else ""
            raise UserError(Fault(f"says {said.value!r}, but {earlier}{place} says {earlier.value!r}", said.name,
                                  said.file, said.line))

    def take_later(self, path: str, of: Callable[[Ranks], int], said: Said, text: str) -> None:
        """A field whose value follows from the cluster, which is known at the end; `of` may raise UserError."""
        self._later[path] = (of, said, text)
        self._told.add((said.file, said.name))

    def assume(self, path: str, value: Any, why: str) -> None:
        """A field's value where no file says it; what a file says wins, whenever it is said."""
        if path not in self._fields:
            self._fields[path] = value
            self._notes[path] = Note("assumed", "", path, value, why)

    def has(self, path: str) -> bool:
        """Whether the draft says anything of a field or of one below it."""
        return any(one == path or one.startswith(f"{path}.") for one in self._fields)

    def origin(self, path: str) -> Said | None:
        """The setting that a field's value is from, None where no file says it."""
        return self._from.get(path)

    def value(self, path: str) -> Any:
        """A field's value so far, None without one."""
        return self._fields.get(path)

    def overridden(self, path: str) -> bool:
        """Whether the command line sets a field or one above it, so that what a file says of it does not matter."""
        names = [text.partition("=")[0].strip() for text in self.sets]
        return any(path == one or path.startswith(f"{one}.") for one in names)

    def given(self, path: str) -> Any:
        """What the command line sets a field to, None where it does not. Raises UserError."""
        values = [parse_value(value, "") for name, _, value in (text.partition("=") for text in self.sets)
                  if name.strip() == path]
        return values[-1] if values else None

    def before(self, since: int) -> bool:
        """Whether the command line says that the stack is of before a year. Raises UserError."""
        when = self.given("software.year")
        return isinstance(when, int) and not isinstance(when, bool) and when < since

    def leave(self, said: Said, why: str) -> None:
        """A setting that matters, which no field says or which is not simulated."""
        self._told.add((said.file, said.name))
        self._others.append(Note("left", str(said), "", said.value, why))

    def packs(self, said: Said) -> None:
        """A setting that keeps attention to the documents packed into a sequence, whose lengths lie with the data."""
        if self.overridden(f"{_DOCUMENT}.mean"):
            self.share(_DOCUMENT, said.value, said)
            return
        self.leave(said, "attention keeps to the documents packed into a sequence, and how long these are no setting "
                         "says: it is counted over the whole sequence, which is too much; "
                         f"--set {_DOCUMENT}=N, their mean tokens, or {_DOCUMENT}='{{mean: N, spread: S}}'")

    def share(self, path: str, value: Any, said: Said) -> None:
        """A setting that says a part of a field whose whole another one is the origin of."""
        self._told.add((said.file, said.name))
        self._others.append(Note("taken", str(said), path, value))

    def opened(self, files: Iterable[str]) -> Iterator[Settings]:
        """The settings of each file but a model's config.json, which `sim.scenario.hf` reads. Raises UserError."""
        for file in files:
            settings = read_settings(file)
            said = None if settings.has("base_model") else settings.get("model_type", "architectures")
            if said is None:  # axolotl's files have a model_type beside their base_model
                yield settings
                continue
            self.take("model.hf", file, said)
            settings.elsewhere = True
            self.close(settings)

    def close(self, settings: Settings) -> None:
        """Notes all that nobody took of a file."""
        self._closed.append(settings)
        for said, idle in settings.rest():
            near = "" if idle else settings.near(said.name)
            self._others.append(Note("idle" if idle else "unknown", str(said), "", said.value, near))

    def finish(self, sets: Sequence[str] = ()) -> Imported:
        """The scenario, checked.

        Args:
            sets: more texts `dotted.path=value`, put on top of all.

        Raises:
            UserError: something a scenario needs is said nowhere, or what is said is impossible; faults name the file
                and line that said it.
        """
        document = Document({}, {}, "", Path())
        for path, value in self._fields.items():
            _put(document.data, path, copy.deepcopy(value))
        for path, said in self._from.items():
            document.places[path] = (said.file, said.line)
        faults: list[Fault] = []
        done = apply_sets(document, (*self.sets, *sets), faults)
        document.data.setdefault("name", self.name or "imported")
        if not faults:
            faults += [fault for fault in _missing(document) if fault.field not in self._later]
            faults += [Fault(f"was not taken: {note.text}", file=note.said) if kind == "left" and note.text else
                       Fault("is not known here", file=note.said, hint=note.text)
                       for kind in ("left", "unknown") for note in self._others if faults and note.kind == kind][:_FEW]
        if faults:
            raise UserError(faults)
        dropped = _drop_batch(document, done)
        notes = [note for path, note in self._notes.items()
                 if path not in dropped and not any(path == one or path.startswith(f"{one}.") for one in done)]
        notes += [Note("taken", "command line", path, _at(document.data, path)) for path in done]
        notes += self._size(document)
        data = copy.deepcopy(document.data)
        try:
            scenario = resolve_document(document)
        except UserError as error:  # what was to follow from the cluster is lacking only since something else is wrong
            raise UserError([one for one in error.faults if one.field not in self._later] or error.faults) from None
        return Imported(data, scenario, tuple(notes + self._others + self._defaults()))

    def _defaults(self) -> list[Note]:
        """Settings that a reader looked at and that are no field's origin."""
        told = self._told | {(one.file, one.name) for one in (self.gpus, self.nodes, self.per_node) if one is not None}
        return [Note("default", str(said), "", said.value) for settings in self._closed for said in settings.read()
                if (said.file, said.name) not in told]

    def _size(self, document: Document) -> list[Note]:
        """Nodes and GPUs of each, from what files say of their number, and what follows from those; the notes of it."""
        cluster = document.data["cluster"]
        named = cluster["topology"]
        topology = find_topology(named, Path()).data if isinstance(named, str) else named
        of_node = topology.get("gpus_per_node") if isinstance(topology, Mapping) else None
        if not isinstance(of_node, int) or of_node < 1:
            return []  # the scenario's own reading says what is wrong with it
        notes = []
        for name, (value, said) in _counts(self, of_node, cluster.get("nodes")).items():
            if cluster.get(name) is None:
                notes.append(_fill(document, f"cluster.{name}", value, said))
        if cluster.get("nodes") is None:
            cluster["nodes"] = topology.get("nodes", 1)
            notes.append(Note("assumed", "", "cluster.nodes", cluster["nodes"], "how many GPUs there are (--nodes N)"))
        each = cluster.get("gpus_per_node") or of_node
        degrees = [_at(document.data, f"parallel.{name}") for name in ("tensor", "pipeline", "context")]
        if self._later and all(isinstance(one, int | None) for one in (each, cluster["nodes"], *degrees)):
            ranks = Ranks(each, each * cluster["nodes"], *(one or 1 for one in degrees))
            notes += [_fill(document, path, of(ranks), said, text) for path, (of, said, text) in self._later.items()
                      if _at(document.data, path) is None]
        return notes


@dataclass(frozen=True)
class Imported:
    """A finished scenario.

    Attributes:
        data: what the scenario file holds; relative paths in it are relative to the working directory.
        scenario: it, resolved.
        notes: what became of every setting.
    """

    data: Mapping[str, Any]
    scenario: Scenario
    notes: tuple[Note, ...]

    def of(self, kind: Kind) -> list[Note]:
        """The notes of one kind."""
        return [note for note in self.notes if note.kind == kind]

    def beside(self, out: Path | None) -> Imported:
        """The same, its relative paths as a file at `out` has to write them."""
        if out is None:
            return self
        data = copy.deepcopy(dict(self.data))
        for section, name in (("model", "hf"), ("model", "table"), ("cluster", "topology")):
            written = data.get(section, {}).get(name) if isinstance(data.get(section), dict) else None
            if isinstance(written, str) and (name != "topology" or "/" in written
                                             or written.endswith((".yaml", ".yml"))):
                path = Path(os.path.expanduser(written))
                if not path.is_absolute():
                    data[section][name] = os.path.relpath(path, out.parent)
        return replace(self, data=data)


def _counts(draft: Draft, of_node: int, nodes: Any) -> dict[str, tuple[int, Said]]:
    """What of `nodes` and `gpus_per_node` follows from the files; `nodes` is what the command line says of them."""
    found: dict[str, tuple[int, Said]] = {}
    used = of_node
    if draft.per_node is not None:
        used = draft.per_node.whole()
        found["gpus_per_node"] = (used, draft.per_node)
    if draft.nodes is not None:
        found["nodes"] = (draft.nodes.whole(), draft.nodes)
        nodes = nodes if isinstance(nodes, int) else draft.nodes.whole()
    if draft.gpus is None:
        return found
    gpus = draft.gpus.whole()
    if not isinstance(nodes, int):
        nodes = max(1, gpus // used)
        found["nodes"] = (nodes, draft.gpus)
    share, rest = divmod(gpus, nodes)
    if rest or share > used or (draft.per_node is not None and share != used):
        many = "node" if nodes == 1 else "nodes"
        raise UserError(Fault(f"{gpus} GPUs do not go over {nodes} {many} of {used}", draft.gpus.name, draft.gpus.file,
                              draft.gpus.line,
                              "another --cluster, or --nodes N and --set cluster.gpus_per_node=N"))
    if share != of_node:
        found["gpus_per_node"] = (share, draft.gpus)
    return found


def _fill(document: Document, path: str, value: Any, said: Said, text: str = "") -> Note:
    _put(document.data, path, value)
    document.places[path] = (said.file, said.line)
    return Note("taken", str(said), path, value, text)


#: Fields that tell the same: one of the command line replaces the other.
_BATCH = ("training.global_batch", "training.micro_steps")


def _drop_batch(document: Document, done: Sequence[str]) -> tuple[str, ...]:
    """Takes out the batch as files tell it where the command line tells it otherwise; the fields taken out."""
    dropped = tuple(path for path in _BATCH if path not in done and any(one in done for one in _BATCH))
    for path in dropped:
        document.data.get("training", {}).pop(path.partition(".")[2], None)
    return dropped


def _missing(document: Document) -> Iterable[Fault]:
    for path, hint in _WANTED.items():
        if _at(document.data, path) in (None, {}):
            yield Fault("is said in none of the files", path, hint=hint)
    model = document.data.get("model")
    if isinstance(model, Mapping) and "layers" in model and not {"preset", "hf", "vocab", "table"} & set(model):
        yield Fault("is said in none of the files", "model.vocab", hint="--set model.vocab=N, tokens of its vocabulary")


def _put(data: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for part in above:
        inner = data.get(part)
        if not isinstance(inner, dict):
            inner = data[part] = {}
        data = inner
    data[last] = value


def _at(data: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return None
        data = data[part]
    return data
