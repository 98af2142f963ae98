"""Names that other tools have for what a scenario calls otherwise (`other_names.yaml`), for hints alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sim.catalog import table
from sim.errors import bare

_FILE = "scenario/text/other_names.yaml"


def other_field(name: str, inside: str) -> str:
    """A hint at what another tool's field `name`, written in the table `inside`, is here; "" if it says nothing."""
    path = _inside().get((inside, bare(name))) or _fields().get(bare(name), "")
    if not path or path == f"{inside}.{name}":
        return _follows().get(bare(f"{inside}.{name}")) or _follows().get(bare(name), "")
    return f"did you mean '{path.removeprefix(f'{inside}.')}'?"


def other_value(path: str, value: str) -> str:
    """A hint at what field `path` calls `value` here, "" if unknown."""
    own = _values().get((path, bare(value)), "")
    return f"did you mean {own}?" if own else _answers().get((path, bare(value)), "")


def same_sizes(model: str) -> str:
    """The preset with the sizes of a model of another name, "" if unknown."""
    own = _values().get(("model.preset", bare(model)), "").strip("'")
    return own if " " not in own else ""


@cache
def _fields() -> Mapping[str, str]:
    return {bare(str(name)): path for path, names in table(_FILE)["fields"].items() for name in names}


@cache
def _inside() -> Mapping[tuple[str, str], str]:
    return {(inside, bare(str(name))): f"{inside}.{ours}"
            for inside, fields in table(_FILE)["inside"].items() for ours, names in fields.items() for name in names}


@cache
def _follows() -> Mapping[str, str]:
    return {bare(str(name)): reason for reason, names in table(_FILE)["follows"].items() for name in names}


@cache
def _answers() -> Mapping[tuple[str, str], str]:
    return {(path, bare(str(name))): answer
            for path, answers in table(_FILE)["answers"].items() for answer, names in answers.items() for name in names}


@cache
def _values() -> Mapping[tuple[str, str], str]:
    rows: Mapping[str, Mapping[Any, list[Any]]] = table(_FILE)["values"]
    return {(path, bare(str(name))): str(ours) if " " in str(ours) else f"'{ours}'"
            for path, values in rows.items() for ours, names in values.items() for name in names}
