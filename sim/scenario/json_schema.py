"""JSON Schema of a scenario file, for editors: what a user may write, units and names included."""

from __future__ import annotations

from typing import Any

from sim.scenario.fields.cluster import GpuProfile
from sim.scenario.fields.precisions import PRECISIONS
from sim.scenario.fields.schema import Scenario
from sim.scenario.named.gpus import gpu_names
from sim.scenario.named.presets import preset_names
from sim.scenario.named.topologies import topology_names

_POINT = {"type": "object", "description": "dotted field -> value: one point of the sweep", "minProperties": 1}


def json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12)."""
    schema: dict[str, Any] = Scenario.model_json_schema()
    _tidy(schema)
    tables = schema["$defs"]
    _names(tables)
    properties = schema["properties"]
    properties["sweep"] = {
        "type": "object",
        "description": "what-if axes: dotted field -> list of values",
        "additionalProperties": {"type": "array", "minItems": 1},
    }
    properties["expect"] = {
        "type": "object",
        "description": "regression bounds: result field -> bound",
        "additionalProperties": {"anyOf": [*_bound(), {"type": "array", "items": {"anyOf": _bound()}}]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "drystep scenario",
        **{key: value for key, value in schema.items() if key != "title"},
        "description": "a distributed training step, or a request: what runs, on what, and how",
    }


def _names(tables: dict[str, Any]) -> None:
    """Names where a name may stand for a mapping, and the catalogues' names as suggestions or choices."""
    cluster, topology = tables["Cluster"]["properties"], tables["TopologySpec"]["properties"]
    model, training = tables["Model"]["properties"], tables["Training"]["properties"]
    cluster["topology"] = _either(
        {"enum": topology_names()},
        {"type": "string", "pattern": r"\.ya?ml$|/"},
        {"$ref": "#/$defs/TopologySpec"},
        says=cluster["topology"],
    )
    gpu = {"$ref": "#/$defs/GpuFigures"}
    profile = GpuProfile.model_json_schema()
    _tidy(profile)
    topology["gpu"] = _either(
        {"type": "string", "examples": gpu_names()},
        {
            "type": "object",
            "properties": {
                **profile["properties"],
                "like": profile["properties"]["like"] | {"enum": gpu_names()},
                **tables["GpuFigures"]["properties"],
            },
            "required": ["like"],
            "additionalProperties": False,
        },
        says=topology["gpu"],
    )
    cluster["gpu"] = {**gpu, "description": cluster["gpu"].get("description", "")}
    model["preset"] = {"enum": preset_names(), "description": model["preset"]["description"]}
    # a table of layers has no sequences, and a preset's mixture or latent attention fills in what is left out
    step = {"required": [name for name in tables["Training"].pop("required") if name != "sequence"],
            "oneOf": [{"required": ["global_batch"]}, {"required": ["micro_steps"]}]}
    request = {"required": ["mode"], "properties": {"mode": {"type": "object"}}}
    tables["Training"]["anyOf"] = [step, request]
    for part in ("Moe", "Mla"):
        tables[part].pop("required")
    precision = tables["Precision"]
    precision["anyOf"] = [{"required": precision.pop("required")},
                          {"required": ["name"], "properties": {"name": {"enum": list(PRECISIONS)}}}]
    training["precision"] = _either(
        {"enum": list(PRECISIONS)}, {"$ref": "#/$defs/Precision"}, says=training["precision"]
    )


def _either(*choices: dict[str, Any], says: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(choices), "description": says.get("description", "")}


def _bound() -> list[dict[str, Any]]:
    share = {
        "anyOf": [{"type": "string", "pattern": r"^\s*[0-9.]+\s*%\s*$"}, {"type": "number", "minimum": 0, "maximum": 1}]
    }
    number, quantity = {"type": "number"}, {"type": ["number", "string"]}  # a text has a unit
    kinds = (
        {"value": {"type": ["number", "string", "boolean"]}, "within": share},
        {"min": quantity, "max": quantity},
        {"relative_to": {"anyOf": [{"type": "string"}, _POINT]}, "ratio": number, "within": share},
    )
    tables = [
        {"type": "object", "properties": {**kind, "at": _POINT}, "additionalProperties": False, "minProperties": 1}
        for kind in kinds
    ]
    return [{"type": ["number", "string", "boolean"]}, *tables]


def _tidy(node: Any) -> None:
    """Takes out what only says that a field may be left out: null defaults and null alternatives."""
    if isinstance(node, list):
        for item in node:
            _tidy(item)
    elif isinstance(node, dict):
        if "default" in node and node["default"] is None:
            del node["default"]
        choices = node.get("anyOf")
        if isinstance(choices, list) and {"type": "null"} in choices:
            rest = [choice for choice in choices if choice != {"type": "null"}]
            del node["anyOf"]
            node.update(rest[0] if len(rest) == 1 else {"anyOf": rest})
        if isinstance(node.get("title"), str):
            del node["title"]
        for item in node.values():
            _tidy(item)
