"""Ranks that are not like the others: kinds of GPUs, draws of clocks, trouble on links, as an initial colour per rank.

The colours are refined to classes (`layout.equitable_classes`); what is slow splits off those that meet it in a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.errors import Fault, UserError
from sim.network.fabric.topology import Topology, speeds
from sim.network.fabric.trouble import link_colours
from sim.parallel.layout import Layout, Ranks, equitable_classes
from sim.parallel.places import place_colours
from sim.scenario.fields.schema import Scenario

#: Classes of ranks that are simulated at most: trouble in very many places at once costs minutes beyond it.
MOST_CLASSES = 1024
#: Draws of clocks are rounded so that about so many classes come out.
_SPREAD_CLASSES = 96
#: First step of that rounding, in standard deviations; it doubles until classes are few, up to the last.
_FIRST_STEP, _LAST_STEP = 0.125, 2.0


class GpuKind(NamedTuple):
    """Hardware of a class of ranks.

    Attributes:
        gpu: catalogue name, "" = the cluster's own.
        clock, memory_bandwidth: shares of its like's.
    """

    gpu: str = ""
    clock: float = 1.0
    memory_bandwidth: float = 1.0


@dataclass(frozen=True)
class Variety:
    """Ranks told apart before groups are looked at.

    Attributes:
        kinds: hardware kinds, indexed by `devices`.
        devices: kind of each rank, shape (ranks,); None = all are kind 0.
        links: colour of the links each rank uses, shape (ranks,); None = alike.
        places: colour of how each rank's groups lie on nodes, shape (ranks,); None = alike in every stage.
        step: clocks were drawn and rounded to multiples of this share, 0 = none were.
    """

    kinds: tuple[GpuKind, ...] = (GpuKind(),)
    devices: Ranks | None = None
    links: Ranks | None = None
    step: float = 0.0
    places: Ranks | None = None

    @property
    def colours(self) -> Ranks | None:
        """Initial colour per rank, None where all ranks are alike."""
        found: Ranks | None = None
        for own in (self.devices, self.links, self.places):
            if own is not None:
                found = own if found is None else found * (int(own.max()) + 1) + own
        return found


#: All ranks alike.
ALIKE = Variety()


def variety(scenario: Scenario, layout: Layout, groups: Mapping[str, Ranks]) -> Variety:
    """What the scenario says of GPUs and links that are not like the others.

    Args:
        layout: where the parallel dimensions lie.
        groups: of all ranks by name, for counting how many classes draws of clocks would make.

    Raises:
        UserError: clocks spread over a layout in which hardly two ranks would be alike.
    """
    cluster, places = scenario.cluster, place_colours(scenario, layout, groups)
    if not (cluster.slow_gpus or cluster.other_gpus or cluster.clock_spread or cluster.degraded
            or cluster.topology.degraded):
        return ALIKE if places is None else Variety(places=places)
    links = _links(scenario, groups)
    if cluster.clock_spread is None:
        return replace(_kinds(scenario, np.ones(scenario.gpus), links, 0.0), places=places)
    step = _FIRST_STEP
    while True:
        found = _kinds(scenario, _drawn(scenario, layout, step), links, step * cluster.clock_spread.sigma)
        classes = _count(found.colours, layout, groups)
        if classes <= _SPREAD_CLASSES:
            return found
        step *= 2
        if step > _LAST_STEP:
            if classes <= MOST_CLASSES:
                return found
            raise UserError(Fault(f"clocks that differ make {classes:,} kinds of ranks in this layout, and at most "
                                  f"{MOST_CLASSES:,} are simulated", "cluster.clock_spread",
                                  hint="use fewer GPUs, or a layout with fewer groups (ddp, or fsdp over all GPUs)"))


def _kinds(scenario: Scenario, clock: npt.NDArray[np.float64], links: Ranks | None, step: float) -> Variety:
    """Every rank's GPU, clock and memory bandwidth, as kinds by number."""
    cluster, gpus = scenario.cluster, scenario.gpus
    names = ["", *dict.fromkeys(one.gpu for one in cluster.other_gpus or ())]
    name, bandwidth = np.zeros(gpus), np.ones(gpus)
    for other in cluster.other_gpus or ():
        begin = other.first_node * cluster.gpus_per_node
        name[begin:begin + other.nodes * cluster.gpus_per_node] = names.index(other.gpu)
    clock = clock.copy()
    for slow in cluster.slow_gpus or ():
        clock[slow.gpu] *= slow.clock
        bandwidth[slow.gpu] *= slow.memory_bandwidth
    rows, devices = np.unique(np.column_stack((name, clock, bandwidth)), axis=0, return_inverse=True)
    kinds = tuple(GpuKind(names[int(row[0])], float(row[1]), float(row[2])) for row in rows)
    return Variety(kinds, devices.reshape(-1).astype(np.int64) if len(kinds) > 1 else None, links, step)


def _drawn(scenario: Scenario, layout: Layout, step: float) -> npt.NDArray[np.float64]:
    """Clock of each rank, share of its kind's, rounded to `step` standard deviations.

    Ranks of a tensor group wait for each other several times in every layer, so each gets the slowest one's clock.
    """
    spread = scenario.cluster.clock_spread
    assert spread is not None, "asked only where clocks are spread"
    drawn = np.random.default_rng(spread.seed).standard_normal(scenario.gpus)
    if layout.sizes["tensor"] > 1:
        together = layout.group("tensor")
        drawn[together] = drawn[together].min(axis=1, keepdims=True)
    rounded: npt.NDArray[np.float64] = 1.0 + spread.sigma * np.round(drawn / step) * step
    return np.clip(rounded, 0.1, 2.0)


def _links(scenario: Scenario, groups: Mapping[str, Ranks]) -> Ranks | None:
    """Colours of degraded links; where they are in so many places that hardly two ranks would be alike, all groups of
    a kind move at the pace of the slowest."""
    cluster = scenario.cluster
    topology = Topology.from_mapping(cluster.template())
    nominal = speeds(topology, cluster.intra_gbps_per_gpu, cluster.inter_gbps_per_node)
    colours = link_colours(topology, nominal, cluster.nodes, cluster.gpus_per_node)
    few = colours is None or int(equitable_classes(colours, groups).max()) < MOST_CLASSES
    return colours if few else None


def _count(colours: Ranks | None, layout: Layout, groups: Mapping[str, Ranks]) -> int:
    """Classes of ranks, pipeline stages told apart."""
    if colours is None:
        return 1
    stages = layout.coordinate("pipeline")
    kinds = dict(groups)
    if layout.sizes["pipeline"] > 1:
        kinds["replica"] = layout.group("pipeline")
    return int(equitable_classes(colours * layout.sizes["pipeline"] + stages, kinds).max()) + 1
