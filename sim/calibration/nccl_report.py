"""`python -m sim.calibration.nccl_report [--quick]`: writes reports/collectives.md and its pictures, worst first.

Without `--quick` every site is left out in turn and predicted by a fit to the others (some ten minutes on two cores);
with it, the errors of the last such run are shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sim.calibration.nccl import dispatch
from sim.calibration.nccl.left_out import left_out
from sim.calibration.nccl.notes import NOTES
from sim.calibration.nccl.sweeps import Sweep, load
from sim.network.figures import catalogue, origins

_FOLDER = Path(__file__).resolve().parents[2] / "reports"
#: Aims of the project: (median, 90th percentile) of sweeps' errors, and how much worse with the site left out.
_AIMS = {"one node": (0.06, 0.15), "several nodes": (0.12, 0.25)}
_LEFT_OUT = 1.3
_COMMAND = "python -m sim.calibration.nccl_report"


#: Sources that measured many sites alike: how their tables are headed.
_SERIES = {"aiconfigurator": "AIConfigurator, one node", "aiconfigurator-sums": "AIConfigurator, an engine's own sums",
           "aiconfigurator-engines": "AIConfigurator, sums of newer engines"}


def _place(sweep: Sweep) -> str:
    return _SERIES.get(sweep.series) or ("one node" if sweep.nodes == 1 else "several nodes")


def _noisy(sweep: Sweep) -> bool:
    """Whether the source calls some of the sweep's rows noise."""
    return sweep.noisy_below > 0


def _figures(errors: Sequence[float]) -> str:
    return f"{100 * np.median(errors):.1f} % / {100 * np.percentile(errors, 90):.1f} %" if errors else "–"


def _table(sweeps: Sequence[Sweep], kept: dict[str, float]) -> list[str]:
    """Median and 90th percentile by place, against the aims."""
    lines = ["| sweeps | count | aim | in sample | without the host of the benchmark | without sweeps of noisy rows "
             "| site left out | aim |", "|---|---|---|---|---|---|---|---|"]
    for place in (*_AIMS, *_SERIES.values()):
        median, high = _AIMS.get(place, _AIMS["one node"])
        here = [s for s in sweeps if _place(s) == place]
        bare = [float(np.abs(s.predict_us(False) / s.measured_us - 1)[s.counted].mean()) for s in here]
        lines.append(
            f"| {place} | {len(here)} | {100 * median:.0f} % / {100 * high:.0f} % "
            f"| {_figures([s.error() for s in here])} "
            f"| {_figures(bare)} | {_figures([s.error() for s in here if not _noisy(s)])} "
            f"| {_figures([kept[s.id] for s in here if s.id in kept])} "
            f"| {130 * median:.1f} % / {130 * high:.1f} % |")
    return lines


def _sweep_table(sweeps: Sequence[Sweep], kept: dict[str, float]) -> list[str]:
    lines = ["| sweep | site | nodes | ranks | in sample | site left out | largest size | NCCL's choices |",
             "|---|---|---|---|---|---|---|---|"]
    for s in sorted(sweeps, key=lambda s: -s.error()):
        last = s.predict_us()[-1] / s.measured_us[-1] - 1
        outside = f"{100 * kept[s.id]:.1f} %" if s.id in kept else "–"
        lines.append(f"| {s.id} | {s.site} | {s.nodes} | {s.ranks} | {100 * s.error():.1f} % | {outside} | "
                     f"{100 * last:+.1f} % | {', '.join(dict.fromkeys(s.names()))} |")
    return lines


def _series_table(sweeps: Sequence[Sweep], kept: dict[str, float]) -> list[str]:
    """Sweeps of a series by site and operation, those of 2, 4 and 8 GPUs side by side: in sample / site left out."""
    lines = ["| site | operation | 2 GPUs | 4 GPUs | 8 GPUs | largest size | NCCL's choices |",
             "|---|---|---|---|---|---|---|"]
    rows: dict[tuple[str, str], list[Sweep]] = {}
    for s in sweeps:
        rows.setdefault((s.site, s.kind), []).append(s)
    for (site, kind), own in sorted(rows.items(), key=lambda row: -max(s.error() for s in row[1])):
        cells = {s.ranks: f"{100 * s.error():.1f} / " + (f"{100 * kept[s.id]:.1f} %" if s.id in kept else "–")
                 for s in own}
        last = ", ".join(f"{100 * (s.predict_us()[-1] / s.measured_us[-1] - 1):+.0f}" for s in own)
        names = dict.fromkeys(name for s in own for name in s.names())
        cells_of = " | ".join(cells.get(n, "–") for n in (2, 4, 8))
        lines.append(f"| {site} | {kind} | {cells_of} | {last} % | {', '.join(names)} |")
    return lines


def _site_table(sweeps: Sequence[Sweep], kept: dict[str, float]) -> list[str]:
    """Mean error of each site's sweeps, and the figures that without it have only their prior or their family."""
    lines = ["| site | sweeps | in sample | site left out | figures that no other site determines |",
             "|---|---|---|---|---|"]
    rows = []
    for site in sorted({s.site for s in sweeps}):
        own = [s for s in sweeps if s.site == site]
        alone = [name for name, row in origins().items() if row["sites"] == [site]]
        outside = [kept[s.id] for s in own if s.id in kept]
        rows.append((float(np.mean(outside)) if outside else 0.0,
                     f"| {site} | {len(own)} | {100 * np.mean([s.error() for s in own]):.1f} % | "
                     f"{100 * np.mean(outside):.1f} % | {', '.join(alone) or '–'} |"
                     if outside else ""))
    return lines + [line for _, line in sorted(rows, reverse=True) if line]


