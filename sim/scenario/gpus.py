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


def is_profile(spec: Any) -> bool:
    """Whether a GPU is given as the path of a profile rather than by name."""
    return isinstance(spec, str) and spec.endswith((".yaml", ".yml"))


def gpu_facts(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """The catalogue's entry of a GPU by its own name, or of the one a profile is `like` with the profile's fields."""
    entries: dict[str, dict[str, Any]] = table("hardware/gpus.yaml")["gpus"]
    if isinstance(spec, str):
        return entries[spec]
    return entries[spec["like"]] | {key: value for key, value in spec.items() if key not in ("like", "name")}
