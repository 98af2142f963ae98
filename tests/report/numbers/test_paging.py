"""Paged optimizer states: outside the allocator, on the device while there is room, moved whole where there is not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.api import memory_of, run
from sim.errors import UserError
from sim.hardware import HostShare
from sim.parallel import lower
from sim.report.numbers.memory import MemoryResult
from sim.report.numbers.paging import Paging
from sim.scenario import Scenario, resolve

GIB = 2**30
SHARE = HostShare(12e9, 12e9, 1e9, 1e9, 100e9, 1)
#: Parameters of the model below: four blocks and a table, which has no head of its own.
HIDDEN, LAYERS, VOCAB = 1024, 4, 8192


def job(optimizer: str = "adamw", place: str = "paged", layers: int = LAYERS, batch: int = 1,
        **training: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "single-rtx4090"},
        "model": {"kind": "decoder", "layers": layers, "hidden": HIDDEN, "heads": 8, "ffn": 4 * HIDDEN, "vocab": VOCAB,
                  "positions": "rotary", "norm": "rmsnorm", "bias": False, "dropout": False},
        "training": {"micro_batch": batch, "global_batch": batch, "sequence": 256, "precision": "fp32",
                     "optimizer": optimizer, "recompute": "full", **training},
        "parallel": {"strategy": "none", "offload": {"optimizer": place}},
        "software": {"framework": "pytorch", "modules": "transformers", "optimizer_kernel": "fused"}})


#: torch's fused Adam counts its steps in a tensor for each of a block's eight parameters, the table and the last norm.
COUNTERS = 512 * (8 * LAYERS + 2)


def states(memory: MemoryResult) -> int:
    return memory.use.at_peak["optimizer_states"]


def test_states_of_large_parameters_leave_the_allocator() -> None:
    plain, paged = (memory_of(job(place=place)) for place in ("none", "paged"))
    norms = (2 * LAYERS + 1) * HIDDEN  # fewer than 100,000 elements each
    assert paged.paging is not None
    assert paged.paging.states_bytes == states(plain) - COUNTERS - 8 * norms
    assert states(paged) == 8 * norms
    assert plain.use.peak_allocated_bytes - paged.use.peak_allocated_bytes == paged.paging.states_bytes + COUNTERS
    # there is room for all of them, so the device holds as much as without paging and nothing moves
    assert (paged.paging.host_bytes, paged.paging.seconds, paged.host) == (0, 0.0, None)
    assert paged.device_used_bytes == pytest.approx(plain.device_used_bytes, rel=0.01)


def test_states_that_do_not_fit_travel_in_every_step() -> None:
    layers = 140  # 1.8e9 parameters: weights and gradients of 6.6 GiB each, states of 13.2, on a card of 23.6
    plain, paged = (run(job(place=place, layers=layers, batch=4)) for place in ("none", "paged"))
    paging = paged.memory.paging
    assert paging is not None
    assert not plain.memory.fits
    assert paged.memory.fits
    assert paging.host_bytes > 0
    assert paged.memory.host is not None
    assert paged.memory.host.by_category == {"optimizer_states": paging.host_bytes}
    assert paged.step_time_s == pytest.approx(plain.step_time_s + paging.seconds, rel=0.02)
    assert any("paged optimizer states" in warning for warning in paged.warnings)


def test_one_byte_too_much_moves_all_of_them() -> None:
    fitting, short = Paging(8 * GIB, 8 * GIB, SHARE), Paging(8 * GIB, 8 * GIB - 1, SHARE)
    assert (fitting.moved_bytes, fitting.host_bytes) == (0, 0)
    assert (short.moved_bytes, short.host_bytes) == (8 * GIB, 1)
    # in and out at 12 GB/s each, one after the other, at 0.83 of that
    assert short.seconds == pytest.approx(8 * GIB * 2 / 12e9 / 0.83)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 80 * GIB), st.integers(-GIB, 80 * GIB))
def test_pages_are_on_the_device_or_on_the_host(size: int, room: int) -> None:
    one = Paging(size, room, SHARE)
    assert one.resident_bytes + one.host_bytes == size
    assert 0 <= one.resident_bytes <= max(0, room)
    assert one.moved_bytes in (0, size)


@pytest.mark.parametrize("change", [{"optimizer": "sgd"}, {"optimizer": "lamb"}])
def test_only_what_bitsandbytes_pages_can_be_paged(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="paged"):
        lower(job(**change))


def test_eight_bit_states_are_a_quarter() -> None:
    wide, narrow = (memory_of(job(optimizer)).paging for optimizer in ("adamw", "adamw-8bit"))
    assert wide is not None
    assert narrow is not None
    assert narrow.states_bytes < 0.6 * wide.states_bytes
