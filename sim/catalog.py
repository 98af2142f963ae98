"""Where the data files are: topologies and scenarios beside the package or inside the wheel, catalogues inside rooms.

Floor 0. In a checkout (editable install) `topologies/` and `scenarios/` stand beside `sim/`; a wheel carries them as
`sim/_data/`.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_BRANDS = ("nvidia", "amd", "geforce", "tesla", "instinct")
_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder `topologies` or `scenarios`."""
    inside = _PACKAGE / "_data" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def names(name: str) -> list[str]:
    """Names (without .yaml) of the files in the folder `topologies` or `scenarios`, sorted."""
    return sorted(p.stem for p in folder(name).glob("*.yaml"))


def plain_spelling(name: str) -> str:
    """A vendor's product name without case, punctuation and brand: `NVIDIA GeForce RTX 4090` and `rtx-4090` are one."""
    text = "".join(c for c in name.lower() if c.isalnum())
    for brand in _BRANDS:
        text = text.removeprefix(brand)
    return text


@cache
def table(relative: str) -> dict[str, Any]:
    """A catalogue inside the package, e.g. `table("hardware/gpus.yaml")`. Treat it as read-only."""
    path = _PACKAGE / relative
    loaded = _compiled(path)
    if not isinstance(loaded, dict):
        raise TypeError(f"{relative}: expected a mapping")
    return loaded


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with single figures of nested mappings replaced."""
    result = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if nested else value
    return result


def inherited(entries: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """An entry of a catalogue, with what the one it names as `like` says where it says nothing."""
    own = {key: value for key, value in entries[name].items() if key != "like"}
    return merged(inherited(entries, entries[name]["like"]), own) if "like" in entries[name] else own


def _compiled(path: Path) -> Any:
    """The file's content, kept parsed beside it as Python keeps its modules: parsing is a twentieth of a short run.

    As with modules, the copy belongs to one size and time of the file, and a folder that cannot be written is no fault.
    """
    status = path.stat()
    copy = path.parent / "__pycache__" / f"{path.name}.{sys.implementation.cache_tag}"
    stamp = (status.st_mtime_ns, status.st_size)
    try:
        kept = marshal.loads(copy.read_bytes())
        if kept[0] == stamp:
            return kept[1]
    except (OSError, ValueError, EOFError, TypeError, IndexError):
        pass
    with open(path, encoding="utf-8") as file:
        loaded = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if not sys.dont_write_bytecode:
        with suppress(OSError, ValueError):
            copy.parent.mkdir(exist_ok=True)
            whole = copy.with_name(f"{copy.name}.{os.getpid()}")  # written aside, so that no reader meets half a copy
            whole.write_bytes(marshal.dumps((stamp, loaded)))
            whole.replace(copy)
    return loaded
