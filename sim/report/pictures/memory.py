"""The picture of memory over the step: categories stacked, the capacity, and where the peak is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.memory.curve import envelope, host_spans
from sim.memory.ledger import CATEGORIES
from sim.program import Job, Kind, Program
from sim.report.numbers.breakdown import COMPUTE_STREAM
from sim.report.pictures import style as look
from sim.report.pictures.timeline_rows import counted, steady, whole
from sim.report.result import Result
from sim.report.words import forward_of, others

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Bins of the time axis: about one per pixel of the file.
_BINS = 1400
#: Samples of the digest.
_DIGEST_SAMPLES = 40
_PHASES = ("forward", "backward", "optimizer")
_GIB = 2.0**30
#: A host that has issued forward and backward within this share of the step gets a close look.
_EARLY = 0.25
#: Inches below the last panel and above the first.
_BOTTOM, _TOP = 0.62, 0.9
#: Inches: height of a ribbon.
_RIBBON = 0.16
#: Height of the peak's text as a share of the capacity.
_TEXT_ROOM = 0.14
#: A phase's name is written on the ribbon if it takes this share of the axis.
_NAMED_RIBBON = 0.09


@dataclass(slots=True)
class MemoryView:
    """What is drawn.

    Attributes:
        program: of the fullest rank; rank: its number; alike: how many more are as full.
        host, gpu: phase of what the host issues and of what the GPU computes: (start, end, index into forward,
            backward, optimizer), seconds.
        micro_steps: when the host was in each micro-step, shape (m, 2).
        peak_s: when the fullest moment is, on the host's clock.
    """

    result: Result
    program: Program
    rank: int
    alike: int
    host: list[tuple[float, float, int]]
    gpu: list[tuple[float, float, int]]
    micro_steps: Floats
    peak_s: float

    def levels(self, start_s: float, end_s: float, bins: int = _BINS) -> tuple[Floats, Ints]:
        """Edges of the bins and the fullest moment of each, shape (bins, categories)."""
        edges = np.linspace(start_s, end_s, bins + 1)
        number = fullest(self.result)
        runs = steady(self.result.detail.timeline.classes[number], self.result.step_time_s)
        return edges, envelope(self.program, runs, edges)


def fullest(result: Result) -> int:
    """The simulated class whose memory the result reports."""
    job: Job = result.detail.lowered.job
    use = result.memory.use
    for number, one in enumerate(job.classes):
        gpu = result.detail.machine.devices[one.device].gpu
        same = result.memory.stages[one.program] is use
        if same and int(gpu.usable_memory_bytes) == result.memory.capacity_bytes:
            return number
    return result.detail.critical


def memory_view(result: Result) -> MemoryView:
    """Read off a result what the picture needs."""
    number = fullest(result)
    job = result.detail.lowered.job
    one = job.classes[number]
    program = job.programs[one.program]
    known = {name: i for i, name in enumerate(_PHASES)}
    phase_of = np.array([known.get(label.phase, -1) for label in program.labels] or [-1], dtype=np.int64)
    host: list[tuple[float, float, int]] = []
    gpu: list[tuple[float, float, int]] = []
    spans = []
    for run in steady(result.detail.timeline.classes[number], result.step_time_s):
        section = program.sections[run.section]
        if not len(section):
            continue
        phases = phase_of[np.array(section.label, dtype=np.int64)]
        computes = ((np.array(section.kind, dtype=np.int64) == Kind.KERNELS)
                    & (np.array(section.stream, dtype=np.int64) == COMPUTE_STREAM))
        for each in run:
            begin, end = host_spans(section, each)
            for rows in _stretches(phases):
                phase = int(phases[rows[0]])
                host.append((float(begin[rows[0]]), float(end[rows[-1]]), phase))
                rows = rows[computes[rows]]
                if len(rows):
                    gpu.append((float(each.start_s[rows].min()), float(each.end_s[rows].max()), phase))
            if (phases == 0).any() or (phases == 1).any():
                spans.append((float(begin[0]), float(end[-1])))
    view = MemoryView(result, program, one.representative, len(one.members) - 1, host, gpu,
                      np.array(spans).reshape(-1, 2), 0.0)
    window = (0.0, result.step_time_s)
    for _ in range(2):  # the bin of the peak, then its place in that bin
        edges, levels = view.levels(*window)
        fullest_bin = int(levels.sum(axis=1).argmax())
        window = (float(edges[fullest_bin]), float(edges[fullest_bin + 1]))
    view.peak_s = window[0]
    return view


def _stretches(phases: Ints) -> list[Ints]:
    """Rows of a section in stretches of one phase: a pipeline's section may go forward and backward in turn."""
    rows = np.flatnonzero(phases >= 0)
    return np.split(rows, np.flatnonzero(np.diff(phases[rows])) + 1) if len(rows) else []


