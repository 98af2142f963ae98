"""Commands that look at many configurations: `size` and `compare`."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.cli_output import Finite, apart, json_option, json_output, reporting, writable, writing
from sim.errors import Fault, UserError

if TYPE_CHECKING:
    from sim.sizing import Sizing


@click.command()
@click.argument("scenario", metavar="SCENARIO")
@click.option("--gpus", required=True, help="Numbers of GPUs: 8..512 (powers of two and both ends) or 8,16,24.")
@click.option("--cluster", "clusters", help="Topologies, separated by commas; default the scenario's.")
@click.option("--offload", help="What to try on the host, separated by commas: none, activations, optimizer, states, "
              "everything; default what the scenario says.")
@click.option("--overlap-p2p", is_flag=True, help="Try pipelines whose transfers overlap with compute, too.")
@click.option("--deadline", help="Longest run, e.g. '30 days'; needs tokens in the scenario's budget.")
@click.option("--budget", type=Finite(min=0), help="Most money for the run, USD.")
@click.option("--price", help="USD per GPU-hour, or a kind of cloud instance: 2.5, p5, or A=2.5,B=p5 by cluster.")
@click.option("--objective", type=click.Choice(["time", "cost", "gpus", "energy"]), default="time",
              help="What is best.")
@click.option("--memory-margin", type=Finite(min=0), default=0.0, metavar="GIB",
              help="GiB of every GPU's memory that are to stay free.")
@click.option("--top", type=click.IntRange(1, 1000), default=10, help="How many of the best.")
@click.option("--out", type=click.Path(dir_okay=False), help="SQLite file that results stream into.")
@click.option("--resume", is_flag=True, help="Go on with the file of --out.")
@click.option("--seconds", type=Finite(min=0), help="Simulate no longer; the best so far, with its gap.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes; default one for each CPU.")
@click.option("--dask", metavar="ADDRESS", help="Dask scheduler whose workers simulate instead, tcp://host:port.")
@json_option("the result")
@click.option("--csv", "csv_to", metavar="FILE", help="Write every simulated configuration as CSV.")
@click.option("--parquet", "parquet_to", metavar="FILE", help="The same as Parquet; needs drystep[parquet].")
@click.option("--report", "report_to", metavar="DIR", help="Write the text and a picture of the front there.")
def size(scenario: str, gpus: str, clusters: str | None, offload: str | None, overlap_p2p: bool, deadline: str | None,
         budget: float | None, objective: str, top: int, out: str | None, resume: bool, seconds: float | None,
         workers: int | None, dask: str | None, price: str | None, memory_margin: float, json_to: str | None,
         csv_to: str | None, parquet_to: str | None, report_to: str | None) -> None:
    """Search layouts, clusters and numbers of GPUs for the best configuration."""
    from sim import sizing
    from sim.api import load
    from sim.sizing import export
    from sim.sizing.front_picture import write_front
    from sim.sizing.wish import steps_of

    writable("--json", json_to)
    writable("--out", out)
    writable("--csv", csv_to)
    writable("--parquet", parquet_to)
    apart([scenario], {"--json": json_to, "--out": out, "--csv": csv_to, "--parquet": parquet_to})
    if parquet_to is not None:
        export.need_parquet()
    writable("--report", report_to and os.path.join(report_to, "front.png"), parents=True)
    if resume and out is None:
        raise UserError(Fault("there is nothing to resume", "--resume", hint="name the file with --out"))
    with _renaming("budget.deadline", "--deadline"):
        loaded = load(scenario, [] if deadline is None else [f"budget.deadline={deadline}"])
    asked, steps = loaded.scenario.budget, steps_of(loaded.scenario)
    if (deadline or budget is not None) and steps is None:
        raise UserError(Fault("a deadline or a budget needs the tokens of the run", "budget.tokens",
                              hint="give budget.tokens in the scenario"))
    wish = sizing.Wish(objective, 1.0 if steps is None else steps,
                       asked.deadline if asked is not None and steps is not None else None, budget,
                       memory_margin * 2**30)
    longest_s = math.inf if seconds is None else seconds
    found = sizing.size(loaded, sizing.Choice(sizing.counts(gpus)), wish,
                        clusters=_clusters(clusters), offload=_listed(offload), overlap_p2p=overlap_p2p,
                        top=top, out=Path(out) if out else None, resume=resume, price=price,
                        workers=workers or _cpus(), dask=dask, seconds=longest_s,
                        progress=_progress(longest_s) if sys.stderr.isatty() else None)
    if sys.stderr.isatty():
        click.echo(err=True)
    with json_output(json_to, many=False) as to:
        if to is not None:
            to.document(found.to_json())
    if csv_to is not None:
        with writing("--csv", csv_to):
            export.write_csv(Path(csv_to), found.rows)
    if parquet_to is not None:
        with writing("--parquet", parquet_to):
            export.write_parquet(Path(parquet_to), found.rows)
    _deliver("\n".join(_size_lines(found)), json_to, report_to, "sizing.txt", lambda folder: write_front(folder, found))


def _clusters(text: str | None) -> list[str]:
    """The topologies that --cluster names, each one that exists; none asked for is the scenario's own."""
    from sim.scenario.topologies import find_topology

    names = [] if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if text is not None and not names:
        raise UserError(Fault("names no topology", "--cluster", hint="see 'drystep list topologies'"))
    with _renaming("", "--cluster"):
        for name in names:
            find_topology(name, Path())
    return names


def _listed(text: str | None) -> list[str]:
    """Names separated by commas."""
    return [] if text is None else [name.strip() for name in text.split(",")]


