"""A resolved scenario as plain data, every default filled in: the `scenario` field of a result."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from sim.scenario.fields.schema import Prefetch, Scenario


def dump(scenario: Scenario) -> dict[str, Any]:
    """JSON-able mapping that reads back as the same scenario (`resolve(dump(s)) == s`)."""
    plain = _plain(scenario)
    assert isinstance(plain, dict)
    for name in ("sweep", "expect", "budget", "claim"):
        if not plain.get(name):
            plain.pop(name, None)
    plain["training"].pop("micro_steps")  # told by global_batch
    if scenario.model.kind == "layers":  # a table of layers has no transformer sizes
        plain["model"] = {key: value for key, value in plain["model"].items() if value != 0 or value is False}
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        fields = {name: _plain(getattr(value, name)) for name in type(value).model_fields}
        if isinstance(value, Prefetch) and value.limit is None:
            fields["limit"] = "none"
        return fields
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
