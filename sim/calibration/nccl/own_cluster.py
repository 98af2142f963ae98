"""`drystep calibrate --nccl`: the figures of a user's own cluster from what nccl-tests printed there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sim.calibration.nccl.command import OPERATIONS, bus_factor
from sim.calibration.nccl.doubts import doubts
from sim.calibration.nccl.figures import Floats, Parameters
from sim.calibration.nccl.printed import Run, parse
from sim.calibration.nccl.solver import influence, residuals, solve
from sim.calibration.nccl.sweeps import LEAST_BYTES, Sweep, sweep_of, topology_mapping
from sim.errors import Fault, UserError
from sim.network.figures import catalogue
from sim.network.nccl.site import TODAY

#: A figure that moved less than this (relative) stays the catalogue's.
_MOVED = 0.01
#: Nodes that a table without lines of ranks may be of, and how far its bandwidths' ratio may be off by their rounding.
_MOST_NODES, _RATIO_OFF = 64, 0.002
#: How far figures of a cluster may differ from the catalogue's (standard deviation of the logarithm), however little
#: those of published sites differ: cables, switches and settings are the cluster's own (judged).
_OWN_SPREAD = 0.15
#: Mean error from which on a fitted table is told to be of another machine: published sites stay below half of it.
_FAR_OFF = 0.5


@dataclass(frozen=True, slots=True)
class Calibration:
    """What came of a fit.

    Attributes:
        links: figures of this cluster, by name, that its tables moved.
        tables: of each run its op, nodes, gpus_per_node, rows, and its mean absolute error with the catalogue's figures
            (before), the cluster's (after), and on the rows left out of a second fit to every other row (checked).
        topology: the mapping a scenario can name, `links` included.
        warnings: what of the texts was not read, and what makes the fit doubtful.
    """

    links: Mapping[str, float]
    tables: Sequence[Mapping[str, Any]]
    topology: Mapping[str, Any]
    warnings: Sequence[str] = ()

    def text(self) -> str:
        """Quality of the fit and what moved, for people."""
        lines = ["table                        rows   catalogue   fitted   held-out rows"]
        lines += [f"{t['op']:<16} {t['nodes']:>2} x {t['gpus_per_node']:<4} {t['rows']:>6} {100 * t['before']:>10.1f}% "
                  f"{100 * t['after']:>7.1f}% {100 * t['checked']:>12.1f}%" for t in self.tables]
        rows = catalogue()
        lines += ["", "figure                            catalogue    this cluster"]
        lines += [f"{name:<32} {float(rows[name]):>10.4g} {value:>15.4g}"
                  for name, value in self.links.items()]
        lines += ["", *(f"! {text}" for text in self.warnings)] if self.warnings else []
        return "\n".join(lines) + "\n"


def calibrate_nccl(text_files: str | Path | Sequence[str | Path], topology: str | Path | Mapping[str, Any],
                   out: str | Path | None = None) -> Calibration:
    """Fit the network's figures to a cluster's nccl-tests output.

    Args:
        text_files: the programs' standard output, a file or several, any number of tables and operations in each. Where
            it does not tell NCCL's version, that is today's, as for `drystep collective`.
        topology: the cluster: a name of `topologies/`, a path or a mapping. Ranks and hosts come from the text.
        out: where to write the topology with its `links`, for `cluster.topology` of a scenario; None writes nothing.

    Raises:
        UserError: an unreadable file, no table in it, or ranks the topology cannot hold.
    """
    paths = [Path(text_files)] if isinstance(text_files, str | Path) else [Path(name) for name in text_files]
    mapping = _mapping(topology)
    read = [(run, str(path)) for path in paths for run in _runs(path)]
    runs = [run for run, _ in read if run.op in OPERATIONS]
    sweeps = [_sweep(run, mapping, file) for run, file in read if run.op in OPERATIONS]
    if not sweeps:
        raise UserError(Fault(f"no table is of an operation that is simulated: {', '.join(OPERATIONS)}", "--nccl",
                              read[0][1], read[0][0].line))
    center = {name: float(value) for name, value in catalogue().items()}
    own = {**center, **{str(k): float(v) for k, v in (mapping.get("links") or {}).items()}}
    parameters = Parameters(own, _OWN_SPREAD)
    zero = np.zeros(len(parameters.names))
    try:
        parameters.apply(zero)
        residuals(sweeps)
        before = [sweep.error() for sweep in sweeps]
        checked = _held_out(sweeps, parameters, zero)
        shifts = solve(sweeps, parameters, zero)
        residuals(sweeps)
        after = [sweep.error() for sweep in sweeps]
        moving = influence(sweeps, parameters, shifts)
    finally:
        catalogue().update(center)
    fitted = parameters.values(shifts)
    links = {name: float(f"{value:.5g}") for name, value in fitted.items()
             if moving[name] and abs(value / center[name] - 1) > _MOVED and not name.startswith("host_")}
    tables = [{"op": run.op, "nodes": sweep.nodes, "gpus_per_node": sweep.network.gpus_per_node, "rows": len(run.rows),
               "before": b, "after": a, "checked": c}
              for run, sweep, b, a, c in zip(runs, sweeps, before, after, checked, strict=True)]
    result = Calibration(links, tables, {**mapping, "links": links}, [*doubts(read, mapping), *_far_off(tables)])
    if out is not None:
        names = ", ".join(path.name for path in paths)
        head = f"# Written by drystep calibrate from {names}: the topology with figures of links measured on it.\n"
        Path(out).write_text(head + yaml.safe_dump(dict(result.topology), sort_keys=False, default_flow_style=None,
                                                   width=120), encoding="utf-8")
    return result


def _runs(path: Path) -> list[Run]:
    if not path.is_file():
        raise UserError(Fault("no such file", "--nccl", str(path)))
    return parse(path.read_text(encoding="utf-8", errors="replace"), str(path))


def _far_off(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each table that no figures of this topology come near."""
    return [f"{table['op']} on {table['nodes']} x {table['gpus_per_node']} stays {100 * table['after']:.0f}% off "
            "however its links are counted: is it of this topology?" for table in tables if table["after"] > _FAR_OFF]