@contextmanager
def _renaming(field: str, option: str) -> Iterator[None]:
    """Faults of what an option gave, told as that option's."""
    try:
        yield
    except UserError as error:
        raise UserError([replace(f, field=option, file="") if f.field == field and f.file in ("", "--set") else f
                         for f in error.faults]) from None


def _cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _deliver(text: str, json_to: str | None, report_to: str | None, name: str, picture: Callable[[Path], Path]) -> None:
    """The text on standard output, unless JSON goes there; with a folder, the text as `name` and a picture in it."""
    if json_to != "-":
        click.echo(text)
    if report_to is not None:
        with reporting(Path(report_to)) as written:
            written.append(picture(Path(report_to)))
            written.append(Path(report_to) / name)
            written[-1].write_text(text + "\n", encoding="utf-8")


def _progress(seconds: float) -> Callable[[int, float, float], None]:
    """A line on the terminal: how many were simulated, how fast, how far the bound of what is left is below
    the best, and how long --seconds leaves."""
    started = time.monotonic()

    def advance(done: int, bound: float, best: float) -> None:
        passed = time.monotonic() - started
        left = "" if math.isinf(seconds) else f", at most {max(0.0, seconds - passed):.0f} s left"
        gap = f", {100 * (best / bound - 1):.1f}% from proof" if 0 < bound < best < math.inf else ""
        click.echo(f"\r\x1b[K{done:,} simulated, {done / max(passed, 1e-9):.1f}/s{gap}{left}", nl=False, err=True)

    return advance


def _size_lines(found: Sizing) -> Iterator[str]:
    from sim.sizing.offloads import KEEPERS
    from sim.sizing.why import why_lines

    if found.not_offloaded:
        yield (f"not tried: --offload {','.join(found.not_offloaded)}, which nothing of this framework keeps on the "
               f"host ({KEEPERS})")
    pruned = ", ".join(f"{count:,} by {name}" for name, count in found.pruned.items())
    yield f"{found.raw:,} configurations can be written, {found.covered:,} of them differ in effect"
    yield (f"of these {found.impossible:,} impossible, pruned {pruned}, "
           f"{found.simulated:,} simulated ({found.refused:,} refused)")
    if found.faults:
        yield f"the simulation failed on {found.faults:,} of them, a fault of ours: the best is not proven"
        if found.first_fault is not None:
            yield f"  the first: {_layout(found.first_fault['set'])}: {found.first_fault['reason']}"
    elif found.proven:
        yield "the best is proven"
    else:
        yield f"not proven: a configuration not yet simulated may be up to {100 * found.gap:.1f}% better"
    if not found.best:
        yield "nothing that was simulated fits"
    proven = "no layout beats them in time, GPUs and cost; by energy of those simulated" if found.front_proven else (
        "of those simulated, by time, GPUs, cost and energy")
    if found.front_proven and found.wish.objective == "energy":
        proven = "the fastest and the least energy of every number of GPUs; of those simulated between them"
    for title, rows in (("best", found.best), (f"Pareto front ({proven})", found.front)):
        if rows:
            yield f"\n{title}:"
        for row in rows:
            yield f"  {_told(row)}"
    for name, origin in found.price_origin.items():
        yield f"\n{name}: {found.wish.prices[name]:g} USD per GPU-hour ({origin})"
    yield ""
    yield from why_lines(found.why, _brief, found.wish.told)


def _told(row: Mapping[str, Any]) -> str:
    cost = "" if row["usd"] is None else f"{row['usd']:10.4g} USD  "
    return (f"{row['step_time_s']:10.4g} s  {row['gpus']:6} GPUs  {row['gpu_hours']:10.4g} GPU-hours  "
            f"{row['energy_kwh']:9.4g} kWh  {cost}"
            f"{row['device_used_bytes'] / 2**30:6.1f} GiB  {row['cluster']}  {_layout(row['set'])}")


def _brief(row: Mapping[str, Any]) -> str:
    return f"{row['step_time_s']:.4g} s on {row['gpus']:,} GPUs of {row['cluster']}, {_layout(row['set'])}"


def _layout(sets: Mapping[str, Any]) -> str:
    shown = {name.removeprefix("parallel.").removeprefix("training."): value for name, value in sets.items()
             if name != "cluster.nodes" and value not in (1, False) and (value != "none" or "offload" not in name)
             and (name != "parallel.schedule" or sets["parallel.pipeline"] > 1)}
    return " ".join(f"{name}={_said(value)}"
                    for name, value in shown.items())


def _said(value: Any) -> str:
    return f"first-{value['layers']}-blocks" if isinstance(value, dict) else str(value)


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="A B...")
@json_option("the comparison")
@click.option("--report", "report_to", metavar="DIR", help="Write the comparison and its picture into a directory.")
def compare(scenarios: tuple[str, ...], json_to: str | None, report_to: str | None) -> None:
    """Runs side by side: which term of the step and of memory moved, why, and which fields differ."""
    from sim import sizing
    from sim.api import run
    from sim.sizing.compare_text import lines, write_picture

    writable("--json", json_to)
    writable("--report", report_to and os.path.join(report_to, "comparison.png"), parents=True)
    apart(scenarios, {"--json": json_to})
    if len(scenarios) < 2:
        raise UserError(Fault("one scenario cannot be compared", "A B...", hint="give two or more"))
    found = sizing.compare([run(name) for name in scenarios])
    with json_output(json_to, many=False) as to:
        if to is not None:
            to.document(found.to_json())
    _deliver("\n".join(lines(found)), json_to, report_to, "comparison.txt", lambda folder: write_picture(folder, found))


COMMANDS = (size, compare)
