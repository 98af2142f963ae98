"""The familiar picture of a pipeline: a row for every stage, a box for every forward and backward, bubbles white."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.report.pictures import style as look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Window = tuple[float, float]

#: Inches: the highest row and all rows of a panel, what a panel needs beside its rows, head and foot, margins.
_ROW, _ROWS, _PANEL, _HEAD, _FOOT = 0.27, 3.6, 0.52, 0.66, 0.34
_LEFT, _RIGHT = 0.72, 0.15
#: Inches of a digit at the size of a box's number, and what is free beside it.
_DIGIT, _BESIDE = 0.062, 0.035
#: Inches: a box from which it gets an outline, a row from which it gets numbers, between the names of stages.
_OUTLINED, _READABLE, _NAMED = 0.03, 0.15, 0.17
#: More chunks than these get no line each in the legend.
_TOLD_APART = 3

_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
_COLOURS = {"F": look.SKY, "B": look.GREEN, "W": look.ORANGE}


@dataclass(frozen=True)
class Boxes:
    """What the stages of a pipeline did; one entry of each array for one action.

    Attributes:
        stage: row, 0-based.
        kind: "F" forward, "B" backward, "W" gradients of weights.
        chunk: model chunk of the stage, 0-based.
        micro: micro-batch, 0-based; drawn from 1.
        start_s, end_s: seconds.
    """

    stage: npt.NDArray[np.int64]
    kind: npt.NDArray[np.str_]
    chunk: npt.NDArray[np.int64]
    micro: npt.NDArray[np.int64]
    start_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]

    @property
    def stages(self) -> int:
        return int(self.stage.max()) + 1

    @property
    def chunks(self) -> int:
        return int(self.chunk.max()) + 1

    @property
    def window(self) -> Window:
        return float(self.start_s.min()), float(self.end_s.max())

    def take(self, chosen: npt.NDArray[Any]) -> Boxes:
        """Some of the boxes."""
        return Boxes(self.stage[chosen], self.kind[chosen], self.chunk[chosen], self.micro[chosen],
                     self.start_s[chosen], self.end_s[chosen])


def bubble_share(boxes: Boxes, step_time_s: float | None = None) -> float:
    """Share of all stages' time in which no box is, 0 to 1.

    Args:
        step_time_s: how long a step takes. It is shorter than from the first start to the last end where stages begin
            their next step while others are still in this one.
    """
    start, end = boxes.window
    whole = boxes.stages * (end - start if step_time_s is None else min(end - start, step_time_s))
    return 1 - float((boxes.end_s - boxes.start_s).sum()) / whole if whole > 0 else 0.0


def pipeline_figure(title: str, boxes: Boxes, subtitle: str = "", chunk_names: Sequence[str] = (),
                    step_time_s: float | None = None) -> Figure:
    """Draw a step's pipeline; call within `look.style()`.

    Where boxes are too narrow for their numbers, a second and a third panel show how the pipeline fills and empties.

    Args:
        boxes: at least one.
        subtitle: what to say before the share of bubbles.
        chunk_names: what to call the chunks; "chunk 0", "chunk 1", ... without.
        step_time_s: as in `bubble_share`.
    """
    begin = boxes.window[0]  # before 0 where a stage begins its step while others are still in the one before
    boxes = replace(boxes, start_s=boxes.start_s - begin, end_s=boxes.end_s - begin)
    panels = _panels(boxes)
    rows = min(_ROWS, boxes.stages * _ROW)
    per_panel = rows + _PANEL
    legend = _legend(boxes, chunk_names)
    foot = _FOOT + 0.2 * (len(legend) > 5)
    height = _HEAD + foot + len(panels) * per_panel
    made = look.figure(height)
    bubbles = f"{100 * bubble_share(boxes, step_time_s):.1f}% of the stages' time is bubbles"
    look.heading(made, title, f"{subtitle}; {bubbles}" if subtitle else bubbles)
    for number, (name, window) in enumerate(panels):
        bottom = height - _HEAD - number * per_panel - 0.2 - rows
        ax = made.add_axes((_LEFT / look.WIDTH, bottom / height, (look.WIDTH - _LEFT - _RIGHT) / look.WIDTH,
                            rows / height))
        # where parts of it follow, the whole is an overview: numbers on some of its boxes would only confuse
        _panel(ax, boxes, window, name, rows / boxes.stages, numbered=len(panels) < 3 or number > 0)
    look.key(made, legend)
    return made


def pipeline_digest(boxes: Boxes, step_time_s: float | None = None) -> dict[str, Any]:
    """What the picture shows, as a few numbers: seconds of every stage by kind, and the share of bubbles."""
    seconds = boxes.end_s - boxes.start_s
    stages = [{kind: float(seconds[(boxes.stage == stage) & (boxes.kind == kind)].sum()) for kind in _NAMES
               if (boxes.kind == kind).any()} for stage in range(boxes.stages)]
    return {"boxes": len(boxes.stage), "bubble_share": bubble_share(boxes, step_time_s), "stages": stages}


def _panels(boxes: Boxes) -> list[tuple[str, Window]]:
    """(title, window), from the whole to its parts."""
    start, end = boxes.window
    digits = len(str(int(boxes.micro.max()) + 1))
    needed = digits * _DIGIT + _BESIDE
    narrow = float(np.quantile(boxes.end_s - boxes.start_s, 0.25))
    wide = (look.WIDTH - _LEFT - _RIGHT) * narrow / needed
    readable = min(_ROWS / boxes.stages, _ROW) >= _READABLE
    if wide >= end - start or wide <= 0 or not readable:
        return [("", (start, end))]
    if 2 * wide >= end - start:
        middle = (start + end) / 2
        return [("first half", (start, middle)), ("second half", (middle, end))]
    return [("the whole step", (start, end)), ("the pipeline fills", (start, start + wide)),
            ("the pipeline empties", (end - wide, end))]


def _panel(ax: Axes, boxes: Boxes, window: Window, title: str, row_inches: float, numbered: bool) -> None:
    start, end = window
    unit, factor = look.scale(boxes.window[1] - boxes.window[0])
    ax.set_xlim(start * factor, end * factor)
    ax.ticklabel_format(axis="x", style="plain", useOffset=False)
    ax.set_ylim(boxes.stages - 0.5, -0.5)
    every = next(every for every in (1, 2, 4, 8, 16, 64, boxes.stages) if every * row_inches >= _NAMED)
    shown = range(0, boxes.stages, every)
    ax.set_yticks(shown, [f"stage {stage}" for stage in shown])
    ax.set_title(title)
    ax.set_title(unit, loc="right", fontsize=8.5, color="#444444")
    look.quiet(ax)
    inside = boxes.take((boxes.end_s > start) & (boxes.start_s < end))
    per_second = (look.WIDTH - _LEFT - _RIGHT) / (end - start)
    for kind in _NAMES:
        for chunk in range(boxes.chunks):
            own = inside.take((inside.kind == kind) & (inside.chunk == chunk))
            if len(own.stage):
                _draw(ax, own, colour(kind, chunk, boxes.chunks), factor, per_second)
    if numbered and row_inches >= _READABLE:
        _number(ax, inside, window, boxes.chunks, factor, per_second)


def _draw(ax: Axes, own: Boxes, filled: str, factor: float, per_second: float) -> None:
    """Boxes of one colour."""
    from matplotlib.collections import PolyCollection

    left, right = own.start_s * factor, own.end_s * factor
    top, bottom = own.stage - 0.44, own.stage + 0.44
    corners = np.stack([np.stack([left, right, right, left], 1), np.stack([bottom, bottom, top, top], 1)], 2)
    outlined = float(np.median(own.end_s - own.start_s)) * per_second >= _OUTLINED
    ax.add_collection(PolyCollection(list(corners), facecolors=filled, edgecolors="white" if outlined else "none",
                                     linewidths=0.6 if outlined else 0.0))


def _number(ax: Axes, inside: Boxes, window: Window, chunks: int, factor: float, per_second: float) -> None:
    """Micro-batches' numbers on the boxes that have the room."""
    left, right = np.maximum(inside.start_s, window[0]), np.minimum(inside.end_s, window[1])
    for i in range(len(left)):
        text = str(int(inside.micro[i]) + 1)
        if (right[i] - left[i]) * per_second < len(text) * _DIGIT + _BESIDE * 0.3:
            continue
        filled = colour(str(inside.kind[i]), int(inside.chunk[i]), chunks)
        ax.text((left[i] + right[i]) / 2 * factor, int(inside.stage[i]) + 0.03, text, ha="center", va="center",
                fontsize=7, color=look.legible(filled), clip_on=True)


