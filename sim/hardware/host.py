"""A GPU's share of its host: link, memory and disks, when all GPUs of the node use them at once.

Ranks of a training job run the same program, so they copy at the same time: what a node has is divided by its GPUs,
and the link of a PCIe switch by those below it. ZeRO-Infinity measures the same on a DGX-2: 12 GB/s of one GPU alone,
3 GB/s of each of sixteen (Rajbhandari et al. 2021, figure 2b; recalled).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.catalog import table

_FIGURES = "hardware/host.yaml"

#: Directions of a copy: over the GPU's link, and between host memory and disks.
DIRECTIONS = ("h2d", "d2h", "nvme_read", "nvme_write")


@dataclass(frozen=True, slots=True)
class HostShare:
    """One GPU's share of a node, bytes/s, all GPUs busy.

    Attributes:
        h2d_bps, d2h_bps: copies between pinned host memory and the device.
        nvme_read_bps, nvme_write_bps: the node's disks.
        memory_bps: host memory, as stated.
        gpus: GPUs of the node that the job uses.
    """

    h2d_bps: float
    d2h_bps: float
    nvme_read_bps: float
    nvme_write_bps: float
    memory_bps: float
    gpus: int

    def bandwidth_bps(self, direction: str) -> float:
        """Rate of a copy (`DIRECTIONS`)."""
        return float(getattr(self, f"{direction}_bps"))

    def optimizer_bps(self, implementation: str, threads: int) -> float:
        """Bytes/s that a rank's optimizer on the CPU moves.

        Args:
            implementation: fused (one vectorised pass) or loop (a pass per operator).
            threads: of one rank; 0 = the ranks share all cores.
        """
        figures = table(_FIGURES)
        together = float(figures["cpu_optimizer"][implementation]["share"]) * self.memory_bps
        return min(together, threads * float(figures["core"]["gb_s"]) * 1e9) if threads else together


def pageable_bps() -> float:
    """Bytes/s at which the driver copies pageable host memory to pinned buffers, which one core reads and writes."""
    return float(table(_FIGURES)["core"]["gb_s"]) * 1e9 / 2


def host_share(host: Any, gpus: int, below_switch: int = 1) -> HostShare:
    """A GPU's share of a node with `gpus` working GPUs.

    Args:
        host: `cluster.topology.host` of a resolved scenario.
        below_switch: GPUs below one PCIe switch, which has one link to the host.
    """
    figures = table(_FIGURES)
    link = table("hardware/gpus.yaml")["copies"][host.pcie]
    stated = figures["memory_bandwidth"][host.pcie]
    node_bps = host.memory_bandwidth
    if node_bps is None:
        node_bps = float(stated["gb_s"]) * 1e9 * (gpus if stated["per"] == "gpu" else 1)
    sharing = min(below_switch, gpus)
    limit = float(figures["copy_share"]["value"]) * node_bps / gpus
    h2d, d2h = (min(float(link[way]) * 1e9 / sharing, limit) for way in ("h2d", "d2h"))
    return HostShare(h2d, d2h, host.nvme_read / gpus, host.nvme_write / gpus, node_bps / gpus, gpus)
