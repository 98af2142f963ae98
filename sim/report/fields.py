"""Every field a scenario may have, as rows: what `drystep list fields` shows, read off the JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sim.scenario.json_schema import json_schema

Node = Mapping[str, Any]

#: Names of a catalogue are listed by another command where there are more than this.
_MOST_NAMES = 14
#: Fields whose names are a catalogue's, and the command that lists it.
_CATALOGUES = {"cluster.topology": "topologies", "cluster.topology.gpu": "gpus", "model.preset": "models",
               "training.precision": "precisions"}
#: What the scenario says about itself has a paragraph in the guide, and no fields below it here.
_CLOSED = ("expect", "claim.figures")


def field_rows() -> list[dict[str, Any]]:
    """A row per field: its dotted path, what it takes, its default ("" where it depends or is required) and meaning."""
    schema = json_schema()
    return list(_rows(schema, "", schema["$defs"]))


def _rows(table: Node, head: str, tables: Node) -> Iterator[dict[str, Any]]:
    required = {*table.get("required", ()), *(name for choice in table.get("anyOf", ()) if "oneOf" in choice
                                              for name in choice["required"])}
    for name, node in table.get("properties", {}).items():
        path = f"{head}{name}"
        default = node.get("default")
        yield {"field": path, "takes": ", ".join(dict.fromkeys(_takes(node, path, tables))),
               "default": "required" if name in required else _plain(default),
               "meaning": _said(node, tables)}
        if path not in _CLOSED:
            for inner in _tables(node, tables):
                yield from _rows(inner, f"{path}.", tables)


def _tables(node: Node, tables: Node) -> Iterator[Node]:
    """The mappings that may stand in a field's place."""
    if "$ref" in node:
        yield tables[node["$ref"].rpartition("/")[2]]
    elif node.get("properties"):
        yield node
    for choice in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _tables(choice, tables)
    if node.get("type") == "array":
        yield from _tables(node.get("items", {}), tables)


def _takes(node: Node, path: str, tables: Node) -> Iterator[str]:
    choices = (*node.get("anyOf", ()), *node.get("oneOf", ()))
    if choices:
        for choice in choices:
            yield from _takes(choice, path, tables)
    elif "enum" in node:
        listed = _CATALOGUES.get(path)
        yield (f"a name (drystep list {listed})" if listed else
               " | ".join(map(str, node["enum"])) if len(node["enum"]) <= _MOST_NAMES else "a name")
    elif "const" in node:
        yield str(node["const"])
    elif "$ref" in node or node.get("type") == "object":
        yield "a mapping"
    elif node.get("type") == "array":
        inner = " or ".join(dict.fromkeys(_takes(node.get("items", {}), path, tables))) or "values"
        yield f"a list of: {inner}"
    elif node.get("type") == "boolean":
        yield "true | false"
    elif node.get("type") in ("integer", "number"):
        unit = f" of {node['description']}" if node.get("description") and len(node["description"]) < 24 and (
            "default" not in node) and node["description"] in _UNITS else ""
        yield ("a whole number" if node["type"] == "integer" else "a number") + unit
    elif node.get("type") == "string" and _CATALOGUES.get(path):
        yield f"a name (drystep list {_CATALOGUES[path]})" if node.get("examples") else "a path"
    elif node.get("type") == "string":
        yield f"text such as {node['examples'][0]}" if node.get("examples") else "text"


#: What a plain number of a field with a unit counts.
_UNITS = ("bytes", "seconds", "bytes per second", "gigabits per second", "W", "MiB", "hours")


def _said(node: Node, tables: Node) -> str:
    found = node.get("description") or next((t.get("description", "") for t in _tables(node, tables)), "")
    return str(found).partition("\n\n")[0].replace("\n", " ")


def _plain(value: Any) -> str:
    if value is None or isinstance(value, dict):
        return ""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
