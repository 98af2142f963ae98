"""The ledger: how many bytes of each category a rank holds while its host walks through one steady step.

Memory follows the host (rule 3 of the machine): `Section.memory` is replayed in the order in which the host passes the
operations, whenever the GPU gets to the work. What the whole step holds is `Program.resident`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.program import Program

#: Memory categories of result.md, in its order, and the cache of keys and values of inference.
CATEGORIES = (
    "parameters", "gradients", "optimizer_states", "master_parameters", "gathered_parameters", "activations", "logits",
    "kv_cache", "buffers", "workspace", "fragmentation", "context",
)

#: Phases of result.md's `memory.phases`, in the order in which a step passes them.
PHASES = ("after_init", "end_of_forward", "peak_in_backward", "optimizer_step")

_INDEX = {name: i for i, name in enumerate(CATEGORIES)}
#: Held by the driver or lost inside blocks: not part of what `torch.cuda.memory_allocated` counts.
_OUTSIDE = ("fragmentation", "context")
#: Which of `CATEGORIES` are tensors, which `memory_allocated` counts.
TENSORS = np.array([name not in _OUTSIDE for name in CATEGORIES])
_LABEL_PHASES = ("forward", "backward", "optimizer")

Levels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """A point of the host's order: the section, the label of the task it is about to issue, and the operator of the
    layer that allocates there, where one can be named."""

    section: str
    layer: str
    phase: str
    task: str
    operator: str = ""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What one class of ranks holds in a steady step.

    Attributes:
        peak_allocated_bytes: highest sum of all categories but context and fragmentation.
        at_peak: bytes by category at that moment.
        where: where in the host's order that is; None if nothing is ever allocated above the resident level.
        phases: bytes by category after construction, at the end of forward, at the highest point of backward and of the
            optimizer step; a phase the program does not have is left out.
        highest: highest sum within each phase of the step: forward, backward, optimizer.
        category_peaks: each category's own highest level.
        net_bytes: level at the end of the step minus level at its start, by category; zero in a steady step.
    """

    peak_allocated_bytes: int
    at_peak: dict[str, int]
    where: Place | None
    phases: dict[str, dict[str, int]]
    highest: dict[str, int]
    category_peaks: dict[str, int]
    net_bytes: dict[str, int]

    @property
    def steady(self) -> bool:
        """Whether the step ends at the level at which it began."""
        return not any(self.net_bytes.values())


@dataclass(frozen=True, slots=True)
class _Samples:
    """Operations of all sections of a program, and zero-sized marks where the phase changes; each section from level 0.

    A section's samples stand together in host order. What is asked of them is worked out for all sections at once:
    a pipeline's stage has hundreds of short ones.

    Attributes:
        levels: after each sample, shape (samples, categories); totals: allocated categories only, shape (samples,).
        before: task of its section that the host issues next; operations: number of its operation, -1 for a mark.
        net, highest: of each section, the level at its end and each category's highest, shape (sections, categories).
        net_total: of `net`, allocated categories only.
        top: sample of each section with the highest total, the first of equals; the same of marks at which a forward
            ends, and of the samples of each of `_LABEL_PHASES`. The number of samples where a section has none.
    """

    levels: Levels
    totals: list[int]
    before: Levels
    operations: Levels
    net: Levels
    highest: Levels
    net_total: list[int]
    top: list[int]
    forward_ends: list[int]
    phases: tuple[list[int], ...]


def allocated_bytes(levels: Mapping[str, int]) -> int:
    """Sum of the categories that PyTorch's `memory_allocated` counts."""
    return sum(size for name, size in levels.items() if name not in _OUTSIDE)


def peak(program: Program) -> MemoryUse:
    """Replay one steady step of `program` and find its highest point.

    A section that repeats is replayed at its first and its last run only: in between the start level moves by the same
    amount each run, so every maximum lies at one of the two.

    Raises:
        ValueError: an operation names a category that result.md does not have.
    """
    resident = np.zeros(len(CATEGORIES), dtype=np.int64)
    for _, size, category in program.resident:
        resident[_category(category)] += size
    samples = _samples(program)
    walk = _Walk(samples, resident)
    for number, repeats in program.schedule:
        walk.run(number)
        if repeats > 1:
            walk.pass_over(number, repeats - 2)
            walk.run(number)
    return walk.finish(program, resident)


class _Walk:
    """The running level, and the highest points seen so far."""

    def __init__(self, samples: _Samples, resident: Levels) -> None:
        self.samples = samples
        self.level = resident
        self.total = int(resident[TENSORS].sum())
        self.category_peaks = resident.copy()
        self.best = self.total
        self.best_levels = resident
        self.best_at: tuple[int, int] | None = None  # section, sample
        self.phases: dict[str, tuple[int, Levels]] = {}
        self.highest = dict.fromkeys(_LABEL_PHASES, 0)

    def run(self, section: int) -> None:
        """One run of a section from the current level."""
        samples = self.samples
        top = samples.top[section]
        total = self.total + samples.totals[top]
        if total > self.best:
            self.best, self.best_levels, self.best_at = total, self.level + samples.levels[top], (section, top)
        np.maximum(self.category_peaks, self.level + samples.highest[section], out=self.category_peaks)
        self._highest("end_of_forward", samples.forward_ends[section])
        for phase, name, tops in zip(_LABEL_PHASES, ("", *PHASES[2:]), samples.phases, strict=True):
            if tops[section] < len(samples.totals):
                self.highest[phase] = max(self.highest[phase], self.total + samples.totals[tops[section]])
                if name:
                    self._highest(name, tops[section])
        self.pass_over(section, 1)

    def pass_over(self, section: int, times: int) -> None:
        """What runs of a section leave behind."""
        self.level = self.level + self.samples.net[section] * times
        self.total += self.samples.net_total[section] * times

    def _highest(self, name: str, sample: int) -> None:
        if sample < len(self.samples.totals):
            total = self.total + self.samples.totals[sample]
            if name not in self.phases or total > self.phases[name][0]:
                self.phases[name] = (total, self.level + self.samples.levels[sample])

    def finish(self, program: Program, resident: Levels) -> MemoryUse:
        """The walk as a result. PyTorch's optimizers make their states in the first step, so construction has none."""
        init = resident.copy()
        init[_INDEX["optimizer_states"]] = 0
        phases = {"after_init": _named(init)}
        phases |= {name: _named(self.phases[name][1]) for name in PHASES if name in self.phases}
        where = None if self.best_at is None else _place(program, self.samples, *self.best_at)
        return MemoryUse(self.best, _named(self.best_levels), where, phases, self.highest, _named(self.category_peaks),
                         _named(self.level - resident))


