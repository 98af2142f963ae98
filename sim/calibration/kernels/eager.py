"""Operators as PyTorch runs them one by one, measured, against the kernels that the model room has for them:
`data/eager_liger.csv.gz` (Liger Kernel's benchmark of what it replaces, and of its own kernels).

Every call finds its inputs in device memory: the benchmark (triton.testing.do_bench) overwrites the L2 in between, and
its events bracket kernels that the host has issued long before. `also` says what a row timed beside the operator.
Nothing is fitted to it row by row; what `row_blocks.py` counts per element was chosen with it in view. Of Liger's own
norm one row of a backward lasts longer than its Python does (H100, 16,384 columns), and that chose `per_sm`. The rows
on A100 are of release 0.2.1 (September 2024), whose norm wrote a gradient of its weight row by row. Left out: backward
of Liger's rotary positions on B200, 107 to 590 us in no order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from sim.calibration.kernels.tables import DATA, read_csv
from sim.hardware import Device, gpu
from sim.model import build
from sim.model.architecture import Layer, Operator
from sim.model.kernels import elementwise, softmax_gradient
from sim.scenario import resolve
from sim.software import stack_of
from sim.work import DTYPE_BYTES, Kernel

TABLE = DATA / "eager_liger.csv.gz"
COLUMNS = ("gpu", "op", "direction", "dtype", "rows", "cols", "heads", "kv_heads", "also", "time_us")
#: Time a kernel needs for the host not to be what a row measures: a forward and a backward call.
_HOST_US = {"forward": 12.0, "backward": 30.0, "both": 30.0}
#: Liger's own kernels, of the year of the rows on H100 and B200, and as they were when A100's were timed (0.2.1).
_NEW, _OLD = ({"modules": "transformers", "versions": {"liger_kernel": release}} for release in ("0.8", "0.2"))
#: Time below which a call of those is its Python's, or what a pair of events costs: all are alike however few columns.
_PYTHON_US = {"forward": 50.0, "backward": 150.0, "both": 330.0}
#: Layer, operator, what the model and software say, and which sizes of the model rows and columns are.
_MADE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "layer_norm": ("block", "norm1", {"norm": "layernorm"}, {}),
    "rms_norm": ("block", "norm1", {"norm": "layernorm", "bias": False}, {}),  # one kernel, no mean
    "rms_norm_spelled": ("block", "norm1", {"norm": "rmsnorm", "bias": False}, {"modules": "transformers"}),
    "rotary": ("block", "rotary", {"positions": "rotary", "bias": False}, {"modules": "transformers"}),
    "gate": ("block", "activation", {"gated_mlp": True, "fused_gate": True, "bias": False},
             {"modules": "transformers"}),
    "cross_entropy": ("head", "loss", {}, {}),
    "rms_norm_liger": ("block", "norm1", {"norm": "rmsnorm", "bias": False}, _NEW),
    "rms_norm_rows": ("block", "norm1", {"norm": "rmsnorm", "bias": False}, _OLD),
    "rotary_liger": ("block", "rotary", {"positions": "rotary", "norm": "rmsnorm", "bias": False}, _NEW),
    "gate_liger": ("block", "activation", {"gated_mlp": True, "norm": "rmsnorm", "bias": False}, _NEW),
    "vocab_parallel": ("head", "loss", {}, {"framework": "megatron", "fused": False}),
    "embedding": ("embedding", "embedding", {}, {}),
}
_COLS = {"gate": "ffn", "gate_liger": "ffn", "cross_entropy": "vocab", "vocab_parallel": "vocab"}


@cache
def _layer(op: str, dtype: str, rows: int, cols: int, heads: int, kv_heads: int) -> Layer:
    """The layer of a model of those sizes that has the operator."""
    kind, _, model, software = _MADE[op]
    sizes = {"hidden": 1024, "ffn": 1024, "vocab": 1024, _COLS.get(op, "hidden"): cols}
    asked = resolve({
        "name": op, "cluster": {"topology": "single-h100-80g-sxm"},
        "model": {"kind": "decoder", "layers": 1, "heads": heads or 8, "kv_heads": kv_heads or heads or 8,
                  "max_positions": rows, **sizes, **model},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": rows,
                     "precision": "fp32" if dtype == "fp32" else "pure-bf16"},
        "software": {"framework": "pytorch", "year": 2025, **software}})
    return next(layer for layer in build(asked, stack_of(asked.software), 1).stack if layer.kind == kind)


def operator(row: Mapping[str, str]) -> Operator:
    """What a row timed, as the model has it."""
    rows, cols, heads, kv_heads = (int(row[name]) for name in ("rows", "cols", "heads", "kv_heads"))
    if row["op"] == "softmax":
        size_bytes = DTYPE_BYTES[row["dtype"]] * rows * cols
        forward, backward = (Kernel("softmax", row["dtype"], (rows, cols), way, 0.0, passes * size_bytes,
                                    "memory_bound") for way, passes in (("forward", 2), ("backward", 3)))
        return Operator("softmax", (forward,), (softmax_gradient(row["dtype"], rows * cols, "memory_bound"), backward))
    layer = _layer(row["op"], row["dtype"], rows, cols, heads, kv_heads)
    return next(op for op in layer.operators if op.name == _MADE[row["op"]][1])


def kernels(row: Mapping[str, str]) -> list[Kernel]:
    """Kernels of a row's call, with those that the benchmark added."""
    timed, direction = operator(row), row["direction"]
    made = [*(timed.forward if direction != "backward" else ()), *(timed.backward if direction != "forward" else ())]
    elements, e = int(row["rows"]) * int(row["cols"]), DTYPE_BYTES[row["dtype"]]
    if row["also"] == "accumulated":  # grad += new, as every call but the first finds one
        made.append(elementwise("accumulate_gradient", elements, 3 * e, row["dtype"]))
    if row["also"] == "summed":  # a sum of the output, and its gradient written out
        made += [elementwise("sum", elements, e, row["dtype"]), elementwise("expand", elements, e, row["dtype"])]
    return made


