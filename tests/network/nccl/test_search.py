"""NCCL's graph search in closed form, against channel counts that NCCL's logs tell."""

from __future__ import annotations

import pytest

from sim.network.nccl.search import Graph, compute_channels, search, speeds

NOW, OLD = (2, 29), (2, 16)


@pytest.mark.parametrize(("capability", "version", "links", "graph", "channels"), [
    (80, NOW, 240.0, (12, 20.0), 24),  # 6 x 40, split
    (80, OLD, 264.0, (12, 22.0), 24),  # 6 x 44, split
    (90, NOW, 370.8, (12, 30.0), 24),  # 6 x 60, split
    (100, NOW, 721.8, (16, 45.0), 32)], ids=["A100", "A100 before 2.18", "H100", "B200"])
def test_rings_behind_a_switch(capability: int, version: tuple[int, int], links: float, graph: tuple[int, float],
                               channels: int) -> None:
    """24 channels on A100 and H100, 32 on B200: "coll channels" of NCCL's logs."""
    found = search(speeds(capability, False, version), links, links, 0, 0.0, capability)
    assert (found.channels, found.inside) == graph
    assert compute_channels(found, False, capability) == channels


@pytest.mark.parametrize("version", [(2, 7), (2, 8)])
@pytest.mark.parametrize(("capability", "links", "path", "nics", "gbps", "graph"), [
    (70, 126.0, 21.0, 0, 0.0, (6, 21)), (80, 252.0, 252.0, 0, 0.0, (12, 21)), (80, 252.0, 24.0, 8, 24.0, (8, 24)),
    (80, 252.0, 12.0, 4, 12.0, (4, 12))], ids=["DGX-1V", "DGX A100", "two DGX A100", "two p4d"])
def test_rings_of_old_releases(version: tuple[int, int], capability: int, links: float, path: float, nics: int,
                               gbps: float, graph: tuple[int, float]) -> None:
    """What ncclTopoCompute of NVIDIA's binaries 2.7.8 and 2.8.3 returned for these machines, described in XML."""
    found = search(speeds(capability, nics > 0, version), links, path, nics, gbps, capability)
    assert (found.channels, found.inside) == graph


@pytest.mark.parametrize(("capability", "links", "nics", "gbps", "graph", "channels"), [
    (80, 240.0, 8, 24.0, Graph(8, 24, 24, 30), 16),  # DGX A100: a channel per NIC
    (80, 240.0, 4, 12.0, Graph(4, 12, 12, 24), 8),  # p4d: "8 coll channels"
    (90, 370.8, 8, 48.0, Graph(8, 45, 45, 45), 16),  # DGX H100: eight of 48 are more than NVLink has
    (90, float("inf"), 1, 48.0, Graph(2, 24.0, 24.0, 24.0), 4)], ids=["A100", "p4d", "H100", "one H100 a node"])
def test_rings_over_nics(capability: int, links: float, nics: int, gbps: float, graph: Graph, channels: int) -> None:
    """One channel per NIC at the fastest speed both allow; few fast ones are split."""
    found = search(speeds(capability, True, NOW), links, links, nics, gbps, capability)
    if links == float("inf"):
        assert (found.channels, found.inside, found.between) == (graph.channels, graph.inside, graph.between)
    else:
        assert found == graph
    assert compute_channels(found, True, capability) == channels


def test_slow_slots_are_halved_where_that_carries_more() -> None:
    """24 GB/s of PCIe: one channel of 20 or two of 12; 16 between processors: one of 15."""
    inside = search(speeds(80, False, NOW), 24.0, 24.0, 0, 0.0, 80)
    across = search(speeds(80, False, NOW), 16.0, 16.0, 0, 0.0, 80)
    assert (inside.channels, inside.inside) == (2, 12)
    assert (across.channels, across.inside) == (1, 15)


def test_nothing_that_fits_is_one_slow_channel() -> None:
    found = search((4.0, 3.0), 1.0, 1.0, 0, 0.0, 80)
    assert (found.channels, found.inside) == (1, 1.0)
