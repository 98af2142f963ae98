"""Where the data files are: topologies and scenarios beside the package or inside the wheel, catalogues inside rooms.

Floor 0. In a checkout (editable install) `topologies/` and `scenarios/` stand beside `sim/`; a wheel carries them as
`sim/_data/`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder `topologies` or `scenarios`."""
    inside = _PACKAGE / "_data" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def names(name: str) -> list[str]:
    """Names (without .yaml) of the files in the folder `topologies` or `scenarios`, sorted."""
    return sorted(p.stem for p in folder(name).glob("*.yaml"))


@cache
def table(relative: str) -> dict[str, Any]:
    """A catalogue inside the package, e.g. `table("hardware/gpus.yaml")`. Treat it as read-only."""
    with open(_PACKAGE / relative, encoding="utf-8") as file:
        loaded = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if not isinstance(loaded, dict):
        raise TypeError(f"{relative}: expected a mapping")
    return loaded
