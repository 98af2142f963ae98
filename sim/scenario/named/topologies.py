"""Finding a cluster: a name of `topologies/`, a path, or the mapping such a file holds."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from sim.catalog import folder, names
from sim.errors import Fault, UserError, nearest
from sim.scenario.text.document import Document, beside, read_document
from sim.scenario.text.other_names import other_value


def topology_names() -> list[str]:
    """Names of the clusters that come with the product."""
    return names("topologies")


@lru_cache(maxsize=256)
def _shipped(name: str) -> Document:
    return read_document(folder("topologies") / f"{name}.yaml", f"topologies/{name}.yaml")


def find_topology(name: str, base: Path) -> Document:
    """The document of a topology given by name, or by path relative to `base`.

    Raises:
        UserError: no such topology or file; its faults have no place yet where the name itself is wrong.
    """
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        known = topology_names()
        if name in known:
            return _shipped(name)
        hint = other_value("cluster.topology", name) or nearest(name, known) or (
            "see 'drystep list topologies', give the path of a file, or write the mapping here")
        raise UserError(Fault(f"there is no topology named '{name[:80]}'", hint=hint))
    path, shipped = beside(base, name), Path(name).stem
    if not path.exists() and shipped in topology_names():
        raise UserError(Fault(f"'{name[:80]}': no such file", hint=f"the catalogue's is called by its name: {shipped}"))
    return read_document(path, name, "topology")
