"""What each pipeline stage did in a step, read off a timeline as the boxes of the pipeline's picture.

A stage's actions have no micro-batch of their own in a Program, where what recurs is written once; they run in the
order of their micro-batches, so that counting gives it back.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from sim.program import GOES_ON, Kind, Label
from sim.report.numbers.breakdown import COMPUTE_STREAM
from sim.report.numbers.stages import replica_of
from sim.report.pictures.pipeline import Boxes
from sim.report.result import Result

#: Labels of actions: the chunk (of a forward that runs as one with a backward, in front), and what is done to it.
_CHUNK = re.compile(r"chunk(?:(\d+)\+)?(\d+)$")
_KINDS = {"forward": "F", "backward": "B", "weight gradients": "W", "forward and backward": "B"}
#: Schedules that run backwards from the last micro-batch to the first.
_REVERSED = ("gpipe",)

_Box = tuple[int, str, int, int, float, float]


class MicroBatches:
    """Numbers a stage's actions: the count of what was done to a chunk is its micro-batch, for which schedules that run
    backwards count down."""

    def __init__(self, schedule: str, micro_steps: int) -> None:
        self._last = micro_steps - 1 if schedule in _REVERSED else None
        self._counted: Counter[tuple[str, int]] = Counter()

    def of(self, label: Label) -> int | None:
        """The micro-batch of the next action with this label; None for what is no action of a chunk."""
        action = label.name.removesuffix(GOES_ON)
        first = _CHUNK.match(action)
        if first and label.phase == "forward":  # layer by layer
            self._counted["F", int(first[2])] = 1
            return 0
        named = _CHUNK.match(label.layer)
        if not named or action not in _KINDS:
            return None
        key = (_KINDS[action], int(named[2]))
        if action != label.name:  # more of the one before
            self._counted[key] -= 1
        if named[1]:
            self._counted["F", int(named[1])] += 1
        number = self._counted[key]
        self._counted[key] += 1
        return self._last - number if self._last is not None and key[0] == "B" else number


def boxes_of(result: Result) -> Boxes | None:
    """The boxes of all stages, of the replica with the critical rank; None if the job is no pipeline.

    The first forward and the last backward of a chunk may stand in the Program layer by layer: its layers, one behind
    the other, are one box.
    Copies into and out of gradient buckets are none.
    """
    parallel = result.scenario.parallel
    if parallel.pipeline < 2:
        return None
    count = result.scenario.micro_steps
    found: list[_Box] = []
    for number in replica_of(result.detail.lowered.job, result.detail.critical):
        own = _of_class(result, number)
        if parallel.schedule in _REVERSED:
            own = [(*box[:3], count - 1 - box[3], *box[4:]) if box[1] == "B" else box for box in own]
        found += own
    if not found:
        return None
    stage, kind, chunk, micro, start, end = zip(*found, strict=True)
    return Boxes(np.array(stage), np.array(kind), np.array(chunk), np.array(micro), np.array(start), np.array(end))


def chunk_names(result: Result) -> tuple[str, ...]:
    """What to call the chunks of a stage: directions where micro-batches flow both ways, else nothing of their own."""
    return ("upwards", "downwards") if result.scenario.parallel.schedule == "dualpipe" else ()


def merges(result: Result) -> bool:
    """Whether forwards and backwards run as one (`parallel.overlap_experts`), so that their boxes' edge is no event."""
    return any("+" in label.layer and label.name in _KINDS
               for program in result.detail.lowered.job.programs for label in program.labels)


def _of_class(result: Result, number: int) -> list[_Box]:
    """Boxes of one class of ranks, in order."""
    job = result.detail.lowered.job
    simulated = job.classes[number]
    labels = job.programs[simulated.program].labels
    layers = set(result.detail.lowered.architecture.names)
    columns = result.detail.timeline.columns(number)
    rows = np.flatnonzero((columns.stream == COMPUTE_STREAM) & (columns.kind == Kind.KERNELS)
                          & (columns.end_s > columns.start_s))
    counted: Counter[tuple[str, int]] = Counter()
    boxes: list[_Box] = []
    joined = False
    for row in rows.tolist():
        label = labels[columns.label[row]]
        start, end = float(columns.start_s[row]), float(columns.end_s[row])
        named, action = _CHUNK.match(label.layer), label.name.removesuffix(GOES_ON)
        if named and action in _KINDS:
            if action != label.name:  # more of the one before
                boxes[-1] = (*boxes[-1][:5], end)
                continue
            kind, chunk = _KINDS[action], int(named[2])
            if named[1]:  # as one with a forward: each is drawn in half of their time
                ahead = int(named[1])
                boxes.append((simulated.program, "F", ahead, counted["F", ahead], start, (start + end) / 2))
                counted["F", ahead] += 1
                start = (start + end) / 2
        elif label.layer in layers and (label.phase == "backward" or _CHUNK.match(action)):
            of = _CHUNK.match(action)  # of a first forward, whose parameters come layer by layer
            kind = label.phase[0].upper()
            if joined and boxes[-1][1] == kind and (of is None or boxes[-1][2] == int(of[2])):
                boxes[-1] = (*boxes[-1][:5], end)
                continue
            chunk = int(of[2]) if of else _ending(counted)
        else:
            joined = False
            continue
        joined = not named
        boxes.append((simulated.program, kind, chunk, counted[kind, chunk], start, end))
        counted[kind, chunk] += 1
    return boxes


def _ending(counted: Counter[tuple[str, int]]) -> int:
    """The chunk whose last backward is written by layers: of those that are not through the nearest to it."""
    left = {chunk: forwards - counted["B", chunk] for (kind, chunk), forwards in list(counted.items()) if kind == "F"}
    return min((chunk for chunk in left if left[chunk] > 0), key=lambda chunk: (left[chunk], -chunk), default=0)
