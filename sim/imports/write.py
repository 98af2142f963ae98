"""What `import` prints and writes: the scenario with the origin of each line, and what became of every setting."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from sim.imports.draft import Imported, Kind, Note
from sim.scenario.fields.schema import Scenario

_SECTIONS = ("name", "cluster", "model", "training", "parallel", "software")
_WIDTH = 120
#: Column in which the origin of a line stands, where the line is shorter.
_COMMENT_AT = 44


def to_yaml(imported: Imported, kind: str, files: Sequence[str]) -> str:
    """The scenario file: a line a field, behind it which setting said so."""
    lines = [f"# Written by drystep import {kind} from {', '.join(files)}."]
    left = "; ".join(f"{note.said} = {_short(note.value)}: {note.text}" for note in imported.of("left"))
    lines += textwrap.wrap(left, _WIDTH, initial_indent="# No field says: ", subsequent_indent="#   ")
    data = imported.data
    for section in [*_SECTIONS, *(one for one in data if one not in _SECTIONS)]:
        value = data.get(section)
        if value is None or value == {}:
            continue
        if not isinstance(value, Mapping):
            lines.append(_line(0, section, value, _origin(imported.notes, section)))
            continue
        lines.append(f"{section}:")
        lines += [_line(2, key, value[key], _origin(imported.notes, f"{section}.{key}"))
                  for key in sorted(value, key=_order(section))]
    return "\n".join(lines) + "\n"


def to_text(imported: Imported) -> str:
    """What became of every setting, for people."""
    width = max(60, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns))
    taken, assumed, left = imported.of("taken"), imported.of("assumed"), imported.of("left")
    lines = [f"{len(taken)} taken", *_table([(n.field, _short(n.value), _why(n)) for n in taken], width)]
    if assumed:
        lines += ["", f"{len(assumed)} assumed, since no file says",
                  *_table([(n.field, _short(n.value), n.text) for n in assumed], width)]
    if left:
        lines += ["", f"{len(left)} that no field can say, though time or memory may depend on it",
                  *_table([(n.said, _short(n.value), n.text) for n in left], width)]
    heads: tuple[tuple[Kind, str], ...] = (
        ("default", "read, and changing nothing beside the others"), ("idle", "without effect on time or memory"),
        ("unknown", "not known here, so not read"))
    for kind, head in heads:
        notes = imported.of(kind)
        if notes:
            lines += ["", f"{len(notes)} {head}", *_listed(notes, width)]
    return "\n".join(lines) + "\n"


def to_json(imported: Imported) -> dict[str, Any]:
    """The scenario and the notes as plain data."""
    return {"scenario": imported.data,
            "notes": [{"kind": n.kind, "field": n.field, "value": n.value, "said": n.said, "why": n.text}
                      for n in imported.notes]}


def _order(section: str) -> Callable[[str], int]:
    """Fields of a table in the order of `drystep list fields`."""
    table = Scenario.model_fields[section].annotation if section in Scenario.model_fields else None
    names = list(getattr(table, "model_fields", ()))
    return lambda key: names.index(key) if key in names else len(names)


def _line(indent: int, key: str, value: Any, origin: str) -> str:
    written = f"{' ' * indent}{key}: {_flow(value)}"
    return f"{written:<{_COMMENT_AT}}  # {origin}" if origin else written


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False,
                          allow_unicode=True).removesuffix("\n").removesuffix("\n...")


def _origin(notes: Iterable[Note], path: str) -> str:
    """Where a line of the file comes from: every setting that said it or a part of it."""
    found = [n.said or f"assumed: {n.text}" for n in notes if n.kind in ("taken", "assumed")
             and (n.field == path or n.field.startswith(f"{path}."))]
    return "; ".join(dict.fromkeys(found))


def _why(note: Note) -> str:
    return f"{note.said} ({note.text})" if note.text else note.said


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def _table(rows: Sequence[tuple[str, str, str]], width: int) -> list[str]:
    first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines = []
    for name, value, why in rows:
        head = f"  {name:<{first}}  {value:<{second}}  "
        lines += textwrap.wrap(why, max(width, len(head) + 30), initial_indent=head, subsequent_indent=" " * len(head),
                               break_long_words=False, break_on_hyphens=False) or [head.rstrip()]
    return lines


def _listed(notes: Sequence[Note], width: int) -> list[str]:
    """Names alone, file by file, and what each may be a slip of."""
    by_file: dict[str, list[str]] = {}
    for note in notes:
        file, _, name = note.said.rpartition(": ")
        by_file.setdefault(file, []).append(_why(replace(note, said=name)))
    lines = []
    for file, names in by_file.items():
        lines += textwrap.wrap(f"{file}: {', '.join(names)}", width, initial_indent="  ", subsequent_indent="    ",
                               break_long_words=False, break_on_hyphens=False)
    return lines
