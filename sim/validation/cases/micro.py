"""Micro-measurements, row by row: NCCL sweeps against `sim.network`, kernel timings against `sim.hardware`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from sim.errors import Fault, UserError
from sim.hardware import gpu
from sim.measured.harness import harness_of, nccl_version
from sim.measured.rows import quantising_kernel, table_kernel
from sim.measured.timing import card, reported_s, source_of, timing
from sim.network import Coflow, Network, Topology
from sim.validation.cases.files import Case
from sim.validation.statistics import Record
from sim.work import COLLECTIVES, DTYPE_BYTES, collective_name, dtype_name


def collective_rows(case: Case) -> Record:
    """Time of one collective alone on its cluster, per message size, as the sweep's own harness would read it.

    Raises:
        UserError: an operation or cluster that cannot be expressed.
    """
    sweep = case.given
    kind = collective_name(sweep["op"])
    kind = "send" if kind == "send_recv" else kind
    if kind not in COLLECTIVES:
        raise UserError(Fault(f"unknown collective {sweep['op']!r}", "op"))
    dtype = dtype_name(str(sweep.get("dtype", "fp32")))
    if dtype not in DTYPE_BYTES:
        raise UserError(Fault(f"unknown dtype {sweep['dtype']!r}", "dtype"))
    network, ranks = _network(case), np.arange(sweep["ranks"], dtype=np.int64).reshape(1, -1)
    nodes, rows = math.ceil(sweep["ranks"] / network.gpus_per_node), []
    harness = harness_of({**sweep, "nodes": nodes}, network.topology.generation)
    for row in case.rows:
        flow = network.coflow(kind, int(row["bytes"]), ranks, dtype)
        floor = harness.floor_s(kind, ranks.size, flow.channels, network.topology.figures)
        predicted = 1e6 * max(alone_s(network, flow), floor)
        rows.append({**row, "predicted_us": predicted, "error": predicted / row["measured_us"] - 1})
    return {"nodes": nodes, "rows": rows}


def alone_s(network: Network, flow: Coflow) -> float:
    """Seconds of a collective that shares no link: latency, then its size at the slowest hop's rate."""
    hops = (network.capacity(link) / load for link, load in zip(flow.links, flow.loads, strict=True) if load > 0)
    rate = min(flow.cap_bps, *hops, math.inf)
    return flow.latency_s + (flow.size_bytes / rate if flow.size_bytes else 0.0)


def _network(case: Case) -> Network:
    from sim.scenario import resolve

    cluster = case.given["cluster"]
    cluster = {"topology": cluster} if isinstance(cluster, str) else dict(cluster)
    cluster.setdefault("nodes", 1)
    spec = resolve({"name": case.id, "cluster": cluster, "model": {"preset": "gpt2"},
                    "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 1024}},
                   case.path, base=Path(case.path).parent).cluster
    ranks, per_node = case.given["ranks"], spec.gpus_per_node
    nodes = max(spec.nodes, math.ceil(ranks / per_node))
    if nodes > 1 and spec.topology.inter.kind == "none":
        raise UserError(Fault(f"{ranks} ranks need {nodes} nodes of '{spec.topology.name}', which has no network "
                              "between nodes", "cluster"))
    topology = Topology.from_mapping(spec.topology.model_dump())
    version = nccl_version({**case.given, "nodes": nodes}, topology.generation)
    return Network(topology, nodes, per_node, nccl={"version": version})


def kernel_rows(case: Case) -> Record:
    """Time per row of one (GPU, dtype, operator) of a kernel file, as the benchmark behind the file would read it.

    Raises:
        UserError: a GPU or operator outside the catalogues.
    """
    names = case.given
    if "efficiency" in case.rows[0]:
        raise UserError(Fault(f"efficiency tables of {names['op']} are not compared: they give no times", "op"))
    dtype = dtype_name(names["dtype"])
    if dtype not in DTYPE_BYTES:
        raise UserError(Fault(f"unknown dtype {names['dtype']!r}", "dtype"))
    source, product = source_of(Path(case.path).name), names["op"] == "gemm"
    kernels = [table_kernel({**row, "op": names["op"], "dtype": dtype}) for row in case.rows]
    operators = [str(row["source"]).split("-")[0] if product else names["op"] for row in case.rows]
    method = timing(source, names["gpu"])
    card_ = gpu(card(source, names["gpu"]))
    kernels = [method.found(kernel, card_.l2_bytes) for kernel in kernels]
    beside = [quantising_kernel({**row, "dtype": dtype}) for row in case.rows] if product else []
    times = reported_s(card_, method, kernels, operators, beside=beside) * 1e6
    rows = []
    for row, predicted in zip(case.rows, times, strict=True):
        shape = [int(row[k]) for k in ("m", "n", "k", "batch", "rows", "cols") if k in row]
        rows.append({"shape": shape, "measured_us": row["time_us"], "predicted_us": float(predicted),
                     "error": float(predicted / row["time_us"] - 1)})
    return {"rows": rows}
