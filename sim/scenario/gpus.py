"""What the scenario must know of GPUs: their names, spellings and which dtypes they have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sim.catalog import plain_spelling, table


def gpu_names() -> list[str]:
    """Names of the catalogue."""
    return list(table("hardware/gpus.yaml")["gpus"])


def canonical_gpu(name: str) -> str | None:
    """The catalogue's name of a GPU given by that name or a vendor's spelling, None if there is none."""
    if name in table("hardware/gpus.yaml")["gpus"]:
        return name
    return _spellings().get(plain_spelling(name))


@cache
def _spellings() -> dict[str, str]:
    catalogue = table("hardware/gpus.yaml")
    spelled = {**catalogue["aliases"], **{name: name for name in catalogue["gpus"]}}
    return {plain_spelling(spelling): name for spelling, name in spelled.items()}


def is_profile(spec: Any) -> bool:
    """Whether a GPU is given as the path of a profile rather than by name."""
    return isinstance(spec, str) and spec.endswith((".yaml", ".yml"))


def gpu_facts(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """The catalogue's entry of a GPU by its own name, or of the one a profile is `like` with the profile's fields."""
    entries: dict[str, dict[str, Any]] = table("hardware/gpus.yaml")["gpus"]
    if isinstance(spec, str):
        return entries[spec]
    return entries[spec["like"]] | {key: value for key, value in spec.items() if key not in ("like", "name")}
