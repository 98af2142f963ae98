"""Figures of the kernel models (`kernels.yaml`), picked for one GPU. Knows values, not formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sim.catalog import inherited, merged, table
from sim.hardware.gpu import Gpu
from sim.hardware.power import Power
from sim.work import FIXED_ORDER

_FIGURES = "hardware/kernels.yaml"
_FITTED = "hardware/kernels_fitted.yaml"

#: Class of arithmetic units by dtype.
UNITS = {
    "fp16": "half", "bf16": "half", "fp8": "fp8", "mxfp8": "fp8", "int8": "fp8", "nvfp4": "fp4", "tf32": "tf32",
    "fp32": "fp32", "fp64": "fp32",
}

#: Where a kernel of this name was not built for a GPU, what runs in its place.
#: `efficient` is PyTorch's memory-efficient kernel (CUTLASS), which takes a bias; about as fast as the first flash
#: kernels (Dao, FlashAttention-2, 2023, figure 4). `trtllm`: TensorRT-LLM's for Blackwell, which others call too.
_REPLACEMENT = {"trtllm": "flash3", "flash3": "flash2", "flash2": "flash1", "triton": "flash1", "efficient": "flash1",
                "flash1": "flash2"}

#: How forward blocks show: a kernel's own where it was measured, else its family's.
_OWN_BLOCKS = ("longest_share", "balance", "block_start_s")

#: Head dimension beyond which a block of backward holds fewer keys (flash_bwd_launch_template.h of FlashAttention-2).
_WIDE_HEAD = 128


@dataclass(frozen=True, slots=True)
class GemmRates:
    """Matrix products of one class of units: see the head of `kernels.yaml` for meanings and units."""

    flops_per_s: float
    fill_k: float
    batched_slice: float
    batched_tile: tuple[int, int] | None
    block_start_s: float
    operand_cost: float
    exposed_output: float
    start_s: float
    tiles: tuple[tuple[int, int], ...]
    splits: tuple[int, ...]
    idle_wave_loss: float
    held_wave_loss: float
    persistent: bool
    partial_tile: float
    spread: float
    overlap: float
    bandwidth_share: float
    streamed_share: float
    few_rows_share: float
    alignment: Mapping[int, float] | None
    batched_unaligned: float
    flop_j: float
    expanded_per_s: float
    marlin_per_s: float
    gradient_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class DecodingRates:
    """Attention of one query a sequence: what a block waits for beside its keys, and for each 128 keys of 128 elements;
    what joining the parts of a split one takes; the time of an SM that a block takes where many follow each other;
    share of the stated bandwidth they reach."""

    wait_s: float
    step_s: float
    join_s: float
    block_start_s: float
    bandwidth_share: float


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """A fused attention kernel: FLOP/s on the work it does with every SM busy; what a forward block takes beside its
    products, how the longest one shows, and whether backward's grid runs over the heads first; whether each of its
    blocks adds to a sum of its own (`split`)."""

    flops_per_s: float
    block_rows: int
    longest_share: float
    balance: float
    heads_first: bool
    start_s: float
    overlap: float
    bandwidth_share: float
    flop_j: float
    decoding: DecodingRates = DecodingRates(0.0, 0.0, 0.0, 0.0, 1.0)
    block_start_s: float = 0.0
    split: bool = False


@dataclass(frozen=True, slots=True)
class Basis:
    """What a kernel's time rests on: confidence, source, and whether tables of this very GPU entered."""

    confidence: str
    source: str
    own_data: bool


#: Datasheets round: from this part of a chip's full rate on a card has all of it.
_WHOLE = 0.95
#: fp4 over half of a whole chip (B200, RTX PRO 6000); B300 and GB300 have one and a half times that, fed alike.
_FP4_OVER_HALF = 4.0


