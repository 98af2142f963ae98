"""GPUs of the catalogue (`gpus.yaml`): what a datasheet says of one, and the table of spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from sim.catalog import merged, plain_spelling, table
from sim.errors import Fault, UserError, nearest

_CATALOGUE = "hardware/gpus.yaml"
_GIB = 2**30
_MIB = 2**20

#: Dtype whose units do the arithmetic when a GPU has none of its own: quantised weights are expanded to half precision,
#: an emulated bf16 or tf32 product runs on the fp32 pipeline.
_STAND_IN = {
    "nvfp4": "fp8", "mxfp8": "fp8", "fp8": "bf16", "int8": "bf16", "int4": "bf16", "nf4": "bf16", "fp16": "fp32",
    "bf16": "fp32", "tf32": "fp32",
}


@dataclass(frozen=True, slots=True)
class NVLink:
    """Links of one GPU: `links` × `bandwidth_bps` each (bytes/s, one direction). Generation 0 = AMD Infinity Fabric."""

    generation: int
    links: int
    bandwidth_bps: float
    bridge_pairs_only: bool = False


#: Fields of the catalogue that few GPUs have.
_OPTIONAL = {"tensor_clock_mhz", "reached_mhz", "kernel_figures", "calibration", "exponentials"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as a rank sees it. Bandwidths in bytes/s, sizes in bytes, `tflops` = dense peak in 1e12 FLOP/s by dtype.

    Attributes:
        kernels: family of kernel parameters (a key of `kernels.yaml`).
        usable_memory_bytes: what CUDA reports as total, ECC and firmware taken out.
        tensor_clock_mhz: clock the tensor peak is stated at; reached_mhz: clock under load with power to spare, above
            the stated one where the driver lets a card boost (GeForce).
        pcie: generation and lanes, a key of the catalogue's `copies`.
        power_limit_w: what it may draw on average; `design_power_w` is the datasheet's.
        kernel_figures: figures of this GPU's own calibration that replace its family's (nested as in `kernels.yaml`).
        exponentials: per clock and SM, over those of its family's first chip: what a fused softmax waits for.
        confidence: high (figures and kernels measured on this GPU), medium or low.
        unverified: figures that no opened source shows.
    """

    name: str
    arch: str
    kernels: str
    compute_capability: str
    tflops: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    usable_memory_bytes: float
    memory_bandwidth_bps: float
    sms: int
    l2_bytes: float
    boost_mhz: float
    tensor_clock_mhz: float
    nvlink: NVLink | None
    pcie: str
    power_limit_w: float
    design_power_w: float
    confidence: str
    sources: tuple[str, ...]
    unverified: tuple[str, ...] = ()
    kernel_figures: Mapping[str, Any] = field(default_factory=dict, hash=False)
    reached_mhz: float = 0.0
    exponentials: float = 1.0

    def __post_init__(self) -> None:
        if not self.reached_mhz:
            object.__setattr__(self, "reached_mhz", self.tensor_clock_mhz)

    def arithmetic(self, dtype: str) -> str:
        """The dtype whose units do the work: `dtype`, or its stand-in where the GPU has none (bf16 on a V100)."""
        while dtype not in self.tflops:
            if dtype not in _STAND_IN:
                known = ", ".join(self.tflops)
                raise UserError(Fault(f"{self.name} has no arithmetic for '{dtype}'; it has {known}"))
            dtype = _STAND_IN[dtype]
        return dtype

    def peak_flops(self, dtype: str) -> float:
        """Dense peak in FLOP/s of the units that do `dtype`'s work."""
        return self.tflops[self.arithmetic(dtype)] * 1e12

    def reached_flops(self, dtype: str) -> float:
        """The same at the clock the GPU runs at where its power allows."""
        return self.peak_flops(dtype) * self.reached_mhz / self.tensor_clock_mhz

    def supports(self, dtype: str) -> bool:
        """Whether the GPU has units of its own for `dtype`."""
        return dtype in self.tflops


def gpu_names() -> list[str]:
    """Names of the catalogue, in its order."""
    return list(table(_CATALOGUE)["gpus"])


@cache
def _spellings() -> dict[str, str]:
    catalogue = table(_CATALOGUE)
    return {**catalogue["aliases"], **{name: name for name in catalogue["gpus"]}}


@cache
def _plainly_spelled() -> dict[str, str]:
    return {plain_spelling(spelling): name for spelling, name in _spellings().items()}


def canonical_gpu(name: str) -> str:
    """The catalogue's name for any known spelling (`A100-SXM4-80GB` -> `a100-80g-sxm`), whatever its case, punctuation
    and brand.

    Raises:
        UserError: no such GPU; the nearest name is given.
    """
    known = _spellings()
    found = _plainly_spelled().get(plain_spelling(name))
    if found is None:
        fault = Fault(f"unknown GPU '{name}'; known are {', '.join(gpu_names())}", "cluster.topology.gpu",
                      hint=nearest(name, known))
        raise UserError(fault)
    return found


