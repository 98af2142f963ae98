"""Python's search for garbage, put off while a prediction is made.

What a prediction makes (tasks, kernels, section runs) lives until its end, so that a search finds nothing; at Python's
700 new objects between two of them, searching took a quarter to two fifths of the time of lowering and simulating
large jobs (measured against gc.disable()).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects between two searches, and searches of one generation between those of the next.
_THRESHOLDS = (100_000, 20, 20)


def search_seldom() -> None:
    """For a process of our own: from now on."""
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def seldom_searched() -> Iterator[None]:
    """While this runs, also as a decorator; then what the caller's process had set is set again."""
    before = gc.get_threshold()
    search_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*before)
