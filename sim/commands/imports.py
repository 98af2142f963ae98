"""`drystep import`: what a user already has, as a scenario."""

from __future__ import annotations

from pathlib import Path

import click

from sim.commands.output import (
    JsonCommand,
    answer,
    apart,
    examples,
    json_option,
    set_option,
    writable,
    write_json,
    writing,
)
from sim.errors import Fault, UserError


@click.command("import", cls=JsonCommand, short_help="Turn configurations of other tools into a scenario.",
               epilog=examples(
                   "drystep import hf config.json training_args.json --cluster dgx-a100-80g --out scenario.yaml",
                   "drystep import deepspeed ds_config.json config.json --cluster p4d --nodes 4 --out scenario.yaml",
                   "drystep import megatron train_gpt3_175b.sh --cluster dgx-h100 --out scenario.yaml",
                   "drystep import torchtitan llama3_8b.toml --cluster dgx-h100 --nodes 2 --out scenario.yaml",
                   "drystep import axolotl qlora.yaml --cluster p4d --out scenario.yaml",
                   "drystep import chakra rank0.json --cluster dgx-h100 --out scenario.yaml"))
@click.argument("kind", metavar="KIND")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--cluster", "cluster", metavar="T", help="What it runs on: a topology's name, or a path.")
@click.option("--nodes", "nodes", type=click.IntRange(1, 1_000_000), help="Nodes, where no file says how many GPUs.")
@set_option()
@click.option("--out", "out", metavar="F", help="Where the scenario goes (YAML); without it, standard output.")
@click.option("--overwrite", is_flag=True, help="Replace F where it exists.")
@json_option("the scenario and what became of every setting")
def import_command(kind: str, files: tuple[str, ...], cluster: str | None, nodes: int | None, sets: tuple[str, ...],
                   out: str | None, overwrite: bool, json_to: str | None) -> None:
    """Turn what you already have into a scenario.

    KIND is one of hf, deepspeed, accelerate, axolotl, llamafactory, megatron, nemo, torchtitan, torchtune, litgpt,
    llm-foundry and chakra. hf, deepspeed and accelerate take any mix of a model's config.json, the Trainer's arguments
    (JSON or YAML), DeepSpeed's JSON, accelerate's YAML and peft's adapter_config.json; axolotl and llamafactory theirs
    beside those; megatron a launch script or its arguments; torchtitan a TOML file; chakra execution traces of PyTorch
    (JSON) or Chakra (.et), a file a rank; the others their YAML. Whatever was not taken is listed.
    """
    from sim.imports.read import import_files
    from sim.imports.write import to_json, to_text, to_yaml

    writable("--out", out)
    writable("--json", json_to)
    apart(files, {"--out": out, "--json": json_to})
    if out is not None and not overwrite and Path(out).exists():
        raise UserError(Fault(f"{out} exists", "--out", hint="name another file, or --overwrite"))
    on_top = [f"cluster.topology={cluster}"] * (cluster is not None) + [f"cluster.nodes={nodes}"] * (nodes is not None)
    found = import_files(kind, files, (*on_top, *sets))
    text = to_yaml(found.beside(None if out is None else Path(out)), kind, files)
    if out is None:
        if not write_json(json_to, to_json(found)):
            click.echo(text, nl=False)
        click.echo(to_text(found), err=True, nl=False)
        return
    from sim.report.whole_file import whole_file

    with writing("--out", out), whole_file(out) as part:
        part.write_text(text, encoding="utf-8")
    answer(json_to, to_text(found), to_json(found))
    click.echo(f"wrote {out}; drystep run {out}", err=True)


COMMANDS = (import_command,)
