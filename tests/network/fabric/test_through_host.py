"""GPUs whose driver lets none reach another over PCIe: all that goes between them takes their switch's uplink."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.network import Network, Topology, fair_share
from sim.network.figures import Figures

GIB = 1 << 30
SLOT = 31e9 * Figures()["pcie_share.gen4x16"]
RANKS = np.arange(8).reshape(1, -1)


def mapping(gpu: Any, **intra: Any) -> dict[str, Any]:
    return {"gpu": gpu, "gpus_per_node": 8, "intra": {"kind": "pcie", "gpus_per_switch": 4, **intra},
            "host": {"pcie": "gen4x16"}, "inter": {"kind": "none"}}


def rate(given: dict[str, Any], ranks: int, op: str = "all_gather", gbps: float | None = None) -> float:
    """Bytes/s of the operation alone on the first GPUs; `gbps` in the place of a slot's nominal 248 Gb/s."""
    net = Network(Topology.from_mapping(given), 1, 8, gbps, nccl={"algorithm": "Ring", "protocol": "Simple"})
    flow = net.coflow(op, GIB, RANKS[:, :ranks])
    return float(fair_share([flow], net.capacity)[0])


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_ring_below_one_switch_shares_its_uplink(gpus: int) -> None:
    """Every edge goes up and down again: g edges on an uplink as fast as a slot; a byte of an all-gather is (g-1)/g on
    each."""
    assert rate(mapping("rtx4090"), gpus) == pytest.approx(SLOT / gpus / ((gpus - 1) / gpus))
    assert rate(mapping("l40s"), gpus) == pytest.approx(SLOT / ((gpus - 1) / gpus))


def test_eight_gpus_are_bound_by_the_uplinks_of_four() -> None:
    """Four edges start below each switch, at a slot's 24 GB/s; one crosses between the CPUs, at 12.5: uplinks bind."""
    assert rate(mapping("a10g"), 8) == pytest.approx(SLOT / 4 / (7 / 8))
    assert rate(mapping("l40s"), 8) == pytest.approx(12.5e9 / (7 / 8))


def test_an_all_to_all_takes_the_uplinks_too() -> None:
    """Of a rank's data 3/4 leave it, up its switch's uplink, with those of three others."""
    assert rate(mapping("a10g"), 4, "all_to_all") == pytest.approx(SLOT / (4 * 3 / 4))


def test_the_scenario_wins_over_the_driver() -> None:
    assert rate(mapping("rtx4090", peer_copies=True), 4) == rate(mapping("l40s"), 4)
    assert rate(mapping("l40s", peer_copies=False), 4) == rate(mapping("rtx4090"), 4)
    assert rate(mapping({"like": "rtx4090", "name": "mine"}), 4) == rate(mapping("rtx4090"), 4)


def test_cards_in_slots_of_their_own_share_nothing() -> None:
    given = mapping("rtx4090")
    del given["intra"]["gpus_per_switch"]
    topology = Topology.from_mapping(given)
    assert not topology.intra.peers and not topology.intra.through_host
    assert rate(given, 4) == pytest.approx(SLOT / (3 / 4))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("gpu", ["l40s", "rtx4090"])
def test_another_speed_of_the_links_is_the_slots(gpu: str, factor: float) -> None:
    """31 GB/s nominal are 248 Gb/s. Slots and the uplink of the host's way change; what crosses between the CPUs stays:
    of eight cards that read one another it binds until a slot is slower (11.95 of 12.5 GB/s at half)."""
    assert rate(mapping(gpu), 4, gbps=248 * factor) == pytest.approx(rate(mapping(gpu), 4) * factor)
    eight = min(SLOT * factor, 12.5e9) if gpu == "l40s" else SLOT * factor / 4
    assert rate(mapping(gpu), 8, gbps=248 * factor) == pytest.approx(eight / (7 / 8))
