"""A GPU's share of its host, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sim.hardware import Device, HostShare, gpu, host_share


def host(**changes: Any) -> SimpleNamespace:
    given = {"pcie": "gen3x16", "nvme_read": 8e9, "nvme_write": 4e9, "memory_bandwidth": None}
    return SimpleNamespace(**given | changes)


def test_gpus_below_a_switch_share_its_link_and_all_share_disks_and_memory() -> None:
    share = host_share(host(), 8, 2)
    assert share == HostShare(6e9, 12.35e9 / 2, 1e9, 0.5e9, 32e9, 8)
    assert share.bandwidth_bps("nvme_write") == 0.5e9
    assert host_share(host(), 1, 4).h2d_bps == 12e9, "alone there is nobody to share with"


def test_copies_of_all_gpus_stay_below_the_memory_s_bandwidth() -> None:
    assert host_share(host(memory_bandwidth=40e9), 8).h2d_bps == pytest.approx(0.8 * 40e9 / 8)


def test_memory_of_a_superchip_belongs_to_its_gpus() -> None:
    assert [host_share(host(pcie="nvlink-c2c"), gpus).memory_bps for gpus in (72, 4)] == [250e9, 250e9]


def test_an_optimizer_on_the_cpu_is_bound_by_memory_or_by_its_threads() -> None:
    whole, eighth = host_share(host(), 1), host_share(host(), 8)
    assert whole.optimizer_bps("fused", 0) == pytest.approx(0.47 * 256e9)
    assert eighth.optimizer_bps("loop", 0) == pytest.approx(0.24 * 256e9 / 8)
    assert whole.optimizer_bps("loop", 1) == 12e9


def test_a_device_copies_at_its_share() -> None:
    share = host_share(host(), 8, 2)
    alone, shared = Device(gpu("v100-32g-sxm")), Device(gpu("v100-32g-sxm"), host=share)
    assert shared.copy_s("h2d", 6e9) == pytest.approx(1.0, rel=1e-4)
    assert alone.copy_s("h2d", 6e9) == pytest.approx(0.5, rel=1e-4)
    assert shared.copy_s("nvme_read", 2e9) == pytest.approx(2.0, rel=1e-4)
