"""What each trouble of a cluster costs: the step with it against the step of the same cluster without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sim.scenario.fields.cluster import Cluster, Degraded
from sim.scenario.fields.schema import Scenario

#: More entries than this are not taken away one by one but all of a field at once.
_SINGLY = 6
#: The field of all troubles together.
ALL = "cluster"
_LINKS = {"gpu": "link of GPU", "nic": "NIC", "leaf": "leaf", "pcie": "PCIe switch"}


@dataclass(frozen=True, slots=True)
class Trouble:
    """One trouble.

    Attributes:
        what: in words.
        field: of the scenario that tells it; `ALL` of all of them.
        without_s: the step without it, everything else as it is.
        slowdown: the step with it over that.
    """

    what: str
    field: str
    without_s: float
    slowdown: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"what": self.what, "field": self.field, "without_s": self.without_s, "slowdown": self.slowdown}


def troubles(scenario: Scenario, step_s: float, predict: Callable[[Scenario], float]) -> list[Trouble]:
    """Every trouble of a scenario with what it costs, the dearest first; of several, all together last.

    Args:
        step_s: the step with all of them.
        predict: step time of another scenario, seconds.
    """
    found = []
    each = list(_taken_away(scenario.cluster))
    if len(each) > 1:  # two of a kind cost nothing one by one: either holds the job up as long as the other
        each.append(("all of these", ALL, _well(scenario.cluster)))
    for what, field, cluster in each:
        without_s = predict(scenario.model_copy(update={"cluster": cluster}))
        found.append(Trouble(what, field, without_s, step_s / without_s))
    return sorted(found, key=lambda trouble: (trouble.field == ALL, -trouble.slowdown))


def _well(cluster: Cluster) -> Cluster:
    """The cluster without any of its troubles."""
    plain = cluster.topology.model_copy(update={"degraded": None})
    return cluster.model_copy(update={"topology": plain, "slow_gpus": None, "other_gpus": None, "degraded": None,
                                      "clock_spread": None})


def troubled(scenario: Scenario) -> bool:
    """Whether anything of the cluster is not like the rest."""
    return next(_taken_away(scenario.cluster), None) is not None


def _taken_away(cluster: Cluster) -> Iterator[tuple[str, str, Cluster]]:
    """(trouble in words, its field, the cluster without it)."""
    lists = {"slow_gpus": [_slow(s.gpu, s.clock, s.memory_bandwidth) for s in cluster.slow_gpus or ()],
             "other_gpus": [f"{o.gpu} on {_nodes(o.first_node, o.nodes)}" for o in cluster.other_gpus or ()],
             "degraded": [_link(d) for d in cluster.degraded or ()]}
    whole = sum(map(len, lists.values())) > _SINGLY
    for field, words in lists.items():
        path, entries = f"cluster.{field}", getattr(cluster, field) or ()
        if whole and len(words) > 1:
            name = {"slow_gpus": "slow GPUs", "other_gpus": "kinds of other GPUs", "degraded": "degraded links"}[field]
            yield f"{len(words):,} {name}", path, cluster.model_copy(update={field: None})
            continue
        for i, what in enumerate(words):
            rest = [entry for j, entry in enumerate(entries) if j != i]
            yield what, f"{path}.{i}", cluster.model_copy(update={field: rest})
    template = cluster.topology.degraded or ()
    if template:
        plain = cluster.topology.model_copy(update={"degraded": None})
        what = _link(template[0]) if len(template) == 1 else f"{len(template):,} degraded links of the topology"
        yield what, "cluster.topology.degraded", cluster.model_copy(update={"topology": plain})
    spread = cluster.clock_spread
    if spread is not None:
        yield (f"clocks {100 * spread.sigma:g}% apart (seed {spread.seed})", "cluster.clock_spread",
               cluster.model_copy(update={"clock_spread": None}))


def _nodes(first: int, count: int) -> str:
    return f"node {first}" if count == 1 else f"nodes {first} to {first + count - 1}"


def _slow(number: int, clock: float, memory: float) -> str:
    parts = [f"{100 * share:g}% of its {name}" for share, name in ((clock, "clock"), (memory, "memory bandwidth"))
             if share < 1]
    return f"GPU {number} at {' and '.join(parts) or 'full speed'}"


def _link(one: Degraded) -> str:
    return (f"{_LINKS[one.link]} {one.index} failed" if one.share == 0
            else f"{_LINKS[one.link]} {one.index} at {100 * one.share:g}%")
