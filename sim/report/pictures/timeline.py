"""The picture of a step: host, compute and communication as rows, from the whole step down to a few layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.report.pictures import style as look
from sim.report.pictures.timeline_rows import BUBBLE, EXPOSED, LATE, OTHER, Bars, Rows, close_look, rows_of, whole
from sim.report.result import Result
from sim.report.words import others

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

#: Inches: a row, what a panel needs beside its rows, head and foot of the picture.
_ROW, _PANEL, _HEAD, _FOOT = 0.24, 0.55, 0.62, 0.52
_RIGHT = 0.15
#: What the line below the key takes that says what the marks of panels mean.
_MARKS = 0.2
#: How boundaries of micro-steps are drawn.
_DASHES: dict[str, Any] = {"color": "#666666", "lw": 0.7, "ls": (0, (3, 3))}
#: Width of a panel in bars that can be told apart; narrower neighbours are drawn as one.
_TELLABLE = 450
#: Inches a letter needs at the size of a bar's text.
_LETTER = 0.068
#: Layers whose number alone is understood.
_NUMBERED = re.compile(r"^(block|encoder|decoder)(?=\d+$)")
#: Mere numbers of layers are written on the bars of a row only if at least this share of them has the room.
_WORTH_NUMBERING = 0.5
#: Points: the outline of narrow bars, so that none is thinner than a screen can show.
_HAIR = 0.5
#: Of more bars of a colour none is widened, or they would fill what they take a part of; a row of communication with
#: more is drawn as the share of time that each kind takes.
_MANY = 300
#: Stretches of the panel over which those shares are taken.
_SHARES = 150
#: Half the height of a row's bars, in rows.
_HALF = 0.4
#: Height of the lowest bar.
_LOW = 0.06
#: Height of the lowest stack of a crowded row, so that its colours are seen, and the least share that it stands for.
_LOW_STACK, _LEAST = 0.12, 1e-3
#: Waits that nobody can tell from one another are drawn if they take as much as so many that one can.
_HATCHED = 4
#: Beyond so many micro-steps their boundaries would be a grey field.
_MARKED_MICRO_STEPS = 40

#: A pipeline with more stretches than this is shown over three of them.
_FEW = 4

Window = tuple[float, float]


def timeline_figure(result: Result) -> Figure:
    """Draw the critical rank's step; call within `look.style()`."""
    rows = rows_of(result)
    panels = _panels(rows, whole(result.scenario))
    left = 0.2 + _LETTER * max(len(_spelt(name)) for name in rows.names)
    per_panel = len(rows.names) * _ROW + _PANEL
    marks = _marks(rows, panels)
    height = _HEAD + _FOOT + _MARKS * bool(marks) + len(panels) * per_panel
    made = look.figure(height)
    simulated = result.detail.lowered.job.classes[result.detail.critical]
    unit, factor = look.scale(result.step_time_s)
    exposed = result.breakdown.exposed_s / result.step_time_s
    waiting = f", {100 * exposed:.1f}% of it exposed communication" if exposed or len(rows.names) > 2 else (
        ", no communication")
    whose = f"rank {simulated.representative}{others(len(simulated.members) - 1)}"
    lasts = f"{result.step_time_s * factor:.4g} {unit}"
    look.heading(made, result.scenario.name, f"one {whole(result.scenario)} of {whose}: {lasts}{waiting}")
    seen: set[str] = set()
    for number, (title, window) in enumerate(panels):
        top = height - _HEAD - number * per_panel - 0.24
        box = (left / look.WIDTH, (top - len(rows.names) * _ROW) / height,
               (look.WIDTH - left - _RIGHT) / look.WIDTH, len(rows.names) * _ROW / height)
        ax = made.add_axes(box)
        seen |= _panel(ax, rows, window, title, panels[number + 1][1] if number + 1 < len(panels) else None)
    look.key(made, [(_spelt(name), colour) for name, colour in look.BARS.items()
                    if name in seen], _MARKS * bool(marks) / height)
    if marks:
        made.legend(handles=marks, loc="lower center", ncols=len(marks), handlelength=2.2, columnspacing=1.6,
                    borderaxespad=0.3)
    return made


def _marks(rows: Rows, panels: Sequence[tuple[str, Window]]) -> list[Line2D]:
    """What the lines in panels mean, for a key: boundaries of micro-steps, and what part the next panel shows."""
    from matplotlib.lines import Line2D

    said = "a stretch ends: passes that the schedule repeats together" if rows.piece == "stretch" else (
        f"the next {rows.piece} begins")
    found = [Line2D([], [], **_DASHES, label=said)] if any(_boundaries(rows, window) for _, window in panels) else []
    return found + [Line2D([], [], color=look.BLACK, lw=3, label="the part that the next panel shows")] * (
        len(panels) > 1)


