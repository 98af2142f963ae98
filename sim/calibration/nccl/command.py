"""`drystep collective`: a table in the layout of nccl-tests, predicted instead of measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sim.catalog import names
from sim.errors import Fault, UserError, nearest
from sim.network import Network, Topology
from sim.network.network import choose
from sim.work import DTYPE_BYTES, collective_name

#: Operations by the names of nccl-tests' programs and ours -> (kind, title, reduction shown).
OPERATIONS = {
    "all_reduce": ("all_reduce", "AllReduce", "sum"), "all_gather": ("all_gather", "AllGather", "none"),
    "reduce_scatter": ("reduce_scatter", "ReduceScatter", "sum"), "all_to_all": ("all_to_all", "AlltoAll", "none"),
    "broadcast": ("broadcast", "Broadcast", "none"), "reduce": ("reduce", "Reduce", "sum"),
    "send_recv": ("send_recv", "SendRecv", "sum")}
_PROGRAMS = {"all_to_all": "alltoall", "send_recv": "sendrecv"}
_TYPES = {"fp32": "float", "fp16": "half", "bf16": "bfloat16", "fp8": "f8e4m3", "int8": "int8", "fp64": "double"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: sizes in bytes and elements, time in us, bandwidths in GB/s (10^9)."""

    size_bytes: int
    count: int
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    algorithm: str
    protocol: str
    channels: int


def bus_factor(kind: str, ranks: int) -> float:
    """Bus over algorithm bandwidth (nccl-tests doc/PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def operation(op: str) -> str:
    """The name of an operation from any usual spelling.

    Raises:
        UserError: an unknown one.
    """
    name = collective_name(op)
    name = "send_recv" if name == "send" else name
    if name not in OPERATIONS:
        raise UserError(Fault(f"unknown collective {op!r}: it is one of {', '.join(OPERATIONS)}", "OP",
                              hint=nearest(name, OPERATIONS)))
    return name


def sizes(min_bytes: int, max_bytes: int, factor: float) -> list[int]:
    """Message sizes from `min_bytes` to `max_bytes`, each `factor` times the last."""
    if min_bytes < 1 or max_bytes < min_bytes:
        raise UserError(Fault(f"sizes must grow from 1 byte on, not from {min_bytes} to {max_bytes}", "--min-bytes"))
    if factor <= 1 and max_bytes > min_bytes:
        raise UserError(Fault(f"the factor between sizes must be above 1, not {factor:g}", "--factor"))
    found, size = [min_bytes], float(min_bytes)
    if factor <= 1:
        return found
    while (size := size * factor) <= max_bytes * (1 + 1e-9):
        found.append(round(size))
    return found


def network_for(topology: str | Path | Mapping[str, Any], nodes: int, gpus_per_node: int | None = None,
                nccl: Mapping[str, Any] | None = None) -> Network:
    """Network of `nodes` of a topology given by name, path or mapping.

    Raises:
        UserError: no such topology, or counts it cannot have.
    """
    mapping = topology if isinstance(topology, Mapping) else read_topology(str(topology))
    whole = int(mapping.get("gpus_per_node") or 1)
    used = whole if gpus_per_node is None else gpus_per_node
    if not 1 <= used <= whole:
        raise UserError(Fault(f"a node has {whole} GPUs, not {used}", "--gpus-per-node"))
    if nodes < 1:
        raise UserError(Fault(f"nodes must be 1 or more, not {nodes}", "--nodes"))
    return Network(Topology.from_mapping(mapping), nodes, used, nccl=nccl)


def read_topology(name: str) -> Mapping[str, Any]:
    """A topology's mapping from its name in the catalogue or the path of a file.

    Raises:
        UserError: there is none.
    """
    import yaml

    from sim.catalog import folder

    path = Path(name) if name.endswith((".yaml", ".yml")) else folder("topologies") / f"{name}.yaml"
    if not path.is_file():
        raise UserError(Fault(f"no topology {name!r}", "--topology", hint=nearest(name, names("topologies"))))
    loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if not isinstance(loaded, dict):
        raise UserError(Fault("a topology is a mapping", file=str(path)))
    return loaded


def predict(op: str, network: Network, at: Sequence[int], dtype: str = "fp32") -> list[Row]:
    """Rows of the table: one collective of all the network's ranks, alone."""
    name = operation(op)
    kind = OPERATIONS[name][0]
    ranks = np.arange(network.nodes * network.gpus_per_node, dtype=np.int64).reshape(1, -1)
    if ranks.size < 2:
        raise UserError(Fault("a collective needs two GPUs", "--nodes"))
    options = network.options(kind, network.placement(ranks))
    factor, rows = bus_factor(kind, ranks.size), []
    for size in at:
        way, rate = choose(options, size)
        time = way.latency_at(size, rate) + size / rate
        shared = ranks.size if name in ("all_gather", "reduce_scatter", "all_to_all") else 1
        count = int(size / DTYPE_BYTES[dtype]) // shared
        rows.append(Row(size, count, time * 1e6, size / time / 1e9, factor * size / time / 1e9, way.algorithm,
                        way.protocol, network.coflow(kind, size, ranks).channels))
    return rows


