"""Machines the network tests run on, as plain topology mappings."""

from __future__ import annotations

from typing import Any

import pytest

CUBE_MESH = [[0, 1, 1, 2, 2, 0, 0, 0], [1, 0, 2, 1, 0, 2, 0, 0], [1, 2, 0, 2, 0, 0, 1, 0], [2, 1, 2, 0, 0, 0, 0, 1],
             [2, 0, 0, 0, 0, 1, 1, 2], [0, 2, 0, 0, 1, 0, 2, 1], [0, 0, 1, 0, 1, 2, 0, 2], [0, 0, 0, 1, 2, 1, 2, 0]]


def _inter(nics: int, gbps: float, **more: Any) -> dict[str, Any]:
    return {"kind": "fat-tree", "fabric": "infiniband", "nics_per_node": nics, "gbps_per_nic": gbps,
            "rail_optimized": True, "oversubscription": 1.0, "nodes_per_leaf": 16, **more}


MACHINES: dict[str, dict[str, Any]] = {
    "dgx-a100": {"name": "dgx-a100", "gpu": "a100-80g-sxm", "gpus_per_node": 8, "nodes": 4,
                 "intra": {"kind": "nvswitch", "link": "nvlink3", "links_per_gpu": 12}, "inter": _inter(8, 200)},
    "dgx-h100": {"name": "dgx-h100", "gpu": "h100-80g-sxm", "gpus_per_node": 8, "nodes": 4,
                 "intra": {"kind": "nvswitch", "link": "nvlink4", "links_per_gpu": 18}, "inter": _inter(8, 400)},
    "dgx-1v": {"name": "dgx-1v", "gpu": "v100-32g-sxm", "gpus_per_node": 8, "nodes": 4, "host": {"pcie": "gen3x16"},
               "intra": {"kind": "nvlink-mesh", "link": "nvlink2", "matrix": CUBE_MESH}, "inter": _inter(4, 100)},
    "pcie": {"name": "pcie", "gpu": "a10", "gpus_per_node": 8, "nodes": 1,
             "intra": {"kind": "pcie", "gpus_per_switch": 4, "gen": 4}, "inter": {"kind": "none"}},
}


@pytest.fixture
def machines() -> dict[str, dict[str, Any]]:
    """Topology mappings by name; copy before changing one."""
    return MACHINES
