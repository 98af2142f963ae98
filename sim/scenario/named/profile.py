"""A GPU described by the user: the profile that `drystep calibrate --gemm` writes, or the same mapping inline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sim.catalog import inherited, table
from sim.errors import Fault, UserError, nearest
from sim.scenario.fields.cluster import GpuFigures, GpuProfile
from sim.scenario.named.gpus import canonical_gpu, gpu_facts, gpu_names
from sim.scenario.text.document import Document, describe, read_document
from sim.scenario.text.explain import explain

#: Where a profile stands in a scenario.
PLACE = "cluster.topology.gpu"


def read_profile(path: Path, shown: str) -> dict[str, Any]:
    """The checked mapping of a profile's file, as `sim.hardware.gpu` takes it.

    Raises:
        UserError: no such file, not YAML, or a figure that is unknown or impossible.
    """
    document = read_document(path, shown, "gpu")
    faults = [*document.faults]
    checked = check_profile(document.data, document, "", faults)
    if faults or checked is None:
        raise UserError(faults)
    return checked


def check_profile(mapping: Mapping[str, Any], document: Document, prefix: str,
                  faults: list[Fault]) -> dict[str, Any] | None:
    """The mapping with its base GPU by the catalogue's name, or None and what is wrong with it added to `faults`.

    Args:
        mapping: fields of `GpuProfile`, `tflops` beside them.
        document: has the places of the mapping's fields below `prefix` ("" = at its root).
        faults: each fault's field starts with cluster.topology.gpu, wherever the mapping was written.
    """
    below = f"{prefix}." if prefix else ""
    places = {path.removeprefix(below): place for path, place in document.places.items() if path.startswith(below)}
    own = Document(dict(mapping), {**places, "": document.place(prefix)}, document.file, document.folder)
    fields = {key: value for key, value in mapping.items() if key != "tflops" and value is not None}
    found: list[Fault] = []
    if not isinstance(fields.get("like"), str):
        found.append(own.fault("", "a GPU of one's own needs 'like', the GPU of the catalogue it resembles",
                               "add 'like: a100-80g-sxm'; figures beside it override that GPU's"))
        fields.pop("like", None)
    elif (base := canonical_gpu(fields["like"])) is None:
        hint = nearest(fields["like"], gpu_names()) or "see 'drystep list gpus'"
        found.append(own.fault("like", f"there is no GPU named '{fields['like'][:80]}' in the catalogue", hint))
    else:
        fields["like"] = base
        found += _figure_faults(fields, own)
        found += _tflops_faults(mapping, own)
    try:
        GpuProfile.model_validate({"like": "none", **fields})
    except ValidationError as error:
        found += explain(error, GpuProfile, own)
    faults += [replace(f, field=f"{PLACE}.{f.field}" if f.field else PLACE) for f in found]
    if found:
        return None
    if mapping.get("tflops"):
        fields["tflops"] = {**gpu_facts(fields["like"])["tflops"], **mapping["tflops"]}
    return fields


def _tflops_faults(mapping: Mapping[str, Any], document: Document) -> list[Fault]:
    try:
        GpuFigures.model_validate({"tflops": mapping.get("tflops")})
    except ValidationError as error:
        return explain(error, GpuFigures, document)
    return []


def _figure_faults(fields: dict[str, Any], document: Document) -> list[Fault]:
    """Names and kinds of `kernel_figures`; units the family has no figures for are completed with those of half."""
    figures = fields.get("kernel_figures")
    if not isinstance(figures, Mapping):
        return []
    family = _family(str(gpu_facts(fields["like"])["kernels"]))
    gemm = family["gemm"]
    units = dict.fromkeys(("half", "tf32", "fp32", "fp8", "fp4"), gemm["half"])
    found = list(_unlike(figures, {**family, "gemm": {**units, **gemm}}, "kernel_figures", document))
    if not found and "gemm" in figures:
        products = {name: {**units[name], **value} if name in units and name not in gemm else value
                    for name, value in figures["gemm"].items()}
        fields["kernel_figures"] = {**figures, "gemm": products}
    return found


def _family(name: str) -> dict[str, Any]:
    """Figures of a family of GPUs; those that a fit wrote have the same names."""
    return inherited(table("hardware/kernels.yaml")["families"], name)


def _unlike(given: Mapping[str, Any], known: Mapping[str, Any], path: str, document: Document) -> Iterator[Fault]:
    """Where figures differ in name or kind from those they replace."""
    for name, value in given.items():
        place = f"{path}.{name}"
        if name not in known:
            hint = nearest(str(name), [str(k) for k in known]) or f"known here: {', '.join(map(str, known))}"
            yield document.fault(place, f"there is no figure '{str(name)[:60]}' here", hint)
        elif isinstance(known[name], Mapping):
            if isinstance(value, Mapping):
                yield from _unlike(value, known[name], place, document)
            else:
                yield document.fault(place, f"expected a mapping of figures, not {describe(value)}")
        elif isinstance(known[name], list):
            if not isinstance(value, list) or len(value) != len(known[name]) or not all(map(_figure, value)):
                yield document.fault(place, f"expected a list of {len(known[name])} numbers, not {describe(value)}")
        elif isinstance(known[name], int | float) and not _figure(value):
            yield document.fault(place, f"expected a number from 0 to 1e18, not {describe(value)}")


def _figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e18
