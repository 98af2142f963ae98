"""Weighted max-min: hand cases and the properties that define it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.network.fabric.fair_share import LinkId, fair_share


@dataclass(frozen=True)
class Flow:
    links: tuple[LinkId, ...]
    loads: tuple[float, ...]
    cap_bps: float = float("inf")
    weight: float = 1.0


A, B = ("nic_out", 0), ("nic_out", 1)


def test_alone_takes_the_tightest_link_or_its_cap() -> None:
    capacity = {A: 10.0, B: 3.0}.__getitem__
    assert fair_share([Flow((A, B), (2.0, 1.0))], capacity) == [3.0]
    assert fair_share([Flow((A, B), (2.0, 1.0), cap_bps=1.0)], capacity) == [1.0]


def test_classic_line_network() -> None:
    """Two links of 10: the long flow gets 5, and each short one the 5 that is left on its link."""
    flows = [Flow((A, B), (1.0, 1.0)), Flow((A,), (1.0,)), Flow((B,), (1.0,))]
    assert fair_share(flows, lambda _: 10.0) == pytest.approx([5.0, 5.0, 5.0])
    assert fair_share(flows, {A: 4.0, B: 10.0}.__getitem__) == pytest.approx([2.0, 2.0, 8.0])


def test_what_a_capped_flow_spares_is_redistributed() -> None:
    flows = [Flow((A,), (1.0,), cap_bps=1.0), Flow((A,), (1.0,)), Flow((A,), (1.0,), weight=2.0)]
    assert fair_share(flows, lambda _: 10.0) == pytest.approx([1.0, 3.0, 6.0])


def test_load_counts_against_the_link() -> None:
    """Equal rates 10 / (2 + 3) although one flow puts twice its size on the link, the other three times."""
    assert fair_share([Flow((A,), (2.0,)), Flow((A,), (3.0,))], lambda _: 10.0) == pytest.approx([2.0, 2.0])


LINKS = [("nic_out", i) for i in range(4)]
flows = st.lists(st.builds(
    lambda chosen, cap, weight: Flow(tuple(link for link, _ in chosen), tuple(load for _, load in chosen), cap, weight),
    st.lists(st.tuples(st.sampled_from(LINKS), st.floats(0.1, 10)), min_size=1, max_size=4, unique_by=lambda x: x[0]),
    st.floats(0.5, 100), st.sampled_from([1.0, 2.0, 8.0])), min_size=1, max_size=6)
capacities = st.lists(st.floats(1, 100), min_size=4, max_size=4)


def _used(chosen: list[Flow], rates: list[float]) -> dict[LinkId, float]:
    used = dict.fromkeys(LINKS, 0.0)
    for flow, rate in zip(chosen, rates, strict=True):
        for link, load in zip(flow.links, flow.loads, strict=True):
            used[link] += rate * load
    return used


@settings(max_examples=50, deadline=None)
@given(flows, capacities)
def test_is_max_min(chosen: list[Flow], sizes: list[float]) -> None:
    """No link is over its capacity, and every flow is at its cap or on a full link where none gets more per weight."""
    capacity = dict(zip(LINKS, sizes, strict=True))
    rates = fair_share(chosen, capacity.__getitem__)
    used = _used(chosen, rates)
    assert all(used[link] <= capacity[link] * (1 + 1e-9) for link in LINKS)
    for flow, rate in zip(chosen, rates, strict=True):
        if rate >= flow.cap_bps * (1 - 1e-9):
            continue
        full = [link for link in flow.links if used[link] >= capacity[link] * (1 - 1e-9)]
        assert any(all(other_rate / other.weight <= rate / flow.weight * (1 + 1e-9)
                       for other, other_rate in zip(chosen, rates, strict=True) if link in other.links)
                   for link in full)


@settings(max_examples=25, deadline=None)
@given(flows, capacities, st.floats(0.01, 100))
def test_scales_with_the_machine(chosen: list[Flow], sizes: list[float], scale: float) -> None:
    capacity = dict(zip(LINKS, sizes, strict=True))
    bigger = [Flow(f.links, f.loads, f.cap_bps * scale, f.weight) for f in chosen]
    before = fair_share(chosen, capacity.__getitem__)
    after = fair_share(bigger, lambda link: capacity[link] * scale)
    assert after == pytest.approx([rate * scale for rate in before], rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(flows, capacities)
def test_order_does_not_matter(chosen: list[Flow], sizes: list[float]) -> None:
    capacity = dict(zip(LINKS, sizes, strict=True)).__getitem__
    assert fair_share(chosen[::-1], capacity)[::-1] == pytest.approx(fair_share(chosen, capacity), rel=1e-9)
