"""Commands that look at many configurations: `size` and `compare`."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.commands.output import (
    INTERRUPTED,
    Finite,
    apart,
    examples,
    json_option,
    json_output,
    reporting,
    set_option,
    writable,
    writing,
)
from sim.errors import Fault, UserError

if TYPE_CHECKING:
    from sim.scenario import Scenario
    from sim.sizing import Wish


@click.command(short_help="Search for the best layout, cluster and number of GPUs.", epilog=examples(
    "drystep size scenario.yaml --gpus 32", "drystep size scenario.yaml --gpus 8..64 --cluster dgx-a100-80g,dgx-h100",
    "drystep size scenario.yaml --gpus 64 --only parallel.tensor=1,2 --only strategy=zero1,fsdp",
    "drystep size scenario.yaml --gpus 64 --precision megatron-bf16,fp8",
    "drystep size scenario.yaml --gpus 64 --objective cost --price 2.5 --seconds 60 --out runs.db",
    "drystep size inference.yaml --gpus 1..8 --weights bf16,int8,int4 --latency '30 ms' --first-token '2 s'",
    "drystep size inference.yaml --gpus 1..8 --cluster dgx-h100,dgx-a100-40g --objective gpus --throughput 2000"))
@click.argument("scenario", metavar="SCENARIO")
@set_option()
@click.option("--gpus", required=True, help="Numbers of GPUs: 8..512 (powers of two and both ends) or 8,16,24.")
@click.option("--cluster", "clusters", help="Topologies, separated by commas; default the scenario's.")
@click.option("--only", "narrow", multiple=True, metavar="FIELD=V[,V...]", help="Values that an axis may have, e.g. "
              "parallel.tensor=4,8 or training.recompute=none,full; repeatable.")
@click.option("--offload", help="What to try on the host, separated by commas: none, activations, optimizer, states, "
              "everything; of inference none, parameters; default what the scenario says.")
@click.option("--precision", help="Training: precisions to try beside the scenario's own, separated by commas, e.g. "
              "megatron-bf16,fp8 (see 'drystep list precisions'); default the scenario's own alone.")
@click.option("--weights", help="Inference: how to store weights, separated by commas: bf16, fp16, int8, int4, nf4, "
              "fp8, ..., and fp8-products, int8-products, ... to multiply in it too; default what the scenario says.")
@click.option("--kv-cache", help="Inference: caches to try, separated by commas: same, fp8, int8; default what the "
              "scenario says.")
@click.option("--overlap-p2p", is_flag=True, help="Try pipelines whose transfers overlap with compute, too.")
@click.option("--deadline", help="Longest run, e.g. '30 days'; needs tokens in the scenario's budget.")
@click.option("--budget", type=Finite(min=0), help="Most money for the run, USD.")
@click.option("--latency", metavar="TIME", help="Inference: longest time of a token behind the first, their mean, e.g. "
              "'30 ms'.")
@click.option("--first-token", metavar="TIME", help="Inference: longest time to the first token, e.g. '2 s'.")
@click.option("--throughput", type=Finite(min=0, min_open=True), metavar="TOKENS/S",
              help="Inference: fewest tokens per second of all replicas.")
@click.option("--price", help="USD per GPU-hour, or a kind of cloud instance: 2.5, p5, or A=2.5,B=p5 by cluster.")
@click.option("--objective", type=click.Choice(["time", "cost", "gpus", "energy", "latency", "first-token",
                                                "throughput"]),
              help="What is best: default time, of inference cost (both per million tokens, as energy is); the last "
              "three are of inference.")
@click.option("--memory-margin", type=Finite(min=0), default=0.0, metavar="GIB",
              help="GiB of every GPU's memory that are to stay free.")
@click.option("--top", type=click.IntRange(1, 1000), default=10, show_default=True, help="How many of the best.")
@click.option("--out", type=click.Path(dir_okay=False), help="SQLite file that results stream into.")
@click.option("--resume", is_flag=True, help="Go on with the file of --out.")
@click.option("--seconds", type=Finite(min=0), help="From the start of the command: then stop and tell the best so "
              "far, with its gap. A third of it is for bounding all layouts: of millions some may not be looked "
              "at, and it is told how many. One round of simulations and the reasons are not cut short.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes; default one for each CPU.")
@click.option("--dask", metavar="ADDRESS", help="Dask scheduler whose workers simulate instead, tcp://host:port.")
@json_option("the result")
@click.option("--csv", "csv_to", metavar="FILE", help="Write every simulated configuration as CSV.")
@click.option("--parquet", "parquet_to", metavar="FILE", help="The same as Parquet; needs drystep[parquet].")
@click.option("--report", "report_to", metavar="DIR", help="Write the text and a picture of the front there.")
@click.pass_context
def size(ctx: click.Context, scenario: str, sets: tuple[str, ...], gpus: str, clusters: str | None,
         narrow: tuple[str, ...], offload: str | None, precision: str | None, weights: str | None,
         kv_cache: str | None, overlap_p2p: bool, deadline: str | None, budget: float | None, latency: str | None,
         first_token: str | None, throughput: float | None, objective: str | None, top: int, out: str | None,
         resume: bool, seconds: float | None, workers: int | None, dask: str | None, price: str | None,
         memory_margin: float, json_to: str | None, csv_to: str | None, parquet_to: str | None,
         report_to: str | None) -> None:
    """Search layouts, clusters and numbers of GPUs for the best configuration."""
    started = time.monotonic()
    from sim import sizing
    from sim.api import load
    from sim.beside import processors
    from sim.sizing.space.only import only
    from sim.sizing.words import export
    from sim.sizing.words.front_picture import write_front
    from sim.sizing.words.rerun import command
    from sim.sizing.words.size import lines

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
        loaded = load(scenario, [*sets, *([] if deadline is None else [f"budget.deadline={deadline}"])])
    wish = replace(_wish(loaded.scenario, deadline is not None, budget, objective), margin_bytes=memory_margin * 2**30,
                   latency_s=_time("--latency", latency), first_token_s=_time("--first-token", first_token),
                   throughput=throughput)
    choice = replace(only(sizing.Choice(sizing.counts(gpus)), narrow), precision=_listed(precision),
                     weights=_listed(weights), kv_cache=_listed(kv_cache))
    longest_s = math.inf if seconds is None else seconds - (time.monotonic() - started)
    if sys.stderr.isatty():
        click.echo("listing layouts and bounding them", nl=False, err=True)
    with _first_interrupt() as interrupted:
        found = sizing.size(loaded, choice, wish,
                            clusters=_clusters(clusters), offload=_listed(offload), overlap_p2p=overlap_p2p,
                            top=top, out=Path(out) if out else None, resume=resume, price=price,
                            workers=workers or processors(), dask=dask, seconds=longest_s, interrupted=interrupted,
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
    again = None if found.winner is None else command(scenario, sets, found.winner, found.best[0]["set"],
                                                      _named(clusters, found.best[0]["cluster"]))
    text = "\n".join(lines(found, again))
    _deliver(text, json_to, report_to, "sizing.txt", lambda folder: write_front(folder, found))
    if interrupted():
        ctx.exit(INTERRUPTED)


def _wish(scenario: Scenario, deadline: bool, budget: float | None, objective: str | None) -> Wish:
    """What is asked of a scenario's run; a request is asked for by itself."""
    from sim.sizing.wish import SERVED_DEFAULT, Wish, steps_of

    asked = scenario.budget
    if scenario.training.mode != "train":
        asked_s = asked.deadline if asked is not None and deadline else None
        return Wish(objective or SERVED_DEFAULT, deadline_s=asked_s, budget=budget)
    steps = steps_of(scenario)
    if (deadline or budget is not None) and steps is None:
        raise UserError(Fault("a deadline or a budget needs the tokens of the run", "budget.tokens",
                              hint="give budget.tokens in the scenario"))
    return Wish(objective or "time", 1.0 if steps is None else steps,
                asked.deadline if asked is not None and steps is not None else None, budget)


