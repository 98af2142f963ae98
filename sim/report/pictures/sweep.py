"""The pictures of a sweep: step time, throughput and memory along an axis, and how throughput scales with GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from sim.report.pictures import style as look
from sim.report.result import Result
from sim.report.words import written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More lines in one picture than this cannot be told apart; what is left becomes further pictures.
MOST_LINES = 8
#: Dotted fields that change the number of GPUs and nothing else.
_CLUSTER = "cluster.nodes"
#: An axis whose values grow by about a factor each is drawn with powers.
_GEOMETRIC = 1.7


#: Letters below an axis that fit side by side; entries in a row of the legend, and inches of a row.
_LETTERS, _LEGEND_COLUMNS, _LEGEND_ROW = 24, 4, 0.24
#: How far below the GPU's memory all points may be for its line still to be drawn.
_FAR = 4
#: Values of an axis that are all written below it.
_TICKS = 6
#: Values this many times apart are drawn on a logarithmic scale.
_LOGARITHMIC = 20


@dataclass(frozen=True, slots=True)
class Line:
    """Points of a sweep that differ in one axis only, in its order. `x` are its values, or places if they are words."""

    name: str
    x: list[float]
    points: list[Result]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One picture: lines over an axis.

    Attributes:
        axis: the dotted field along x; values: all of its values, in the sweep's order.
        other: the dotted field that tells the lines apart, "" if there is one line.
        fixed: what further axes are held at.
    """

    title: str
    axis: str
    values: list[Any]
    other: str
    fixed: dict[str, Any]
    lines: list[Line]

    @property
    def numeric(self) -> bool:
        """Whether x is a quantity."""
        return all(_number(v) for v in self.values)

    @property
    def geometric(self) -> bool:
        """Whether x grows by factors."""
        if not self.numeric or len(self.values) < 3 or min(self.values) <= 0:
            return False
        ordered = sorted(set(self.values))
        return bool(ordered[-1] / ordered[0] >= _GEOMETRIC ** (len(ordered) - 1))


def sweeps(points: Sequence[Result], axes: Mapping[str, Sequence[Any]]) -> list[Sweep]:
    """The pictures of a sweep: x is the numeric axis with most values (nodes come first), lines are the next axis, and
    further axes are held, one picture for each combination of their values."""
    distinct = {name: list(dict.fromkeys(map(_plain, values))) for name, values in axes.items()}
    varied = {name: values for name, values in distinct.items() if len(values) > 1}
    if not points or not varied:
        return []
    axis = max(varied, key=lambda name: (name == _CLUSTER, all(map(_number, varied[name])), len(varied[name])))
    rest = sorted((name for name in varied if name != axis), key=lambda name: -len(varied[name]))
    other = next((name for name in rest if len(varied[name]) <= MOST_LINES), "")
    held = [name for name in rest if name != other]
    found = []
    for chosen in product(*(varied[name] for name in held)):
        fixed = dict(zip(held, chosen, strict=True))
        here = [p for p in points if all(_plain(p.set[k]) == v for k, v in fixed.items())]
        lines = []
        for value in varied[other] if other else [None]:
            own = [p for p in here if not other or _plain(p.set[other]) == value]
            ordered = sorted(own, key=lambda p: varied[axis].index(_plain(p.set[axis])))
            places = [_place(p.set[axis], varied[axis]) for p in ordered]
            if ordered:
                lines.append(Line(f"{_short(other)} {_say(value)}" if other else "", places, ordered))
        if lines:
            found.append(Sweep(points[0].scenario.name, axis, varied[axis], other, fixed, lines))
    return found


def sweep_figure(sweep: Sweep) -> Figure:
    """Step time, throughput per GPU and memory over the axis; call within `look.style()`."""
    foot = 0.58 + _slant(sweep) + _LEGEND_ROW * _legend_rows(sweep)
    height = 2.85 + foot
    made = look.figure(height)
    look.heading(made, sweep.title, _subtitle(sweep, _points(sweep)))
    first = sweep.lines[0].points[0]
    serving, tokens = first.inference is not None, first.scenario.model.kind != "layers"
    unit, factor = look.scale(max(p.step_time_s for line in sweep.lines for p in line.points))
    panels: tuple[tuple[str, str, Callable[[Result], float]], ...] = (
        ("time of a request" if serving else "step time", unit, lambda p: p.step_time_s * factor),
        ("tokens per second per GPU" if tokens else "samples per second per GPU", "",
         lambda p: (p.tokens_per_second if tokens else p.samples_per_second) / p.gpus),
        ("memory per GPU", "GiB", lambda p: p.memory.device_used_bytes / 2**30))
    for number, (title, in_unit, value) in enumerate(panels):
        ax = made.add_axes(((0.6 + number * 2.95) / look.WIDTH, foot / height, 2.3 / look.WIDTH,
                            (height - foot - 0.92) / height))
        ax.set_title(title)
        ax.set_title(in_unit, loc="right", fontsize=8.5, color="#444444")
        for index, line in enumerate(sweep.lines):
            _line(ax, line, [value(p) for p in line.points], index, joined=sweep.numeric)
        shown = [value(p) for line in sweep.lines for p in line.points]
        has = {p.memory.capacity_bytes / 2**30 for line in sweep.lines for p in line.points}
        if in_unit == "GiB" and len(has) == 1 and max(shown) * _FAR > max(has):
            ax.axhline(max(has), color=look.VERMILION, lw=1.1, ls=(0, (4, 2)), zorder=2)
            ax.set_title(f"of {max(has):.1f} GiB", loc="right", fontsize=8.5, color=look.VERMILION)
            shown.append(max(has))
        if max(shown) > _LOGARITHMIC * min(shown) > 0:
            ax.set_yscale("log")
            _readable_powers(ax, shown)
        else:
            ax.set_ylim(0, max(shown) * 1.1 or 1.0)
            ax.yaxis.set_major_formatter("{x:,g}")
        _x_axis(ax, sweep)
    _legend(made, sweep)
    return made


