"""`drystep memory`: memory alone, without simulating a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.commands.output import (
    JsonOutput,
    apart,
    examples,
    json_option,
    json_output,
    load_all,
    progress,
    set_option,
    writable,
    writing,
)
from sim.errors import Fault, UserError

if TYPE_CHECKING:
    from sim.report.memory_plan import MemoryPlan
    from sim.scenario import Loaded


@click.command(short_help="Predict memory alone, and what would fit.", epilog=examples(
    "drystep memory scenario.yaml",
    "drystep memory scenario.yaml --set training.micro_batch=8 --snapshot memory.pickle"))
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@set_option()
@json_option("the result")
@click.option("--snapshot", "snapshot_to", metavar="FILE",
              help="Write a snapshot for pytorch.org/memory_viz (the fullest rank's; FILE.pickle).")
@click.option("--stages", "stages", is_flag=True, help="Print the phases of every stage of a pipeline.")
def memory(scenarios: tuple[str, ...], sets: tuple[str, ...], json_to: str | None, snapshot_to: str | None,
           stages: bool) -> None:
    """Predict memory alone: by phase and category, the largest sizes that fit, rules of thumb beside it."""
    from sim.api import load

    writable("--json", json_to)
    writable("--snapshot", snapshot_to)
    apart(scenarios, {"--json": json_to, "--snapshot": snapshot_to})
    loaded = load_all(scenarios, lambda name: load(name, sets))
    if snapshot_to and (len(loaded) > 1 or loaded[0].sweep):
        raise UserError(Fault("a snapshot shows one job", "--snapshot",
                              hint="give one scenario; --set sweep={} --set expect={} leaves a sweep out"))
    text = json_to != "-"
    with json_output(json_to, many=len(loaded) > 1) as out:
        for number, one in enumerate(loaded):
            if text and number:
                click.echo()
            if one.sweep:
                _sweep(one, out, text)
            else:
                _one(one, out, text, stages, snapshot_to)


def _one(loaded: Loaded, out: JsonOutput | None, text: bool, stages: bool, snapshot_to: str | None) -> None:
    from sim.api import plan_memory

    plan = plan_memory(loaded)
    if out is not None:
        out.document(plan.to_json())
    if snapshot_to:
        from sim.report.snapshot import write_snapshot

        with writing("--snapshot", snapshot_to):
            write_snapshot(Path(snapshot_to), plan.memory, plan.fullest.layers)
    if text:
        from sim.report.terminal.memory import render_memory
        from sim.report.terminal.render import console

        render_memory(plan, console(), stages)


def _sweep(loaded: Loaded, out: JsonOutput | None, text: bool) -> None:
    from sim.api import plan_points

    plans: list[MemoryPlan] = []
    skipped: list[dict[str, Any]] = []
    if out is not None:
        out.begin_sweep()
    with progress() as advance:
        for done, (sets, found, total) in enumerate(plan_points(loaded), 1):
            if isinstance(found, str):
                skipped.append({"set": dict(sets), "reason": found})
            else:
                plans.append(found)
                if out is not None:
                    out.point(found.to_json(searched=False))
            if advance is not None:
                advance(done, total)
    if out is not None:
        out.end_sweep({"skipped": skipped, "axes": loaded.sweep})
    if text:
        from sim.report.terminal.memory import render_memory_sweep
        from sim.report.terminal.render import console

        render_memory_sweep(plans, skipped, list(loaded.sweep), console())


COMMANDS = (memory,)