def _mapping(topology: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    from sim.calibration.nccl.command import read_topology

    return topology_mapping(topology) if isinstance(topology, Mapping) else read_topology(str(topology))


def _sweep(run: Run, mapping: Mapping[str, Any], file: str) -> Sweep:
    per_node = int(mapping.get("gpus_per_node") or 1)
    ranks = run.ranks or _told(run, per_node, file)
    nodes = run.nodes or -(-ranks // per_node)
    if ranks < 2 or ranks % nodes or ranks // nodes > per_node:
        raise UserError(Fault(f"{ranks} ranks on {nodes} hosts do not fit nodes of {per_node} GPUs", file=file,
                              line=run.line))
    entry = {"id": run.op, "op": run.op, "ranks": ranks, "cluster": {"nodes": nodes, "gpus_per_node": ranks // nodes},
             "nccl": run.version or ".".join(map(str, TODAY)), "harness": {"processes": run.processes},
             "rows": [(size, time) for size, time, _ in run.rows]}
    sweep = sweep_of(entry, mapping)
    if not bool(sweep.counted.any()):
        raise UserError(Fault(f"the table of {run.op} has no size of {LEAST_BYTES} bytes or more", file=file,
                              line=run.line))
    return sweep


def _told(run: Run, per_node: int, file: str) -> int:
    """Ranks of a table without its lines of ranks, from bus over algorithm bandwidth: as many of one node, or whole
    nodes, as come nearest to it.

    Raises:
        UserError: the operation has one ratio for all, or two numbers come as near.
    """
    ratio = run.ratios[-1] if run.ratios else 0.0  # of the largest size: both are printed to most digits there
    counts = [*range(2, per_node + 1), *(per_node * nodes for nodes in range(2, _MOST_NODES))]
    off = sorted((abs(bus_factor(run.op, ranks) - ratio), ranks) for ranks in counts)
    if len(off) < 2 or off[0][0] > _RATIO_OFF or off[1][0] < 3 * _RATIO_OFF:
        raise UserError(Fault("the table does not tell how many ranks it is of", file=file, line=run.line,
                              hint="keep the lines '#  Rank  0 … on HOST device 0' above it"))
    return int(off[0][1])


def _held_out(sweeps: Sequence[Sweep], parameters: Parameters, zero: Floats) -> list[float]:
    """Error of every second row, predicted by a fit to the others."""
    whole = [(sweep.sizes, sweep.measured_us) for sweep in sweeps]
    for sweep, (at, times) in zip(sweeps, whole, strict=True):
        sweep.sizes, sweep.measured_us, sweep.choices = at[::2], times[::2], []
    used = [sweep for sweep in sweeps if sweep.fitted.any()]
    if used:
        solve(used, parameters, zero)
    errors = []
    for sweep, (at, times) in zip(sweeps, whole, strict=True):
        sweep.sizes, sweep.measured_us, sweep.choices = at[1::2], times[1::2], []
        sweep.refresh()
        errors.append(sweep.error() if sweep.counted.any() else float("nan"))
        sweep.sizes, sweep.measured_us, sweep.choices = at, times, []
    return errors
