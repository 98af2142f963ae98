"""Known architectures by name (`models.yaml`)."""

from __future__ import annotations

from typing import Any

from sim.catalog import table


def preset_names() -> list[str]:
    """Names of all presets, in the catalogue's order."""
    return list(table("scenario/named/models.yaml")["presets"])


def preset(name: str) -> dict[str, Any] | None:
    """The fields of `model` behind a preset's name, None if there is no such preset."""
    fields = table("scenario/named/models.yaml")["presets"].get(name)
    return None if fields is None else {k: v for k, v in fields.items() if k != "source"}


def preset_source(name: str) -> str:
    """Where a preset's figures were published."""
    catalogue = table("scenario/named/models.yaml")
    return str(catalogue["sources"][catalogue["presets"][name]["source"]])