def scaling_figure(sweep: Sweep) -> Figure:
    """Throughput against its ideal, and its efficiency, over GPUs; the ideal is the smallest job times its GPUs."""
    several = len(sweep.lines) > 1
    foot = 0.58 + _LEGEND_ROW * _legend_rows(sweep)
    height = 3.05 + foot
    made = look.figure(height)
    look.heading(made, sweep.title, _subtitle(sweep, "ideal: each GPU as fast as in the smallest job"))
    boxes = [((0.75 + n * 4.3) / look.WIDTH, foot / height, 3.75 / look.WIDTH, (height - foot - 0.92) / height)
             for n in (0, 1)]
    rate, share = made.add_axes(boxes[0]), made.add_axes(boxes[1])
    rate.set_title("throughput, tokens per second")
    share.set_title("scaling efficiency")
    share.set_title("%", loc="right", fontsize=8.5, color="#444444")
    for index, line in enumerate(sweep.lines):
        gpus = [float(p.gpus) for p in line.points]
        each = [p.tokens_per_second_per_gpu for p in line.points]
        rate.plot([gpus[0], gpus[-1]], [gpus[0] * each[0], gpus[-1] * each[0]], color=look.GREY, lw=1.1,
                  ls=(0, (4, 2)), zorder=2)
        over_gpus = Line(line.name, gpus, line.points)
        _line(rate, over_gpus, [p.tokens_per_second for p in line.points], index)
        efficiency = [100 * e / each[0] for e in each]
        _line(share, over_gpus, efficiency, index)
        if not several:
            for x, y in zip(gpus[1:], efficiency[1:], strict=True):
                share.annotate(f"{y:.1f}", (x, y), xytext=(0, -7), textcoords="offset points", ha="center", va="top",
                               fontsize=8)
    first = sweep.lines[0].points
    rate.annotate("ideal", (first[-1].gpus, first[-1].gpus * first[0].tokens_per_second_per_gpu), xytext=(-14, -1),
                  textcoords="offset points", ha="right", va="bottom", fontsize=8.5, color="#666666")
    share.axhline(100, color=look.GREY, lw=1.1, ls=(0, (4, 2)), zorder=2)
    share.set_ylim(0, max(108.0, share.get_ylim()[1]))
    rate.set_yscale("log")
    sizes = sorted({p.gpus for line in sweep.lines for p in line.points})
    for ax in (rate, share):
        _powers(ax, [float(s) for s in sizes])
        ax.set_xlabel("GPUs")
        ax.grid(True, color="#EBEBEB", lw=0.8, zorder=0)
    _readable_powers(rate, [p.tokens_per_second for line in sweep.lines for p in line.points])
    _legend(made, sweep)
    return made


def scales(sweep: Sweep) -> bool:
    """Whether the picture is one of scaling: every line has jobs of several sizes and nothing else changes."""
    return sweep.axis == _CLUSTER and all(len({p.gpus for p in line.points}) > 1 for line in sweep.lines)


def sweep_digest(sweep: Sweep) -> dict[str, Any]:
    """What the picture shows, as numbers."""
    return {"axis": sweep.axis, "values": [_plain(v) for v in sweep.values], "fixed": sweep.fixed, "lines": [
        {"name": line.name, "x": line.x, "gpus": [p.gpus for p in line.points],
         "step_time_s": [p.step_time_s for p in line.points],
         "tokens_per_second_per_gpu": [p.tokens_per_second_per_gpu for p in line.points],
         "mfu": [p.mfu for p in line.points], "fits": [p.memory.fits for p in line.points]} for line in sweep.lines]}


