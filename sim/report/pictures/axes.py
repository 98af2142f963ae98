"""Pictures for notebooks: each draws one thing on matplotlib axes, its own or yours, and returns them.

    ax = sim.plot_breakdown(sim.run("scenarios/llama2-7b-fsdp.yaml"))      # shown by the notebook
    sim.plot_scaling(sweep, ax=axes[1])                                    # beside others

matplotlib is imported when something is drawn. Files with titles and legends for a README come from `--report`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sim.report.pictures import style as look
from sim.report.pictures.sweep import sweeps
from sim.report.result import Result
from sim.report.words import term as said
from sim.report.words import written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours of a step's terms.
TERMS: Mapping[str, str] = {
    "gemm": look.BLUE, "attention": look.SKY, "memory_bound": "#A6D3EF", "optimizer": "#1B2A49",
    "exposed communication": look.VERMILION, "pipeline bubble": look.PURPLE, "host": look.YELLOW,
    "offload": look.ORANGE}
_GIB = 2.0**30


class Swept(Protocol):
    """What `run_sweep` returns."""

    axes: dict[str, list[Any]]
    points: list[Result]


def terms_of(result: Result) -> dict[str, float]:
    """A step's terms, seconds, communication as one; they sum to the step."""
    parts = result.breakdown
    return {**parts.compute, "exposed communication": parts.exposed_s, "pipeline bubble": parts.pipeline_bubble,
            "host": parts.host, "offload": parts.offload}


def plot_breakdown(results: Result | Sequence[Result], ax: Axes | None = None) -> Axes:
    """Where the step of one run, or of several side by side, goes: stacked bars.

    Args:
        results: one run, or several.
        ax: where to draw; None makes a figure.
    """
    several = [results] if isinstance(results, Result) else list(results)
    return stacked([r.scenario.name for r in several], [terms_of(r) for r in several], ax)


def stacked(names: Sequence[str], terms: Sequence[Mapping[str, float]], ax: Axes | None = None) -> Axes:
    """Horizontal bars of seconds by term, the first on top.

    Args:
        terms: for each bar its terms in seconds (names of `TERMS`).
    """
    ax = _axes(ax, 1.0 + 0.45 * len(names))
    unit, factor = look.scale(max(sum(one.values()) for one in terms))
    left = [0.0] * len(names)
    for term, colour in TERMS.items():
        width = [one.get(term, 0.0) * factor for one in terms]
        if max(width) > 0:
            ax.barh(range(len(names)), width, left=left, color=colour, height=0.62, label=said(term))
            left = [a + b for a, b in zip(left, width, strict=True)]
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel(f"step, {unit}")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8, handlelength=1.2)
    return ax


def plot_memory(result: Result, ax: Axes | None = None) -> Axes:
    """What fills the fullest GPU at its peak, GiB by category, against what it has."""
    held = sorted(((size / _GIB, name) for name, size in result.memory.at_peak.items() if size), reverse=True)
    ax = _axes(ax, 1.0 + 0.28 * len(held))
    ax.barh(range(len(held)), [size for size, _ in held], height=0.66,
            color=[look.MEMORY.get(name, look.GREY) for _, name in held])
    ax.set_yticks(range(len(held)), [name.replace("_", " ") for _, name in held])
    ax.invert_yaxis()
    used, has = result.memory.device_used_bytes / _GIB, result.memory.capacity_bytes / _GIB
    ax.set_title(f"{used:.1f} of {has:.1f} GiB" + ("" if result.memory.fits else ": does not fit"))
    ax.set_xlabel("GiB")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_sweep(sweep: Swept, y: str = "step_time_s", ax: Axes | None = None) -> Axes:
    """One number of a sweep's points along its axis, one line per value of a second axis.

    Args:
        sweep: what `run_sweep` returned; of further axes the first values are shown.
        y: an attribute of `Result`, e.g. step_time_s, mfu, tokens_per_second_per_gpu.

    Raises:
        ValueError: the sweep has no points, or nothing varies.
    """
    return _lines(sweep, lambda points: [float(getattr(p, y)) for p in points], y.replace("_", " "), ax)


def plot_scaling(sweep: Swept, ax: Axes | None = None) -> Axes:
    """Throughput per GPU along the sweep's axis, % of its first point's; where communication bounds markers are open.

    Raises:
        ValueError: the sweep has no points, or nothing varies.
    """
    def efficiency(points: Sequence[Result]) -> list[float]:
        return [100 * p.tokens_per_second_per_gpu / points[0].tokens_per_second_per_gpu for p in points]

    ax = _lines(sweep, efficiency, "throughput per GPU, % of the first", ax)
    ax.axhline(100, color=look.GREY, lw=1, ls=(0, (4, 2)), zorder=1)
    ax.set_ylim(0, max(108.0, ax.get_ylim()[1]))
    return ax


def _lines(sweep: Swept, values: Any, label: str, ax: Axes | None) -> Axes:
    pictures = sweeps(sweep.points, sweep.axes)
    if not pictures:
        raise ValueError("the sweep has no points, or nothing varies in it")
    shown = pictures[0]
    ax = _axes(ax, 3.4)
    for index, line in enumerate(shown.lines):
        colour, marker = look.LINES[index % len(look.LINES)], look.MARKERS[index % len(look.MARKERS)]
        heights = values(line.points)
        ax.plot(line.x, heights, color=colour, lw=1.6, label=line.name or None)
        for x, height, point in zip(line.x, heights, line.points, strict=True):
            ax.plot([x], [height], marker=marker, ms=5.5, color=colour, mew=1.3, ls="none",
                    mfc="white" if point.bound == "communication" else colour)
    if shown.geometric:
        from matplotlib.ticker import NullLocator

        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(map(float, shown.values)), [f"{v:g}" for v in sorted(map(float, shown.values))])
        ax.xaxis.set_minor_locator(NullLocator())
    elif not shown.numeric:
        ax.set_xticks(range(len(shown.values)), [written(v) for v in shown.values])
    ax.set_xlabel(shown.axis)
    ax.set_ylabel(label)
    ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)
    if any(p.bound == "communication" for line in shown.lines for p in line.points):
        ax.plot([], [], color=look.GREY, marker="o", mfc="white", ls="none", label="bound by communication")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8)
    return ax


def _axes(ax: Axes | None, height: float) -> Axes:
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(8.0, height), layout="constrained")[1]