def colour(kind: str, chunk: int, chunks: int) -> str:
    """Colour of a box as "#RRGGBB": the kind's, paler for the first chunks."""
    share = 0.45 + 0.55 * (chunk / (chunks - 1)) if chunks > 1 else 0.75 + 0.25 * (kind == "F")
    full = _COLOURS[kind]
    mixed = [round(255 + share * (int(full[i:i + 2], 16) - 255)) for i in (1, 3, 5)]
    return "#" + "".join(f"{part:02X}" for part in mixed)


def _legend(boxes: Boxes, chunk_names: Sequence[str]) -> list[tuple[str, str]]:
    """(name, colour) of each kind and chunk; of a few chunks each, of many the first and the last."""
    called = {kind: name for kind, name in _NAMES.items() if (boxes.kind == kind).any()}
    if "W" in called and "B" in called:
        called["B"] = "input gradients"
    chunks = boxes.chunks
    if chunks == 1:
        return [(name, colour(kind, 0, 1)) for kind, name in called.items()]
    names = list(chunk_names) or [f"chunk {chunk}" for chunk in range(chunks)]
    told = range(chunks) if chunks <= _TOLD_APART else (0, chunks - 1)
    return [(f"{name}, {names[chunk]}", colour(kind, chunk, chunks)) for kind, name in called.items()
            for chunk in told]
