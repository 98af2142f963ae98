"""`python -m sim.calibration.fit_kernels`: fits the kernel figures to the shipped tables, writes kernels_fitted.yaml.

Each class of units of each family of GPUs (volta half, ga100 fp32, ...) gets few figures from all its tables together.
`assess` repeats the fit without every fifth shape, and predicts each GPU from the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sim.hardware
from sim.calibration.kernels import gemm_fit, row_fit
from sim.calibration.kernels.tables import Group, groups
from sim.hardware.kernels.rates import UNITS, family_figures

FITTED = Path(sim.hardware.__file__).parent / "kernels_fitted.yaml"
#: Families in order of generation: without a table of its own a family takes the figures of the nearest one with memory
#: of the same kind. Streams reach another share of stacked memory than of graphics memory.
GENERATIONS = ("volta", "turing", "ga100", "ga102", "ada", "hopper", "blackwell", "gb202")
_STACKED = ("volta", "ga100", "hopper", "blackwell")
_FIFTH = 5
_SURE = 0.12  # median error up to which a fit to many rows is called sure
#: Tables that are only compared, (benchmark, family, units): on A100 and Hopper the figures rest on products of the
#: libraries that the published steps ran with (2021 to 2025), and 8 bits on long loops; aic's are of 2026's libraries.
#: Attention on A100 as vLLM 0.14 calls it gathers keys from pages and writes to the cache, training's kernel does not.
COMPARED = (("aic", "ga100", "half"), ("aic", "ga100", "flash2"), ("aic", "hopper", "half"), ("aic", "hopper", "fp8"),
            ("aic", "blackwell", "half"))

Figures = dict[str, Any]
#: What is fitted together: kind ("gemm", "memory", "sdp_fwd", "sdp_bwd", "sdp_decode"), family, units of products or
#: name of an attention kernel.
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Outcome:
    """Relative errors of one group: fitted with its rows, without them, and without its GPU. Of one that is only
    compared (`compared`) the first alone, by the shipped figures."""

    group: Group
    inside: NDArray[np.float64]
    shapes_out: NDArray[np.float64]
    out_rows: NDArray[np.intp]
    gpu_out: NDArray[np.float64]
    stand_in: str
    compared: bool = False


def compared(group: Group) -> bool:
    """Whether a group is held against the figures and gives none."""
    _, family, units = key_of(group)
    return (group.file.split("_")[0], family, units) in COMPARED


def key_of(group: Group) -> Key:
    """What a group is fitted together with."""
    if group.op == "gemm":
        return "gemm", group.gpu.kernels, UNITS[group.gpu.arithmetic(group.dtype)]
    if group.op == "sdp_decode":
        return group.op, group.gpu.kernels, ""
    if group.op.startswith("sdp"):
        return group.op, group.gpu.kernels, group.kernels[0].kernel
    return "memory", group.gpu.kernels, ""


def fit(key: Key, members: Sequence[Group]) -> Figures:
    """The figures of one key from its groups."""
    kind, family, name = key
    if kind == "gemm":
        return gemm_fit.fit([gemm_fit.sample(group) for group in members])
    if kind == "memory":
        return row_fit.fit_memory(members)
    if kind == "sdp_decode":
        return row_fit.fit_decoding(members)
    dims = sorted({kernel.shape[-1] for group in members for kernel in group.kernels})
    return row_fit.fit_attention(members, kind == "sdp_bwd", dims, _shares(family, name))


def predict(group: Group, figures: Mapping[str, float]) -> NDArray[np.float64]:
    """Seconds the benchmark would report, with these figures."""
    kind, family, name = key_of(group)
    if kind == "gemm":
        return gemm_fit.sample(group, None).predict(figures)
    if kind == "memory":
        return row_fit.predict(group, {"memory": dict(figures)})
    if kind == "sdp_decode":
        return row_fit.predict(group, row_fit.decoding_figures(figures))
    return row_fit.predict(group, row_fit.attention_figures(figures, kind == "sdp_bwd", _shares(family, name), name))


def by_key(members: Sequence[Group]) -> dict[Key, list[Group]]:
    """Groups that are fitted together; those that are only compared are in none."""
    found: dict[Key, list[Group]] = {}
    for group in members:
        if compared(group):
            continue
        found.setdefault(key_of(group), []).append(group)
    return found


def assess(members: Sequence[Group], say: Callable[[str], None] = lambda _: None) -> list[Outcome]:
    """Errors of every group: inside the fit, for every fifth shape left out, and with its whole GPU left out."""
    keyed = by_key(members)
    inside = {key: fit(key, some) for key, some in keyed.items()}
    say("fitted; now without every fifth shape")
    without = {key: fit(key, [group.pick(_kept(group)) for group in some]) for key, some in keyed.items()}
    say("now without whole GPUs")
    outcomes = []
    others: dict[tuple[Key, str], tuple[Figures, str]] = {}
    for group in members:
        key = key_of(group)
        if compared(group):
            outcomes.append(Outcome(group, _errors(group, {}), np.empty(0), np.empty(0, dtype=np.intp), np.empty(0), "",
                                    compared=True))
            continue
        if (key, group.gpu.name) not in others:
            others[key, group.gpu.name] = _without_gpu(key, group.gpu.name, keyed, inside)
        stand_in, name = others[key, group.gpu.name]
        rows = np.setdiff1d(np.arange(len(group.kernels)), _kept(group))
        outcomes.append(Outcome(group, _errors(group, inside[key]), _errors(group.pick(rows), without[key]), rows,
                                _errors(group, stand_in), name))
    return outcomes


def _without_gpu(key: Key, name: str, keyed: Mapping[Key, list[Group]],
                 inside: Mapping[Key, Figures]) -> tuple[Figures, str]:
    """Figures for a GPU from the tables of all others: its family's, else those of the generation before with memory of
    the same kind, else of the next, else of the other kind."""
    kind, family, units = key
    siblings = [group for group in keyed[key] if group.gpu.name != name]
    if siblings:
        return fit(key, siblings), ", ".join(sorted({group.gpu.name for group in siblings}))
    places = {other: GENERATIONS.index(other) for wanted, other, same in keyed
              if (wanted, same) == (kind, units) and other != family}
    own = GENERATIONS.index(family)
    nearest = min(places, key=lambda other: ((other in _STACKED) != (family in _STACKED), places[other] > own,
                                             abs(places[other] - own)))
    figures = inside[kind, nearest, units]
    if kind == "gemm":
        figures = figures | gemm_fit.library(keyed[kind, nearest, units][0])
    return figures, f"family {nearest}"


def _errors(group: Group, figures: Mapping[str, float]) -> NDArray[np.float64]:
    if not len(group.kernels):
        return np.empty(0)
    errors: NDArray[np.float64] = predict(group, figures) / group.measured_s - 1.0
    return errors


def _kept(group: Group) -> NDArray[np.intp]:
    """Rows whose shape is not every fifth, counted in order of shape: all rows of a shape stay together."""
    shapes = sorted({kernel.shape for kernel in group.kernels})
    rank = {shape: place for place, shape in enumerate(shapes)}
    return np.array([row for row, kernel in enumerate(group.kernels) if rank[kernel.shape] % _FIFTH], dtype=np.intp)


def _shares(family: str, kernel: str) -> dict[int, Sequence[float]]:
    figures = family_figures(family, fitted=False)["attention"].get(kernel, {})
    return {dim: value for dim, value in figures.items() if isinstance(dim, int)}


def document(fitted: Mapping[Key, Figures], keyed: Mapping[Key, Sequence[Group]]) -> dict[str, Any]:
    """Fitted figures in the shape of `kernels.yaml`, each set with its source and confidence."""
    families: dict[str, Any] = {}
    for (kind, family, units), figures in fitted.items():
        members = keyed[kind, family, units]
        rounded = {name: float(f"{value:.3g}") for name, value in figures.items()}
        rows = sum(len(group.kernels) for group in members)
        origin = {"source": _source(members),
                  "gpus": sorted({group.gpu.name for group in members}), "rows": rows,
                  "confidence": "high" if rows >= 300 and _sure(kind, members, figures) else "medium"}
        entry = families.setdefault(family, {})
        if kind == "gemm":
            energy = rounded.pop("energy", None)
            entry.setdefault("gemm", {})[units] = rounded | origin
            if energy is not None:
                stated = gemm_fit.stated_energy_pj(members[0])
                energies = entry.setdefault("power", {"pj_per_flop": {}})["pj_per_flop"]
                energies[units] = float(f"{energy * stated:.3g}")
        elif kind == "memory":
            entry["memory"] = rounded | origin
        elif kind == "sdp_decode":
            entry.setdefault("attention", {})["decoding"] = rounded | origin
        else:
            other = {} if kind == "sdp_bwd" else _shares(family, units)
            if kind == "sdp_fwd" and ("sdp_bwd", family, units) not in fitted:
                origin["source"] = f"{origin['source']}; backward as in kernels.yaml"
            _attention(entry.setdefault("attention", {}), kind == "sdp_bwd", rounded, origin, units, other)
    return {"families": families}


def _source(members: Sequence[Group]) -> str:
    """Tables behind a fit: each file once, with what it calls its GPUs."""
    files = sorted({group.file for group in members})
    labels = {file: sorted({group.label for group in members if group.file == file}) for file in files}
    return "fit_kernels: " + "; ".join(f"{file} {', '.join(labels[file])}" for file in files)


def _sure(kind: str, members: Sequence[Group], figures: Figures) -> bool:
    """Whether products of all sizes, a few rows included, come out within `_SURE` on average. Attention never: how
    engines of inference call it is not how training does."""
    if kind != "gemm":
        return kind == "memory"
    errors = np.concatenate([np.abs(_errors(group, figures)) for group in members])
    return float(np.median(errors)) <= _SURE


def _attention(entry: dict[str, Any], backward: bool, figures: Figures, origin: dict[str, Any], kernel: str,
               other: Mapping[int, Sequence[float]]) -> None:
    """Writes what one direction of a kernel gave; the other direction stays where nothing gave it."""
    shaped = row_fit.attention_figures(figures, backward, other, kernel)["attention"]
    if not backward and "blocks" in shaped:
        entry["blocks"] = shaped["blocks"]
    shares = entry.setdefault(kernel, dict(origin))
    for name, value in shaped[kernel].items():
        if isinstance(name, int) and name in shares:
            shares[name][int(backward)] = value[int(backward)]
        else:
            shares[name] = value


def write(path: Path = FITTED) -> dict[str, Any]:
    """Fits everything and writes the figures."""
    import yaml

    keyed = by_key(groups())
    fitted = {key: fit(key, members) for key, members in keyed.items()}
    result = document(fitted, keyed)
    head = ("# Written by `python -m sim.calibration.fit_kernels` from sim/calibration/data; do not edit.\n"
            "# Meanings and units: kernels.yaml, whose figures of the same name these replace.\n")
    text = yaml.safe_dump(result, sort_keys=False, width=160, default_flow_style=None)
    path.write_text(head + text, encoding="utf-8")
    return result


if __name__ == "__main__":
    write()
    print(f"wrote {FITTED}")