def _least_us(row: Mapping[str, str], made: Iterable[Kernel]) -> float:
    """Time below which a row says nothing of its kernels."""
    if "versions" in _MADE.get(row["op"], ("", "", {}, {}))[3]:
        return _PYTHON_US[row["direction"]]
    return _HOST_US[row["direction"]] * sum(kernel.launches for kernel in made)


def errors(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, str, str, str], list[float]]:
    """predicted / measured - 1 by operator, GPU, direction and dtype, of rows that the host did not bound."""
    devices: dict[str, Device] = {}
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for row in rows:
        made, time_us = kernels(row), float(row["time_us"])
        if time_us < _least_us(row, made):
            continue
        if row["gpu"] not in devices:
            devices[row["gpu"]] = Device(gpu(row["gpu"]), sustained=False)
        predicted_us = 1e6 * float(devices[row["gpu"]].times(made).sum())
        key = (row["op"], row["gpu"], row["direction"], row["dtype"])
        found.setdefault(key, []).append(predicted_us / time_us - 1)
    return found


def section() -> list[str]:
    """What the report says of it."""
    lines = ["## Operators of eager PyTorch, one by one", "",
             "What Liger Kernel's benchmark timed of the code it replaces (`eager_liger.csv.gz`), and of its own",
             "kernels (`_liger`; `rms_norm_rows`: its norm before 0.4), against kernels of the model room: median",
             "error, in brackets the least and the largest, rows. Calls that the host bounds are left out. Before",
             "unvectorised kernels were told apart (commit 0e75dd9c) rotary positions came out 25 to 78% too fast,",
             "spelled-out norms 25 to 38%, a split gate 40 to 50%, log-softmax 40 to 55%.", "",
             "| operator | GPU | direction | dtype | error | rows |", "|---|---|---|---|---|---|"]
    ordered = sorted(errors(read_csv(TABLE, COLUMNS)).items(), key=lambda item: -abs(float(np.median(item[1]))))
    return [*lines, *(_line(key, pairs) for key, pairs in ordered), ""]


def _line(key: Sequence[str], found: Sequence[float]) -> str:
    cells = f"{100 * np.median(found):+.0f}% ({100 * min(found):+.0f} to {100 * max(found):+.0f})"
    return f"| {' | '.join(key)} | {cells} | {len(found)} |"