def _boundaries(rows: Rows, window: Window) -> list[float]:
    """Where micro-steps begin inside a window; none where there are too many to tell apart."""
    found = [t for t in rows.micro_steps[1:, 0].tolist() if window[0] < t < window[1]]
    return found if len(found) < _MARKED_MICRO_STEPS else []


def _spelt(name: str) -> str:
    """A row's or a key's name as a person reads it."""
    return name.replace("_", "-").replace("recv", "receive")


def timeline_digest(result: Result) -> dict[str, Any]:
    """What the picture shows, as a few numbers: whether a stored picture is current can be told without its pixels."""
    rows = rows_of(result)
    shown = []
    for name, bars in zip(rows.names, rows.bars, strict=True):
        inside = bars.within(0.0, rows.step_time_s)
        seconds = {rows.keys[k]: float((inside.end_s - inside.start_s)[inside.key == k].sum())
                   for k in sorted(set(inside.key.tolist()))}
        shown.append({"row": name, "bars": len(inside.key), "seconds": dict(sorted(seconds.items()))})
    panels = _panels(rows, whole(result.scenario))
    return {"step_time_s": rows.step_time_s, "exposed_s": rows.exposed_s(0.0, rows.step_time_s), "rows": shown,
            "panels": [{"title": title, "start_s": window[0], "end_s": window[1]} for title, window in panels]}


def _panels(rows: Rows, name: str) -> list[tuple[str, Window]]:
    """(title, window), from the whole, which is called `name`, to the part."""
    count = len(rows.micro_steps)
    if count < 1:
        return [(f"the {name}", (0.0, rows.step_time_s))]
    panels = [(f"the whole {name}" + (f": {rows.counted}" if rows.counted else ""), (0.0, rows.step_time_s))]
    first, last = rows.closest, rows.closest
    if rows.piece == "stretch" and count > _FEW:  # neighbours too: transfers between stages lie on their edges
        first, last = first - 1, last + 1
    start, end = float(rows.micro_steps[first, 0]), float(rows.micro_steps[last, 1])
    if count > 1:
        which = f"{first + 1}" if first == last else f"{first + 1} to {last + 1}"
        panels.append((f"{rows.piece}{'es' if first < last else ''} {which} of {count}", (start, end)))
    part = close_look(rows, start, end)
    if part is not None:
        panels.append((f"a close look: {part[0]}", part[1]))
    return panels


def _panel(ax: Axes, rows: Rows, window: Window, title: str, next_window: Window | None) -> set[str]:
    """One window of the step; returns the keys that it shows."""
    start, end = window
    unit, factor = look.scale(rows.step_time_s)
    ax.set_xlim(start * factor, end * factor)
    ax.ticklabel_format(axis="x", style="plain", useOffset=False)
    count = len(rows.names)
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_yticks(range(count), [_spelt(name) for name in rows.names])
    ax.set_title(title)
    ax.set_title(unit, loc="right", fontsize=8.5, color="#444444")
    look.quiet(ax)
    seen: set[str] = set()
    for number, bars in enumerate(rows.bars):
        seen |= _row(ax, rows, bars.within(start, end), number, window)
    _bands(ax, rows, window, factor)
    for t in _boundaries(rows, window):
        ax.axvline(t * factor, **_DASHES, zorder=4)
    if next_window is not None:
        _bracket(ax, next_window, window, factor)
    return seen


def _row(ax: Axes, rows: Rows, bars: Bars, number: int, window: Window) -> set[str]:
    from matplotlib.collections import PolyCollection

    start, end = window
    _, factor = look.scale(rows.step_time_s)
    tellable = (end - start) / _TELLABLE
    host = number == 0
    bars = _told_apart(rows, bars, number, tellable)
    if number > 1 and len(bars.key) > _MANY:
        return _crowded(ax, rows, bars, number, window)
    seen: set[str] = set()
    half = 0.22 if host else _HALF
    per_inch = ax.bbox.width / look.DOTS_PER_INCH / (end - start)
    for index in sorted(set(bars.key.tolist())):
        name = rows.keys[index]
        chosen = bars.take((bars.key == index).nonzero()[0])
        colour = look.BARS.get(name, look.GREY)
        waits = chosen.end_s - chosen.start_s
        if name in (EXPOSED, LATE) and waits.max() <= tellable and waits.sum() <= _HATCHED * tellable:
            continue  # slivers of a colour that the key would have to name
        seen.add(name)
        shapes = []
        for s, e, share in zip(chosen.start_s.tolist(), chosen.end_s.tolist(), chosen.share.tolist(), strict=True):
            top = number + half - 2 * half * max(share, _LOW)
            shapes.append([(s * factor, number + half), (e * factor, number + half), (e * factor, top),
                           (s * factor, top)])
        if (chosen.share < 0.995).any() and number < 2 and name != EXPOSED:
            seen.add(LATE)
            _late(ax, chosen, number, half, factor)
        wide = bool(((chosen.end_s - chosen.start_s) > 4 * tellable).any()) and name not in (EXPOSED, BUBBLE)
        ax.add_collection(PolyCollection(shapes, facecolor=colour, edgecolor="white" if wide else colour,
                                         linewidth=0.4 if wide else 0.0 if name == BUBBLE or len(shapes) > _MANY else
                                         _HAIR, zorder=3,
                                         snap=False))
        if not host and name not in (EXPOSED, BUBBLE, LATE, OTHER):
            _texts(ax, rows, chosen, colour, number, window, per_inch)
    return seen