_TIMES = "write '30 ms' or '2 s'"


def _time(option: str, text: str | None) -> float | None:
    """Seconds of an option whose numbers have a unit: without one 50 would be read as seconds, and meant in ms."""
    from pydantic_core import PydanticCustomError

    from sim.scenario.fields.units import SECONDS

    if text is None:
        return None
    try:
        value = SECONDS.read(text)
    except PydanticCustomError as error:
        raise UserError(Fault(f"'{text}' is no time: {error.message()}", option, hint=_TIMES)) from None
    if text.strip()[-1:].isdigit() or not 0 < value < math.inf:
        raise UserError(Fault(f"'{text}' is no time above 0 with its unit", option, hint=_TIMES))
    return value


@contextmanager
def _first_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed. Once the search asks, the first ends it with the best so far; a second, or one before
    there is anything to tell, ends the program."""
    pressed, asked = threading.Event(), threading.Event()

    def press(_number: int, _frame: object) -> None:
        if pressed.is_set() or not asked.is_set():
            raise KeyboardInterrupt
        pressed.set()
        click.echo("interrupted: the best so far follows (Ctrl-C again ends at once)", err=True)

    def ask() -> bool:
        asked.set()
        return pressed.is_set()

    if threading.current_thread() is not threading.main_thread():
        yield ask
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield ask
    finally:
        signal.signal(signal.SIGINT, before)


def _clusters(text: str | None) -> list[str]:
    """The topologies that --cluster names, each one that exists; none asked for is the scenario's own."""
    from sim.scenario.named.topologies import find_topology

    names = [] if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if text is not None and not names:
        raise UserError(Fault("names no topology", "--cluster", hint="see 'drystep list topologies'"))
    with _renaming("", "--cluster"):
        for name in names:
            find_topology(name, Path())
    return names


