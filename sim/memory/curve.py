"""Memory over the step: the ledger's operations at the times at which the host does them (rule 3 of the machine).

`sim.memory.ledger` finds the highest points without any times; this file replays the same operations along a Timeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.engine import SectionRun
from sim.memory.ledger import CATEGORIES
from sim.program import Kind, Program, Section

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_INDEX = {name: i for i, name in enumerate(CATEGORIES)}


@dataclass(frozen=True, slots=True)
class _Operations:
    """A section's memory operations: before which task the host does them, and the level after each of them."""

    before: Ints  # (operations,)
    levels: Ints  # (operations, categories), relative to the section's start
    share: Floats  # (operations,) how far through the issue of the task before they lie, in (0, 1]


class Replay:
    """Walks one class's step in host order.

    Attributes:
        level: bytes held now, shape (categories,), in the order of `sim.memory.ledger.CATEGORIES`.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[int, _Operations] = {}
        self.level = np.zeros(len(CATEGORIES), dtype=np.int64)
        for _, size_bytes, category in program.resident:
            self.level[_INDEX[category]] += size_bytes

    def run(self, run: SectionRun) -> tuple[Floats, Ints]:
        """One run of a section: seconds, shape (n,), and the level from each on, shape (n, categories).

        The host does what stands between two tasks while it issues the kernels of the first, evenly; after any other
        task it does all of it at once.
        """
        operations = self._operations(run.section)
        if not len(operations.before):
            return np.zeros(0), np.zeros((0, len(CATEGORIES)), dtype=np.int64)
        begin, end = host_spans(self._program.sections[run.section], run)
        last = np.maximum(operations.before - 1, 0)
        spread = begin[last] + operations.share * (end[last] - begin[last])
        times = np.where(operations.before == 0, begin[0], spread)
        levels = self.level + operations.levels
        self.level = levels[-1]
        return np.maximum.accumulate(times), levels

    def skip(self, section: int, runs: int) -> None:
        """Advance over `runs` runs of a section without writing them out."""
        levels = self._operations(section).levels
        if len(levels):
            self.level = self.level + runs * levels[-1]

    def _operations(self, number: int) -> _Operations:
        if number not in self._known:
            self._known[number] = _operations(self._program.sections[number])
        return self._known[number]


def host_spans(section: Section, run: SectionRun) -> tuple[Floats, Floats]:
    """When the host was busy with each task of a section, shape (tasks,) each.

    A full launch queue holds it in the middle of a task, so that a task of the device lasts until the next begins. In a
    HOST task it first waits, then works: the span is its work.
    """
    host = np.array(section.kind, dtype=np.int64) == Kind.HOST
    issued = run.issue_s + np.array(section.host_s, dtype=np.float64)
    following = np.append(run.issue_s[1:], issued[-1:])
    return np.where(host, run.start_s, run.issue_s), np.where(host, run.end_s, np.maximum(issued, following))


def envelope(program: Program, runs: Iterable[SectionRun], edges: Floats) -> Ints:
    """The fullest moment in each bin of the time axis, shape (bins, categories); needs no more memory for more repeats.

    Args:
        runs: the class's runs of the step, in order.
        edges: of the bins, shape (bins + 1,), rising. What happens before the first counts as its level.
    """
    bins = len(edges) - 1
    fullest = np.full(bins, -1, dtype=np.int64)
    levels = np.zeros((bins, len(CATEGORIES)), dtype=np.int64)
    replay = Replay(program)
    reached = 0  # the bin that the host is in: everything before it is complete
    for run in runs:
        for one in run:
            before = replay.level
            times, held = replay.run(one)
            if not len(times):
                continue
            at = np.searchsorted(edges, times, side="right") - 1
            _raise(levels, fullest, slice(reached, min(max(int(at[0]), reached) + 1, bins)), before)
            # the level from one operation on lasts into the bin of the next
            following = np.append(at[1:], at[-1])
            for start, stop, row in _longest(at, following, held):
                _raise(levels, fullest, slice(max(start, 0), min(stop, bins - 1) + 1), row)
            reached = min(max(int(at[-1]), 0), bins)
    _raise(levels, fullest, slice(reached, bins), replay.level)
    return levels


def _longest(at: Ints, following: Ints, held: Ints) -> Iterable[tuple[int, int, Ints]]:
    """(first bin, last bin, level) of the operations that matter: of those within one bin only the fullest."""
    total = held.sum(axis=1)
    groups = np.flatnonzero(np.concatenate(([True], np.diff(at) > 0)))
    ends = np.append(groups[1:], len(at))
    for start, stop in zip(groups.tolist(), ends.tolist(), strict=True):
        top = start + int(total[start:stop].argmax())
        yield int(at[start]), int(at[start]), held[top]
        yield int(at[start]), int(following[stop - 1]), held[stop - 1]


def _raise(levels: Ints, fullest: Ints, bins: slice, level: Ints) -> None:
    total = int(level.sum())
    chosen = np.flatnonzero(fullest[bins] < total) + bins.start
    fullest[chosen] = total
    levels[chosen] = level


def _operations(section: Section) -> _Operations:
    before = np.array([op.before for op in section.memory], dtype=np.int64)
    steps = np.zeros((len(before), len(CATEGORIES)), dtype=np.int64)
    for row, op in enumerate(section.memory):
        steps[row, _INDEX[op.category]] = op.size_bytes
    order = np.argsort(before, kind="stable")
    before, levels = before[order], np.cumsum(steps[order], axis=0)
    first = np.searchsorted(before, before, side="left")
    count = np.searchsorted(before, before, side="right") - first
    share = (np.arange(len(before)) - first + 1) / np.maximum(count, 1)
    kernels = np.array(section.kind, dtype=np.int64)[np.maximum(before - 1, 0)] == Kind.KERNELS if len(section) else (
        np.zeros(len(before), dtype=bool))
    return _Operations(before, levels, np.where(kernels, share, 1.0))
