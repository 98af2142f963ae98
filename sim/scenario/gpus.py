"""What the scenario must know of GPUs: their names, spellings and which dtypes they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.catalog import table


def gpu_names() -> list[str]:
    """Names of the catalogue."""
    return list(table("hardware/gpus.yaml")["gpus"])


def canonical_gpu(name: str) -> str | None:
    """The catalogue's name of a GPU given by that name or a vendor's spelling, None if there is none."""
    catalogue = table("hardware/gpus.yaml")
    if name in catalogue["gpus"]:
        return name
    aliases: Mapping[str, str] = catalogue.get("aliases", {})
    found = aliases.get(name)
    if found is None:
        lower = name.strip().lower()
        found = (
            lower if lower in catalogue["gpus"] else next((v for k, v in aliases.items() if k.lower() == lower), None)
        )
    return found


def gpu_facts(name: str) -> dict[str, Any]:
    """The catalogue's entry of a GPU by its own name."""
    facts: dict[str, Any] = table("hardware/gpus.yaml")["gpus"][name]
    return facts