def gpu(spec: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Gpu:
    """A GPU by name, from a mapping or from a profile file, with single figures overridden.

    Args:
        spec: any known spelling; a mapping with the catalogue's fields, the rest taken from the GPU named by `like`; or
            the path (ending in .yaml or .yml) of a file with such a mapping, as `drystep calibrate --gemm` writes it.
            A mapping's `kernel_figures` replaces figures of its family in `kernels.yaml`, nested as there.
        overrides: `memory` (bytes), `memory_bandwidth` (bytes/s), `tflops` {dtype: TFLOP/s}, `power_limit_w`; a value
            of None leaves the figure alone.

    Raises:
        UserError: unknown GPU, a profile that cannot be read, or a mapping with a figure missing or unknown.
    """
    base = _base(spec)
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    unknown = sorted(set(given) - {"memory", "memory_bandwidth", "tflops", "power_limit_w"})
    if unknown:
        raise UserError(Fault(f"no such GPU figure: {', '.join(unknown)}", "cluster.gpu"))
    if not given:
        return base
    memory_bytes = float(given.get("memory", base.memory_bytes))
    return replace(
        base,
        memory_bytes=memory_bytes,
        usable_memory_bytes=base.usable_memory_bytes * memory_bytes / base.memory_bytes,
        memory_bandwidth_bps=float(given.get("memory_bandwidth", base.memory_bandwidth_bps)),
        tflops={**base.tflops, **{dtype: float(value) for dtype, value in given.get("tflops", {}).items()}},
        power_limit_w=float(given.get("power_limit_w", base.power_limit_w)),
    )


def _base(spec: str | Path | Mapping[str, Any]) -> Gpu:
    if isinstance(spec, Mapping):
        return _inline(spec)
    if isinstance(spec, Path) or spec.endswith((".yaml", ".yml")):
        return _inline(_profile(Path(spec)))
    return _from_catalogue(canonical_gpu(spec))


def _profile(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(Fault(f"cannot read the GPU profile {path}: {error}", "cluster.topology.gpu")) from error
    if not isinstance(loaded, Mapping):
        raise UserError(Fault(f"{path} holds no GPU profile (a mapping)", "cluster.topology.gpu"))
    return loaded


@cache
def _from_catalogue(name: str) -> Gpu:
    return _build(name, table(_CATALOGUE)["gpus"][name])


def _inline(mapping: Mapping[str, Any]) -> Gpu:
    entries = table(_CATALOGUE)["gpus"]
    base: dict[str, Any] = dict(entries[canonical_gpu(str(mapping["like"]))]) if "like" in mapping else {}
    fields = {key: value for key, value in mapping.items() if key not in ("like", "name")}
    known = set(next(iter(entries.values()))) | _OPTIONAL
    faults = [Fault(f"no such field of a GPU: '{key}'", "cluster.topology.gpu", hint=nearest(key, known))
              for key in fields if key not in known]
    optional = _OPTIONAL | {"sources", "unverified", "confidence", "nvlink", "usable_memory_gib"}
    missing = sorted(known - optional - set(base) - set(fields))
    if missing:
        faults.append(Fault(f"an inline GPU needs {', '.join(missing)}", "cluster.topology.gpu",
                            hint="or name a GPU of the catalogue it is 'like'"))
    if faults:
        raise UserError(faults)
    if "memory_gib" in fields and "usable_memory_gib" not in fields:
        base.pop("usable_memory_gib", None)
    if {"clock_mhz", "tensor_clock_mhz"} & set(fields):
        base.pop("reached_mhz", None)  # another card's clocks: how far it goes beyond them is not known
    if "kernel_figures" in fields and "kernel_figures" in base:  # single figures of the card's own are replaced
        fields["kernel_figures"] = merged(base["kernel_figures"], fields["kernel_figures"])
    base |= fields | {"confidence": fields.get("confidence", "low"), "sources": fields.get("sources", ["user"])}
    return _build(str(mapping.get("name", "inline")), base)


def _build(name: str, entry: Mapping[str, Any]) -> Gpu:
    nvlink = entry.get("nvlink")
    memory_gib = float(entry["memory_gib"])
    return Gpu(
        name=name,
        arch=entry["arch"],
        kernels=entry["kernels"],
        compute_capability=str(entry["compute_capability"]),
        tflops={dtype: float(value) for dtype, value in entry["tflops"].items()},
        memory_bytes=memory_gib * _GIB,
        usable_memory_bytes=float(entry.get("usable_memory_gib", memory_gib)) * _GIB,
        memory_bandwidth_bps=float(entry["memory_bandwidth_gb_s"]) * 1e9,
        sms=int(entry["sms"]),
        l2_bytes=float(entry["l2_mib"]) * _MIB,
        boost_mhz=float(entry["clock_mhz"]),
        tensor_clock_mhz=float(entry.get("tensor_clock_mhz", entry["clock_mhz"])),
        nvlink=None if nvlink is None else NVLink(int(nvlink["generation"]), int(nvlink["links"]),
                                                  float(nvlink["gb_s_per_link"]) * 1e9,
                                                  bool(nvlink["bridge_pairs_only"])),
        pcie=entry["pcie"],
        power_limit_w=float(entry["tdp_w"]),
        design_power_w=float(entry["tdp_w"]),
        confidence=entry["confidence"],
        sources=tuple(entry["sources"]),
        unverified=tuple(entry.get("unverified", ())),
        kernel_figures=entry.get("kernel_figures", {}),
        reached_mhz=float(entry.get("reached_mhz", 0.0)),
        exponentials=float(entry.get("exponentials", 1.0)),
    )