def text(op: str, network: Network, rows: Sequence[Row], dtype: str = "fp32", max_bytes: int | None = None) -> str:
    """The layout of nccl-tests (src/common.cu, 2.x) with the prediction in its place and NCCL's choice added.

    Args:
        max_bytes: the largest size asked for, which the last row's may be below.
    """
    name = operation(op)
    _, title, reduction = OPERATIONS[name]
    ranks = network.nodes * network.gpus_per_node
    root = "0" if name in ("broadcast", "reduce") else "-1"
    lines = [
        f"# Predicted by drystep, not measured: {title} ({_PROGRAMS.get(name, name)}_perf) on {network.nodes} x "
        f"{network.gpus_per_node} "
        f"{network.topology.name or 'inline'} ({ranks} ranks)",
        f"# nThread 1 nGpus 1 minBytes {rows[0].size_bytes} maxBytes {max_bytes or rows[-1].size_bytes}",
        "#",
        "#                                                              out-of-place",
        "#       size         count      type   redop    root     time   algbw   busbw  choice",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)"]
    lines += [f"{r.size_bytes:>12}  {r.count:>12}  {_TYPES.get(dtype, dtype):>8}  {reduction:>6}  {root:>6}  "
              f"{_short(r.time_us):>7}  {r.algbw_gbps:>6.2f}  {r.busbw_gbps:>6.2f}  "
              f"{r.algorithm}/{r.protocol}/{r.channels}"
              for r in rows]
    lines += ["# Out of bounds values : 0 OK",
              f"# Avg bus bandwidth    : {sum(r.busbw_gbps for r in rows) / len(rows):.5g} "]
    return "\n".join(lines) + "\n"


def _short(time_us: float) -> str:
    """A time as nccl-tests prints it: seven characters, as many decimals as fit."""
    return f"{time_us:.2f}" if time_us < 1e4 else f"{time_us:.1f}" if time_us < 1e5 else f"{time_us:.0f}"


def collective_command(op: str, topology: str | Path | Mapping[str, Any], nodes: int = 1, min_bytes: int = 8,
                       max_bytes: int = 1 << 30, factor: float = 2.0, gpus_per_node: int | None = None,
                       dtype: str = "fp32", nccl: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Predict one collective over a range of sizes.

    Args:
        op: an operation, by nccl-tests' name or ours; topology: a name of `topologies/`, a path or a mapping.
        nodes, gpus_per_node: of the communicator, all ranks of which take part.
        min_bytes, max_bytes, factor: sizes, as nccl-tests' -b, -e, -f; dtype: element type of the counts.
        nccl: forced `algorithm`, `protocol`, `channels`, `version`.

    Returns:
        The text in nccl-tests' layout, and the same as plain data.

    Raises:
        UserError: anything the user got wrong.
    """
    if dtype not in DTYPE_BYTES:
        raise UserError(Fault(f"unknown type {dtype!r}", "--dtype", hint=nearest(dtype, DTYPE_BYTES)))
    network = network_for(topology, nodes, gpus_per_node, nccl)
    rows = predict(op, network, sizes(min_bytes, max_bytes, factor), dtype)
    data = {"op": operation(op), "topology": network.topology.name, "nodes": network.nodes,
            "gpus_per_node": network.gpus_per_node, "ranks": network.nodes * network.gpus_per_node, "dtype": dtype,
            "rows": [{"size_bytes": r.size_bytes, "count": r.count, "time_us": r.time_us, "algbw_gbps": r.algbw_gbps,
                      "busbw_gbps": r.busbw_gbps, "algorithm": r.algorithm, "protocol": r.protocol,
                      "channels": r.channels} for r in rows]}
    return text(op, network, rows, dtype, max_bytes), data