def _crowded(ax: Axes, rows: Rows, bars: Bars, number: int, window: Window) -> set[str]:
    """A row of more bars than can be told apart: what share of the time each kind takes, one upon the other."""
    _, factor = look.scale(rows.step_time_s)
    edges = np.linspace(*window, _SHARES + 1)
    shares = {rows.keys[index]: bars.take((bars.key == index).nonzero()[0]).shares(edges)
              for index in sorted(set(bars.key.tolist()))}
    total = np.sum(list(shares.values()), axis=0)
    visible = np.maximum(_LOW_STACK / np.maximum(total, _LEAST), 1.0)
    base = np.full(_SHARES, number + _HALF)
    for name, share in shares.items():
        top = base - 2 * _HALF * share * visible
        ax.fill_between(edges * factor, np.append(base, base[-1]), np.append(top, top[-1]), step="post", lw=0,
                        color=look.BARS.get(name, look.GREY), zorder=3)
        base = top
    return set(shares)


def _told_apart(rows: Rows, bars: Bars, number: int, tellable: float) -> Bars:
    """Bars that stand too close as one. Of communication, and of waits for it, that is as high as the share of time
    that they take."""
    waits = bars.key == (rows.keys.index(EXPOSED) if EXPOSED in rows.keys and number == 1 else -1)
    parts = [bars.take((waits == dense).nonzero()[0]).merged(tellable / 4, tellable * 3, dense or number > 1)
             for dense in (False, True)]
    return Bars(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(Bars)))


def _late(ax: Axes, bars: Bars, number: int, half: float, factor: float) -> None:
    """Behind bars whose kernels waited for their launch: the missing height is the share of time that they did."""
    from matplotlib.collections import PolyCollection

    shapes = [[(s * factor, number - half), (e * factor, number - half), (e * factor, number + half),
               (s * factor, number + half)]
              for s, e, share in zip(bars.start_s.tolist(), bars.end_s.tolist(), bars.share.tolist(), strict=True)
              if share < 0.995]
    ax.add_collection(PolyCollection(shapes, facecolor=look.BARS[LATE], edgecolor="none", zorder=2))


def _texts(ax: Axes, rows: Rows, bars: Bars, colour: str, number: int, window: Window, per_inch: float) -> None:
    """Names of layers on bars that have the room."""
    from matplotlib.patheffects import withStroke

    _, factor = look.scale(rows.step_time_s)
    halo = withStroke(linewidth=2, foreground=colour)  # where waits are drawn over the bar
    whole, numbers = [], []
    for s, e, text in zip(bars.start_s.tolist(), bars.end_s.tolist(), bars.text.tolist(), strict=True):
        left, right = max(s, window[0]), min(e, window[1])
        room = (right - left) * per_inch / _LETTER - 1
        name = rows.texts[text] if text >= 0 else ""
        short = _NUMBERED.sub("", name)
        if name and len(name) <= room:
            whole.append(((left + right) / 2 * factor, name))
        elif short and len(short) <= room:
            numbers.append(((left + right) / 2 * factor, short))
    most = len(whole) + len(numbers) >= len(bars.text) * _WORTH_NUMBERING
    for x, shown in [*whole, *(numbers if most else [])]:
        ax.text(x, number, shown, ha="center", va="center_baseline", fontsize=7.5, color=look.legible(colour), zorder=5,
                path_effects=[halo])


def _bands(ax: Axes, rows: Rows, window: Window, factor: float) -> None:
    """A tint through all rows wherever the rank waits for communication for long enough to be seen."""
    least = (window[1] - window[0]) / _TELLABLE
    start, end = rows.exposed.T
    for s, e in rows.exposed[(end > window[0]) & (start < window[1]) & (end - start > least)].tolist():
        ax.axvspan(max(s, window[0]) * factor, min(e, window[1]) * factor, color=look.VERMILION, alpha=0.13, lw=0,
                   zorder=1)


def _bracket(ax: Axes, inner: Sequence[float], window: Window, factor: float) -> None:
    """Below the rows: which stretch the next panel shows."""
    least = (window[1] - window[0]) / 300
    middle, half = (inner[0] + inner[1]) / 2, max((inner[1] - inner[0]) / 2, least)
    ax.plot([(middle - half) * factor, (middle + half) * factor], [0, 0], color=look.BLACK, lw=3, clip_on=False,
            solid_capstyle="butt", transform=ax.get_xaxis_transform(), zorder=6)