def family_figures(name: str, fitted: bool = True) -> dict[str, Any]:
    """Figures of a family of GPUs, with those of the family it is `like` where it gives none; `fitted`: as fitted to
    tables where they are, else as `kernels.yaml` judges them."""
    entries = table(_FIGURES)["families"]
    if not fitted:
        return inherited(entries, name)
    like = entries[name].get("like")
    own = merged(family_figures(like), entries[name]) if like else entries[name]
    return merged(own, table(_FITTED)["families"].get(name, {}))


class Rates:
    """Figures for one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        figures = table(_FIGURES)
        self._gpu = gpu
        self._shared = figures
        self._family: dict[str, Any] = merged(_fed(family_figures(gpu.kernels), gpu), gpu.kernel_figures)
        memory, power = self._family["memory"], self._family["power"]
        self.start_s = float(self._family["start_s"]["value"])
        self.bandwidth_floor = float(figures["bandwidth_floor"]["value"])
        self.l2_share = float(memory["l2_share"])
        self.reread_cost = float(memory["reread_cost"])
        self.latency_s = float(memory["latency_cycles"]) / (gpu.boost_mhz * 1e6)
        self.l1_bytes = float(figures["l1_share"]["value"]) * 1024 * float(self._family["l1_kib"])
        self.sm_threads = float(self._family["sm_threads"])
        self.sm_bandwidth_bps = float(figures["sm_bandwidth"]["bytes_in_flight"]) / float(
            figures["sm_bandwidth"]["latency_s"])
        self.benchmark_gap_s = float(figures["benchmark_gap"]["value"])
        self.training_duty = float(figures["training_duty"]["value"])
        self.chip_spread = float(figures["chip_spread"]["value"])
        self.power = Power(
            limit_w=gpu.power_limit_w,
            constant_w=float(power["constant_share"]) * gpu.design_power_w,
            byte_j=float(power["pj_per_byte"]) * 1e-12,
            lowest_clock=float(figures["lowest_clock"]["value"]),
        )

    def memory_share(self, op: str) -> float:
        """Share of the stated bandwidth a memory-bound kernel of class `op` reaches."""
        return float(self._family["memory"][op])

    def gemm(self, dtype: str, in_graph: bool = False) -> GemmRates:
        """Figures of a matrix product in `dtype`.

        Args:
            in_graph: a CUDA graph launches it, not a stream.
        """
        units = UNITS[self._gpu.arithmetic(dtype)]
        family = self._family["gemm"]
        figures = family[units if units in family else "half"]
        kind = self._shared["products"]["simt" if units == "fp32" else "tensor"]
        alignment = self._shared["alignment"]
        library = 1.0 if units == "fp32" else float(self._family.get("library_rate", 1.0))
        rate = self._gpu.reached_flops(dtype) * float(figures["eta"]) * library
        return GemmRates(
            flops_per_s=rate,
            fill_k=float(figures["fill_k"]),
            batched_slice=float(figures.get("batched_slice", 1)),
            batched_tile=(int(tile[0]), int(tile[1])) if (tile := figures.get("batched_tile")) else None,
            block_start_s=float(figures["block_start_s"]),
            operand_cost=float(figures["operand_cost"]),
            exposed_output=float(figures["exposed_output"]),
            start_s=float(family["start_s"].get("in_graph" if in_graph else "value", family["start_s"]["value"])),
            tiles=tuple((int(rows), int(cols)) for rows, cols in kind["tiles"]),
            splits=tuple(kind["split_k"]),
            idle_wave_loss=float(figures["idle_wave_loss"]),
            held_wave_loss=float(self._shared["held_wave_loss"]["value"]),
            persistent=bool(family.get("persistent", {}).get("value", False)) and units == "half",
            partial_tile=float(figures["partial_tile"]),
            spread=float(kind["spread"]),
            overlap=float(kind["overlap"]),
            bandwidth_share=self.memory_share("gemm"),
            few_rows_share=float(self._family["memory"].get("few_rows", self.memory_share("gemm"))),
            streamed_share=max(self.memory_share("gemm"), self.memory_share("elementwise")),
            alignment=None if units == "fp32" else {key: float(alignment[key]) for key in (16, 8, 4, 2, 1)},
            batched_unaligned=min(1.0, self._on_fp32_units() / rate),
            flop_j=self._flop_j(units),
            expanded_per_s=float(self._shared["expanded"]["value"]) * self._gpu.sms * self._gpu.reached_mhz * 1e6,
            marlin_per_s=float(self._shared["expanded"]["marlin"]) * self._gpu.sms * self._gpu.reached_mhz * 1e6,
            gradient_rate=float(figures.get("gradient_rate", 1.0)),
        )

    def _on_fp32_units(self) -> float:
        return float(self._shared["batched_unaligned"]["value"]) * self._gpu.reached_flops("fp32")

    def attention(self, kernel: str, dtype: str, head_dim: int, backward: bool) -> AttentionRates:
        """Figures of a fused attention kernel; a head dimension between two listed ones takes the nearest.

        Forward, a score costs one exponential and four FLOPs an element of its head: where exponentials come twice as
        fast, heads are fed like those twice as wide (TensorRT-LLM's kernel: 128 on GB300 runs as 256 on B200).

        Args:
            kernel: its name, with `FIXED_ORDER` behind where backward adds up in a fixed order. How it does so is
                `fixed_order` of its figures: "split", or a share of its rate; kernels without it do so anyway.
        """
        family = self._family["attention"]
        figures = family[self._attention_kernel(kernel)]
        listed = {dim: value for dim, value in figures.items() if isinstance(dim, int)}
        fed = head_dim * (1.0 if backward else self._gpu.exponentials)
        share = listed[min(listed, key=lambda dim: (abs(dim - fed), dim))][int(backward)]
        blocks = family["blocks"] | {name: figures[name] for name in _OWN_BLOCKS if name in figures}
        rows = figures.get("block_rows", blocks["rows"])
        order = figures.get("fixed_order", 1.0) if backward and kernel.endswith(FIXED_ORDER) else 1.0
        return AttentionRates(
            flops_per_s=self._gpu.reached_flops(dtype) * float(share) * (1.0 if order == "split" else float(order)),
            split=order == "split",
            block_rows=int(rows[0 if not backward else 1 if head_dim <= _WIDE_HEAD else 2]),
            block_start_s=float(blocks.get("block_start_s", 0.0)),
            longest_share=float(blocks["longest_share"]),
            balance=float(blocks["balance"]),
            heads_first=bool(blocks["heads_first"]),
            start_s=self.start_s,
            overlap=float(self._shared["products"]["tensor"]["overlap"]),
            bandwidth_share=self.memory_share("gemm"),
            flop_j=self._flop_j(UNITS[self._gpu.arithmetic(dtype)]) * float(figures.get("energy", 1.0)),
            decoding=self._decoding(family),
        )

    def _decoding(self, family: Mapping[str, Any]) -> DecodingRates:
        """Of this family, or of those measured where it was not."""
        figures = self._decoding_figures(family)
        return DecodingRates(**{field.name: float(figures[field.name]) for field in fields(DecodingRates)})

    def _decoding_figures(self, family: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._shared["decoding"], **family.get("decoding", {})}

    def basis(self, op: str, dtype: str, kernel: str = "") -> Basis:
        """Where the figures for `op` ("decoding": attention of one query a sequence) in `dtype` come from; inherited
        ones are a step less certain than their source."""
        if op == "gemm":
            units = UNITS[self._gpu.arithmetic(dtype)]
            entry = self._family["gemm"].get(units, self._family["gemm"]["half"])
        elif op == "attention":
            entry = self._family["attention"][self._attention_kernel(kernel)]
        elif op == "decoding":
            entry = self._decoding_figures(self._family["attention"])
        else:
            entry = self._family["memory"]
        own = "gpus" not in entry or self._gpu.name in entry["gpus"]
        confidence, source = str(entry["confidence"]), str(entry["source"])
        if op == "attention" and (stands_in := self._attention_kernel(kernel)) != kernel.removesuffix(FIXED_ORDER):
            source = f"no figures of {kernel} on this family, {stands_in} stands in: {source}"
        return Basis(confidence if own else {"high": "medium"}.get(confidence, "low"), source,
                     "gpus" in entry and own)

    def _attention_kernel(self, kernel: str) -> str:
        """The kernel of this name, or what runs in its place on this family."""
        name = kernel.removesuffix(FIXED_ORDER)
        name = name if name in _REPLACEMENT else "flash2"
        while name not in self._family["attention"]:
            name = _REPLACEMENT[name]
        return name

    def flop_energies(self) -> dict[str, float]:
        """Energy per FLOP by class of units, pJ, as `kernels.yaml` writes it."""
        return {units: float(value) for units, value in self._family["power"]["pj_per_flop"].items()}

    def _flop_j(self, units: str) -> float:
        """Energy of a FLOP at the clock reached: voltage follows the clock, and cards of one chip run at several."""
        power = self._family["power"]
        energies = power["pj_per_flop"]
        stated_mhz = self._gpu.tensor_clock_mhz
        faster = self._gpu.reached_mhz / float(power.get("at_mhz", stated_mhz))
        return float(energies.get(units, energies["half"])) * 1e-12 * faster**2


def parted_sms(card: Gpu, kernel: str) -> int:
    """SMs of a GPU on which `kernel` keeps the order of its backward's sums by a tensor for each of its parts; else
    0."""
    return card.sms if Rates(card).attention(kernel + FIXED_ORDER, "bf16", 128, True).split else 0


def fed_share(gpu: Gpu, units: str, share: float) -> float:
    """Share of its peak that products on `units` of `gpu` reach where those of the whole chip reach `share`.

    GeForce cards sum halves in fp32 at half the rate, export variants are cut further. What feeds the units (loads from
    L2 and shared memory, softmax beside the products) is as fast as on the whole chip, so what a product takes beyond
    its arithmetic stays: of a share s at the full rate, 1 / (1 + f (1 / s - 1)) is left at the part f of it.
    """
    part = _part(family_figures(gpu.kernels), gpu, units)
    return share if part == 1.0 else 1.0 / (1.0 + part * (1.0 / share - 1.0))


def _part(family: dict[str, Any], gpu: Gpu, units: str) -> float:
    """Rate of `units` over the one of the family's whole chip; of fp4, beyond 1 where the chip has more of it."""
    half = max(gpu.tflops.get("fp16", 0.0), gpu.tflops.get("bf16", 0.0)) * 1e12
    part = 1.0
    if "full_rate" in family and half:
        part = half / (float(family["full_rate"]["value"]) * gpu.sms * gpu.tensor_clock_mhz * 1e6)
        part = 1.0 if part > _WHOLE else part
    if units == "fp4" and half and "nvfp4" in gpu.tflops:
        part *= gpu.tflops["nvfp4"] * 1e12 / (_FP4_OVER_HALF * half)
        part = 1.0 if _WHOLE < part < 1.0 / _WHOLE else part
    return part


def _fed(family: dict[str, Any], gpu: Gpu) -> dict[str, Any]:
    """`family` with the shares of the peak that `gpu` reaches where its tensor units are not as fast as the chip's."""
    gemm = {name: {**row, "eta": fed_share(gpu, name, row["eta"])} if "eta" in row and name != "fp32" else row
            for name, row in family["gemm"].items()}
    attention = {name: {key: [fed_share(gpu, "half", share) for share in value] if isinstance(key, int) else value
                        for key, value in row.items()} for name, row in family["attention"].items()}
    return {**family, "gemm": gemm, "attention": attention}