def _line(ax: Axes, line: Line, values: Sequence[float], index: int, joined: bool = True) -> None:
    """A line with its markers; points that do not fit in memory are hollow. Words are joined faintly."""
    colour, marker = look.LINES[index % len(look.LINES)], look.MARKERS[index % len(look.MARKERS)]
    if joined:
        ax.plot(line.x, values, color=colour, lw=1.7, zorder=3)
    else:
        ax.plot(line.x, values, color=colour, lw=0.9, ls=":", alpha=0.6, zorder=3)
    for fits, face in ((True, colour), (False, "white")):
        at = [(x, y) for x, y, p in zip(line.x, values, line.points, strict=True) if p.memory.fits is fits]
        if at:
            ax.plot([x for x, _ in at], [y for _, y in at], ls="none", marker=marker, ms=5.5, mfc=face, mec=colour,
                    mew=1.3, zorder=4, clip_on=False)


def _x_axis(ax: Axes, sweep: Sweep) -> None:
    if sweep.geometric:
        _powers(ax, [float(v) for v in sorted(set(sweep.values))])
    elif sweep.numeric:
        ax.margins(x=0.06)
        values = sorted(set(sweep.values))
        if len(values) <= _TICKS and min(b - a for a, b in pairwise(values)) * 2 * _TICKS > values[-1] - values[0]:
            ax.set_xticks(values, [_say(v) for v in values])
        else:
            ax.locator_params(axis="x", integer=all(isinstance(v, int) for v in values))
    else:
        ax.set_xticks(range(len(sweep.values)), [_say(v) for v in sweep.values])
        ax.set_xlim(-0.4, len(sweep.values) - 0.6)
        if _slant(sweep):
            ax.tick_params(axis="x", rotation=30)
            for label in ax.get_xticklabels():
                label.set_horizontalalignment("right")
                label.set_rotation_mode("anchor")
    ax.set_xlabel(sweep.axis)
    ax.grid(True, color="#EBEBEB", lw=0.8, zorder=0)


def _slant(sweep: Sweep) -> float:
    """Inches that slanted words below the axis need; 0 if they fit side by side."""
    longest = max(len(_say(v)) for v in sweep.values)
    return 0.0 if sweep.numeric or longest * len(sweep.values) <= _LETTERS else 0.1 + longest * 0.066 * 0.5


def _powers(ax: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis whose ticks are the values themselves, as many as there is room for."""
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log", base=2)
    step = -(-len(values) // 8)
    shown = values[::-1][::step][::-1]
    ax.set_xticks(shown, [f"{v:g}" for v in shown])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(values[0] / 1.25, values[-1] * 1.25)


#: With fewer a logarithmic axis looks like a linear one.
_FEWEST_TICKS = 4


def _readable_powers(ax: Axes, values: Sequence[float]) -> None:
    """Ticks of a logarithmic y axis in thousands and millions."""
    from matplotlib.ticker import FixedLocator, NullLocator

    low, high = min(values), max(values)
    for mantissas in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):  # finer where coarse ones hide the scale
        ticks = [m * 10.0**e for e in range(-9, 16) for m in mantissas if low / 1.3 <= m * 10.0**e <= high * 1.3]
        if len(ticks) >= _FEWEST_TICKS:
            break
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(low / 1.3, high * 1.3)
    ax.set_yticklabels([_large(t) for t in ticks])


def _large(value: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


def _subtitle(sweep: Sweep, text: str) -> str:
    held = ", ".join(f"{_short(k)} {_say(v)}" for k, v in sweep.fixed.items())
    return f"{text}; {held}" if held else text


def _points(sweep: Sweep) -> str:
    count = sum(len(line.points) for line in sweep.lines)
    return f"{count} predictions over {sweep.axis}" + (f" and {sweep.other}" if sweep.other else "")


def _tight(sweep: Sweep) -> bool:
    return any(not p.memory.fits for line in sweep.lines for p in line.points)


def _legend_rows(sweep: Sweep) -> int:
    entries = sum(1 for line in sweep.lines if line.name) + _tight(sweep)
    return -(-entries // _LEGEND_COLUMNS)


def _legend(made: Figure, sweep: Sweep) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=look.LINES[i % len(look.LINES)], marker=look.MARKERS[i % len(look.MARKERS)],
                      ms=5.5, lw=1.7, label=line.name) for i, line in enumerate(sweep.lines) if line.name]
    if _tight(sweep):
        handles.append(Line2D([], [], color="#444444", marker="o", mfc="white", mew=1.3, ls="none", ms=5.5,
                              label="hollow: does not fit in memory"))
    if handles:
        made.legend(handles=handles, loc="lower center", ncols=min(_LEGEND_COLUMNS, len(handles)),
                    bbox_to_anchor=(0.5, 0.0), borderaxespad=0.3, columnspacing=1.8)


def _place(value: Any, values: Sequence[Any]) -> float:
    return float(value) if all(map(_number, values)) else float(values.index(_plain(value)))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """A value that can be compared and put into a set: mappings of a sweep become their text."""
    return value if isinstance(value, str | int | float | bool) or value is None else written(value)


def _say(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return written(value)


def _short(path: str) -> str:
    return path.split(".")[-1].replace("_", " ")
