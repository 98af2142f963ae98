"""Hypothesis: CI draws the same examples every time, so that what fails there fails here; elsewhere they are fresh."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "explore")
