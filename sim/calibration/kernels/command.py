"""What `drystep kernel` and `drystep calibrate --gemm` do: one kernel's time; a hardware profile from a CSV."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sim.calibration.kernels import gemm_fit
from sim.calibration.kernels.optimise import Vector
from sim.calibration.kernels.tables import PRODUCT_COLUMNS, Group, read_csv
from sim.errors import Fault, UserError, nearest
from sim.hardware import Device, Gpu, gpu
from sim.hardware.kernels.attention import attention_work
from sim.hardware.kernels.operators import ROW_WISE, attention_kernel, product_kernel, row_wise_kernel
from sim.hardware.kernels.rates import UNITS
from sim.measured.rows import table_kernel
from sim.measured.timing import Timing
from sim.work import DTYPE_BYTES, Kernel

_SHAPES = {"gemm": "m,n,k or batch,m,n,k", "attention": "batch,heads,kv_heads,queries,keys,head_dim",
           "optimizer": "parameters", "": "rows,cols"}
_ADAM_BYTES = 28  # per parameter: p, g, m, v read in fp32; p, m, v written
_FEWEST_ROWS = 10
_FIFTH = 5
_ABOVE_PEAK = 1.2  # of the stated peak: no clock reaches so far
_IDLE_GAP_S = 0.02  # the GPU rests between calls timed alone: far longer than a call


@dataclass(frozen=True)
class KernelAnswer:
    """Predicted times of one kernel; `time_us`: alone in a benchmark, `sustained_us`: within a long training run."""

    gpu: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    time_us: float
    sustained_us: float
    beside_24_channels_us: float
    tflops: float | None
    gb_s: float
    share_of_peak: float | None
    confidence: str
    rests_on: str
    arithmetic: str = ""  # the dtype whose units do the work
    own_data: bool = False  # whether tables measured on this very GPU gave the figures

    def to_json(self) -> str:
        """The answer as one JSON object."""
        return json.dumps(self.__dict__ | {"shape": list(self.shape)}, indent=1)

    def to_text(self) -> str:
        """The answer in a few lines."""
        rate = f"{self.tflops:.1f} TFLOP/s ({100 * (self.share_of_peak or 0):.0f}% of peak), " if self.tflops else ""
        return (f"{self.op} {'x'.join(map(str, self.shape))} {self.dtype} on {self.gpu}\n"
                f"  alone                {self.time_us:12.2f} us   {rate}{self.gb_s:.0f} GB/s\n"
                f"  in a long run        {self.sustained_us:12.2f} us   at the clock the power limit allows\n"
                f"  beside a collective  {self.beside_24_channels_us:12.2f} us   of 24 channels\n"
                f"  confidence {self.confidence}{', measured on this GPU' if self.own_data else ''}: {self.rests_on}"
                + (f"\n  {self.gpu} has no arithmetic for {self.dtype}: these are the times of {self.arithmetic} units"
                   if self.arithmetic not in ("", self.dtype) else ""))


def kernel_command(gpu_name: str | dict[str, Any] | Path, op: str, shape: Sequence[int] | str, dtype: str = "bf16",
                   layout: str = "tn", backward: bool = False, causal: bool = True,
                   kernel: str = "flash2") -> KernelAnswer:
    """Predicted time of one kernel.

    Args:
        gpu_name: a GPU of the catalogue, a mapping, or the path of a profile that `calibrate_gemm` wrote.
        op: `gemm`, `attention`, `optimizer`, or a row-wise operator (`softmax`, `ln`, `gelu`, `add`, `mlp_act`, ...).
        shape: integers, or text such as "4096,4096,4096" or "4096x4096x4096"; by operator: gemm m,n,k or batch,m,n,k;
            attention batch,heads,kv_heads,queries,keys,head_dim; optimizer parameters; row-wise rows,cols.
        layout: of a product: tn forward, nn data gradient, nt weight gradient.
        backward, causal, kernel: of attention; `kernel` = flash1, flash2, flash3, trtllm, triton, efficient.

    Raises:
        UserError: unknown GPU, operator or dtype, or a shape that does not fit the operator.
    """
    if dtype not in DTYPE_BYTES:
        raise UserError(Fault(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}", "dtype"))
    card = gpu(gpu_name)
    asked = _kernel(op, _integers(op, shape), dtype, layout, backward, causal, kernel)
    short = float(Device(card, sustained=False).times([asked])[0])
    device = Device(card)
    long, beside = (float(device.times([asked], taken)[0]) for taken in (0, 24))
    basis, units = device.basis(asked), card.arithmetic(dtype)
    calibrated = any(text.startswith("calibrate:") for text in card.sources)
    own = calibrated and asked.op == "gemm" and UNITS[units] in card.kernel_figures.get("gemm", {})
    confidence, source = (card.confidence, "; ".join(card.sources)) if own else (basis.confidence, basis.source)
    work = attention_work(asked) if asked.op == "attention" else asked.flops
    return KernelAnswer(card.name, op, dtype, asked.shape, 1e6 * short, 1e6 * long, 1e6 * beside,
                        work / short / 1e12 if work else None, asked.bytes / short / 1e9,
                        work / short / card.peak_flops(dtype) if work else None, confidence, source,
                        units if work else "", own or basis.own_data)


def _kernel(op: str, sizes: tuple[int, ...], dtype: str, layout: str, backward: bool, causal: bool,
            name: str) -> Kernel:
    if op == "gemm":
        batch, m, n, k = sizes if len(sizes) == 4 else (1, *sizes)
        if layout not in ("tn", "nn", "nt"):
            raise UserError(Fault(f"unknown layout {layout!r}; known are tn, nn, nt", "layout"))
        return product_kernel(m, n, k, batch, dtype, layout, (DTYPE_BYTES[dtype],))
    if op == "attention":
        batch, heads, kv_heads, queries, keys, dim = sizes
        return attention_kernel(batch, heads, kv_heads, queries, keys, dim, dtype, backward, causal, name)
    if op == "optimizer":
        return Kernel("optimizer", dtype, sizes, "fused", 0.0, sizes[0] * _ADAM_BYTES, "optimizer")
    return row_wise_kernel(op, sizes[0], sizes[1], dtype)


def _integers(op: str, shape: Sequence[int] | str) -> tuple[int, ...]:
    parts = re.split(r"[,x ]+", shape.strip()) if isinstance(shape, str) else list(shape)
    try:
        sizes = tuple(int(part) for part in parts)
    except ValueError as error:
        raise UserError(Fault(f"shape {shape!r} is not a row of integers", "SHAPE")) from error
    known = op in _SHAPES or op in ROW_WISE
    allowed = {"gemm": (3, 4), "attention": (6,), "optimizer": (1,)}.get(op, (2,))
    if known and (len(sizes) not in allowed or min(sizes) < 1):
        wanted = _SHAPES.get(op, _SHAPES[""])
        raise UserError(Fault(f"{op} wants the shape {wanted} in positive integers, not {shape!r}", "SHAPE"))
    if not known:
        names = ["gemm", "attention", "optimizer", *ROW_WISE]
        raise UserError(Fault(f"no operator '{op[:40]}'; known are {', '.join(names)}", "OP", hint=nearest(op, names)))
    if op == "attention" and sizes[1] % sizes[2]:
        raise UserError(Fault(f"{sizes[1]} heads are no multiple of {sizes[2]} kv_heads", "SHAPE"))
    return sizes


@dataclass(frozen=True)
class Calibration:
    """A fitted profile and how good it is; errors are medians of |predicted / measured - 1|."""

    profile: dict[str, Any]
    fits: tuple[dict[str, Any], ...]
    measured_on: tuple[str, ...] = ()

    def to_text(self) -> str:
        """One line per dtype, and how the profile is used."""
        out = [f"{fit['dtype']}: {fit['rows']} products, median error {100 * fit['before']:.1f}% before, "
               f"{100 * fit['median']:.1f}% fitted (90%: {100 * fit['p90']:.1f}%), {100 * fit['left_out']:.1f}% on "
               "every fifth shape left out" for fit in self.fits]
        if self.profile["confidence"] == "low":
            out.append("this fit is poor: the timings are not of this kind of GPU, or not of calls alone; start from "
                       "the GPU nearest to yours")
        if self.measured_on:
            out.append(f"the rows are of {', '.join(self.measured_on)}; the profile starts from {self.profile['like']}")
        use = "use it as cluster.topology.gpu: <this file>, or in the place of GPU in `drystep kernel`"
        return "\n".join([*out, use])


def calibrate_gemm(csv_path: str | Path, gpu_name: str, out: str | Path | None = None) -> Calibration:
    """Fits a GPU's matrix-product figures to a CSV of gpu,dtype,m,n,k,batch,time_us,source.

    Args:
        csv_path: rows measured on one kind of GPU, as `python -m sim.calibration.measure_gpu` writes them; the `gpu`
            column is only repeated. A `source` with the word `alone` marks calls with the GPU idle before them.
        gpu_name: the GPU of the catalogue that the profile starts from.
        out: where the profile (YAML) goes, for `cluster.topology.gpu` to name; nowhere if None.

    Raises:
        UserError: file or GPU unknown, a column missing, a value that is no number, or fewer than ten products.
    """
    import yaml

    base = gpu(gpu_name)
    by_dtype: dict[str, list[dict[str, str]]] = {}
    names = set()
    for row in read_csv(Path(csv_path), PRODUCT_COLUMNS):
        by_dtype.setdefault(row["dtype"], []).append(row)
        names.add(row["gpu"].strip() or "an unnamed GPU")
    if not by_dtype:
        raise UserError(Fault(f"no products; a fit needs at least {_FEWEST_ROWS}", str(csv_path)))
    figures: dict[str, Any] = {}
    fits = []
    for dtype, rows in by_dtype.items():
        values, quality = _fitted(_user_groups(base, dtype, rows, Path(csv_path)))
        figures[UNITS[base.arithmetic(dtype)]] = {name: float(f"{value:.4g}") for name, value in values.items()}
        fits.append({"dtype": dtype, **quality})
    profile = {"name": f"{base.name}-calibrated", "like": base.name, "kernel_figures": {"gemm": figures},
               "confidence": _confidence(fits), "sources": [f"calibrate: {Path(csv_path).name}"], "calibration": fits}
    if out is not None:
        Path(out).write_text(yaml.safe_dump(profile, sort_keys=False), encoding="utf-8")
    return Calibration(profile, tuple(fits), tuple(sorted(names)))


def _confidence(fits: Sequence[dict[str, Any]]) -> str:
    """By the worst dtype's error on the shapes left out; the catalogue's own fits aim at 5 to 10%."""
    worst = max((fit["left_out"] for fit in fits), default=1.0)
    return "high" if worst <= 0.1 else "medium" if worst <= 0.2 else "low"


def _user_groups(base: Gpu, dtype: str, rows: list[dict[str, str]], path: Path) -> list[Group]:
    """Rows timed alone (the word stands in `source`) ran at full clock, all others in a loop at the settled one."""
    if dtype not in DTYPE_BYTES:
        raise UserError(Fault(f"unknown dtype {dtype!r}", str(path)))
    if len(rows) < _FEWEST_ROWS:
        raise UserError(Fault(f"{len(rows)} products in {dtype}; a fit needs at least {_FEWEST_ROWS}",
                              str(path)))
    alone = [row for row in rows if "alone" in row["source"].split()]
    looped = [row for row in rows if "alone" not in row["source"].split()]
    return [_user_group(base, dtype, some, path, gap_s)
            for some, gap_s in ((alone, _IDLE_GAP_S), (looped, 0.0)) if some]


def _user_group(base: Gpu, dtype: str, rows: list[dict[str, str]], path: Path, gap_s: float) -> Group:
    try:
        kernels = tuple(table_kernel(row) for row in rows)
        measured = np.array([float(row["time_us"]) for row in rows]) * 1e-6
    except ValueError as error:
        raise UserError(Fault(str(error), str(path))) from error
    if min(measured) <= 0 or min(min(kernel.shape) for kernel in kernels) < 1:
        raise UserError(Fault("sizes and times must be positive", str(path)))
    rates = np.array([kernel.flops for kernel in kernels]) / measured
    fastest, peak = int(rates.argmax()), base.peak_flops(dtype)
    if rates[fastest] > _ABOVE_PEAK * peak:
        size = "x".join(map(str, kernels[fastest].shape))
        took_us = 1e6 * measured[fastest]
        raise UserError(Fault(
            f"a product {size} in {took_us:g} us would be {rates[fastest] / 1e12:,.0f} TFLOP/s, and {base.name} has "
            f"{peak / 1e12:,.0f} in {dtype}", str(path),
            hint="times are in microseconds; start from the GPU they were measured on"))
    return Group(path.name, base.name, dtype, "gemm", base, Timing(0.0, 0.0, gap_s, 1.0, None), kernels, measured,
                 ("gemm",) * len(rows))


def _fitted(groups: Sequence[Group]) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures from all rows, and errors: before, fitted, and of every fifth shape by a fit without those."""
    kept = [group.pick(np.flatnonzero(np.arange(len(group.kernels)) % _FIFTH)) for group in groups]
    out = [group.pick(np.arange(0, len(group.kernels), _FIFTH)) for group in groups]
    values = gemm_fit.fit([gemm_fit.sample(group) for group in groups])
    partial = gemm_fit.fit([gemm_fit.sample(group) for group in kept if group.kernels])
    values.pop("energy", None)
    fitted = _errors(groups, values)
    return values, {"rows": len(fitted), "before": float(np.median(_errors(groups, {}))),
                    "median": float(np.median(fitted)), "p90": float(np.percentile(fitted, 90)),
                    "left_out": float(np.median(_errors(out, partial)))}


def _errors(groups: Sequence[Group], figures: dict[str, float]) -> Vector:
    return np.concatenate([np.abs(gemm_fit.sample(group, None).predict(figures) / group.measured_s - 1)
                           for group in groups if group.kernels])