def memory_figure(result: Result) -> Figure:
    """Draw it; call within `look.style()`."""
    view = memory_view(result)
    windows = _windows(view)
    height = 4.4 if len(windows) == 1 else 6.2
    made = look.figure(height)
    memory = result.memory
    used, capacity = memory.shown_bytes / _GIB, memory.capacity_bytes / _GIB
    verdict = f"at most {used:.1f} of {capacity:.1f} GiB" if memory.fits_device else (
        f"{used:.1f} of {capacity:.1f} GiB without what the allocator's blocks waste; does not fit, "
        f"{memory.missing_bytes / _GIB:.1f} GiB too much")
    look.heading(made, result.scenario.name, f"memory of rank {view.rank}{others(view.alike)}: {verdict}")
    left, right = 0.62 / look.WIDTH, 2.18 / look.WIDTH
    bottoms = [_BOTTOM] if len(windows) == 1 else [height - 2.0, _BOTTOM]
    heights = [height - _BOTTOM - _TOP] if len(windows) == 1 else [2.0 - _TOP, height - 2.0 - 0.88 - _BOTTOM]
    shown = np.zeros(len(CATEGORIES), dtype=np.int64)
    for number, (title, window) in enumerate(windows):
        ax = made.add_axes((left, bottoms[number] / height, 1 - left - right, heights[number] / height))
        large = number == len(windows) - 1
        shown = np.maximum(shown, _panel(ax, view, window, title, large))
        if not large:
            _mark(ax, view, windows[1][1])
    _legend(made, view, shown, 1 - right + 0.12 / look.WIDTH)
    return made


def memory_digest(result: Result) -> dict[str, Any]:
    """What the picture shows, as a few numbers."""
    view = memory_view(result)
    _, levels = view.levels(0.0, result.step_time_s, _DIGEST_SAMPLES)
    return {"capacity_bytes": result.memory.capacity_bytes, "device_used_bytes": result.memory.device_used_bytes,
            "peak_s": view.peak_s, "highest_total_bytes": levels.sum(axis=1).tolist(),
            "panels": [{"title": title, "start_s": window[0], "end_s": window[1]} for title, window in _windows(view)]}


def _windows(view: MemoryView) -> list[tuple[str, tuple[float, float]]]:
    step = view.result.step_time_s
    spans = view.micro_steps[view.micro_steps[:, 0] < step]
    if len(spans) < 2:
        issued = max((end for _, end, phase in view.host if _PHASES[phase] != "optimizer"), default=step)
        all_of_it = (f"the whole {whole(view.result.scenario)}, at the times at which the host allocates, ahead of the "
                     "GPU", (0.0, step))
        if issued > _EARLY * step:
            return [all_of_it]
        return [all_of_it, ("the part in which the host issues forward and backward", (0.0, 1.15 * issued))]
    inside = np.flatnonzero((spans[:, 0] <= view.peak_s) & (view.peak_s <= spans[:, 1]))
    number = int(inside[0]) if len(inside) else len(spans) - 1
    start, end = max(0.0, float(spans[number, 0])), min(step, float(spans[number, 1]))
    several, piece = counted(view.result.scenario, len(spans))
    return [(f"the whole {whole(view.result.scenario)}: {several}", (0.0, step)),
            (f"{piece} {number + 1} of {len(spans)}, which holds the peak; times are the host's, ahead of the GPU",
             (start, end))]


def _panel(ax: Axes, view: MemoryView, window: tuple[float, float], title: str, large: bool) -> Ints:
    """One window; returns the highest level of each category in it."""
    unit, factor = look.scale(view.result.step_time_s)
    edges, levels = view.levels(*window)
    x = np.repeat(edges, 2)[1:-1] * factor
    floor = np.zeros(len(x))
    for name, colour in look.MEMORY.items():
        held = np.repeat(levels[:, CATEGORIES.index(name)], 2) / _GIB
        if held.any():
            ax.fill_between(x, floor, floor + held, facecolor=colour, edgecolor="none", zorder=2)
            floor = floor + held
    ax.plot(x, floor, color=look.BLACK, lw=0.6, zorder=1.9)
    memory = view.result.memory
    top = memory.shown_bytes / _GIB
    capacity = memory.capacity_bytes / _GIB
    seen = capacity < 2.2 * top
    ax.set_ylim(0, max(capacity * (1.18 if _close(top, capacity) else 1.06), top * 1.2) if seen else top * 1.3)
    ax.set_xlim(window[0] * factor, window[1] * factor)
    ax.ticklabel_format(axis="x", style="plain", useOffset=False)
    ax.set_title(title)
    ax.set_title(unit, loc="right", fontsize=8.5, color="#444444")
    ax.set_ylabel("GiB")
    late = view.peak_s > (window[0] + window[1]) / 2
    _capacity(ax, capacity, seen, memory.fits, ("left" if late else "right") if large else None)
    _ribbons(ax, view, window, factor)
    if large:
        _peak(ax, view, window, factor, top)
    return np.asarray(levels.max(axis=0), dtype=np.int64)


