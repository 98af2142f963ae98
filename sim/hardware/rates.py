"""Figures of the kernel models (`kernels.yaml`), picked for one GPU. Knows values, not formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.catalog import table
from sim.hardware.gpu import Gpu

_FIGURES = "hardware/kernels.yaml"

#: Class of arithmetic units by dtype.
_CLASS = {
    "fp16": "half", "bf16": "half", "fp8": "fp8", "mxfp8": "fp8", "int8": "fp8", "nvfp4": "fp4", "tf32": "tf32",
    "fp32": "fp32", "fp64": "fp32",
}

#: Where a kernel of this name was not built for a GPU, what runs in its place.
#: `efficient` is PyTorch's memory-efficient kernel (CUTLASS), which takes a bias; about as fast as the first flash
#: kernels (Dao, FlashAttention-2, 2023, figure 4).
_REPLACEMENT = {"flash3": "flash2", "flash2": "flash1", "triton": "flash1", "efficient": "flash1", "flash1": "flash2"}


@dataclass(frozen=True, slots=True)
class GemmRates:
    """Matrix products of one class of units: see the head of `kernels.yaml` for meanings and units."""

    flops_per_s: float
    fill_k: float
    exposed_output: float
    start_s: float
    tiles: tuple[tuple[int, int, float], ...]
    splits: tuple[int, ...]
    idle_wave_loss: float
    bandwidth_share: float
    alignment: Mapping[int, float] | None


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """A fused attention kernel: sustained FLOP/s on the work it does, and the blocks per SM lost at a launch's end."""

    flops_per_s: float
    tail_blocks: float
    start_s: float
    bandwidth_share: float


class Rates:
    """Figures for one GPU.

    Args:
        gpu: the GPU.
        sustained: tensor work at the clock a long run settles at (training), or at the clock of a short run, which is
            how most kernel tables were measured.
    """

    def __init__(self, gpu: Gpu, sustained: bool = True) -> None:
        figures = table(_FIGURES)
        self._gpu = gpu
        self._shared = figures
        self._family: dict[str, Any] = figures["families"][gpu.kernels]
        clock = figures["sustained_clock"].get(gpu.name, {"value": 1.0}) if sustained else {"value": 1.0}
        self._tensor_clock = float(clock["value"])
        self._simt_clock = self._tensor_clock if clock.get("simt") else 1.0
        self.start_s = float(self._family["start_s"]["value"])
        self.bandwidth_floor = float(figures["bandwidth_floor"]["value"])

    def memory_share(self, op: str) -> float:
        """Share of the stated bandwidth a memory-bound kernel of class `op` reaches."""
        return float(self._family["memory"][op])

    def gemm(self, dtype: str) -> GemmRates:
        """Figures of a matrix product in `dtype`."""
        units = _CLASS[self._gpu.arithmetic(dtype)]
        family = self._family["gemm"]
        figures = family[units if units in family else "half"]
        simt = units == "fp32"
        clock = self._simt_clock if simt else self._tensor_clock
        rows = self._shared["tiles"]["simt" if simt else "tensor"]
        alignment = self._shared["alignment"]
        return GemmRates(
            flops_per_s=self._gpu.peak_flops(dtype) * float(figures["eta"]) * clock,
            fill_k=float(figures["fill_k"]),
            exposed_output=float(figures["exposed_output"]),
            start_s=float(family["start_s"]["value"]),
            tiles=tuple((int(rows_), int(cols), float(rate)) for rows_, cols, rate in rows),
            splits=tuple(self._shared["split_k"]),
            idle_wave_loss=float(self._shared["idle_wave_loss"]["value"]),
            bandwidth_share=self.memory_share("gemm"),
            alignment=None if simt else {key: float(alignment[key]) for key in (16, 8, 4, 2, 1)},
        )

    def attention(self, kernel: str, dtype: str, head_dim: int, backward: bool) -> AttentionRates:
        """Figures of a fused attention kernel; a head dimension between two listed ones takes the nearest."""
        family = self._family["attention"]
        name = kernel if kernel in _REPLACEMENT else "flash2"
        while name not in family:
            name = _REPLACEMENT[name]
        listed = {dim: value for dim, value in family[name].items() if isinstance(dim, int)}
        share = listed[min(listed, key=lambda dim: (abs(dim - head_dim), dim))][int(backward)]
        return AttentionRates(
            flops_per_s=self._gpu.peak_flops(dtype) * float(share),
            tail_blocks=float(family["tail_blocks"][int(backward)]),
            start_s=self.start_s,
            bandwidth_share=self.memory_share("gemm"),
        )
