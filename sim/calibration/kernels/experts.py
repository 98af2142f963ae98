"""Layers of experts as inference engines run them, measured on one GPU that holds all, against the kernels drystep has
for them: `data/experts_aic.csv.gz` (NVIDIA AIConfigurator). Nothing is fitted to it.

TensorRT-LLM's are CUTLASS's grouped products between a permutation and its undoing; SGLang's and vLLM's are Triton's,
which pick rows by their numbers. Even loads: expert i * (experts / top_k) + token for the i-th choice of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.calibration.kernels.tables import DATA, read_csv
from sim.hardware import Device, gpu
from sim.measured.timing import card, timing
from sim.model.inference.weights import stored_bytes
from sim.model.kernels import cast, elementwise, product
from sim.work import Kernel

TABLE = DATA / "experts_aic.csv.gz"
_SIZES = ("tokens", "hidden", "ffn", "top_k", "experts")
_COLUMNS = ("gpu", "engine", "dtype", "loads", *_SIZES, "time_us")
#: Classes of rows an expert: up to.
_CLASSES = ((8, "1 to 8"), (64, "9 to 64"), (255, "65 to 255"), (1 << 30, "256 and more"))
_ACT = "bf16"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of experts that gate, `tokens` of which each goes to `top_k` of them; loads even or not."""

    tokens: int
    hidden: int
    ffn: int
    top_k: int
    experts: int
    even: bool = True

    @property
    def rows(self) -> int:
        """Of all experts."""
        return self.tokens * self.top_k

    @property
    def asked(self) -> int:
        """Experts that any token goes to, loads being even."""
        apart = math.ceil(self.experts / self.top_k)
        if self.tokens >= apart:
            return self.experts
        return len({(token * apart // self.tokens + choice * apart) % self.experts
                    for token in range(self.tokens) for choice in range(self.top_k)})


def layer_kernels(layer: Layer, dtype: str, permutes: bool) -> list[Kernel]:
    """Kernels of one pass through the layer: choice, copies to the experts' rows where it `permutes`, products with the
    activation between them, and the sum of a token's outputs.

    Args:
        dtype: bf16, fp8 (inputs quantised before both products) or int4 (weights alone).
    """
    rows, hidden, ffn, narrow = layer.rows, layer.hidden, layer.ffn, dtype == "fp8"
    made = [elementwise("route", layer.tokens * layer.experts, 16, "fp32", 4)]
    made += [cast("quantise", layer.tokens * hidden, _ACT, "fp8")] * narrow
    made += [elementwise("dispatch", rows * hidden, 2 if narrow else 4, _ACT)] * permutes
    return [*made, grouped(layer, 2 * ffn, hidden, dtype), elementwise("act", rows * ffn, 5 if narrow else 6, _ACT),
            grouped(layer, hidden, ffn, dtype), elementwise("combine", rows * hidden, 2 + 2 / layer.top_k, _ACT)]


def grouped(layer: Layer, n: int, k: int, dtype: str) -> Kernel:
    """One product of every expert that is asked."""
    experts = layer.asked
    rows = max(1, round(layer.rows / experts))
    units = "fp8" if dtype == "fp8" else _ACT
    made = product(experts, rows, n, k, "tn", units, units, _ACT)
    if dtype == "int4":
        less = experts * (2 * n * k - stored_bytes((n, k), "int4"))
        return replace(made, bytes=made.bytes - less, kernel="marlin")
    return made if layer.even else replace(made, kernel="uneven")


def errors(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, str, str, str], list[tuple[float, float]]]:
    """(Rows an expert, predicted / measured - 1) by GPU, engine, dtype and loads."""
    devices: dict[str, Device] = {}
    found: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        label, engine, dtype, loads = (row[name] for name in ("gpu", "engine", "dtype", "loads"))
        if label not in devices:
            devices[label] = Device(gpu(card("aic", label)), sustained=False, gap_s=timing("aic", label).gap_s,
                                    graphs=True)
        tokens, hidden, ffn, top_k, experts = (int(row[name]) for name in _SIZES)
        layer = Layer(tokens, hidden, ffn, top_k, experts, loads == "even")
        seconds = float(devices[label].times(layer_kernels(layer, dtype, engine == "trtllm")).sum())
        found.setdefault((label, engine, dtype, loads), []).append(
            (layer.rows / layer.asked, 1e6 * seconds / float(row["time_us"]) - 1))
    return found


def section() -> list[str]:
    """What the report says of it."""
    lines = ["## Layers of experts (nothing fitted)", "",
             "AIConfigurator's timings of all experts on one GPU (`experts_aic.csv.gz`): median error and, behind it,",
             "median |error| and rows, by rows an expert. TensorRT-LLM's grouped products are CUTLASS's; Triton's of",
             "SGLang and vLLM depend on whether somebody tuned them for the shape, and on Blackwell reach a quarter to",
             "three fifths of what dense products do. Uneven: a power law over the experts.", "",
             "| GPU, engine, dtype, loads | " + " | ".join(name for _, name in _CLASSES) + " |",
             "|---|" + "---|" * len(_CLASSES)]
    for key, pairs in sorted(errors(read_csv(TABLE, _COLUMNS)).items()):
        cells, least = [], 0
        for most, _ in _CLASSES:
            cells.append(_cell([error for rows, error in pairs if least < rows <= most]))
            least = most
        lines.append(f"| {' '.join(key)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _cell(found: Sequence[float]) -> str:
    return f"{100 * np.median(found):+.0f}% ({100 * np.median(np.abs(found)):.0f}%, {len(found)})" if found else ""
