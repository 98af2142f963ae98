"""The Pareto front as a picture: step time over GPUs, and money over time where there is a price."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.report.units import figure
from sim.sizing.size import Sizing
from sim.sizing.words import request_picture as served_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Units of a run's length, in seconds, each from the second of its own on.
_UNITS = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))
#: Share of an axis that a label takes.
_LABEL = 0.06
#: An axis of values within this ratio of one another goes beyond them by as much.
_FLAT = 1.1


def plot_front(found: Sizing, ax: Axes | None = None) -> Axes:
    """Step time of the front over its GPUs, one line per cluster, the best ringed; of requests the time of a token over
    the cost of a million.

    Args:
        ax: where to draw; None makes a figure.
    """
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.subplots(figsize=(8.0, 3.4), layout="constrained")[1]
    if found.served:
        served_picture.draw(ax, found)
        return ax
    _draw(ax, found, "gpus", "step_time_s", labels=True)
    ax.set_xlabel("GPUs")
    ax.set_ylabel("step, s")
    return ax


def _unit(longest_s: float) -> tuple[str, float]:
    """In what the lengths of runs are told, the longest of which is given, and the seconds of one."""
    return next(((name, one_s) for name, one_s in _UNITS if longest_s >= 2 * one_s), ("s", 1.0))


def write_front(folder: Path, found: Sizing) -> Path:
    """front.png in a folder, made if it does not exist.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    from sim.report.pictures import style as look

    folder.mkdir(parents=True, exist_ok=True)
    path, height = folder / "front.png", 4.2
    if len(found.front if found.served else {(row["cluster"], row["gpus"]) for row in found.front}) <= 1:
        return _write_best(path, found)  # nothing to trade off: the best side by side say more than one point
    if found.served:
        return served_picture.write(path, found)
    with look.style():
        made = look.figure(height)
        proven = "no other layout searched beats them" if found.front_proven else "of the layouts simulated"
        look.heading(made, "What more GPUs buy", f"Pareto front over time, GPUs and cost: {proven}; "
                                                 f"{found.covered:,} layouts covered, {found.simulated:,} simulated")
        left = made.add_axes((0.10, 0.14, 0.37, 0.62))
        plot_front(found, left)
        right = made.add_axes((0.60, 0.14, 0.37, 0.62))
        spent = "cost" if found.wish.priced else "gpu_hours"
        unit, one_s = _unit(max((row["run_s"] for row in found.front), default=0.0))
        _draw(right, found, "run_s", spent, unit=one_s)
        right.set_xlabel(f"{'run' if found.wish.steps > 1 else 'step'}, {unit}")
        right.set_ylabel("cost, USD" if found.wish.priced else "GPU-hours")
        look.save(made, path)
    return path


def _write_best(path: Path, found: Sizing) -> Path:
    """The best as bars of their step, each with its layout and what it takes of a GPU's memory."""
    from sim.report.pictures import style as look
    from sim.sizing.words.layout import layout_of

    rows = found.best or ([found.nearest] if found.nearest is not None else [])
    covered = f"{found.covered:,} layouts covered, {found.simulated:,} simulated"
    with look.style():
        if not rows:
            made = look.figure(0.7)
            look.heading(made, "No layout does what is asked" if found.proven else "Nothing found so far", covered)
            look.save(made, path)
            return path
        unit, factor = look.scale(max(row["step_time_s"] for row in rows))
        height = 1.15 + 0.34 * len(rows)
        made = look.figure(height)
        title = f"The best {len(rows)} by {found.wish.objective}" if len(rows) > 1 else "The best"
        look.heading(made, title if found.best else "The best without the limits",
                     f"{rows[0]['gpus']:,} GPUs; {covered}")
        ax = made.add_axes((0.03, 0.5 / height, 0.94, (height - 1.15) / height))
        ax.barh(range(len(rows)), [row["step_time_s"] * factor for row in rows], height=0.7, color=look.LINES[0],
                alpha=0.35)
        for place, row in enumerate(rows):
            ax.text(0, place, f"  {row['step_time_s'] * factor:.4g} {unit}, "
                    f"{row['device_used_bytes'] / 2**30:.1f} GiB: {layout_of(row['set'])}", va="center", fontsize=7.5)
        ax.set_yticks([])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlabel(f"step, {unit}")
        ax.spines[["top", "right", "left"]].set_visible(False)
        look.save(made, path)
    return path


def _legible(values: list[float], span: float | None = None) -> list[float]:
    """Positive values in rising order without those whose labels would lie on the one before, on a logarithmic axis
    whose end is `span` times its beginning; the last over the first if not given."""
    apart = (span or values[-1] / values[0]) ** _LABEL if values else 1.0
    kept = values[:1]
    for value in values[1:]:
        if value >= kept[-1] * apart:
            kept.append(value)
    return kept


def _draw(ax: Axes, found: Sizing, x: str, y: str, labels: bool = False, unit: float = 1.0) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    from sim.report.pictures import style as look

    rows: list[dict[str, Any]] = found.front
    told = False
    for index, cluster in enumerate(dict.fromkeys(row["cluster"] for row in rows)):
        mine = sorted((row for row in rows if row["cluster"] == cluster), key=lambda row: float(row[x]))
        colour, marker = look.LINES[index % len(look.LINES)], look.MARKERS[index % len(look.MARKERS)]
        # what is slower and takes less energy stands beside the line through the fastest
        fastest = {gpus: min(row["step_time_s"] for row in mine if row["gpus"] == gpus)
                   for gpus in {row["gpus"] for row in mine}}
        lines = [row for row in mine if row["step_time_s"] == fastest[row["gpus"]]]
        others = [row for row in mine if row["step_time_s"] > fastest[row["gpus"]]]
        ax.plot([row[x] / unit for row in lines], [row[y] for row in lines], color=colour, marker=marker, lw=1.4, ms=5,
                label=cluster)
        ax.plot([row[x] / unit for row in others], [row[y] for row in others], color=colour, marker=marker, ls="none",
                ms=4, mfc="none", label="slower, less energy" if others and not told else None)
        told = told or bool(others)
    if found.best:
        ax.plot([found.best[0][x] / unit], [found.best[0][y]], marker="o", ms=12, clip_on=False, mfc="none",
                mec=look.BLACK, ls="none", label=f"best by {found.wish.objective}")
    plain = FuncFormatter(lambda value, _: figure(value))
    if rows:
        ax.set_xscale("log", base=2 if x == "gpus" else 10)
        ax.set_yscale("log")
        for axis, column, per in ((ax.xaxis, x, unit), (ax.yaxis, y, 1.0)):
            values = sorted({float(row[column]) / per for row in rows})
            low, high = values[0], values[-1]
            if high < _FLAT * low:  # a line from corner to corner would tell of a difference there is not
                low, high = low / _FLAT, high * _FLAT
                axis.set_view_interval(low, high, ignore=True)
            values = _legible(values, high / low)
            axis.set_major_formatter(plain)
            axis.set_minor_formatter(NullFormatter())
            shown = values if len(values) <= 6 else values[::-(-len(values) // 6)]
            axis.set_ticks(shown)
            axis.set_ticks([], minor=True)
    else:
        ax.text(0.5, 0.5, "nothing that was simulated fits", ha="center", transform=ax.transAxes)
        ax.set_xticks([])
        ax.set_yticks([])
    ax.spines[["top", "right"]].set_visible(False)
    if labels and rows:
        ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8)
