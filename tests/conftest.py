"""Hypothesis: CI draws the same examples every time, so that what fails there fails here; elsewhere they are fresh.

On several processes (`pytest -n`) each takes whole files, so that what the tests of a file share (fixtures, caches) is
made once; the file that takes longest goes first, or at the end all wait for it. Tests marked `whole` are left to a
step of their own in CI (`pytest -m whole`), so that the others stay a matter of minutes.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "explore")

LONGEST = "sizing/test_sizing_exhaustive.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, everything else as it was."""
    items.sort(key=lambda item: not item.nodeid.split("::")[0].endswith(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files, in the order of collection."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)
