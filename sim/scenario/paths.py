"""Dotted paths: the grammar of `sweep`, `--set` and the `set` of a published case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sim.errors import Fault, UserError
from sim.scenario.fields.precisions import PRECISIONS
from sim.scenario.named.presets import preset
from sim.scenario.named.topologies import find_topology
from sim.scenario.text.document import Document, Place, parse_value, walk

_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*\Z")
#: Tables whose keys are themselves dotted paths.
_DOTTED_KEYS = ("sweep", "expect")


def apply_sets(document: Document, sets: Sequence[str], faults: list[Fault]) -> list[str]:
    """Puts `path=value` texts of the command line on top of a document; their faults cite `--set`.

    Returns:
        The dotted paths that were set.
    """
    done: list[str] = []
    for text in sets:
        path, equals, value = text.partition("=")
        path = path.strip()
        if not equals:
            faults.append(Fault(f"'{text[:80]}' has no '='", file="--set", hint="write --set path=value"))
            continue
        if not _PATH.match(path):
            faults.append(
                Fault(f"'{path[:80]}' is not a dotted path", file="--set", hint="such as parallel.sharding_factor")
            )
            continue
        try:
            read = parse_value(value, "--set")
        except UserError as error:
            faults += [Fault(f.message, field=path, file="--set", hint=f.hint) for f in error.faults]
            continue
        assign(document, path, read, ("--set", 0), faults)
        done.append(path)
    return done


#: How one figure below a name is set that has no fields of its own here.
_ONE_FIGURE = {"cluster.topology.gpu": "cluster.gpu has single figures such as memory; for others write "
                                       "cluster.topology.gpu={like: NAME, sms: 100}"}


def assign(document: Document, path: str, value: Any, place: Place, faults: list[Fault]) -> None:
    """Sets one dotted path in a document, whole, opening names (a topology's, a precision's) that it goes inside of."""
    head, _, rest = path.partition(".")
    parts = [head, rest] if head in _DOTTED_KEYS and rest else path.split(".")
    here = document.data
    for depth, part in enumerate(parts[:-1]):
        walked = ".".join(parts[: depth + 1])
        inner = here.get(part)
        if isinstance(inner, str):
            inner = _opened(walked, inner, document)
        elif isinstance(inner, int) and walked == "training.document":
            inner = {"mean": inner}
        elif isinstance(inner, dict):
            inner = dict(inner)
        elif inner is None:
            inner = {}
            document.places[walked] = place
        if not isinstance(inner, dict):
            faults.append(
                Fault(
                    f"'{walked}' has no fields: it is a single value",
                    field=path,
                    file=place[0],
                    line=place[1],
                    hint=_ONE_FIGURE.get(walked, f"set {walked} itself"),
                )
            )
            return
        here[part] = inner
        here = inner
    here[parts[-1]] = value
    for below in [p for p in document.places if p == path or p.startswith(path + ".")]:
        del document.places[below]
    for below, _ in walk(value, path):
        document.places[below] = place


def _opened(path: str, name: str, document: Document) -> Any:
    """The mapping a name stands for, so that one field inside it can be changed; the name if it stands for none."""
    if path == "cluster.topology":
        try:
            found = find_topology(name, document.folder)
        except UserError:
            return name
        for below, place in found.places.items():
            document.places[f"{path}.{below}" if below else path] = place
        return dict(found.data)
    if path == "training.precision" and name in PRECISIONS:
        return dict(PRECISIONS[name])
    if path in ("training.recompute", "training.mode"):
        return {}
    if path == "model" and preset(name) is not None:
        return {"preset": name}
    return name