def _samples(program: Program) -> _Samples:
    """Every section's operations, and before them at each change of phase a mark of size zero."""
    sections = program.sections
    sizes = np.array([len(section) for section in sections], dtype=np.int64)
    first = np.concatenate(([0], np.cumsum(sizes + 1)))  # of each section: its tasks, and its end
    phase = _phases(program, first)
    changes = np.flatnonzero(np.diff(phase)) + 1
    marks = np.concatenate((first[:-1], first[:-1] + sizes, np.setdiff1d(changes, first)))
    operations = [op for section in sections for op in section.memory]
    counts = np.array([len(section.memory) for section in sections], dtype=np.int64)
    at = np.array([op.before for op in operations], dtype=np.int64) + np.repeat(first[:-1], counts)
    size = np.array([op.size_bytes for op in operations], dtype=np.int64)
    category = np.array([_category(op.category) for op in operations], dtype=np.int64)
    number = np.arange(len(operations)) - np.repeat(np.cumsum(counts) - counts, counts)

    none = np.zeros(len(marks), dtype=np.int64)
    at = np.concatenate((marks, at))
    order = np.argsort(at, kind="stable")  # marks were put first, so they stay in front of their task's operations
    at, is_mark = at[order], order < len(marks)
    size, category = np.concatenate((none, size))[order], np.concatenate((none, category))[order]
    starts = np.searchsorted(at, first[:-1])  # every section has a mark at its beginning
    counts = np.diff(np.concatenate((starts, [len(at)])))
    steps = np.zeros((len(at), len(CATEGORIES)), dtype=np.int64)
    steps[np.arange(len(at)), category] = size
    levels = _from_each(np.cumsum(steps, axis=0), steps, starts, counts)
    allocated = size * TENSORS[category]
    totals = _from_each(np.cumsum(allocated), allocated, starts, counts)
    before = at - np.repeat(first[:-1], counts)

    def top(chosen: npt.NDArray[np.bool_]) -> list[int]:
        """The first of the highest of the chosen samples, section by section."""
        of = np.where(chosen, totals, np.iinfo(np.int64).min)
        highest = chosen & (of == np.repeat(np.maximum.reduceat(of, starts), counts))
        found: list[int] = np.minimum.reduceat(np.where(highest, np.arange(len(at)), len(at)), starts).tolist()
        return found

    ends, forward_ended = starts + counts - 1, (before > 0) & (phase[np.maximum(at - 1, 0)] == 0)
    return _Samples(
        levels, totals.tolist(), before, np.concatenate((none - 1, number))[order], levels[ends],
        np.maximum.reduceat(levels, starts, axis=0), totals[ends].tolist(), top(np.ones(len(at), dtype=bool)),
        top(is_mark & forward_ended), tuple(top(phase[at] == number) for number in range(len(_LABEL_PHASES))))


def _phases(program: Program, first: Levels) -> Levels:
    """Index into `_LABEL_PHASES` (-1: none) of every section's tasks; a section's end has that of its last task."""
    known = {name: number for number, name in enumerate(_LABEL_PHASES)}
    by_label = np.array([known.get(label.phase, -1) for label in program.labels] or [-1], dtype=np.int64)
    labels = [number for section in program.sections
              for number in (*section.label, section.label[-1] if section.label else -1)]
    found = by_label[np.array(labels, dtype=np.int64)]
    empty = [number for number, section in enumerate(program.sections) if not len(section)]
    found[first[empty]] = -1
    return found


def _from_each(running: Levels, own: Levels, starts: Levels, counts: Levels) -> Levels:
    """Running sums over all sections as sums from each section's beginning."""
    return running - np.repeat(running[starts] - own[starts], counts, axis=0)


def _category(name: str) -> int:
    try:
        return _INDEX[name]
    except KeyError:
        raise ValueError(f"unknown memory category {name!r}; known: {', '.join(CATEGORIES)}") from None


def _named(levels: Levels) -> dict[str, int]:
    return {name: int(levels[i]) for i, name in enumerate(CATEGORIES)}


def _place(program: Program, samples: _Samples, number: int, sample: int) -> Place:
    section = program.sections[number]
    if not len(section):
        return Place(section.name, "", "", "")
    label = program.labels[section.label[min(int(samples.before[sample]), len(section) - 1)]]
    operation = int(samples.operations[sample])
    operator = section.memory[operation].operator if operation >= 0 else ""
    return Place(section.name, label.layer, label.phase, label.name, operator)
