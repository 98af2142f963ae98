"""The command line `drystep` (click). Every command imports what it needs when it runs: starting up stays cheap.

Results go to standard output, everything else to standard error. Exit codes: 0 good, 2 the user's input is wrong, 3 a
`--check` failed, 1 a fault of ours, 130 Ctrl-C, 141 the reader of a pipe went away.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from sim import __version__
from sim.commands.diff import COMMANDS as DIFF_COMMANDS
from sim.commands.imports import COMMANDS as IMPORT_COMMANDS
from sim.commands.machine import COMMANDS
from sim.commands.memory import COMMANDS as MEMORY_COMMANDS
from sim.commands.output import (
    INTERRUPTED,
    JsonCommand,
    JsonOutput,
    apart,
    examples,
    json_option,
    json_output,
    load_all,
    progress,
    report_folders,
    reporting,
    set_option,
    writable,
    write_json,
    write_overview,
    writing,
)
from sim.commands.sizing import COMMANDS as SIZING_COMMANDS
from sim.commands.ui import COMMANDS as UI_COMMANDS
from sim.errors import Fault, UserError, nearest
from sim.garbage import search_seldom

if TYPE_CHECKING:
    from sim.report.expect import Point
    from sim.report.result import Result
    from sim.scenario import Loaded

WRONG_INPUT, CHECK_FAILED, OUR_FAULT, NO_READER = 2, 3, 1, 141

#: What the system says when standard output is full.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)

#: Commands as --help lists them.
ORDER = ("run", "import", "memory", "size", "compare", "diff", "list", "schema", "validate", "kernel", "collective",
         "calibrate", "fit", "ui")


class Commands(click.Group):
    """The group of commands; says of an unknown one which is nearest."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See click: in the order in which a newcomer needs them."""
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def resolve_command(self, ctx: click.Context,
                        args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """See click."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            hint = nearest(args[0], self.commands) or "see drystep --help"
            raise UserError(Fault(f"there is no command '{args[0]}'", hint=hint))
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
             epilog=examples("drystep list topologies", "drystep list fields",
                             "drystep run scenario.yaml --set cluster.nodes=24",
                             "drystep size scenario.yaml --gpus 8..64", "drystep COMMAND --help"))
@click.version_option(__version__, prog_name="drystep")
def cli() -> None:
    """Predict step time, memory and exposed communication of distributed training from one YAML file."""


# ---------------------------------------------------------------------------------------------------------------- run
@cli.command(short_help="Predict one training step, or a sweep of them.", epilog=examples(
    "drystep run scenario.yaml",
    "drystep run scenario.yaml --set parallel.sharding_factor=8 --set training.recompute=full",
    "drystep run scenario.yaml --report report --json result.json --trace trace.json.gz"))
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@set_option()
@json_option("the result")
@click.option("--trace", "trace_to", metavar="FILE", help="Write a trace for ui.perfetto.dev (.gz compresses).")
@click.option("--report", "report_to", metavar="DIR", help="Write text, JSON and pictures into a directory.")
@click.option("--sensitivity", "sensitivity", is_flag=True, help="Also simulate 10% more of each resource.")
@click.option("--unfolded", "unfolded", is_flag=True, help="Simulate every rank, not one of each kind: a check; slow.")
@click.option("--check", "check", is_flag=True, help="Exit with 3 if a bound of `expect` is broken or memory runs out.")
@click.pass_context
def run(ctx: click.Context, scenarios: tuple[str, ...], sets: tuple[str, ...], json_to: str | None,
        trace_to: str | None, report_to: str | None, sensitivity: bool, unfolded: bool, check: bool) -> None:
    """Predict one training step; a scenario with a sweep is run over the whole product."""
    from sim.api import load

    writable("--json", json_to)
    writable("--trace", trace_to)
    writable("--report", None if report_to is None else os.path.join(report_to, "report.txt"), parents=True)
    apart(scenarios, {"--json": json_to, "--trace": trace_to})
    loaded = load_all(scenarios, lambda name: load(name, sets))
    sweeps = [name for name, one in zip(scenarios, loaded, strict=True) if one.sweep]
    if trace_to and (len(loaded) > 1 or sweeps):
        raise UserError(Fault("a trace shows one run", "--trace",
                              hint="give one scenario; --set sweep={} --set expect={} leaves a sweep out"))
    if unfolded and sweeps:
        raise UserError(Fault("--unfolded checks one run", "--unfolded",
                              hint="--set sweep={} --set expect={} leaves a sweep out"))
    interrupted, failed = False, False
    folders = report_folders(report_to, scenarios)
    with json_output(json_to, many=len(loaded) > 1) as out:
        for number, (name, one, folder) in enumerate(zip(scenarios, loaded, folders, strict=True)):
            text = json_to != "-"
            if text and number:
                click.echo()
            if one.sweep:
                points, stopped = _run_sweep(one, out, text, folder, sensitivity, check)
                interrupted = interrupted or stopped
            else:
                points = [_run_one(one, out, text, folder, trace_to, sensitivity, check, unfolded)]
            if interrupted:
                break
            failed |= check and not _checked(name, one, points)
    if report_to is not None and len(loaded) > 1 and not interrupted:
        write_overview(report_to, [one.scenario.name for one in loaded], folders)
    if interrupted:
        ctx.exit(INTERRUPTED)
    if failed:
        ctx.exit(CHECK_FAILED)


def _run_one(loaded: Loaded, out: JsonOutput | None, text: bool, folder: Path | None, trace_to: str | None,
             sensitivity: bool, check: bool, unfolded: bool) -> Point:
    from sim import api

    result = api.run(loaded, fold=False) if unfolded else api.run(loaded)
    if sensitivity:
        result.ask_sensitivity()
    as_json = result.to_json() if out is not None or folder is not None or check else {}
    if out is not None:
        out.document(as_json)
    if trace_to:
        from sim.report.trace import write_trace

        with writing("--trace", trace_to):
            write_trace(result, trace_to)
    if text:
        from sim.report.terminal.render import console, render

        render(result, console())
    if folder is not None:
        from sim.report.folder import write_run
        from sim.report.terminal.render import as_text

        with reporting(folder) as written:
            written += write_run(folder, result, as_text(result), as_json)
    return {}, as_json


def _run_sweep(loaded: Loaded, out: JsonOutput | None, text: bool, folder: Path | None,
               sensitivity: bool, check: bool) -> tuple[list[Point], bool]:
    from sim import api

    points: list[Point] = []
    keep = check or folder is not None

    def each(result: Result) -> None:
        if sensitivity:
            result.ask_sensitivity()
        if out is not None or keep:
            as_json = result.to_json()
            if out is not None:
                out.point(as_json)
            if keep:
                points.append((result.set, as_json))

    if out is not None:
        out.begin_sweep()
    with progress() as advance:
        sweep = api.run_sweep(loaded, progress=advance, each=each)
    if sweep.interrupted:
        done, count = len(sweep.points) + len(sweep.skipped), math.prod(len(v) for v in sweep.axes.values())
        click.echo(f"interrupted: {done} of {count} points", err=True)
    rest = sweep.summary()
    if out is not None:
        out.end_sweep(rest)
    if text:
        from sim.report.terminal.render import console, render_sweep

        render_sweep(sweep.points, sweep.skipped, sweep.axes, console())
    if folder is not None:
        from sim.report.folder import write_sweep
        from sim.report.terminal.render import sweep_as_text

        with reporting(folder) as written:
            written += write_sweep(folder, sweep.points, sweep.axes,
                                   sweep_as_text(sweep.points, sweep.skipped, sweep.axes),
                                   {"points": [p for _, p in points], **rest})
    return points, sweep.interrupted


def _checked(name: str, loaded: Loaded, points: Sequence[Point]) -> bool:
    """Whether every bound of `expect` holds and memory suffices; what does not is printed."""
    from sim import api
    from sim.report import expect

    if not points:
        click.echo(f"{name}: check failed: no point of the sweep can be run", err=True)
        return False
    broken = expect.judge(loaded.expect, points, lambda other: api.run(other).to_json())
    if all(bound.field != "memory.fits" for bound in loaded.expect):
        broken += [expect.Broken("memory.fits", False, "true", expect.where(sets))
                   for sets, result in points if not result["memory"]["fits"]]
    for one in broken:
        click.echo(f"{name}: check failed: {one}", err=True)
    if not broken:
        count = len(loaded.expect)
        click.echo(f"{name}: " + ("it fits; no bounds to check" if not count else
                                  f"all {count} bounds hold" if count > 1 else "its bound holds"), err=True)
    return not broken


# ----------------------------------------------------------------------------------------------------- other commands
@cli.command(short_help="Hold predictions against measured runs.", epilog=examples(
    "drystep validate ours.yaml",
    "drystep validate scenarios/published/nemo.yaml --select '*llama*' --json out.json"))
@click.argument("cases", nargs=-1, required=True, metavar="CASES...")
@json_option("all records")
@click.option("--select", metavar="PATTERN", help="Only cases whose file/id holds this text, or matches this glob.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes; default one per core.")
@click.pass_context
def validate(ctx: click.Context, cases: tuple[str, ...], json_to: str | None, select: str | None,
             workers: int | None) -> None:
    """Hold the predictions against published cases and oracle files.

    A case that cannot be expressed is `unsupported` and counts against coverage; errors of predictions are what the
    tables are for. Exit code 0 all the same; 1 where a case `failed`, which is a fault of ours; 2 where a file is
    wrong.
    """
    from sim import validation
    from sim.validation.words.text import progress_bar, render

    writable("--json", json_to)
    apart(cases, {"--json": json_to})
    with progress_bar() as advance:
        found = validation.validate(cases, select=select, workers=workers, progress=advance)
    with json_output(json_to, many=False) as out:
        if out is not None:
            out.document(found.to_json())
    if json_to != "-":
        from sim.report.terminal.render import console

        render(found, console())
    if found.interrupted:
        ctx.exit(INTERRUPTED)
    failed = [record for record in found.records if record["status"] == "failed"]
    if failed:
        first = f"{failed[0]['file']}/{failed[0]['id']}: {failed[0]['reason']}"
        click.echo(f"failed, which is a fault of ours: {len(failed)} of {len(found.records)} cases, first {first}",
                   err=True)
        ctx.exit(OUR_FAULT)


@cli.command(short_help="Estimate free figures of software profiles from measured runs.", epilog=examples(
    "drystep fit --figure composer.host_step_s scenarios/published/llm_foundry_v5_a100_40g.yaml"))
@click.argument("cases", nargs=-1, metavar="[CASES...]")
@click.option("--figure", "figures", multiple=True, metavar="NAME",
              help="Fit this one only, e.g. composer.host_step_s; repeatable.")
@click.option("--sample", type=click.IntRange(1, 1000), default=10, show_default=True,
              help="Most runs of a source that are simulated with every figure.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes; default one per core.")
@click.option("--json", "json_to", metavar="FILE", help="Write figures and errors as JSON; - is standard output.")
@click.option("--out", metavar="FILE", help="Write the report as Markdown.")
def fit(cases: tuple[str, ...], figures: tuple[str, ...], sample: int, workers: int | None, json_to: str | None,
        out: str | None) -> None:
    """Estimate free figures of software profiles from published step times; test them on what was left out.

    CASES are case files; default all that are shipped, which takes some minutes. Profiles are not changed.
    """
    from sim.validation.fit import fit as fitting
    from sim.validation.fit.report import markdown
    from sim.validation.fit.text import render_fit
    from sim.validation.words.text import progress_bar

    writable("--json", json_to)
    writable("--out", out)
    apart(cases, {"--json": json_to, "--out": out})
    chosen = fitting.chosen(cases)
    with progress_bar("fitting") as advance:
        found = fitting.fit(chosen, most=sample, workers=workers, only=figures, progress=advance)
    with json_output(json_to, many=False) as written:
        if written is not None:
            written.document(found.to_json())
    if out is not None:
        with writing("--out", out):
            Path(out).write_text(markdown(found), encoding="utf-8")
    if json_to != "-":
        from sim.report.terminal.render import console

        render_fit(found, console())


@cli.command(epilog=examples("drystep schema > scenario.schema.json"))
def schema() -> None:
    """Print the JSON Schema of the scenario file, for editors."""
    from sim.scenario.json_schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2))


class _Catalogue(click.Choice[str]):
    """A choice that says of an unknown word which is nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See click."""
        if value not in self.choices:
            raise UserError(Fault(f"there is no catalogue '{value[:40]}'; known are {', '.join(self.choices)}", "WHAT",
                                  hint=nearest(value, self.choices)))
        return str(value)


@cli.command("list", cls=JsonCommand, short_help="Print a catalogue, or every field of a scenario.", epilog=examples(
    "drystep list models", "drystep list topologies h100 infiniband", "drystep list fields"))
@click.argument("what", type=_Catalogue(["gpus", "topologies", "models", "software", "precisions", "fields",
                                     "result"]))
@click.argument("words", nargs=-1)
@json_option("the catalogue")
def list_(what: str, words: tuple[str, ...], json_to: str | None) -> None:
    """Print a catalogue: gpus, topologies, models, software, precisions; fields, what a scenario may say; result, what
    --json writes. With WORDS only the rows that have them all."""
    from sim.report.catalogue import rows

    writable("--json", json_to)
    found = rows(what, words)
    if write_json(json_to, found):
        return
    from sim.report.terminal.render import console, render_catalogue

    render_catalogue([{k: v for k, v in row.items() if k != "source"} for row in found], console())


for _command in (*COMMANDS, *DIFF_COMMANDS, *IMPORT_COMMANDS, *MEMORY_COMMANDS, *SIZING_COMMANDS,
                 *UI_COMMANDS):
    cli.add_command(_command)


# --------------------------------------------------------------------------------------------------------------- main
def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: whatever happens, no traceback (unless DRYSTEP_DEBUG=1 and the fault is ours)."""
    search_seldom()  # start-up alone would be searched some fifty times
    # Python has None for a stream that was closed when the process started
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open to the end)
                              for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")  # a terminal of ASCII has no bars: that is no fault
    try:
        # not cli.main(): it would turn a broken pipe into exit code 1, which here means a fault of ours
        with cli.make_context("drystep", sys.argv[1:] if arguments is None else list(arguments)) as context:
            cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as left:
        _leave(left.exit_code)
    except UserError as error:
        _leave(WRONG_INPUT, "\n".join(str(fault) for fault in error.faults))
    except click.ClickException as error:
        error.show()
        _leave(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _leave(INTERRUPTED, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        _leave(NO_READER)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _leave(WRONG_INPUT, f"cannot write standard output: {error.strerror}")
        if os.environ.get("DRYSTEP_DEBUG") == "1":
            raise
        _leave(OUR_FAULT, f"internal fault ({type(error).__name__}: {error}); please report it with the scenario and "
                          "the output of DRYSTEP_DEBUG=1")
    _leave(0)


def _leave(code: int, message: str = "") -> NoReturn:
    if message:
        click.echo(message, err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
