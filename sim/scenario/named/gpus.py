"""What the scenario must know of GPUs: their names, spellings and which dtypes they have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic_core import PydanticCustomError

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


def resembled(figures: Mapping[str, Any]) -> str | None:
    """The GPU of the catalogue whose 16-bit products and memory bandwidth are nearest, in ratio, to those given; None
    where neither is."""
    from sim.scenario.fields.units import BYTES_PER_S

    tflops = figures.get("tflops")
    halves = [tflops.get(name) for name in ("bf16", "fp16")] if isinstance(tflops, Mapping) else []
    try:
        bandwidth = BYTES_PER_S.read(figures["memory_bandwidth"]) / 1e9 if "memory_bandwidth" in figures else None
    except PydanticCustomError:
        return None
    wanted = (next((half for half in halves if _positive(half)), None), bandwidth)
    if not any(map(_positive, wanted)):
        return None
    entries: Mapping[str, dict[str, Any]] = table("hardware/gpus.yaml")["gpus"]

    def off(name: str) -> float:
        has = (entries[name]["tflops"].get("fp16"), entries[name]["memory_bandwidth_gb_s"])
        return sum(abs(math.log(mine / theirs)) for mine, theirs in zip(wanted, has, strict=True) if _positive(mine))

    return min(entries, key=off)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def gpu_facts(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """The catalogue's entry of a GPU by its own name, or of the one a profile is `like` with the profile's fields."""
    entries: dict[str, dict[str, Any]] = table("hardware/gpus.yaml")["gpus"]
    if isinstance(spec, str):
        return entries[spec]
    return entries[spec["like"]] | {key: value for key, value in spec.items() if key not in ("like", "name")}
