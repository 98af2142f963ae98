"""The front of a search over requests as a picture: how fast tokens come over what a million of them cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sim.report.units import figure
from sim.sizing.size import Sizing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MS = 1e3
_HEIGHT = 4.2


def draw(ax: Axes, found: Sizing) -> None:
    """A line per cluster and number of GPUs, batches along it; the best ringed."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from sim.report.pictures import style as look

    spent = "cost" if found.wish.priced else "gpu_hours"
    name = "time_per_token_s" if any(row["time_per_token_s"] for row in found.front) else "step_time_s"
    clusters = list(dict.fromkeys(row["cluster"] for row in found.front))
    for index, (cluster, gpus) in enumerate(dict.fromkeys((row["cluster"], row["gpus"]) for row in found.front)):
        rows = sorted((row for row in found.front if (row["cluster"], row["gpus"]) == (cluster, gpus)),
                      key=lambda row: float(row[spent]))
        told = f"{gpus:,} GPU{'s' * (gpus > 1)}" + (f" of {cluster}" if len(clusters) > 1 else "")
        marker = look.MARKERS[clusters.index(cluster) % len(look.MARKERS)]
        ax.plot([row[spent] for row in rows], [row[name] * _MS for row in rows], lw=1.4, ms=5, label=told,
                color=look.LINES[index % len(look.LINES)], marker=marker)
    if found.best:
        ax.plot([found.best[0][spent]], [found.best[0][name] * _MS], marker="o", ms=12, clip_on=False, mfc="none",
                mec=look.BLACK, ls="none", label=f"best by {found.wish.objective}")
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
        axis.set_minor_formatter(NullFormatter())
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"{'USD' if found.wish.priced else 'GPU-hours'} per million tokens")
    ax.set_ylabel("ms per token" if name == "time_per_token_s" else "ms per request")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def write(path: Path, found: Sizing) -> Path:
    """The picture in a file.

    Raises:
        OSError: it cannot be written.
    """
    from sim.report.pictures import style as look

    with look.style():
        made = look.figure(_HEIGHT)
        proven = "no other way looked at beats them" if found.front_proven else "of those simulated"
        look.heading(made, "What fast tokens cost", f"Pareto front over latency, GPUs and cost: {proven}; "
                                                    f"{found.covered:,} ways to serve, {found.simulated:,} simulated")
        draw(made.add_axes((0.10, 0.14, 0.62, 0.68)), found)
        look.save(made, path)
    return path
