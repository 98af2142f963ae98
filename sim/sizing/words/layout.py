"""A row's layout in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.sizing.words import requests as served_text


def layout_of(sets: Mapping[str, Any]) -> str:
    """A row's fields in words; what is off or one is left out (but whole experts on tensor ranks, which are not what
    comes of itself), and what is on is named alone."""
    if served_text.BATCH in sets:
        return served_text.layout(sets)
    shown = {name.removeprefix("parallel.").removeprefix("training."): value for name, value in sets.items()
             if name != "cluster.nodes" and value is not None
             and (value is True or value not in (1, False) or name == "parallel.expert_tensor")
             and not (name == "parallel.reshard_after_forward" and value is True)  # what goes without saying
             and (value != "none" or "offload" not in name)
             and (name != "parallel.schedule" or sets["parallel.pipeline"] > 1)}
    return " ".join(name if value is True else f"{name}={said(value)}" for name, value in shown.items())


def said(value: Any) -> str:
    """A field's value."""
    if not isinstance(value, Mapping):
        return str(value)
    if "compute" in value:
        return str(value["name"])
    return f"first-{value['layers']}-blocks" if "layers" in value else "+".join(value["modules"])
