"""Fit of the memory-bound figures of a family to row-wise tables, and of the fused-attention figures to theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.calibration.kernels.optimise import Vector, minimise
from sim.calibration.kernels.tables import Group
from sim.measured.timing import reported_s

#: Figure of `memory`, lowest and highest physical value, value expected before any data.
MEMORY: dict[str, tuple[float, float, float]] = {
    "elementwise": (0.60, 0.97, 0.88),
    "l2_share": (0.10, 1.20, 0.45),
    "reread_cost": (0.0, 0.60, 0.20),
    "latency_cycles": (300.0, 1000.0, 620.0),
}
_BULK = 0.06  # relative error beyond which a row hardly counts (Cauchy loss): the smallest tensors measure the host
_MOST_ROWS = 200
#: From this multiple of the L2 on a tensor's traffic says what device memory does.
_BEYOND_L2 = 8.0
_EXPECTED_WEIGHT = 1.0e-3  # pull towards the expected values
_FEW_ROWS_WEIGHT = 4.0e-3  # where a table has some ten rows


def predict(group: Group, figures: Mapping[str, Any] | None = None) -> Vector:
    """Seconds the benchmark would report for a group, with some of its GPU's kernel figures replaced."""
    return reported_s(group.gpu, group.timing, group.kernels, group.hosts, figures)


def thinned(group: Group, most: int = _MOST_ROWS) -> Group:
    """Rows of a group, evenly spaced by measured time."""
    if len(group.kernels) <= most:
        return group
    order = np.argsort(group.measured_s, kind="stable")
    return group.pick(order[np.linspace(0, len(order) - 1, most).astype(np.intp)])


def fit_memory(groups: Sequence[Group], rounds: int = 150) -> dict[str, float]:
    """The memory figures of least robust relative error; each operator's table weighs the same.

    What device memory streams (`elementwise`) stays as judged where all tensors of the tables are near the L2's size.
    """
    used = [thinned(group) for group in groups]
    streams = any(kernel.bytes > _BEYOND_L2 * group.gpu.l2_bytes for group in used for kernel in group.kernels
                  if kernel.op == "elementwise")
    figures = {name: figure for name, figure in MEMORY.items() if streams or name != "elementwise"}
    return _fit(used, figures, lambda values: {"memory": values}, rounds, _EXPECTED_WEIGHT)


#: How forward blocks show.
BLOCKS = ("longest_share", "balance", "block_start_s")
#: Figure of `decoding`, likewise.
DECODING: dict[str, tuple[float, float, float]] = {
    "wait_s": (0.5e-6, 10e-6, 3e-6),
    "join_s": (0.0, 6e-6, 2.5e-6),
    "block_start_s": (0.5e-6, 8e-6, 3e-6),
    "bandwidth_share": (0.6, 0.97, 0.85),
}
#: Fewest rows that say how a forward block's start shows.
_MANY = 100


def fit_attention(groups: Sequence[Group], backward: bool, dims: Sequence[int], other: Mapping[int, Sequence[float]],
                  rounds: int = 120) -> dict[str, float]:
    """Share of peak by head dimension of one direction of a fused kernel; forward, how blocks show.

    Args:
        groups: tables of that direction.
        dims: head dimensions they hold.
        other: the family's shares (forward, backward) by head dimension, whose other direction stays.
    """
    used = [thinned(group) for group in groups]
    figures = {f"share_{dim}": (0.1, 0.95, 0.5) for dim in dims}
    if not backward:
        figures |= {"longest_share": (0.3, 2.0, 1.0), "balance": (1.0, 4.0, 2.0)}
        if sum(len(group.kernels) for group in used) >= _MANY:
            figures["block_start_s"] = (0.0, 10e-6, 3e-6)
    kernel = used[0].kernels[0].kernel
    return _fit(used, figures, lambda values: attention_figures(values, backward, other, kernel), rounds,
                _FEW_ROWS_WEIGHT)


def fit_decoding(groups: Sequence[Group], rounds: int = 120) -> dict[str, float]:
    """The figures of attention of one query a sequence but for `step_s`, which waits where few blocks run: stated."""
    return _fit([thinned(group) for group in groups], DECODING, decoding_figures, rounds, _EXPECTED_WEIGHT)


def decoding_figures(values: Mapping[str, float]) -> dict[str, Any]:
    """Fitted values in the shape of `kernels.yaml`."""
    return {"attention": {"decoding": dict(values)}}


def attention_figures(values: Mapping[str, float], backward: bool, other: Mapping[int, Sequence[float]],
                      kernel: str = "flash2") -> dict[str, Any]:
    """Fitted values in the shape of `kernels.yaml`.

    Where blocks' starts are among them they are the kernel's own, else the family's. A head dimension that no table
    showed before takes its other direction from the nearest.
    """
    shares: dict[Any, Any] = {}
    for name, value in values.items():
        if name.startswith("share_"):
            dim = int(name.removeprefix("share_"))
            shares[dim] = list(other[min(other, key=lambda known: abs(known - dim))] if other else (value, value))
            shares[dim][int(backward)] = value
    blocks = {name: values[name] for name in BLOCKS if name in values}
    if "block_start_s" in values:
        return {"attention": {kernel: shares | blocks}}
    return {"attention": {kernel: shares, "blocks": blocks}}


def _fit(groups: Sequence[Group], figures: Mapping[str, tuple[float, float, float]], shape: Any,
         rounds: int, pull: float) -> dict[str, float]:
    low, high, expected = (np.array(column) for column in zip(*figures.values(), strict=True))
    logs = [np.log(group.measured_s) for group in groups]

    def cost(scaled: Vector) -> float:
        values = low + scaled * (high - low)
        named = shape(dict(zip(figures, values.tolist(), strict=True)))
        total = pull * float((((values - expected) / (high - low)) ** 2).sum())
        for group, log in zip(groups, logs, strict=True):
            error = np.log(predict(group, named)) - log
            total += _BULK * float(np.log1p((error / _BULK) ** 2).mean()) / len(groups)
        return total

    unit = np.zeros(len(low)), np.ones(len(low))
    found = minimise(cost, (expected - low) / (high - low), *unit, rounds=rounds)
    return dict(zip(figures, (low + found * (high - low)).tolist(), strict=True))
