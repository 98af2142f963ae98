"""Python's search for garbage, put off while a prediction is made.

What a prediction makes (tasks, kernels, section runs) lives until its end, so that a search finds nothing; at Python's
700 new objects between two of them, searching took a quarter to two fifths of the time of lowering and simulating
large jobs (measured against gc.disable()).

And its threads, kept out while it matters when an object goes: a thread that samples the frames of others
(`sys._current_frames`, as the statistical profiler of Dask's workers does) holds what their functions had, and what is
freed with the last reference (`sim/model/eager`) is then freed later.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects between two searches, and searches of one generation between those of the next.
_THRESHOLDS = (100_000, 20, 20)
#: Seconds that Python lets a thread run before it is made to give way: longer than anything takes that may not be.
_UNDISTURBED_S = 60.0


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


@contextmanager
def undisturbed() -> Iterator[None]:
    """While this runs, also as a decorator, no other thread of this process does, unless what runs waits for something.

    Python 3.11 to 3.13 with its lock (docs.python.org, sys.setswitchinterval).
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_UNDISTURBED_S)
    time.sleep(0)  # a thread that had already asked for its turn gets it now
    try:
        yield
    finally:
        sys.setswitchinterval(before)
