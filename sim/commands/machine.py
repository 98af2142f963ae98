"""Commands about the machine alone: one kernel, one collective, and calibration to the user's own measurements."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from sim.commands.output import JsonCommand, answer, apart, examples, json_option, writable, writing
from sim.errors import Fault, UserError, nearest
from sim.work import DTYPE_BYTES, dtype_name

_SIZE = re.compile(r"(\d+(?:\.\d*)?)([KMGT]?)(?:i?B)?\Z", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: Beyond anything that exists; there to catch slips of the keyboard before they take all memory.
_MOST_BYTES, _MOST_ROWS, _LARGEST_SIDE = 1 << 44, 2000, 10**10
_KERNELS = ("flash1", "flash2", "flash3", "trtllm", "triton", "efficient")

#: Options of `kernel` by parameter that only one operator has, and how they are written where that differs.
_OF_ONE = {"layout": "gemm", "backward": "attention", "full": "attention", "kernel_name": "attention"}
_SAID = {"full": "full/--causal", "kernel_name": "kernel"}

_AS_JSON = json_option("the answer")


def _size(value: str | int) -> int:
    """Bytes as nccl-tests takes them: 8, 4K, 1M, 2G (powers of 1024)."""
    found = _SIZE.match(str(value).strip())
    size = int(float(found[1][:30]) * _UNITS[found[2].upper()]) if found else 0
    if not 1 <= size <= _MOST_BYTES:
        raise click.BadParameter(f"'{str(value)[:40]}' is not a size from 1 byte to 16T, such as 8, 4K, 1M or 2G")
    return size


def _dtype(value: str) -> str:
    name = dtype_name(value)
    if name not in DTYPE_BYTES:
        raise UserError(Fault(f"unknown type '{value[:40]}'; known are {', '.join(DTYPE_BYTES)}", "--dtype",
                              hint=nearest(name, DTYPE_BYTES)))
    return name


# ------------------------------------------------------------------------------------------------------------- kernel
@click.command(cls=JsonCommand, short_help="Predict one kernel on one GPU.", epilog=examples(
    "drystep kernel a100-80g-sxm gemm 8192,8192,8192 --dtype bf16",
    "drystep kernel h100-80g-sxm attention 1,32,8,4096,4096,128 --kernel flash3"))
@click.argument("gpu")
@click.argument("op")
@click.argument("shape")
@click.option("--dtype", default="bf16", show_default=True, help="Element type.")
@click.option("--layout", type=click.Choice(["tn", "nn", "nt"]), default="tn", show_default=True,
              help="Of a product: forward, data gradient, weight gradient.")
@click.option("--backward", is_flag=True, help="Attention's backward kernel.")
@click.option("--full/--causal", "full", default=False, help="Attention over all keys, or causal (the default).")
@click.option("--kernel", "kernel_name", type=click.Choice(_KERNELS), default="flash2", show_default=True,
              help="Attention's kernel.")
@_AS_JSON
@click.pass_context
def kernel(ctx: click.Context, gpu: str, op: str, shape: str, dtype: str, layout: str, backward: bool, full: bool,
           kernel_name: str, json_to: str | None) -> None:
    """Predict one kernel: its time, its rate and its share of peak.

    GPU is a name ('drystep list gpus') or the path of a profile that 'calibrate --gemm' wrote. OP and SHAPE: gemm
    m,n,k or batch,m,n,k; attention batch,heads,kv_heads,queries,keys,head_dim; optimizer parameters; or a row-wise
    operator (softmax, ln, gelu, add, ...) rows,cols.
    """
    from sim.calibration.kernels.command import kernel_command

    if any(len(part) > 11 or int(part) > _LARGEST_SIDE for part in re.findall(r"\d+", shape)):
        raise UserError(Fault(f"a side of {shape[:80]} is absurdly large: at most {_LARGEST_SIDE:,}", "SHAPE"))
    for option, only in _OF_ONE.items():
        if op != only and ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise UserError(Fault(f"an option of {only}, not of {op[:40]}", f"--{_SAID.get(option, option)}",
                                  hint="leave it out"))
    writable("--json", json_to)
    found = kernel_command(_gpu(gpu), op, shape, _dtype(dtype), layout, backward, not full, kernel_name)
    answer(json_to, found.to_text(), json.loads(found.to_json()))


def _gpu(name: str) -> str | dict[str, Any]:
    """A name as it is; the checked mapping of a profile's file."""
    from sim.hardware.gpu import canonical_gpu
    from sim.scenario.named.gpus import is_profile
    from sim.scenario.named.profile import read_profile

    try:
        return read_profile(Path(name), name) if is_profile(name) else canonical_gpu(name)
    except UserError as error:
        raise _renamed(error, "cluster.topology.gpu", "GPU") from None


