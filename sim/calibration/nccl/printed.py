"""Reads what nccl-tests prints (all_reduce_perf and its like): several operations and runs in one file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from sim.calibration.nccl.command import bus_factor
from sim.errors import Fault, UserError

_PROGRAM = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|reduce|sendrecv|scatter|gather|"
                      r"hypercube)_perf\b")
_KIND = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+\s*(?:\[[^\]]*\])?\s*(.*)$")
_THREADS = re.compile(r"nThreads?\s+(\d+)\s+nGpus\s+(\d+)")
_VERSION = re.compile(r"NCCL version\s+([\d.]+)")
#: NCCL_VERSION_CODE in the head of nccl-tests 2.17 and later (recalled): 22703 is 2.27.3.
_LIBRARY = re.compile(r"nccl-library=(\d)(\d\d)(\d\d)\b")
_REDUCTIONS = ("sum", "prod", "max", "min", "avg", "all", "mulsum", "none")


@dataclass(slots=True)
class Run:
    """One table: an operation on one communicator.

    Attributes:
        op: name of ours, "" where the file does not say and the table does not tell.
        ranks, nodes, processes: of the run; 0 where the file does not say. Processes: `one` drives several GPUs.
        rows: (bytes, out-of-place time us, in-place time us or None).
        line: of its first row, 1-based.
        gpu: what its first rank calls its GPU ("NVIDIA A100-SXM4-80GB"), "" where no line tells.
        unread: lines, 1-based, that begin as a row does and have no time.
        wrong: lines, 1-based, of rows whose results were wrong (#wrong); they are rows like others.
    """

    op: str = ""
    ranks: int = 0
    nodes: int = 0
    processes: str = "gpu"
    version: str = ""
    rows: list[tuple[int, float, float | None]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    reduction: str = ""
    root: int = -1
    line: int = 0
    gpu: str = ""
    unread: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)


def parse(text: str, file: str = "") -> list[Run]:
    """All tables of a text in order.

    Raises:
        UserError: no row of an nccl-tests table in it, or one whose operation cannot be told.
    """
    runs, current, hosts, ranks, collected = [], Run(), set[str](), set[int](), False
    for number, line in enumerate(text.splitlines(), 1):
        named, rank = _PROGRAM.search(line), _RANK.match(line)
        if named and "concluded" in line:
            current.op = current.op or _KIND.get(named.group(1), named.group(1))
            continue
        if (rank or named or "nThread" in line) and collected:
            runs.append(current)
            current, collected = Run(version=current.version), False
            hosts, ranks = set(), set()
        if named:
            current.op = _KIND.get(named.group(1), named.group(1))
        if found := _THREADS.search(line):
            current.processes = "one" if int(found.group(1)) * int(found.group(2)) > 1 else "gpu"
        if found := _VERSION.search(line):
            current.version = found.group(1)
        elif found := _LIBRARY.search(line):
            current.version = ".".join(str(int(part)) for part in found.groups())
        if rank:
            ranks.add(int(rank.group(1)))
            hosts.add(rank.group(2))
            current.ranks, current.nodes = len(ranks), len(hosts)
            current.gpu = current.gpu or rank.group(3).strip()
        if not line.lstrip().startswith("#") and _row(line, number, current):
            current.line = current.line or number
            collected = True
    if collected:
        runs.append(current)
    if not runs:
        raise UserError(Fault("no row of an nccl-tests table found", file=file,
                              hint="give the whole output of all_reduce_perf or its like"))
    for run in runs:
        run.op = run.op or _guess(run)
        if not run.op:
            raise UserError(Fault("the table does not tell its operation", file=file, line=run.line,
                                  hint="keep the line with the command, e.g. all_reduce_perf"))
    return runs


def _row(line: str, number: int, run: Run) -> bool:
    """Take a row's figures into `run`; False when the line is none."""
    words = line.split()
    if len(words) < 3 or not words[0].isdigit() or not words[1].isdigit() or words[2][0].isdigit():
        return False
    rest = words[3:]
    if rest and rest[0] in _REDUCTIONS:
        run.reduction, rest = rest[0], rest[1:]
        if rest and re.fullmatch(r"-?\d+", rest[0]):
            run.root, rest = int(rest[0]), rest[1:]
    figures = list(_numbers(rest))
    size, inside = int(words[0]), figures[4] if len(figures) >= 7 else figures[3] if len(figures) == 6 else None
    if size == 0:
        return False
    if len(figures) < 3 or figures[0] is None or figures[0] <= 0:
        run.unread.append(number)
        return False
    if any(figures[place] for place in ((3, 7) if len(figures) == 8 else (3,) if len(figures) in (4, 7) else ())):
        run.wrong.append(number)
    run.rows.append((size, figures[0], inside if inside and inside > 0 else None))
    if figures[1] and figures[2] and figures[1] >= 1:
        run.ratios.append(figures[2] / figures[1])
    return True


def _numbers(words: list[str]) -> Iterator[float | None]:
    for word in words:
        try:
            yield float(word)
        except ValueError:
            yield None


def _guess(run: Run) -> str:
    """The operation from reduction, root and bus over algorithm bandwidth; "" where two fit."""
    if not run.ratios or not run.ranks:
        return ""
    ratio = sorted(run.ratios)[len(run.ratios) // 2]
    rooted = run.root >= 0
    reducing = run.reduction not in ("", "none")
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"):
        fits = abs(bus_factor(kind, run.ranks) / ratio - 1) < 0.02
        if fits and reducing == (kind in ("all_reduce", "reduce_scatter", "reduce")) and rooted == (
                kind in ("reduce", "broadcast")):
            return kind
    return ""
