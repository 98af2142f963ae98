"""Measured NCCL sweeps and what the network predicts for them, fast enough to sit inside a fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from sim.catalog import folder, table
from sim.measured.harness import Harness, harness_of, nccl_version
from sim.network import Network, Topology
from sim.network.figures import Figures
from sim.network.nccl.candidate import Candidate
from sim.network.network import choose

Floats = npt.NDArray[np.float64]
#: Sizes below this are not counted: some clocks resolve no more (issue 4).
LEAST_BYTES = 1024
_KIND = {"send_recv": "send"}
#: Files of measured sweeps in `calibration/data`.
_FILES = ("collectives", "collectives_aic", "collectives_peers", "collectives_engines")


@dataclass(slots=True)
class Sweep:
    """One sweep on one machine.

    Attributes:
        id, site, kind: name, cluster it was measured on, a name of `sim.work.COLLECTIVES`.
        nodes, ranks: of the communicator, which is the first ranks of the machine.
        sizes, measured_us: shape (rows,).
        series: whoever measured several sites alike, "" for a site of its own.
        noisy_below: bytes below which the source calls its rows noise; noise_waits: that noise is waiting for late
            ranks, which only adds.
        choices: NCCL's algorithm and protocol of each row, as an index into `options()`.
    """

    id: str
    site: str
    kind: str
    nodes: int
    ranks: int
    sizes: list[int]
    measured_us: Floats
    network: Network
    harness: Harness
    members: npt.NDArray[np.int64]
    noisy_below: int = 0
    noise_waits: bool = False
    series: str = ""
    choices: list[int] = field(default_factory=list)

    @property
    def fitted(self) -> npt.NDArray[np.bool_]:
        """Rows a fit looks at: the counted ones that their source does not call noise, and of those whose noise waits
        the ones that no larger call undercuts."""
        quiet = np.array(self.sizes) >= self.noisy_below
        if self.noise_waits:
            least_after = np.append(np.minimum.accumulate(self.measured_us[::-1])[::-1][1:], np.inf)
            quiet |= self.measured_us <= least_after
        return self.counted & quiet

    @property
    def counted(self) -> npt.NDArray[np.bool_]:
        """Rows that count in a sweep's error."""
        return np.array(self.sizes) >= LEAST_BYTES

    def options(self) -> list[tuple[Candidate, float]]:
        """Ways to serve the sweep's calls, with the rate of each alone."""
        return self.network.options(self.kind, self.network.placement(self.members))

    def predict_us(self, with_harness: bool = True) -> Floats:
        """Time of each row, us; `with_harness` as the benchmark would read it, without as the collective takes."""
        options = self.options()
        if not self.choices:
            self.choices = [options.index(choose(options, size)) for size in self.sizes]
        times = []
        for size, choice in zip(self.sizes, self.choices, strict=True):
            way, rate = options[choice]
            time = way.latency_at(size, rate) + size / rate
            if with_harness:
                if self.harness.timing == "kernel":  # of the first rank, which of two is the sender
                    time = way.sender_s(size, rate)
                floor = self.harness.floor_s(self.kind, self.ranks, way.open_channels(size),
                                             self.network.topology.figures)
                time = max(time, floor) + self.harness.adds_s(self.network.topology.figures)
            times.append(time)
        return np.array(times) * 1e6

    def names(self) -> list[str]:
        """Algorithm and protocol of each row."""
        options = self.options()
        if not self.choices:
            self.predict_us()
        return [f"{options[c][0].algorithm}/{options[c][0].protocol}" for c in self.choices]

    def refresh(self) -> None:
        """Take the figures anew (after a fit has changed them); NCCL's choices do not depend on them."""
        self.network.refresh()

    def reads(self) -> frozenset[str]:
        """Names of the figures its predictions rest on, the others' shifts need not be tried by a fit."""
        own, reader = self.network.topology, _Reader(self.network.topology.figures.own())
        self.network.topology = replace(own, figures=reader)
        self.network.refresh()
        self.predict_us()
        self.network.topology = own
        self.network.refresh()
        return frozenset(reader.names)

    def error(self) -> float:
        """Mean absolute relative error over the counted rows."""
        errors = np.abs(self.predict_us() / self.measured_us - 1.0)
        return float(errors[self.counted].mean())


class _Reader(Figures):
    """Figures that remember which of them were looked up."""

    __slots__ = ("names",)

    def __init__(self, own: Mapping[str, float]) -> None:
        super().__init__(own)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.names.add(name)
        return super().__getitem__(name)


def topology_mapping(topology: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A topology's mapping, read from the catalogue when it is a name."""
    if isinstance(topology, Mapping):
        return topology
    with open(folder("topologies") / f"{topology}.yaml", encoding="utf-8") as file:
        loaded: Mapping[str, Any] = yaml.safe_load(file)
    return loaded


def sweep_of(entry: Mapping[str, Any], mapping: Mapping[str, Any] | None = None) -> Sweep:
    """Build a sweep from its entry in a file of kind `collectives`; `mapping` replaces its topology."""
    cluster = entry["cluster"]
    mapping = mapping or topology_mapping(cluster["topology"])
    nodes, per_node = int(cluster.get("nodes", 1)), int(cluster.get("gpus_per_node") or mapping["gpus_per_node"])
    ranks = int(entry["ranks"])
    rows = [row for row in entry["rows"] if row[0] > 0 and row[1] > 0]
    topology = Topology.from_mapping(mapping)
    said = {**entry, "nodes": nodes}
    network = Network(topology, nodes, per_node, nccl={
        "version": nccl_version(said, topology.generation), "algorithm": entry.get("algorithm")},
        peer_sums=str(entry.get("kernel") or ""))
    return Sweep(
        id=str(entry["id"]), site=str(entry.get("site", entry["id"])), kind=_KIND.get(entry["op"], entry["op"]),
        nodes=-(-ranks // per_node), ranks=ranks, sizes=[int(row[0]) for row in rows],
        measured_us=np.array([float(row[1]) for row in rows]),
        network=network, harness=harness_of(said, topology.generation),
        members=np.arange(ranks, dtype=np.int64).reshape(1, -1), noisy_below=int(entry.get("noisy_below", 0)),
        noise_waits=bool(entry.get("noise_waits", False)), series=str(entry.get("series", "")))


def load() -> list[Sweep]:
    """The project's own sweeps."""
    return [sweep_of(entry) for name in _FILES for entry in table(f"calibration/data/{name}.yaml")["sweeps"]]


def summary(sweeps: Iterable[Sweep]) -> dict[str, tuple[int, float, float]]:
    """Count, median and 90th percentile of the sweeps' errors, for one node and several."""
    found: dict[str, list[float]] = {"one node": [], "several nodes": []}
    for sweep in sweeps:
        found["one node" if sweep.nodes == 1 else "several nodes"].append(sweep.error())
    return {name: (len(errors), float(np.median(errors)), float(np.percentile(errors, 90)))
            for name, errors in found.items() if errors}