def _capacity(ax: Axes, capacity: float, seen: bool, fits: bool, label: str | None) -> None:
    """The capacity line, hatched above if the job goes there; `label` says at which side its name stands."""
    colour = look.VERMILION
    if seen:
        ax.axhline(capacity, color=colour, lw=1.4, ls=(0, (5, 2)), zorder=5)
        if not fits:
            ax.axhspan(capacity, ax.get_ylim()[1], facecolor="none", edgecolor=colour, hatch="///", alpha=0.35,
                       zorder=4, lw=0)
    if label is not None:
        text = f"capacity {capacity:.1f} GiB" + ("" if seen else " (far above)")
        y = capacity if seen else ax.get_ylim()[1]
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
        ax.annotate(text, (0.995 if label == "right" else 0.008, y), xycoords=("axes fraction", "data"),
                    xytext=(0, -4), textcoords="offset points", ha=label, va="top", color=colour, fontsize=8.5,
                    zorder=6, bbox=box)


def _ribbons(ax: Axes, view: MemoryView, window: tuple[float, float], factor: float) -> None:
    """Below the stack: what the host issues, and what the GPU computes meanwhile."""
    per_inch = look.DOTS_PER_INCH / ax.bbox.height
    for row, (who, spans) in enumerate((("host", view.host), ("GPU", view.gpu))):
        high = (-0.03 - row * _RIBBON) * per_inch
        low = high - (_RIBBON - 0.02) * per_inch
        ax.text(-0.008, (low + high) / 2, who, transform=ax.transAxes, fontsize=7, ha="right", va="center_baseline")
        seen = [(max(start, window[0]), min(end, window[1]), _PHASES[phase]) for start, end, phase in spans
                if min(end, window[1]) > max(start, window[0])]
        # one artist for all: a pipeline's step may have a hundred thousand
        ax.broken_barh([(s * factor, (e - s) * factor) for s, e, _ in seen], (low, high - low), lw=0, clip_on=False,
                       facecolors=[look.RIBBON[name] for _, _, name in seen], transform=ax.get_xaxis_transform(),
                       zorder=6)
        for s, e, name in seen:
            if (e - s) / (window[1] - window[0]) > _NAMED_RIBBON:
                ax.text((s + e) / 2 * factor, (low + high) / 2, name, transform=ax.get_xaxis_transform(), fontsize=7,
                        ha="center", va="center_baseline", zorder=7, color=look.legible(look.RIBBON[name]))
    ax.tick_params(axis="x", length=0, pad=(2 * _RIBBON + 0.06) * 72)


def _peak(ax: Axes, view: MemoryView, window: tuple[float, float], factor: float, top: float) -> None:
    if not window[0] <= view.peak_s <= window[1]:
        return
    where = view.result.memory.use.where
    place = f"\n{where.phase} of {where.layer}" if where is not None and where.layer else ""
    if where is not None and where.operator not in ("", where.layer):
        place += f", {where.operator}"
    if where is not None and forward_of(where.section):
        place = f"\n{forward_of(where.section)}"
    x = view.peak_s * factor
    late = view.peak_s > (window[0] + window[1]) / 2
    ax.plot([x], [top], marker="v", color=look.BLACK, ms=6, zorder=7, clip_on=False)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
    capacity = view.result.memory.capacity_bytes / _GIB
    above = capacity if _close(top, capacity) else top  # the capacity line is not written over
    ax.annotate(f"peak {top:.1f} GiB{place}", (x, above), xytext=(-8 if late else 8, 3), textcoords="offset points",
                ha="right" if late else "left", va="bottom", fontsize=8.5, zorder=7, bbox=box)


def _close(top: float, capacity: float) -> bool:
    """Whether the text above the peak would lie on the capacity line."""
    return 0 <= capacity - top < _TEXT_ROOM * capacity


def _mark(ax: Axes, view: MemoryView, inner: Sequence[float]) -> None:
    """Which stretch the large panel shows."""
    _, factor = look.scale(view.result.step_time_s)
    ax.axvspan(inner[0] * factor, inner[1] * factor, facecolor="none", edgecolor=look.BLACK, lw=1.1, zorder=6)


def _legend(made: Figure, view: MemoryView, shown: Ints, left: float) -> None:
    """Categories from the top of the stack down, with what they hold at the peak."""
    from matplotlib.patches import Patch

    at_peak = view.result.memory.at_peak
    boxes = [Patch(facecolor=colour, label=f"{name.replace('_', ' ')}  {_gib(at_peak[name])}")
             for name, colour in reversed(list(look.MEMORY.items()))
             if shown[CATEGORIES.index(name)]]
    held = at_peak["fragmentation"] if view.result.memory.fits_device else 0
    if held and not shown[CATEGORIES.index("fragmentation")]:  # of the peak alone: no layer of the stack, yet in it
        boxes.insert(0, Patch(facecolor="none", edgecolor=look.GREY, label=f"fragmentation  {_gib(held)}"))
    height = made.get_size_inches()[1]
    made.legend(handles=boxes, loc="upper left", bbox_to_anchor=(left, 1 - 0.72 / height), handlelength=1.1,
                        handleheight=1.0, labelspacing=0.45, handletextpad=0.5, title="at the peak, GiB",
                        alignment="left", title_fontsize=8.5, borderaxespad=0.0)


def _gib(size_bytes: int) -> str:
    value = size_bytes / _GIB
    return f"{value:.1f}" if value >= 0.95 or value == 0 else f"{value:.2f}"
