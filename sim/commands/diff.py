"""`drystep diff`: a PyTorch profiler's trace beside the prediction."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from sim.commands.output import JsonCommand, apart, examples, json_option, set_option, writable, write_json, writing
from sim.errors import Fault, UserError

#: A trace that takes a while to read.
_LARGE_BYTES = 20_000_000


@click.command(cls=JsonCommand, short_help="Hold a PyTorch profiler's trace against a prediction.", epilog=examples(
    "drystep diff trace.json.gz scenario.yaml",
    "drystep diff trace.json.gz scenario.yaml --products times.csv"))
@click.argument("trace")
@click.argument("scenario")
@set_option()
@click.option("--steps", type=click.IntRange(1, 10_000),
              help="Steps in the trace, where the profiler's step() was never called.")
@click.option("--products", "products_to", metavar="CSV",
              help="Write the trace's matrix products, as calibrate --gemm takes them.")
@json_option("the comparison")
def diff(trace: str, scenario: str, sets: tuple[str, ...], steps: int | None, products_to: str | None,
         json_to: str | None) -> None:
    """Hold a PyTorch profiler's trace against the prediction of its job, and say where the gap is.

    TRACE is what export_chrome_trace wrote on one rank, .gz or not; profile(record_shapes=True) lets products be
    compared shape by shape.
    """
    from sim.api import load, run
    from sim.report.terminal.render import console
    from sim.traces.diff import compare
    from sim.traces.kineto import read_trace
    from sim.traces.text import products_csv, render

    writable("--json", json_to)
    writable("--products", products_to)
    apart([trace, scenario], {"--json": json_to, "--products": products_to})
    loaded = load(scenario, sets)
    if loaded.sweep:
        raise UserError(Fault("a trace is of one job", "SCENARIO", hint="--set sweep={} --set expect={} leaves a sweep "
                                                                        "out"))
    if sys.stderr.isatty() and os.path.exists(trace) and os.path.getsize(trace) > _LARGE_BYTES:
        click.echo(f"reading {trace} …", err=True)
    found = compare(read_trace(trace), run(loaded.scenario), steps)
    if products_to is not None:
        text = products_csv(found)
        if text.count("\n") < 2:
            raise UserError(Fault("the trace shows no product with its shape that ran alone", "--products",
                                  hint="profile with record_shapes=True"))
        with writing("--products", products_to):
            Path(products_to).write_text(text, encoding="utf-8")
        click.echo(f"wrote {products_to}", err=True)
    if not write_json(json_to, found.to_json()):
        render(found, console())


COMMANDS = (diff,)
