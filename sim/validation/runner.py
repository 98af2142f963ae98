"""`drystep validate`: every case of every file, on any number of workers, with the same result."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sim.catalog import folder
from sim.errors import Fault, UserError
from sim.garbage import search_seldom
from sim.validation.cases.files import Case, CaseFile, expand, read, selects
from sim.validation.cases.predict import predict, settle
from sim.validation.corrections import corrected
from sim.validation.statistics import Record, overall

#: Cases below which starting processes (about half a second each) costs more than it saves.
_WORTH_A_POOL = 24
#: Cases per message to a worker: neighbours of a file share clusters and models, hence the worker's memoised parts.
_CHUNK = 8

Progress = Callable[[int, int], None]

#: Exit codes: after Ctrl-C, as shells give it (128 + SIGINT), and where the user's input is wrong.
INTERRUPTED, WRONG_INPUT = 130, 2


@dataclass(frozen=True, slots=True)
class Validation:
    """What validating gave.

    Attributes:
        files: the case files read, in order.
        records: one per selected case, in the files' order.
        interrupted: Ctrl-C came; cases that had not run are `failed` with that reason.
    """

    files: tuple[CaseFile, ...]
    records: tuple[Record, ...]
    interrupted: bool = False

    @property
    def summary(self) -> dict[str, Any]:
        """Statistics of all records, of each file and the ten worst (see `sim.validation.statistics`)."""
        return overall(self.records)

    def to_json(self) -> dict[str, Any]:
        """`{"cases": [...], "summary": {...}}`."""
        return {"cases": list(self.records), "summary": self.summary}


def validate(paths: str | Path | Sequence[str | Path], *, select: str | None = None, workers: int | None = None,
             progress: Progress | None = None) -> Validation:
    """Predict every case of the files and compare it with what was measured.

    Args:
        paths: case files, folders of them, or names of shipped sources; one or several.
        select: only cases whose `file/id` holds this text, or matches it where it is a glob.
        workers: processes; default the cores this process may use. The result does not depend on it. A script that
            calls this with several workers needs the usual `if __name__ == "__main__":`.
        progress: called with (cases done, cases in all) as cases finish.

    Raises:
        UserError: a file that is not there or not a case file, a pattern that selects nothing, a bad worker count.
    """
    if workers is not None and workers < 1:
        raise UserError(Fault(f"must be at least 1, not {workers}", "--workers"))
    files = _read_all(expand([paths] if isinstance(paths, str | Path) else paths))
    chosen = [c for f in files for c in f.cases if selects(select, c)]
    if select is not None and not chosen:
        raise UserError(Fault(f"no case matches {select!r}", "--select"))
    wanted = chosen + _references(files, chosen)
    finished, interrupted = _predict_all(wanted, worker_count(workers, len(wanted)), progress)
    records = [finished.get(i) or _not_run(case) for i, case in enumerate(wanted)]
    _settle_all(wanted, records)
    return Validation(tuple(files), tuple(records[:len(chosen)]), interrupted)


def published(files: Sequence[str], workers: int | None) -> Validation | int:
    """For commands: the validation of the files, of all shipped published cases where none are named; or the exit code
    where the input is wrong (the faults are printed) or Ctrl-C came."""
    try:
        found = validate(files or [folder("scenarios") / "published"], workers=workers)
    except UserError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    return INTERRUPTED if found.interrupted else found


def _read_all(paths: Sequence[Path]) -> list[CaseFile]:
    files: list[CaseFile] = []
    faults: list[Fault] = []
    for path in paths:
        try:
            files.append(corrected(read(path)))
        except UserError as error:
            faults.extend(error.faults)
    if faults:
        raise UserError(faults)
    return files


def _references(files: Sequence[CaseFile], chosen: Sequence[Case]) -> list[Case]:
    """Cases that chosen ratios refer to and that were not chosen themselves."""
    have = {(c.path, c.id) for c in chosen}
    need = {(c.path, c.measured["relative_to"]) for c in chosen if "relative_to" in c.measured} - have
    return [c for f in files for c in f.cases if (c.path, c.id) in need]


def worker_count(workers: int | None, cases: int) -> int:
    """Processes for that many cases: as asked, else one per core where processes are worth their start."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and not os.path.exists(script):
        return 1  # a program read from standard input: a spawned process could not import it
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = cores if cases >= _WORTH_A_POOL else 1
    return max(1, min(workers, cases))


def _predict_all(cases: Sequence[Case], workers: int, progress: Progress | None) -> tuple[dict[int, Record], bool]:
    """Records by the case's place, and whether Ctrl-C cut it short."""
    finished: dict[int, Record] = {}
    batches = _serial(cases) if workers == 1 else _pooled(cases, workers)
    try:
        for places, records in batches:
            finished.update(zip(places, records, strict=True))
            if progress is not None:
                progress(len(finished), len(cases))
    except KeyboardInterrupt:
        return finished, True
    return finished, False


def _serial(cases: Sequence[Case]) -> Iterator[tuple[Sequence[int], Sequence[Record]]]:
    for place, case in enumerate(cases):
        yield [place], [predict(case)]


def _pooled(cases: Sequence[Case], workers: int) -> Iterator[tuple[Sequence[int], Sequence[Record]]]:
    """Chunks as they finish. Processes are spawned: no state of the parent leaks in, on every platform alike."""
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=as_worker)
    try:
        places = iter(range(len(cases)))
        futures: dict[Future[list[Record]], list[int]] = {}
        while chunk := list(islice(places, _CHUNK)):
            futures[pool.submit(_predict_chunk, [cases[i] for i in chunk])] = chunk
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise UserError(Fault("a worker process ended early: out of memory, or a script without "
                              "'if __name__ == \"__main__\":'", hint="use workers=1")) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def as_worker() -> None:
    """What a worker process starts with: Ctrl-C is the parent's business, and nobody outlives the parent."""
    search_seldom()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()


def _end_with(parent: BaseProcess | None) -> None:
    if parent is not None:
        parent.join()
        os._exit(1)


def _predict_chunk(cases: list[Case]) -> list[Record]:
    return [predict(case) for case in cases]


def _not_run(case: Case) -> Record:
    return {"file": case.file, "id": case.id, "line": case.line, "kind": case.kind, "quality": case.quality,
            "measured": case.measured, "predicted": {}, "error": {}, "status": "failed",
            "reason": "interrupted before it ran"}


def _settle_all(cases: Sequence[Case], records: Sequence[Record]) -> None:
    times: dict[str, dict[str, float]] = {}
    for case, record in zip(cases, records, strict=True):
        if case.kind == "training" and record["status"] == "ok":
            times.setdefault(case.path, {})[case.id] = record["predicted"]["step_time_s"]
    for case, record in zip(cases, records, strict=True):
        settle(record, times.get(case.path, {}))
