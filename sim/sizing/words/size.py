"""What a search found, in words: how much was covered, the best and the Pareto front as tables, why the best wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sim.report.units import seconds
from sim.sizing.space.offloads import KEEPERS
from sim.sizing.words import precisions as precision_text
from sim.sizing.words import requests as served_text
from sim.sizing.words.layout import layout_of
from sim.sizing.words.requests import figure
from sim.sizing.words.why import why_lines

if TYPE_CHECKING:
    from sim.sizing.size import Sizing

Row = Mapping[str, Any]
_DAY_S, _GIB = 86_400.0, 2.0**30
#: Share of a GPU's memory below which what is left free is less than predictions of memory mostly miss by.
_NARROW = 0.03


def lines(found: Sizing, again: str | None = None) -> Iterator[str]:
    """The whole answer for a terminal; `again` is the command that runs the best."""
    yield from _covered(found)
    front = served_text.apart(found.front) if found.served else found.front
    for title, rows in zip(_titles(found), (found.best, front), strict=True):
        if rows:
            yield f"\n{title}:"
            yield from _table(found, rows)
    if found.served and found.best:
        yield from served_text.notes(found)
    if found.precisions:
        yield from precision_text.lines(found)
    if found.own is not None:
        yield f"\nthe scenario's own layout{_own(found, found.own, found.best[0] if found.best else None)}"
    if again is not None:
        yield f"\nrun the best:\n  {again}"
    if found.free_bytes is not None and found.free_bytes < _NARROW * found.best[0]["device_used_bytes"]:
        yield ("\nthe best nearly fills its GPUs, and predictions of memory miss by some percent "
               "(reports/validation.md): --memory-margin GIB asks for layouts that leave room")
    if found.nearest is not None:
        yield f"\n{served_text.nearest_title(found, found.nearest) if found.served else _without(found)}:"
        yield from _table(found, [found.nearest])
    elif found.nearest_cut:
        yield f"\nthe search for {'what is nearest to' if found.served else 'the best without'} the limits was ended " \
            "before it proved one"
    for name, origin in found.price_origin.items():
        yield f"\n{name}: {found.wish.prices[name]:g} USD per GPU-hour ({origin})"
    yield ""
    yield from why_lines(found.why, brief, found.told)


def _spent(found: Sizing) -> str:
    return f"of the whole run of {found.wish.steps:,.0f} steps" if found.wish.steps > 1 else "of one step"


def _without(found: Sizing) -> str:
    return f"best by {found.wish.objective} without the limits ({_spent(found)})"


def _titles(found: Sizing) -> tuple[str, str]:
    """Of the tables of the best and of the front."""
    if found.served:
        return served_text.titles(found)
    proven = "no layout searched beats them in time, GPUs and cost; by energy of those simulated" if (
        found.front_proven) else "of those simulated, by time, GPUs, cost and energy"
    if found.front_proven and found.wish.objective == "energy":
        proven = "the fastest and the least energy searched of every number of GPUs; of those simulated between them"
    return (f"best by {found.wish.objective} (GPU-hours, energy and cost {_spent(found)}; memory of the fullest GPU)",
            f"Pareto front ({proven})")


def _covered(found: Sizing) -> Iterator[str]:
    """How many layouts there are, what became of them, and whether the best is proven."""
    if found.not_offloaded:
        yield (f"not tried: --offload {','.join(found.not_offloaded)}, which nothing of this framework keeps on the "
               f"host ({KEEPERS})")
    yield from precision_text.untried(found)
    yield served_text.covered(found) if found.served else (
        f"{found.raw:,} configurations can be written, {found.covered:,} are searched (of those alike in effect one; "
        f"recomputed blocks{' and micro-batches' * found.stepped} in steps, finer next to the best of every number of "
        "GPUs)")
    ruled = {"memory": "do not fit", "time": "cannot be among the best", "deadline": "miss the deadline",
             "budget": "cost more than the budget", "limits": "break the limits"}
    counts = {"were not looked at (there was no time to bound them)": found.unbounded,
              "are impossible": found.impossible,
              **{ruled.get(name, f"are ruled out by {name}"): count for name, count in found.pruned.items()}}
    parts = [f"{count:,} {said}" for said, count in counts.items() if count]
    refused = f" ({found.refused:,} of them refused)" if found.refused else ""
    simulated = f"{found.simulated:,} {'was' if found.simulated == 1 else 'were'} simulated{refused}"
    yield f"of these {', '.join([*parts, simulated])}"
    if found.schedules:
        yield (f"schedules of pipelines: {', '.join(found.schedules)} (what this release of the framework has, and the "
               "scenario's own)")
    if found.faults:
        yield f"the simulation failed on {found.faults:,} of them, a fault of ours: the best is not proven"
        if found.first_fault is not None:
            yield f"  the first: {layout_of(found.first_fault['set'])}: {found.first_fault['reason']}"
    elif found.proven:
        rest = "; below it a configuration not yet simulated may come in between" if found.best_proven == 1 else (
            f", and so are the first {found.best_proven}; below them one not yet simulated may come in between")
        yield "that no layout does what is asked is proven" if not found.best else "the best is proven" + (
            rest if found.best_proven < len(found.best) else "")
    elif not found.best:
        yield "not proven: the search ended before anything that fits was simulated"
    elif found.unbounded:
        yield "not proven: how good those are that were not looked at is not known"
    else:
        yield f"not proven: a configuration not yet simulated may be up to {100 * found.gap:.1f}% better"
    yield from _without_any(found)
    yield from (f"! {hint}" for hint in found.hints)


def _without_any(found: Sizing) -> Iterator[str]:
    """Numbers of GPUs that are asked for and came to nothing, a line for every reason."""
    several = len({row["cluster"] for row in found.rows} | {one.cluster for one in found.without}) > 1
    for cluster, reason in dict.fromkeys((one.cluster, one.reason) for one in found.without):
        numbers = ", ".join(f"{one.gpus:,}" for one in found.without if (one.cluster, one.reason) == (cluster, reason))
        yield f"on {numbers} GPU{'s' * (numbers != '1')}{f' of {cluster}' * several}: {reason}"


def _table(found: Sizing, rows: Sequence[Row]) -> Iterator[str]:
    """Rows under their heads, columns as wide as they must be."""
    heads, cells = served_text.columns(found, rows) if found.served else _columns(found, rows)
    several = bool(found.precisions)
    told = [{"cluster": row["cluster"], **({"precision": precision_text.name_of(row["set"])} if several else {})}
            for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    names = {name: max(map(len, [name, *(one[name] for one in told)])) for name in told[0]}
    yield "  " + "  ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)) + (
        "".join(f"  {name:{width}}" for name, width in names.items())) + "  layout"
    for row, line, of in zip(rows, cells, told, strict=True):
        layout = layout_of(precision_text.without(row["set"]) if several else row["set"])
        yield "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) + (
            "".join(f"  {of[name]:{width}}" for name, width in names.items())) + f"  {layout}"


def _columns(found: Sizing, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of steps."""
    priced, whole = any(row["usd"] is not None for row in rows), found.wish.steps > 1
    unit, rate = ("samples/s", "samples_per_second") if any(row["tokens_per_second"] is None for row in rows) else (
        "tokens/s", "tokens_per_second")
    heads = ["step", unit, "GPUs", *(["days"] if whole else []), "GPU-hours", "kWh", *(["USD"] if priced else []),
             "memory"]
    return heads, [[seconds(row["step_time_s"]), figure(row[rate]), f"{row['gpus']:,}",
                    *([f"{row['run_s'] / _DAY_S:.4g}"] if whole else []), figure(row["gpu_hours"]),
                    figure(row["energy_kwh"]),
                    *(["–" if row["usd"] is None else figure(row["usd"])] if priced else []),
                    f"{row['device_used_bytes'] / _GIB:.1f} GiB"] for row in rows]


def brief(row: Row) -> str:
    """A row in words."""
    what = served_text.latencies(row) if "replicas" in row else f"{row['step_time_s']:.4g} s"
    return f"{what} on {row['gpus']:,} GPU{'s' * (row['gpus'] > 1)} of {row['cluster']}, {layout_of(row['set'])}"


def _own(found: Sizing, row: Row, best: Row | None) -> str:
    """What became of the scenario's own layout, against the best where that is on the same GPUs."""
    if row["outcome"] != "ok":
        return f" was refused: {row['reason']}"
    if not row["fits"]:
        return (f" does not fit: {row['device_used_bytes'] / _GIB:.1f} GiB on the fullest GPU "
                f"({layout_of(row['set'])})")
    alike = best is not None and all(row[name] == best[name] for name in ("gpus", "cluster"))
    if best is not None and alike and row["set"] == best["set"]:
        return " is the best"
    if found.served:
        return f": {brief(row)}{served_text.behind(found, row, best)}"
    slower = f", {100 * (row['step_time_s'] / best['step_time_s'] - 1):.1f}% above the best" if alike and best else ""
    return f": {brief(row)}{slower}"
