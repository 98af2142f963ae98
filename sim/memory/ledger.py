"""The ledger: how many bytes of each category a rank holds while its host walks through one steady step.

Memory follows the host (rule 3 of the machine): `Section.memory` is replayed in the order in which the host passes the
operations, whenever the GPU gets to the work. What the whole step holds is `Program.resident`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.program import Program, Section

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


@dataclass(slots=True)
class _Track:
    """One section's operations, and zero-sized marks where the phase changes, relative to the section's start."""

    section: Section
    before: Levels  # (samples,) task of the section that the host issues next
    levels: Levels  # (samples, categories) after each operation
    totals: Levels  # (samples,) allocated categories only
    phase: Levels  # (samples,) index into _LABEL_PHASES, -1 for others
    forward_ends: Levels  # samples that are marks at which a forward ends
    net: Levels  # (categories,)
    operations: Levels  # (samples,) number of the operation, -1 for a mark


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
    walk = _Walk(resident)
    tracks: dict[int, _Track] = {}
    for number, repeats in program.schedule:
        track = tracks.get(number)
        if track is None:
            track = tracks[number] = _track(program, program.sections[number])
        walk.run(track)
        if repeats > 1:
            walk.level = walk.level + track.net * (repeats - 2)
            walk.run(track)
    return walk.finish(program, resident)


class _Walk:
    """The running level, and the highest points seen so far."""

    def __init__(self, resident: Levels) -> None:
        self.level = resident
        self.category_peaks = resident.copy()
        self.best = int(resident[TENSORS].sum())
        self.best_levels = resident
        self.best_at: tuple[_Track, int] | None = None
        self.phases: dict[str, tuple[int, Levels]] = {}
        self.highest = dict.fromkeys(_LABEL_PHASES, 0)

    def run(self, track: _Track) -> None:
        """One run of a section from the current level."""
        top = int(track.totals.argmax())
        total = int(self.level[TENSORS].sum() + track.totals[top])
        if total > self.best:
            self.best, self.best_levels, self.best_at = total, self.level + track.levels[top], (track, top)
        np.maximum(self.category_peaks, self.level + track.levels.max(axis=0), out=self.category_peaks)
        self._highest("end_of_forward", track, track.forward_ends)
        base = int(self.level[TENSORS].sum())
        for number, (phase, name) in enumerate(zip(_LABEL_PHASES, ("", *PHASES[2:]), strict=True)):
            samples = np.flatnonzero(track.phase == number)
            if len(samples):
                self.highest[phase] = max(self.highest[phase], base + int(track.totals[samples].max()))
                if name:
                    self._highest(name, track, samples)
        self.level = self.level + track.net

    def _highest(self, name: str, track: _Track, samples: Levels) -> None:
        if not len(samples):
            return
        levels = self.level + track.levels[samples[int(track.totals[samples].argmax())]]
        total = int(levels[TENSORS].sum())
        if name not in self.phases or total > self.phases[name][0]:
            self.phases[name] = (total, levels)

    def finish(self, program: Program, resident: Levels) -> MemoryUse:
        """The walk as a result. PyTorch's optimizers make their states in the first step, so construction has none."""
        init = resident.copy()
        init[_INDEX["optimizer_states"]] = 0
        phases = {"after_init": _named(init)}
        phases |= {name: _named(self.phases[name][1]) for name in PHASES if name in self.phases}
        where = None if self.best_at is None else _place(program, *self.best_at)
        return MemoryUse(self.best, _named(self.best_levels), where, phases, self.highest, _named(self.category_peaks),
                         _named(self.level - resident))


def _track(program: Program, section: Section) -> _Track:
    """The samples of one section: its operations, and before them at each change of phase a mark of size zero."""
    known = {name: i for i, name in enumerate(_LABEL_PHASES)}
    by_label = np.array([known.get(label.phase, -1) for label in program.labels] or [-1], dtype=np.int64)
    task_phase = by_label[np.array(section.label, dtype=np.int64)] if len(section) else np.array([-1], dtype=np.int64)
    changes = np.concatenate(([0], np.flatnonzero(np.diff(task_phase)) + 1, [len(section)])).astype(np.int64)
    ops = section.memory
    before = np.concatenate((changes, np.array([op.before for op in ops], dtype=np.int64)))
    category = np.concatenate((np.zeros(len(changes), dtype=np.int64),
                               np.array([_category(op.category) for op in ops], dtype=np.int64)))
    size = np.concatenate((np.zeros(len(changes), dtype=np.int64),
                           np.array([op.size_bytes for op in ops], dtype=np.int64)))
    order = np.argsort(before, kind="stable")  # marks were put first, so they stay in front of their task's operations
    before, category, size = before[order], category[order], size[order]
    steps = np.zeros((len(size), len(CATEGORIES)), dtype=np.int64)
    steps[np.arange(len(size)), category] = size
    levels = np.cumsum(steps, axis=0)
    is_mark = order < len(changes)
    after_forward = task_phase[np.maximum(before - 1, 0)] == 0
    ends = np.flatnonzero(is_mark & after_forward & (before > 0))
    phase = task_phase[np.minimum(before, len(task_phase) - 1)]
    return _Track(section, before, levels, levels[:, TENSORS].sum(axis=1), phase, ends, levels[-1],
                  order - len(changes))


def _category(name: str) -> int:
    try:
        return _INDEX[name]
    except KeyError:
        raise ValueError(f"unknown memory category {name!r}; known: {', '.join(CATEGORIES)}") from None


def _named(levels: Levels) -> dict[str, int]:
    return {name: int(levels[i]) for i, name in enumerate(CATEGORIES)}


def _place(program: Program, track: _Track, sample: int) -> Place:
    section = track.section
    if not len(section):
        return Place(section.name, "", "", "")
    label = program.labels[section.label[min(int(track.before[sample]), len(section) - 1)]]
    operation = int(track.operations[sample])
    operator = section.memory[operation].operator if operation >= 0 else ""
    return Place(section.name, label.layer, label.phase, label.name, operator)
