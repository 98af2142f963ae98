"""The wait for the slowest of n ranks."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import pytest

from sim.network.jitter import SIGMA_S, expected_maximum, latest, rendezvous_s


@pytest.mark.parametrize(("n", "exact"), [(1, 0.0), (2, 1 / sqrt(pi)), (3, 1.5 / sqrt(pi)), (4, 1.02938), (10, 1.53875),
                                          (100, 2.50759), (1000, 3.24144)])
def test_expected_maximum_against_tables(n: int, exact: float) -> None:
    """Order statistics of the normal distribution (Harter 1961)."""
    assert expected_maximum(n) == pytest.approx(exact, rel=0.03)


def test_it_grows_slowly_and_never_falls() -> None:
    values = [expected_maximum(n) for n in (1, 2, 3, 8, 64, 1024, 16384, 10**6, 10**7, 10**7 + 1, 10**9)]
    assert np.all(np.diff(values) > -0.02) and values[-1] < 7


def test_rendezvous_of_one_is_free() -> None:
    assert rendezvous_s(1) == 0.0
    assert rendezvous_s(2) == pytest.approx(SIGMA_S / sqrt(pi))


def test_latest_of_exponential_delays() -> None:
    """1 + 1/2 + 1/3 + ...; the asymptote log n + Euler's constant takes over without a step."""
    assert [latest(n) for n in (1, 2, 3)] == pytest.approx([1.0, 1.5, 11 / 6])
    assert latest(1001) - latest(1000) == pytest.approx(1 / 1001, rel=1e-3)
