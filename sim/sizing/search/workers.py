"""Where configurations are simulated: this process, processes of this machine, or the workers of a Dask cluster.

One abstraction, the `Executor` of concurrent.futures: results are handed on as they complete, so that what is
finished is kept even when the rest is lost. Dask runs the jobs of a lost worker again on the others
(https://distributed.dask.org/en/stable/resilience.html); its launchers start workers on Slurm and Kubernetes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from sim.beside import as_worker
from sim.errors import Fault, UserError
from sim.garbage import search_seldom

Job = TypeVar("Job")
Done = TypeVar("Done")

#: Seconds to wait for a scheduler: it answers at once where there is one.
CONNECT_S = 10.0


@dataclass(frozen=True)
class Workers:
    """Workers of a search.

    Attributes:
        executor: None = this process.
        losses: exceptions that say that workers, not configurations, are at fault.
    """

    executor: Executor | None = None
    losses: tuple[type[BaseException], ...] = (BrokenExecutor,)

    def each(self, work: Callable[[Job], Done], jobs: Sequence[Job]) -> Iterator[Done]:
        """Results, in the order in which they complete.

        Raises:
            UserError: workers were lost for good; what was yielded before is whole.
        """
        if self.executor is None:
            yield from map(work, jobs)
            return
        try:
            # no future is held once it is read: Dask would work it out again if its worker is lost
            for future in as_completed([self.executor.submit(work, job) for job in jobs]):
                done = future.result()
                del future
                yield done
        except self.losses as error:
            raise UserError(Fault(f"workers were lost: {type(error).__name__}: {error}"[:500], "--workers / --dask",
                                  hint="what is in --out is kept: add --resume to go on")) from None


@contextmanager
def workers(processes: int = 1, dask: str | None = None) -> Iterator[Workers]:
    """Workers, given back at the end.

    Args:
        processes: of this machine; 1 = this one.
        dask: address of a Dask scheduler, e.g. tcp://host:8786; its workers take the place of processes.

    Raises:
        UserError: `distributed` is not installed, or no scheduler answers at the address.
    """
    if dask is not None:
        with _cluster(dask) as found:
            yield found
    elif processes > 1:
        pool = ProcessPoolExecutor(processes, initializer=_as_worker, initargs=(os.getpid(),))
        try:
            yield Workers(pool)
        finally:
            pool.shutdown(cancel_futures=True)
    else:
        yield Workers()


def _as_worker(parent: int) -> None:
    search_seldom()
    as_worker(parent)


@contextmanager
def _cluster(address: str) -> Iterator[Workers]:
    try:
        distributed: Any = import_module("distributed")
    except ImportError:
        raise UserError(Fault("Dask is not installed", "--dask", hint="pip install 'drystep[dask]'")) from None
    try:
        client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(Fault(f"no Dask scheduler answers at '{address}': {error}"[:300], "--dask",
                              hint="start one with 'dask scheduler' and give its tcp://host:8786")) from None
    with client, client.get_executor(pure=False) as executor:
        # an import that fails is a worker without drystep
        yield Workers(executor, (BrokenExecutor, CancelledError, distributed.KilledWorker, ImportError, OSError))
