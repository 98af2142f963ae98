"""A scenario in the making: what other tools' files say, field by field, and where each value came from."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sim.errors import Fault, UserError
from sim.imports.settings import Said, Settings
from sim.scenario.document import Document
from sim.scenario.load import resolve_document
from sim.scenario.paths import apply_sets
from sim.scenario.schema import Scenario
from sim.scenario.topologies import find_topology

Kind = Literal["taken", "assumed", "left", "idle", "unknown"]

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
        kind: taken (a field says it), assumed (no file says it), left (it matters and no field says it), idle (neither
            time nor memory depends on it), unknown (not known here).
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


@dataclass
class Draft:
    """Fields of a scenario by dotted path.

    Attributes:
        name: what the scenario is called.
        gpus, nodes, per_node: how many GPUs in all, nodes, and GPUs of each node, where a file says so.
    """

    name: str = ""
    gpus: Said | None = None
    nodes: Said | None = None
    per_node: Said | None = None
    _fields: dict[str, Any] = field(default_factory=dict)
    _from: dict[str, Said] = field(default_factory=dict)
    _notes: dict[str, Note] = field(default_factory=dict)
    _others: list[Note] = field(default_factory=list)

    def take(self, path: str, value: Any, said: Said, text: str = "") -> None:
        """A field's value as `said` has it. Raises UserError where another setting says something else."""
        earlier = self._from.get(path)
        if earlier is not None and self._fields[path] != value:
            raise UserError(Fault(f"says {said.value!r}, but {earlier} (line {earlier.line}) says {earlier.value!r}"
                                  if earlier.line else f"says {said.value!r}, but {earlier} says {earlier.value!r}",
                                  said.name, said.file, said.line))
        self._fields[path], self._from[path] = value, said
        self._notes[path] = Note("taken", str(said), path, value, text)

    def assume(self, path: str, value: Any, why: str) -> None:
        """A field's value where no file says it; what a file says wins, whenever it is said."""
        if path not in self._fields:
            self._fields[path] = value
            self._notes[path] = Note("assumed", "", path, value, why)

    def has(self, path: str) -> bool:
        """Whether the draft says anything of a field or of one below it."""
        return any(one == path or one.startswith(f"{path}.") for one in self._fields)

    def value(self, path: str) -> Any:
        """A field's value so far, None without one."""
        return self._fields.get(path)

    def leave(self, said: Said, why: str) -> None:
        """A setting that matters, which no field says or which is not simulated."""
        self._others.append(Note("left", str(said), "", said.value, why))

    def close(self, settings: Settings) -> None:
        """Notes all that nobody took of a file."""
        for said, idle in settings.rest():
            self._others.append(Note("idle" if idle else "unknown", str(said), "", said.value))

    def finish(self, sets: Sequence[str] = ()) -> Imported:
        """The scenario, checked.

        Args:
            sets: texts `dotted.path=value` of the command line, put on top.

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
        done = apply_sets(document, sets, faults)
        document.data.setdefault("name", self.name or "imported")
        if not faults:
            faults += _missing(document)
        if faults:
            raise UserError(faults)
        notes = [note for path, note in self._notes.items()
                 if not any(path == one or path.startswith(f"{one}.") for one in done)]
        notes += [Note("taken", "--set", path, _at(document.data, path)) for path in done]
        notes += self._size(document)
        data = copy.deepcopy(document.data)
        scenario = resolve_document(document)
        return Imported(data, scenario, tuple(notes + self._others))

    def _size(self, document: Document) -> list[Note]:
        """Nodes and GPUs of each, from what files say of their number; the notes of it."""
        cluster = document.data["cluster"]
        if not isinstance(cluster["topology"], str):
            return []
        of_node = find_topology(cluster["topology"], Path()).data.get("gpus_per_node")
        if not isinstance(of_node, int) or of_node < 1:
            return []
        found = _counts(self, of_node, cluster.get("nodes"))
        notes = []
        for name, (value, said) in found.items():
            if cluster.get(name) is None:
                cluster[name] = value
                path = f"cluster.{name}"
                document.places[path] = (said.file, said.line)
                notes.append(Note("taken", str(said), path, value))
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
    """What of `nodes` and `gpus_per_node` follows from what files say."""
    found: dict[str, tuple[int, Said]] = {}
    used = of_node
    if draft.per_node is not None and draft.per_node.whole() != of_node:
        used = draft.per_node.whole()
        found["gpus_per_node"] = (used, draft.per_node)
    if draft.nodes is not None:
        found["nodes"] = (draft.nodes.whole(), draft.nodes)
    if draft.gpus is None:
        return found
    gpus = draft.gpus.whole()
    count = nodes if isinstance(nodes, int) else found["nodes"][0] if "nodes" in found else None
    if count is None:
        count = 1 if gpus <= used else gpus // used
        found["nodes"] = (count, draft.gpus)
    if "gpus_per_node" not in found and gpus % count == 0 and gpus // count != of_node:
        found["gpus_per_node"] = (gpus // count, draft.gpus)
    if gpus != count * (found["gpus_per_node"][0] if "gpus_per_node" in found else of_node):
        raise UserError(Fault(f"{gpus} GPUs are not whole nodes of {used}", draft.gpus.name, draft.gpus.file,
                              draft.gpus.line, "--cluster a topology with other nodes, or --set cluster.nodes=N "
                              "--set cluster.gpus_per_node=N"))
    return found


def _missing(document: Document) -> Iterable[Fault]:
    for path, hint in _WANTED.items():
        if _at(document.data, path) in (None, {}):
            yield Fault("is said in none of the files", path, hint=hint)


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