def _named(text: str | None, name: str) -> str | None:
    """What --cluster called the topology of this name; None where the scenario's own was kept."""
    from sim.scenario.named.topologies import find_topology

    return next((asked for asked in _clusters(text) if find_topology(asked, Path()).data.get("name") == name), None)


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


@click.command(short_help="Runs side by side: what moved, and why.", epilog=examples(
    "drystep compare before.yaml after.yaml",
    "drystep compare scenario.yaml --set cluster.nodes=24 --report comparison",
    "drystep compare scenario.yaml --set cluster.topology=p5 --set cluster.topology=hgx-h200"))
@click.argument("scenarios", nargs=-1, required=True, metavar="A [B...]")
@set_option("With one scenario: hold it against itself with these values on top; repeatable, each value of a field "
            "is a run.", several=True)
@json_option("the comparison")
@click.option("--report", "report_to", metavar="DIR", help="Write the comparison and its picture into a directory.")
def compare(scenarios: tuple[str, ...], sets: tuple[str, ...], json_to: str | None, report_to: str | None) -> None:
    """Runs side by side: which term of the step and of memory moved, why, and which fields differ."""
    from sim import sizing
    from sim.api import load, run
    from sim.sizing.words.compare import lines, write_picture

    writable("--json", json_to)
    writable("--report", report_to and os.path.join(report_to, "comparison.png"), parents=True)
    apart(scenarios, {"--json": json_to})
    if sets and len(scenarios) > 1:
        raise UserError(Fault("--set is for one scenario, which is held against itself", "--set",
                              hint="leave out the others, or write the values into them"))
    if not sets and len(scenarios) < 2:
        raise UserError(Fault("one scenario cannot be compared", "A [B...]",
                              hint="give two or more, or one with --set PATH=VALUE"))
    loaded = [load(name) for name in scenarios] + [load(scenarios[0], each) for each in _variants(sets)]
    found = sizing.compare([run(one) for one in loaded])
    with json_output(json_to, many=False) as to:
        if to is not None:
            to.document(found.to_json())
    _deliver("\n".join(lines(found)), json_to, report_to, "comparison.txt", lambda folder: write_picture(folder, found))


def _variants(sets: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What to put on top for each further run: of a field with several values each of them in turn."""
    values: dict[str, dict[str, None]] = {}
    for one in sets:
        values.setdefault(one.partition("=")[0].strip(), {})[one] = None
    return list(product(*values.values())) if sets else []


COMMANDS = (size, compare)