def _figure_table() -> list[str]:
    values = catalogue()
    lines = ["| figure | value | unit | began at | its source | confidence | sites |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {name} | {values[name]:.4g} | {row['unit']} | {row['prior']:g} | {row['source']} "
              f"| {row['confidence']} | {', '.join(row['sites'])} |" for name, row in origins().items()]
    return lines


def _residual_picture(sweeps: Sequence[Sweep], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places = (*_AIMS, *_SERIES.values())
    fig, axes = plt.subplots(len(places), 1, figsize=(10, 3.5 * len(places)), sharex=True)
    for axis, place in zip(axes, places, strict=True):
        for s in (s for s in sweeps if _place(s) == place):
            error = 100 * (s.predict_us() / s.measured_us - 1)
            axis.plot(np.array(s.sizes)[s.counted], error[s.counted], lw=0.8, alpha=0.7,
                      color="0.7" if _noisy(s) else None)
        axis.axhline(0, color="black", lw=0.8)
        axis.set(xscale="log", ylim=(-100, 120), ylabel="predicted over measured − 1 (%)", title=f"Residuals, {place}")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("message size (bytes); grey: sweeps whose source calls rows noise")
    fig.tight_layout()
    fig.savefig(path, dpi=90)
    plt.close(fig)


def _sweep_picture(sweeps: Sequence[Sweep], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    fig, axes = plt.subplots(4, 4, figsize=(15, 12))
    for axis, s in zip(axes.flat, sweeps, strict=False):
        axis.loglog(s.sizes, s.measured_us, "o", ms=3, label="measured")
        axis.loglog(s.sizes, s.predict_us(), "-" if len(s.sizes) > 1 else "x", lw=1.2, label="predicted")
        axis.set_title(f"{s.id}\n{100 * s.error():.1f} %", fontsize=8)
        axis.tick_params(which="both", labelsize=7)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(sweeps):]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=7)
    fig.suptitle(f"{title}: time (us) over message size (bytes)")
    fig.tight_layout()
    fig.savefig(path, dpi=80)
    plt.close(fig)


def _bar_picture(sweeps: Sequence[Sweep], kept: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ordered = sorted(sweeps, key=lambda s: s.error())
    at = np.arange(len(ordered))
    fig, axis = plt.subplots(figsize=(9, 13))
    axis.barh(at, [100 * s.error() for s in ordered], color=["C0" if s.nodes == 1 else "C1" for s in ordered])
    axis.plot([100 * kept.get(s.id, np.nan) for s in ordered], at, "k|", ms=8, label="site left out")
    axis.set_yticks(at, [s.id for s in ordered], fontsize=7)
    axis.set(xlabel="mean absolute error of a sweep (%); blue one node, orange several", ylim=(-1, len(ordered)))
    axis.legend()
    axis.grid(axis="x", alpha=0.3)
    fig.tight_layout()
    fig.savefig(path, dpi=80)
    plt.close(fig)


def main() -> None:
    """Write the report."""
    quick = "--quick" in sys.argv[1:]
    sweeps = load()
    _FOLDER.mkdir(exist_ok=True)
    store = _FOLDER / "collectives_left_out.json"
    if quick:
        kept: dict[str, float] = json.loads(store.read_text(encoding="utf-8")) if store.is_file() else {}
    else:
        kept = left_out(sorted({s.site for s in sweeps}))
        store.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    alone = [s for s in sweeps if not s.series]
    worst = sorted(alone, key=lambda s: -s.error())
    alike = {name: [s for s in sweeps if s.series == name] for name in _SERIES}
    pictures = [f"collectives_{name}.png" for name in ("errors", "residuals", "worst", "rest", "alike")]
    files = [_FOLDER / name for name in pictures]
    _bar_picture(alone, kept, files[0])
    _residual_picture(sweeps, files[1])
    _sweep_picture(worst[:16], files[2], "The sixteen worst sweeps")
    _sweep_picture(worst[16::3][:16], files[3], "Every third of the rest")
    _sweep_picture(sorted(alike["aiconfigurator"], key=lambda s: -s.error())[:16], files[4],
                   "The worst of AIConfigurator's")
    lines: list[str] = [
        "# Collectives: predicted against measured", "",
        f"Generated by `{_COMMAND}` from the {len(alone)} sweeps of `sim/calibration/data/collectives.yaml` and those "
        f"of AIConfigurator, {len(alike['aiconfigurator'])} of NCCL, {len(alike['aiconfigurator-sums'])} of SGLang's "
        f"first kernel and {len(alike['aiconfigurator-engines'])} of other engines' (`collectives_aic.yaml`, "
        "`collectives_peers.yaml`, `collectives_engines.yaml`). The error of a sweep is the mean of "
        "|predicted / measured − 1| over sizes of 1 KiB and more; tables give median / 90th percentile of sweeps.", "",
        *_table(sweeps, kept), "",
        *(f"![{name}]({name})" for name in pictures), "", "## Every sweep of a site of its own, worst first", "",
        *_sweep_table(alone, kept), "", "## Sweeps of AIConfigurator, worst first", "",
        *_series_table(alike["aiconfigurator"], kept), "", "### All-reduces by an engine's own kernel", "",
        *_series_table(alike["aiconfigurator-sums"] + alike["aiconfigurator-engines"], kept), "", "## By site", "",
        *_site_table(sweeps, kept), "", *dispatch.section(), NOTES, "## Every figure", "", *_figure_table()]
    (_FOLDER / "collectives.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
