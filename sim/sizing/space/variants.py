"""Variants of the clusters that are searched, and what a row says of the one that it stands on where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.scenario import Scenario
from sim.scenario.fields.precisions import PRECISIONS
from sim.scenario.fields.schema import Precision

#: The field that says a row's precision.
PRECISION = "training.precision"


def part_of_a_node(scenario: Scenario, clusters: Sequence[Scenario]) -> bool:
    """Whether another of `clusters` has larger nodes of this kind: this one is then part of a single such node."""
    own = scenario.cluster
    return any(other.topology == own.topology and other.gpus_per_node > own.gpus_per_node
               for other in (one.cluster for one in clusters))


def told_of(clusters: Sequence[Scenario], precisions: bool) -> list[dict[str, Any]]:
    """Dotted fields of each cluster's scenario that tell it from its variants.

    Args:
        precisions: whether precisions are an axis.
    """
    outside = any(one.parallel.offload != clusters[0].parallel.offload for one in clusters)
    parts = any(part_of_a_node(one, clusters) for one in clusters)
    transfers = len({one.parallel.overlap_p2p for one in clusters}) > 1
    return [{
        **({f"parallel.offload.{name}": place for name, place in one.parallel.offload if isinstance(place, str)}
           if outside else {}),
        **({"cluster.gpus_per_node": one.cluster.gpus_per_node} if parts else {}),
        **({"parallel.overlap_p2p": one.parallel.overlap_p2p} if transfers else {}),
        **({PRECISION: _said(one.training.precision)} if precisions else {})} for one in clusters]


def _said(precision: Precision) -> Any:
    """A precision as a scenario says it: its name, or all of its dtypes where it has none."""
    return precision.name if precision.name in PRECISIONS else precision.model_dump()