# --------------------------------------------------------------------------------------------------------- collective
@click.command(cls=JsonCommand, short_help="Predict one collective, as nccl-tests prints it.", epilog=examples(
    "drystep collective all_reduce --topology dgx-h100 --nodes 4 -b 1M -e 1G -f 4"))
@click.argument("op")
@click.option("--topology", required=True, metavar="T", help="A name ('drystep list topologies') or a path.")
@click.option("--nodes", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Nodes that take part.")
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), help="GPUs of each node; all unless given.")
@click.option("-b", "--min-bytes", type=_size, metavar="SIZE", default="8", show_default=True, help="Smallest size.")
@click.option("-e", "--max-bytes", type=_size, metavar="SIZE", default="1G", show_default=True, help="Largest size.")
@click.option("-f", "--factor", type=click.FloatRange(1, 1e6), default=2.0, show_default=True,
              help="Between one size and the next.")
@click.option("--dtype", "-d", default="float", show_default=True, help="Element type.")
@_AS_JSON
def collective(op: str, topology: str, nodes: int, gpus_per_node: int | None, min_bytes: int, max_bytes: int,
               factor: float, dtype: str, json_to: str | None) -> None:
    """Predict one collective over a range of sizes, in the layout of nccl-tests.

    OP is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce or send_recv.
    """
    from sim.calibration.nccl.command import collective_command

    if not factor >= 1 or (factor > 1 and math.log(max_bytes / min_bytes) > _MOST_ROWS * math.log(factor)):
        raise UserError(Fault(f"a factor of {factor:g} makes more than {_MOST_ROWS} sizes", "--factor"))
    writable("--json", json_to)
    text, data = collective_command(op, _topology(topology, nodes), nodes, min_bytes, max_bytes, factor, gpus_per_node,
                                    _dtype(dtype))
    answer(json_to, text, data)


