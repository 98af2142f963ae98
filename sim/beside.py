"""Work on several processors: processes that are forked for a list of things to do, and what any worker process is.

A forked process has what its parent has, a lowered job of hundreds of megabytes too, and only hands back what it made
of it. Where forking is not safe (other threads, another system than Linux) or of no use (one processor, a process that
is a worker itself), the caller's process does the work: what comes out is the same.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Done = TypeVar("Done")

#: Linux `sys/prctl.h`: the signal a process gets when its parent dies.
_PDEATHSIG = 1
#: What the processes forked next are for: they find it here.
_WORK: list[tuple[Callable[[Any], Any], Sequence[Any]]] = []


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_worker(parent: int) -> None:
    """For a process that works for another: Ctrl-C is the parent's business. A process whose parent was killed ends
    too, where the system can see to it (Linux prctl(2), PR_SET_PDEATHSIG)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # killed before the call
            os._exit(1)


def each(work: Callable[[Item], Done], items: Sequence[Item], worth: bool = True) -> list[Done]:
    """What `work` makes of items, in their order, side by side where that is possible; what it does to them or to
    anything else is lost there.

    Args:
        worth: whether the work takes so long that starting processes is nothing against it.

    Raises:
        whatever `work` does.
    """
    count = min(processors(), len(items))
    if not worth or count < 2 or not _may_fork():
        return [work(item) for item in items]
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), as_worker, (os.getpid(),))
    _WORK.append((work, items))
    try:
        return list(pool.map(_one, range(len(items))))
    except BrokenExecutor:  # one was killed, for want of memory say
        return [work(item) for item in items]
    except BaseException:  # Ctrl-C too, which does not wait for what they are at
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise
    finally:
        _WORK.pop()
        pool.shutdown(cancel_futures=True)


def _one(place: int) -> Any:
    work, items = _WORK[-1]
    return work(items[place])


def _may_fork() -> bool:
    return (sys.platform == "linux" and threading.active_count() == 1 and multiprocessing.parent_process() is None
            and not multiprocessing.current_process().daemon)
