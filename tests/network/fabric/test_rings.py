"""NVLink rings in a node whose links are a mesh."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from sim.network import Network, Topology
from sim.network.fabric.rings import ring_count


@pytest.mark.parametrize(("gpus", "rings"), [(2, 1), (4, 4), (7, 4), (8, 6)])
def test_cube_mesh_first_gpus(machines: dict[str, dict[str, Any]], gpus: int, rings: int) -> None:
    """vTrain's V100 all-reduce: 22.6, 85.6, 87.1 and 134.5 GB/s on 2, 4, 7, 8 GPUs = 1, 4, 4, 6 rings of about 22."""
    matrix = tuple(tuple(row) for row in machines["dgx-1v"]["intra"]["matrix"])
    assert ring_count(matrix, tuple(range(gpus))) == rings


def test_cube_mesh_all_subsets_within_degree(machines: dict[str, dict[str, Any]]) -> None:
    matrix = tuple(tuple(row) for row in machines["dgx-1v"]["intra"]["matrix"])
    for size in (2, 3, 4, 5, 6):
        for gpus in combinations(range(8), size):
            degree = min(sum(matrix[a][b] for b in gpus) for a in gpus)
            assert 0 <= ring_count(matrix, gpus) <= degree


def test_no_ring_where_links_do_not_join() -> None:
    """Two bridged pairs: rings inside a pair, none through all four."""
    pairs = tuple(tuple(12 if i // 2 == j // 2 and i != j else 0 for j in range(4)) for i in range(4))
    assert ring_count(pairs, (0, 1)) == 12
    assert ring_count(pairs, (0, 1, 2, 3)) == 0


def test_complete_mesh_uses_every_link() -> None:
    """Jean Zay V100: two links per pair, so six rings through four GPUs; MI300X: seven through eight."""
    four = tuple(tuple(0 if i == j else 2 for j in range(4)) for i in range(4))
    eight = tuple(tuple(0 if i == j else 1 for j in range(8)) for i in range(8))
    assert ring_count(four, (0, 1, 2, 3)) == 6
    assert ring_count(eight, tuple(range(8))) == 7


def test_bandwidth_follows_the_rings(machines: dict[str, dict[str, Any]]) -> None:
    """Large all-reduce: 7 GPUs are no faster than 4, 8 GPUs half as fast again."""
    net = Network(Topology.from_mapping(machines["dgx-1v"]), 1, 8)
    bus = {}
    for n in (2, 4, 7, 8):
        flow = net.coflow("all_reduce", 1 << 30, np.arange(n, dtype=np.int64)[None, :])
        bus[n] = flow.cap_bps * 2 * (n - 1) / n / net.speeds.link
    assert bus == pytest.approx({2: 1, 4: 4, 7: 4, 8: 6})
