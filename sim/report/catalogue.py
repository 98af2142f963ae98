"""What `drystep list` shows: the catalogues as rows of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.catalog import names, table
from sim.errors import Fault, UserError, bare, nearest
from sim.report.fields import field_rows

Row = dict[str, Any]


def rows(what: str, words: Sequence[str] = ()) -> list[Row]:
    """The rows of a catalogue; every row of one has the same keys.

    Args:
        what: gpus, topologies, models, software, precisions, fields or result.
        words: each must be in a row's cells, whatever its hyphens and capitals.

    Raises:
        UserError: no row has them all.
    """
    every = {"gpus": gpus, "topologies": topologies, "models": models, "software": software,
             "precisions": precisions, "fields": field_rows, "result": result_rows}[what]()
    found = [row for row in every if all(any(bare(word) in bare(str(cell)) for cell in row.values()) for word in words)]
    if not found:
        named = [str(next(iter(row.values()))) for row in every]
        hint = nearest(words[0], named) if len(words) == 1 else ""
        raise UserError(Fault(f"no row of {what} has {' and '.join(repr(word[:80]) for word in words)}", hint=hint))
    return found


def result_rows() -> list[Row]:
    """Every field of the JSON of a run: its unit, which runs have it, its meaning."""
    return [{name: row.get(name, "") for name in ("field", "unit", "where", "meaning")}
            for row in table("report/result_fields.yaml")["fields"]]


def gpus() -> list[Row]:
    """Every GPU: dense peaks in TFLOP/s, memory in GiB, bandwidth in GB/s, how well its figures are known."""
    from sim.hardware import gpu, gpu_names

    found = []
    for name in gpu_names():
        one = gpu(name)
        half = one.tflops.get("bf16", one.tflops.get("fp16"))
        found.append({
            "name": name, "architecture": one.arch, "half_tflops": half, "fp8_tflops": one.tflops.get("fp8"),
            "memory_gib": round(one.memory_bytes / 2**30, 1), "bandwidth_gb_s": one.memory_bandwidth_bps / 1e9,
            "sms": one.sms, "power_limit_w": one.power_limit_w, "confidence": one.confidence})
    return found


def topologies() -> list[Row]:
    """Every cluster of `topologies/`."""
    found = []
    for name in names("topologies"):
        one = table_of_topology(name)
        intra, inter = one.get("intra") or {}, one.get("inter") or {}
        found.append({
            "name": name, "gpu": one["gpu"], "gpus_per_node": one["gpus_per_node"],
            "inside_a_node": " ".join(str(part) for part in (intra.get("kind"), intra.get("link")) if part),
            "between_nodes": _cards(inter)})
    return found


def _cards(inter: Row) -> str:
    if inter.get("kind", "none") == "none":
        return ""
    return f"{inter['fabric']}, {inter['nics_per_node']} × {inter['gbps_per_nic']:g} Gb/s"


def table_of_topology(name: str) -> Row:
    """The mapping that a topology file holds."""
    from pathlib import Path

    from sim.scenario.named.topologies import find_topology

    return dict(find_topology(name, Path()).data)


def models() -> list[Row]:
    """Every preset with its parameters (10^9, experts and embeddings included) and its source."""
    catalogue = table("scenario/named/models.yaml")
    keys = ("kind", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    return [{"name": name, "parameters_b": _billions(name),
             **{key: fields.get(key, "decoder" if key == "kind" else None) for key in keys},
             "source": catalogue["sources"].get(fields.get("source"), "")}
            for name, fields in catalogue["presets"].items()]


def _billions(preset: str) -> float:
    """Parameters of a preset, 10^9."""
    from sim.model import build
    from sim.scenario import resolve
    from sim.software import stack_for

    scenario = resolve({"name": preset, "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": preset},
                        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}})
    asked = scenario.software
    stack = stack_for(asked.framework, asked.year, asked.compile, asked.versions, asked.modules)
    return float(f"{build(scenario, stack, 1).parameters / 1e9:.3g}")


def software() -> list[Row]:
    """Every stack profile, as it stands without an era."""
    from sim.software import profile_names, stack_for

    found = []
    for name in profile_names():
        stack = stack_for(name, 2024, False, {}, "plain")
        found.append({
            "name": name, "gradients": stack.gradient_path, "host_forward_us": stack.host_forward_s * 1e6,
            "host_backward_us": stack.host_backward_s * 1e6, "host_collective_us": stack.host_collective_s * 1e6,
            "clips_gradients": stack.clip_gradients, "attention": stack.attention_kernel,
            "optimizer": stack.optimizer_kernel})
    return found


def precisions() -> list[Row]:
    """Every named precision and its seven dtypes."""
    from sim.scenario.fields.precisions import PRECISIONS

    return [{"name": name, **dtypes} for name, dtypes in PRECISIONS.items()]
