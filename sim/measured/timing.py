"""What a benchmark's clock reads for a kernel: GPU time, the host's part, and the clock its loop settles at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.catalog import merged, table
from sim.hardware.device import Device
from sim.hardware.gpu import Gpu, canonical_gpu
from sim.work import DTYPE_BYTES, Kernel

#: Benchmarks whose tables are named after them.
SOURCES = ("vidur", "simumax", "deepbench", "neusight", "aic")


@dataclass(frozen=True, slots=True)
class Timing:
    """A benchmark's method for one GPU: see the head of `timings.yaml`."""

    lead_s: Mapping[str, float] | float
    floor_s: Mapping[str, float] | float
    gap_s: float
    host: Mapping[str, float] | float
    lead_share: Mapping[str, float] | None
    start_s: float | None = None
    zeros: tuple[str, ...] = ()
    copies: int = 0
    graphs: bool = False

    @property
    def figures(self) -> dict[str, Any]:
        """Kernel figures (as in `kernels.yaml`) that the benchmark sees differently from a stream of kernels."""
        seen: dict[str, Any] = {} if self.start_s is None else {"start_s": {"value": self.start_s}}
        return seen | ({"power": {"pj_per_flop": dict.fromkeys(self.zeros, 0.0)}} if self.zeros else {})

    def found(self, kernel: Kernel, l2_bytes: float) -> Kernel:
        """`kernel` as the benchmark's loop finds it on a GPU with so much L2: a product whose operands all stay there
        from one turn to the next moves no byte of device memory."""
        if not self.copies or kernel.op != "gemm":
            return kernel
        batch, m, _, k = kernel.shape
        shared_bytes = DTYPE_BYTES[kernel.dtype] * batch * m * k
        held_bytes = self.copies * (kernel.bytes - shared_bytes) + shared_bytes
        return replace(kernel, bytes=0.0) if held_bytes <= l2_bytes else kernel

    def read(self, op: str, gpu_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds the benchmark reports for kernels of operator `op` that take `gpu_s` on the GPU."""
        host = _of(self.host, op)
        floor_s = host * _of(self.floor_s, op)
        lead_s = host * _of(self.lead_s, op) if self.lead_share is None else floor_s * _of(self.lead_share, op)
        read: NDArray[np.float64] = np.maximum(gpu_s + lead_s, floor_s)
        return read


def timing(source: str, label: str) -> Timing:
    """How the benchmark `source` (a key of `timings.yaml`) reads kernels on the GPU it calls `label`."""
    entry: dict[str, Any] = table("measured/timings.yaml")["sources"][source]
    return Timing(lead_s=entry.get("lead_s", 0.0), floor_s=entry["floor_s"], gap_s=_of(entry["gap_s"], label),
                  host=entry.get("host", {}).get(label, 1.0), lead_share=entry.get("lead_share"),
                  start_s=entry.get("start_s", {}).get(label), zeros=tuple(entry.get("zeros", ())),
                  copies=int(entry.get("copies", 0)),
                  graphs=bool(entry.get("graphs", False)))


def source_of(file_name: str) -> str:
    """The benchmark behind a table, by the start of its file's name; `loop` for any other."""
    return next((name for name in SOURCES if file_name.startswith(name)), "loop")


def reported_s(gpu: Gpu, method: Timing, kernels: Sequence[Kernel], operators: Sequence[str],
               figures: Mapping[str, Any] | None = None,
               beside: Sequence[Kernel | None] = ()) -> NDArray[np.float64]:
    """Seconds a benchmark would report for each kernel.

    Args:
        gpu: the GPU it ran on (`card` names it).
        method: how it reads times.
        kernels: what it timed.
        operators: each as the host calls it (`add`, `ln`; of a product table, the first word of `source` before "-").
        figures: kernel figures to use in place of the GPU's (nested as in `kernels.yaml`).
        beside: what each row timed after its kernel, None for nothing; () = none did.
    """
    changes = merged(merged(gpu.kernel_figures, figures or {}), method.figures)
    device = Device(replace(gpu, kernel_figures=changes), sustained=False, gap_s=method.gap_s,
                    graphs=method.graphs)
    gpu_s = device.times(kernels)
    for row, kernel in enumerate(beside):
        gpu_s[row] += 0.0 if kernel is None else device.times([kernel])[0]
    names = np.array(operators)
    read = np.empty_like(gpu_s)
    for name in set(operators):
        rows = names == name
        read[rows] = method.read(name, gpu_s[rows])
    return read


def card(source: str, label: str) -> str:
    """The catalogue's GPU behind a table's label: the benchmark's own statement, else the table of spellings."""
    stated = table("measured/timings.yaml")["sources"][source]["card"].get(label)
    return canonical_gpu(stated or label)


def _of(value: Mapping[str, float] | float, op: str) -> float:
    if isinstance(value, Mapping):
        return float(value.get(op, value.get("default", max(value.values()))))
    return float(value)
