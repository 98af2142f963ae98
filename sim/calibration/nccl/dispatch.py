"""Dispatch and combine of DeepEP's normal kernels, measured, against the one-sided all-to-all that stands for them:
`data/deepep_aic.csv.gz` (NVIDIA AIConfigurator; H100 in nodes of 8 beside 400 Gb/s NICs).

The figures of `one_sided` in `network/links.yaml` were read off this table: per SM and copy from how times grow with
tokens at 4 to 24 SMs, latency from its smallest calls.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sim.calibration.kernels.tables import DATA, read_csv
from sim.network import Network, Pushing, Topology, fair_share
from sim.parallel.model.expert import sent_once
from sim.scenario import resolve

TABLE = DATA / "deepep_aic.csv.gz"
_COLUMNS = ("nodes", "hidden", "top_k", "experts", "tokens", "sms", "dispatch_us", "dispatch_notice_us", "combine_us",
            "combine_notice_us")
_PER_NODE, _MOST_GROUPS, _SMS = 8, 4, 20
#: Bytes of an element: dispatched in fp8 with an fp32 scale for 128 of them, combined in bf16.
_DISPATCHED, _COMBINED = 1 + 4 / 128, 2.0


def predicted_us(nodes: int, tokens: int, hidden: int, top_k: int, width: float) -> float:
    """Microseconds of one way; the benchmark draws a token's experts from up to four nodes."""
    spec = resolve({"name": "deepep", "cluster": {"topology": "dgx-h100", "nodes": nodes}, "model": {"preset": "gpt2"},
                    "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 1024}}).cluster
    network = Network(Topology.from_mapping(spec.topology.model_dump()), nodes, _PER_NODE,
                      one_sided=Pushing("deepep", top_k))
    places, groups = (nodes, nodes) if nodes > 1 else (_PER_NODE, 1)
    once = sent_once(top_k, places, groups, min(groups, _MOST_GROUPS))
    flow = network.coflow("all_to_all", int(tokens * top_k * hidden * width * once),
                          np.arange(nodes * _PER_NODE, dtype=np.int64).reshape(1, -1))
    return 1e6 * (flow.latency_s + flow.size_bytes / fair_share([flow], network.capacity)[0])


def _line(row: Mapping[str, str]) -> str:
    nodes, tokens, hidden, top_k = (int(row[name]) for name in ("nodes", "tokens", "hidden", "top_k"))
    cells, sums = [], [0.0, 0.0]
    for way, width in (("dispatch", _DISPATCHED), ("combine", _COMBINED)):
        took = float(row[f"{way}_us"]) + float(row[f"{way}_notice_us"])
        found = predicted_us(nodes, tokens, hidden, top_k, width)
        sums = [sums[0] + took, sums[1] + found]
        cells.append(f"{took:.0f} | {found:.0f} | {100 * (found / took - 1):+.0f}%")
    return f"| {nodes} | {tokens} | " + " | ".join(cells) + f" | {100 * (sums[1] / sums[0] - 1):+.0f}% |"


def section() -> list[str]:
    """What the report says of it."""
    return ["## DeepEP", "",
            "Normal kernels with 20 SMs on H100, notices included (`deepep_aic.csv.gz`); a training step makes as many",
            "of either way, so their sum counts. On 8 nodes calls of many tokens moved a third of what NICs carry, and",
            "DeepEP's own few-token kernels did not; its README has 64 ranks at full rate: not taken over.", "",
            "| nodes | tokens | dispatch, us | predicted | | combine, us | predicted | | both |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_line(row) for row in read_csv(TABLE, _COLUMNS) if int(row["sms"]) == _SMS), ""]