def _topology(name: str, nodes: int) -> dict[str, Any]:
    """The mapping of a topology with every default filled in, as a scenario that names it would see it."""
    from sim.scenario import resolve

    try:
        scenario = resolve({"name": "machine", "cluster": {"topology": name, "nodes": nodes, "gpus_per_node": 1},
                            "model": {"preset": "gpt2"},
                            "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 1024}})
    except UserError as error:
        raise _renamed(error, "cluster.topology", "--topology") from None
    return scenario.cluster.topology.model_dump()


def _renamed(error: UserError, field: str, argument: str) -> UserError:
    """Faults of a name told as those of the argument that gave it; those inside its file stay where they are."""
    return UserError([replace(f, field=argument) if f.field == field else f for f in error.faults])


# ---------------------------------------------------------------------------------------------------------- calibrate
@click.command(cls=JsonCommand, short_help="Fit the machine to your own measurements.", epilog=examples(
    "drystep calibrate --nccl all_reduce.txt --topology dgx-a100-80g --out mine.yaml",
    "drystep calibrate --gemm times.csv --gpu a100-80g-sxm --out card.yaml"))
@click.option("--nccl", multiple=True, metavar="FILE",
              help="What nccl-tests printed on the cluster; any number of tables, repeatable.")
@click.option("--topology", metavar="T", help="The cluster that --nccl was measured on: a name or a path.")
@click.option("--gemm", metavar="CSV", help="Timings of matrix products: gpu,dtype,m,n,k,batch,time_us,source.")
@click.option("--gpu", metavar="G", help="The catalogue's GPU that --gemm was measured on.")
@click.option("--out", required=True, metavar="F", help="Where the topology or the GPU's profile goes (YAML).")
@json_option("what was fitted and how well")
def calibrate(nccl: tuple[str, ...], topology: str | None, gemm: str | None, gpu: str | None, out: str,
              json_to: str | None) -> None:
    """Fit the machine to your own measurements; the file written is what a scenario names.

    --nccl writes a topology for 'cluster.topology', --gemm a GPU's profile for 'cluster.topology.gpu'; both together
    one topology with the profile inside.
    """
    if not nccl and gemm is None:
        raise UserError(Fault("nothing to calibrate with", hint="give --nccl FILE --topology T, or --gemm CSV --gpu G"))
    for given, wanted, name, other in ((nccl or None, topology, "--nccl", "--topology"),
                                       (gemm, gpu, "--gemm", "--gpu")):
        if (given is None) != (wanted is None):
            raise UserError(Fault(f"{name} and {other} go together", other if wanted is None else name))
    writable("--out", out)
    writable("--json", json_to)
    sources = [*nccl, *([gemm] if gemm else [])]
    apart(sources, {"--out": out, "--json": json_to})
    written: dict[str, Any] = {}
    quality: dict[str, Any] = {"out": out}
    texts = []
    if gemm is not None and gpu is not None:
        written, quality["gemm"], text = _fit_gemm(gemm, gpu)
        texts.append(text)
    if nccl and topology is not None:
        fitted, quality["nccl"], text = _fit_nccl(nccl, topology)
        written = fitted | ({"gpu": written} if written else {})
        texts.append(text)
    _write(out, written, [Path(name).name for name in sources])
    answer(json_to, "\n".join(text.rstrip("\n") for text in texts), quality)


def _fit_nccl(text_files: Sequence[str], topology: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The topology as its file says, with the links' figures of this cluster; how good they are, as data and text."""
    from sim.calibration.nccl.own_cluster import calibrate_nccl
    from sim.scenario.named.gpus import is_profile
    from sim.scenario.named.topologies import find_topology

    mapping = _topology(topology, 1)
    with _reading("--nccl", ", ".join(text_files)):
        found = calibrate_nccl(text_files, mapping)
    document = find_topology(topology, Path())
    plain = {**document.data, "links": dict(found.links)}
    if is_profile(plain["gpu"]):  # a path is relative to the file that holds it
        plain["gpu"] = str((document.folder / plain["gpu"]).resolve())
    return plain, {"links": dict(found.links), "tables": [dict(row) for row in found.tables],
                   "warnings": list(found.warnings)}, found.text()


def _fit_gemm(table: str, gpu: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The GPU's profile, how good it is, and that as text."""
    from sim.calibration.kernels.command import calibrate_gemm

    with _reading("--gemm", table):
        _check_products(Path(table))
        found = calibrate_gemm(table, gpu)
    quality = {"kernel_figures": found.profile["kernel_figures"], "confidence": found.profile["confidence"],
               "fits": list(found.fits)}
    return found.profile, quality, found.to_text()


def _check_products(path: Path) -> None:
    """Refuse rows that lack a cell, or whose numbers are none a product can have."""
    from sim.calibration.kernels.tables import PRODUCT_COLUMNS, read_csv

    limits: Mapping[str, Callable[[str], float]] = {"m": int, "n": int, "k": int, "batch": int, "time_us": float}
    for line, row in enumerate(read_csv(path, PRODUCT_COLUMNS), 2):
        for name in PRODUCT_COLUMNS:
            cell = row[name]
            if cell is None:
                raise UserError(Fault(f"the row has no '{name}'", file=str(path), line=line))
            if name not in limits:
                continue
            try:
                good = 0 < limits[name](cell) <= _LARGEST_SIDE
            except ValueError:
                good = False
            if not good:
                kind = "number" if name == "time_us" else "whole number"
                raise UserError(Fault(f"{name} is not a {kind} above 0: '{cell[:40]}'", file=str(path), line=line))


def _write(out: str, plain: Mapping[str, Any], sources: list[str]) -> None:
    import yaml

    from sim.report.whole_file import whole_file

    text = yaml.safe_dump(dict(plain), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    with writing("--out", out), whole_file(out) as part:
        part.write_text(f"# Written by drystep calibrate from {', '.join(sources)}.\n{text}", encoding="utf-8")
    click.echo(f"wrote {out}", err=True)


@contextmanager
def _reading(option: str, path: str) -> Iterator[None]:
    """What a file's contents or its place do wrong, as the user's input."""
    try:
        yield
    except (UnicodeDecodeError, csv.Error, EOFError) as error:
        raise UserError(Fault(f"cannot be read: {error}", option, path)) from error
    except OSError as error:
        raise UserError(Fault(f"cannot be read: {error.strerror or error}", option, path)) from error


COMMANDS = (kernel, collective, calibrate)
