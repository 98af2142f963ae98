"""Pictures of a validation: measured against predicted, the histogram of errors, errors against scale.

Each PNG carries a digest of the data in it, by which `--check` sees whether it is current, whatever the fonts of the
machine that drew it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.report.pictures import style as look
from sim.validation.statistics import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Errors beyond this are drawn at the edge.
EDGE = 0.4
_BINS = 40
#: File names and what is said of each.
PICTURES = {"validation-scatter.png": "Measured and predicted step times by source",
            "validation-histogram.png": "Errors of all rows, marked ones apart",
            "validation-scale.png": "Errors against the number of GPUs"}


def points(records: Sequence[Record]) -> list[tuple[str, float, float, float, int, bool]]:
    """(source, measured s, predicted s, error, GPUs, marked) of every compared row but bounds, three digits each."""
    found = [(r["file"].removesuffix(".yaml"), _three(r["measured"]["step_time_s"]),
              _three(r["predicted"]["step_time_s"]), round(r["error"]["step_time_s"], 3), int(r["features"]["gpus"]),
              r["quality"] is not None)
             for r in records if "step_time_s" in r["error"] and "features" in r and r["quality"] != "bound"]
    return sorted(found)


def digest(data: Sequence[Any]) -> str:
    """What a picture of `data` is stamped with."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def current(folder: Path, records: Sequence[Record]) -> bool:
    """Whether the folder's pictures show these records."""
    stamp = digest(points(records)).encode()
    return all((folder / name).is_file() and stamp in (folder / name).read_bytes() for name in PICTURES)


def draw(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Write the pictures.

    Raises:
        OSError: a file cannot be written.
    """
    data = points(records)
    written = []
    with look.style():
        for name, make in zip(PICTURES, (_scatter, _histogram, _scale), strict=True):
            look.save(make(data), folder / name, digest(data))
            written.append(folder / name)
    return written


def _three(value: float) -> float:
    return float(f"{value:.3g}")


def _families(data: Sequence[Any]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each source: tables of one project share the colour."""
    colours: dict[str, str] = {}
    found: dict[str, tuple[str, str]] = {}
    for source in sorted({p[0] for p in data}):
        project = source.split("_")[0]
        colour = colours.setdefault(project, look.LINES[len(colours) % len(look.LINES)])
        found[source] = (colour, look.MARKERS[sum(c == colour for c, _ in found.values()) % len(look.MARKERS)])
    return found


def _points(ax: Axes, data: Sequence[Any], across: Any, up: Any) -> None:
    for source, (colour, marker) in _families(data).items():
        own = [p for p in data if p[0] == source]
        ax.scatter([across(p) for p in own], [up(p) for p in own], s=12, marker=marker, facecolors=colour,
                   edgecolors="white", linewidths=0.3, alpha=0.8, label=f"{source} ({len(own)})", zorder=3)


def _legend(made: Figure, ax: Axes) -> None:
    handles, names = ax.get_legend_handles_labels()
    made.legend(handles, names, loc="center left", bbox_to_anchor=(0.725, 0.47), fontsize=7.0, markerscale=1.4,
                handletextpad=0.3)


def _scatter(data: Sequence[Any]) -> Figure:
    made = look.figure(5.6)
    ax = made.add_axes((0.075, 0.1, 0.64, 0.77))
    low, high = min(min(p[1], p[2]) for p in data) / 1.3, max(max(p[1], p[2]) for p in data) * 1.3
    ax.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=look.PALE, zorder=1)
    ax.plot([low, high], [low, high], color=look.GREY, linewidth=0.8, zorder=2)
    _points(ax, data, lambda p: p[1], lambda p: p[2])
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="measured step, s",
           ylabel="predicted step, s")
    look.heading(made, "Predicted against measured step times", f"{len(data)} published runs; the band is ±10%")
    _legend(made, ax)
    return made


def _histogram(data: Sequence[Any]) -> Figure:
    made = look.figure(3.4)
    ax = made.add_axes((0.075, 0.15, 0.9, 0.66))
    edges = [EDGE * (2 * i / _BINS - 1) for i in range(_BINS + 1)]
    inside = [[max(-EDGE, min(EDGE, p[3])) for p in data if p[5] == marked] for marked in (False, True)]
    ax.hist(inside, bins=edges, stacked=True, color=[look.BLUE, look.ORANGE],
            label=[f"as measured ({len(inside[0])})", f"plot readings, outliers, derived ({len(inside[1])})"])
    ax.axvline(0.0, color=look.BLACK, linewidth=0.8)
    ax.set(xlim=(-EDGE, EDGE), xlabel=f"predicted / measured − 1 (beyond ±{EDGE:.0%} at the edge)", ylabel="runs")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:+.0%}")
    ax.legend(loc="upper right")
    close = sum(abs(p[3]) <= 0.1 for p in data) / len(data)
    look.heading(made, "Errors", f"{100 * close:.0f}% of {len(data)} runs within ±10%")
    return made


def _scale(data: Sequence[Any]) -> Figure:
    made = look.figure(5.6)
    ax = made.add_axes((0.085, 0.11, 0.63, 0.75))
    ax.axhspan(-0.1, 0.1, color=look.PALE, zorder=1)
    ax.axhline(0.0, color=look.GREY, linewidth=0.8, zorder=2)
    # rows of one count stand side by side, in the order of their sources
    counts: dict[int, int] = {}
    offsets = []
    for p in data:
        counts[p[4]] = counts.get(p[4], 0) + 1
        offsets.append(counts[p[4]])
    moved = [(*p[:4], p[4] * 2 ** (0.6 * (at / (counts[p[4]] + 1) - 0.5)), p[5])
             for p, at in zip(data, offsets, strict=True)]
    _points(ax, moved, lambda p: p[4], lambda p: max(-1.0, min(EDGE, p[3])))
    lowest = min((p[3] for p in data), default=-EDGE)
    ax.set(xlabel="GPUs", ylabel="predicted / measured − 1", ylim=(min(-EDGE, lowest - 0.03), EDGE))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:+.0%}")
    look.heading(made, "Errors against scale", f"the band is ±10%; what is above {EDGE:+.0%} stands at the edge")
    _legend(made, ax)
    return made
