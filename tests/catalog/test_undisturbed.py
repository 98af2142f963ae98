"""What Python does beside a prediction changes nothing of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sim.garbage import undisturbed
from sim.model import build
from sim.model.eager.profile import profile
from sim.scenario import resolve
from sim.software import stack_for


@contextmanager
def watched() -> Iterator[None]:
    """A thread that samples the frames of all others and holds on to them, as Dask's profiler does."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            held = list(sys._current_frames().values())
            time.sleep(1e-4)
            del held

    before, thread = sys.getswitchinterval(), threading.Thread(target=look)
    sys.setswitchinterval(1e-5)  # it looks thousands of times a second
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


def test_memory_of_a_layer_is_the_same_under_a_profiler() -> None:
    scenario = resolve({"name": "small", "cluster": {"topology": "dgx-a100-80g"},
                        "model": {"preset": "gpt2", "layers": 1},
                        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128}}, "small")
    block = build(scenario, stack_for(), 1).stack[1]
    assert block.program is not None
    measure = profile.__wrapped__  # what is remembered would hide it
    alone = measure(block.program, "none", True)
    with watched():
        assert all(measure(block.program, "none", True) == alone for _ in range(200))


def test_undisturbed_gives_back_the_interval() -> None:
    before = sys.getswitchinterval()
    with undisturbed():
        assert sys.getswitchinterval() > 10
    assert sys.getswitchinterval() == before
