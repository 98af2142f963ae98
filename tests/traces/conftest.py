"""A small job, predicted once."""

from __future__ import annotations

import pytest
from kineto_of import SMALL

import sim
from sim.report.result import Result
from sim.scenario import resolve


@pytest.fixture(scope="session")
def result() -> Result:
    return sim.run(resolve(SMALL))
