"""What a user's own cluster leaves out and a prediction rests on: a default stands for it, and a result says which."""

from __future__ import annotations

from collections.abc import Iterable

from sim.scenario import Scenario
from sim.scenario.fields.tables import Table

#: Fields of a network between nodes, and of a host, as a result says them. What GPUs, PCIe and NVLink are follows from
#: the GPU's own name; what joins nodes, and what a host has, from nothing.
_NETWORK = {"fabric": "{} as fabric", "nics_per_node": "nics_per_node {}", "gbps_per_nic": "gbps_per_nic {:g}"}


def unsaid_network(scenario: Scenario) -> list[str]:
    """A warning where several nodes are joined and their topology leaves out the kind, number or speed of cards."""
    cluster = scenario.cluster
    if cluster.nodes == 1:
        return []
    inter = cluster.topology.inter
    stated = {"gbps_per_nic"} if cluster.inter_gbps_per_node is not None else set()
    told = _defaults(inter, [name for name in _NETWORK if name not in stated])
    if not told:
        return []
    return [f"network: {_listed(_NETWORK[name].format(getattr(inter, name)) for name in told)} "
            f"{'is' if len(told) == 1 else 'are'} assumed: the topology does not say (cluster.topology.inter)"]


def unsaid_host(scenario: Scenario) -> list[str]:
    """A warning where something lives outside the GPUs and the topology leaves out how much a host holds of it, or how
    fast its disks are."""
    offload, host = scenario.parallel.offload, scenario.cluster.topology.host
    places = {offload.parameters, offload.optimizer, offload.activations}
    used = {"memory": f"{host.memory / 1e9:,.0f} GB of host memory"} if places - {"none", "nvme"} else {}
    if "nvme" in places:
        used |= {"nvme_read": f"disks that read {host.nvme_read / 1e9:g} GB/s",
                 "nvme_write": f"disks that write {host.nvme_write / 1e9:g} GB/s"}
    told = _defaults(host, used)
    if not told:
        return []
    return [f"memory: {_listed(used[name] for name in told)} a node are assumed: the topology does not say "
            "(cluster.topology.host)"]


def _defaults(section: Table, fields: Iterable[str]) -> list[str]:
    return [name for name in fields if name not in section.model_fields_set]


def _listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
