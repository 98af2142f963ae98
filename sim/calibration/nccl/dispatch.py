"""Dispatch and combine of DeepEP's normal kernels, measured, against the one-sided all-to-all that stands for them:
`data/deepep_aic.csv.gz` (NVIDIA AIConfigurator; H100 in nodes of 8 beside 400 Gb/s NICs, and single nodes of newer
runs).

The figures of `one_sided` in `network/links.yaml` were read off these tables: what a token and its copies take of an SM
from single nodes of H100, H200, B200 and B300 (18 widths and choices of experts, 20 SMs), what a copy to another node
takes from two nodes of H100, latency from the smallest calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from sim.calibration.kernels.tables import DATA, read_csv
from sim.network import Network, Pushing, Topology, fair_share
from sim.parallel.model.expert import sent_once
from sim.scenario import resolve

TABLE = DATA / "deepep_aic.csv.gz"
COLUMNS = ("gpu", "nodes", "hidden", "top_k", "experts", "tokens", "sms", "dispatch_us", "dispatch_notice_us",
           "combine_us", "combine_notice_us")
_PER_NODE, _MOST_GROUPS, _SMS = 8, 4, 20
#: Cluster of each table, and tokens of which the second one shows errors.
_TOPOLOGIES = {"h100": "dgx-h100", "h100-2026": "dgx-h100", "b200-2026": "hgx-b200"}
_SHOWN = (64, 512, 4096, 32768)
#: Bytes of an element: dispatched in fp8 with an fp32 scale for 128 of them, combined in bf16.
_DISPATCHED, _COMBINED = 1 + 4 / 128, 2.0


@cache
def _topology(name: str, nodes: int) -> Topology:
    spec = resolve({"name": "deepep", "cluster": {"topology": name, "nodes": nodes}, "model": {"preset": "gpt2"},
                    "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 1024}}).cluster
    return Topology.from_mapping(spec.topology.model_dump())


def predicted_us(nodes: int, tokens: int, hidden: int, top_k: int, width: float, topology: str = "dgx-h100") -> float:
    """Microseconds of one way; the benchmark draws a token's experts from up to four nodes."""
    network = Network(_topology(topology, nodes), nodes, _PER_NODE,
                      one_sided=Pushing("deepep", top_k, round(hidden * width)))
    places, groups = (nodes, nodes) if nodes > 1 else (_PER_NODE, 1)
    once = sent_once(top_k, places, groups, min(groups, _MOST_GROUPS))
    flow = network.coflow("all_to_all", int(tokens * top_k * hidden * width * once),
                          np.arange(nodes * _PER_NODE, dtype=np.int64).reshape(1, -1))
    return 1e6 * (flow.latency_s + flow.size_bytes / fair_share([flow], network.capacity)[0])


def _ways(row: Mapping[str, str]) -> list[tuple[float, float]]:
    """Measured and predicted microseconds of dispatch, and of combine."""
    nodes, tokens, hidden, top_k = (int(row[name]) for name in ("nodes", "tokens", "hidden", "top_k"))
    return [(float(row[f"{way}_us"]) + float(row[f"{way}_notice_us"]),
             predicted_us(nodes, tokens, hidden, top_k, width, _TOPOLOGIES[row["gpu"]]))
            for way, width in (("dispatch", _DISPATCHED), ("combine", _COMBINED))]


def error(row: Mapping[str, str]) -> float:
    """Of both ways together."""
    ways = _ways(row)
    return sum(found for _, found in ways) / sum(took for took, _ in ways) - 1


def _line(row: Mapping[str, str]) -> str:
    cells = [f"{took:.0f} | {found:.0f} | {100 * (found / took - 1):+.0f}%" for took, found in _ways(row)]
    return f"| {row['nodes']} | {row['tokens']} | " + " | ".join(cells) + f" | {100 * error(row):+.0f}% |"


def _by_shape(rows: list[dict[str, str]]) -> list[str]:
    """Errors of both ways by GPU, width and choice, a column for each number of tokens."""
    errors: dict[tuple[str, ...], dict[int, float]] = {}
    for row in rows:
        shape = row["gpu"].partition("-")[0].upper(), row["hidden"], row["top_k"], row["experts"]
        errors.setdefault(shape, {})[int(row["tokens"])] = error(row)
    return [f"| {' | '.join(shape)} | " + " | ".join(f"{100 * found[tokens]:+.0f}%" for tokens in _SHOWN) + " |"
            for shape, found in sorted(errors.items(), key=lambda one: -max(map(abs, one[1].values())))]


def section() -> list[str]:
    """What the report says of it."""
    rows = [row for row in read_csv(TABLE, COLUMNS) if int(row["sms"]) == _SMS]
    return ["## DeepEP", "",
            "Normal kernels with 20 SMs on H100, notices included (`deepep_aic.csv.gz`); a training step makes as many",
            "of either way, so their sum counts. On 8 nodes calls of many tokens moved a third of what NICs carry, and",
            "DeepEP's own few-token kernels did not; its README has 64 ranks at full rate: not taken over.", "",
            "| nodes | tokens | dispatch, us | predicted | | combine, us | predicted | | both |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_line(row) for row in rows if row["gpu"] == "h100"), "",
            "Other widths and choices of experts on one node, errors of both ways by tokens a GPU, worst first. Until",
            "November 2026 a copy had no start of its own and a token no work but its copies: tokens for one or two",
            "experts came out 31 to 59% fast from 8,192 on, those of 2,048 elements 18 to 37%.", "",
            "| GPU | width | experts a token | of | " + " | ".join(map(str, _SHOWN)) + " |",
            "|---|---|---|---|" + "---|" * len(_SHOWN),
            *_by_shape([row for row in rows if row["gpu"] != "h100"]), ""]
