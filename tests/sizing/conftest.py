"""Simulations that tests of one process share."""

from __future__ import annotations

import sys

import pytest
from sizing_once import Once

_ONCE = Once()


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Once:
    """What tests simulate with, searches in this process too."""
    monkeypatch.setattr(sys.modules["sim.sizing.search.runner"], "simulated", _ONCE)
    return _ONCE
