"""From a file, or a plain mapping, to a resolved Scenario; every fault found on the way is reported together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sim.errors import Fault, UserError
from sim.scenario.checks.whole import check, check_names
from sim.scenario.defaults import fill
from sim.scenario.expand import expand
from sim.scenario.expect import Bound, read_bounds
from sim.scenario.fields.schema import Scenario
from sim.scenario.fields.tables import Given
from sim.scenario.paths import apply_sets, assign
from sim.scenario.sweep import fix_axes, points, read_axes
from sim.scenario.text.document import Document, read_document
from sim.scenario.text.explain import explain
from sim.scenario.text.other_files import what_else


@dataclass(frozen=True)
class Loaded:
    """A scenario file, read.

    Attributes:
        scenario: the base point: what the file says outside `sweep` (where that alone is impossible, the first
            possible point).
        sweep: dotted field -> values; empty without a sweep.
        expect: the bounds of `expect`.
        document: the file as written, with its lines.
        notes: what a user should know of how the file and the sets were read together.
    """

    scenario: Scenario
    sweep: dict[str, list[Any]]
    expect: tuple[Bound, ...]
    document: Document
    notes: tuple[str, ...] = ()

    def points(self) -> Iterator[tuple[dict[str, Any], Scenario | str]]:
        """Each point of the sweep as (set, scenario), or (set, reason) where it is impossible.

        Without a sweep there is one point with an empty set.
        """
        if not self.sweep:
            yield {}, self.scenario
            return
        for chosen in points(self.sweep):
            yield chosen, _point(self.document, chosen)


def load_scenario(path: str | Path, sets: Sequence[str] = ()) -> Loaded:
    """Read a scenario file.

    Args:
        path: the YAML file.
        sets: texts `dotted.path=value`, put on top in order.

    Raises:
        UserError: with every fault found in the file and in the sets.
    """
    document = read_document(Path(path), str(path))
    if found := what_else(document):
        field, what, hint = found
        raise UserError([document.fault(field, f"{what}, not a scenario", hint.format(path=path))])
    return load_document(document, sets)


def load_mapping(data: Mapping[str, Any], sets: Sequence[str] = ()) -> Loaded:
    """As `load_scenario`, of what a file would hold; paths inside are relative to the working folder.

    Raises:
        UserError: with every fault found.
    """
    return load_document(Document(_copy(data), {}, "", Path()), sets)


def load_document(document: Document, sets: Sequence[str] = ()) -> Loaded:
    """As `load_scenario`, from text already parsed (the document is changed by `sets`)."""
    faults: list[Fault] = []
    notes = fix_axes(document, apply_sets(document, sets, faults), faults)
    return replace(_load(document, faults), notes=notes)


def _load(document: Document, faults: list[Fault]) -> Loaded:
    axes = read_axes(document, faults)
    bounds = read_bounds(document, faults)
    base = _variant(document)
    for axis, values in axes.items():
        if not _written(document.data, axis):
            assign(base, axis, values[0], document.place(f"sweep.{axis}"), faults)
    try:
        scenario = resolve_document(base, faults)
    except UserError as error:
        found = None if faults or not axes else _first_possible(document, axes)
        if found is None:
            raise UserError(_distinct(error.faults)) from None
        scenario = found
    scenario = scenario.model_copy(update={"sweep": axes, "expect": document.data.get("expect") or {}})
    return Loaded(scenario, axes, tuple(bounds), document)


def _variant(document: Document) -> Document:
    """A copy whose root and places can be changed; the values below the root are shared and never changed in place."""
    data = {key: value for key, value in document.data.items() if key not in ("sweep", "expect")}
    return Document(data, dict(document.places), document.file, document.folder, list(document.faults))


def _point(document: Document, chosen: Mapping[str, Any]) -> Scenario | str:
    variant = _variant(document)
    faults: list[Fault] = []
    for path, value in chosen.items():
        assign(variant, path, value, document.place(f"sweep.{path}"), faults)
    try:
        return resolve_document(variant, faults)
    except UserError as error:
        return "; ".join(": ".join(part for part in (f.field, f.message) if part) for f in error.faults)


def _first_possible(document: Document, axes: dict[str, list[Any]]) -> Scenario | None:
    for tried, chosen in enumerate(points(axes)):
        if tried >= _TRIES:
            return None
        found = _point(document, chosen)
        if isinstance(found, Scenario):
            return found
    return None


#: Points looked at for a base when the file alone is impossible.
_TRIES = 1000


def _written(data: Mapping[str, Any], path: str) -> bool:
    here: Any = data
    for part in path.split("."):
        if not isinstance(here, Mapping) or here.get(part) is None:
            return isinstance(here, str)  # inside a name (a topology's): it has every field
        here = here[part]
    return True


def resolve(
    mapping: Mapping[str, Any], source: str = "", sets: Mapping[str, Any] | None = None, base: Path | str = "."
) -> Scenario:
    """A scenario from plain data.

    Args:
        mapping: what a scenario file would hold.
        source: named as the file of faults.
        sets: dotted path -> value, put on top; a mapping replaces what was there whole.
        base: folder that relative paths inside (topology, hf, table) are relative to.

    Raises:
        UserError: with every fault found.
    """
    document = Document(_copy(mapping), {}, source, Path(base))
    faults: list[Fault] = []
    for path, value in (sets or {}).items():
        assign(document, path, value, (source, 0), faults)
    return _load(document, faults).scenario


def resolve_document(document: Document, faults: Sequence[Fault] = ()) -> Scenario:
    """A scenario from a document of its own (it is changed). Raises UserError with `faults` and all others."""
    found = [*document.faults, *faults]
    given = Given(_copy(document.data), document.folder)
    data = expand(document, found)
    found += check_names(data, document)
    try:
        written = Scenario.model_validate(data)
    except ValidationError as error:
        found += explain(error, Scenario, document)
    if found:
        unread = [f.field + "." for f in document.faults if f.field]  # values thrown away: what they lack is no news
        raise UserError(_distinct([f for f in found if f in document.faults or not f.field.startswith(tuple(unread))]))
    scenario = fill(written)
    scenario._given = given
    found = check(written, scenario, document)
    if found:
        raise UserError(found)
    return scenario


def _distinct(faults: Sequence[Fault]) -> list[Fault]:
    """One fault per field, the first found (the most particular), in the order of the file."""
    by_field: dict[tuple[str, str, int], Fault] = {}
    for fault in faults:
        key = (fault.field, "", 0) if fault.field else (fault.message, fault.file, fault.line)
        by_field.setdefault(key, fault)
    return sorted(by_field.values(), key=lambda f: (f.file, f.line))


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value
