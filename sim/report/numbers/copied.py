"""What stands behind waiting for offload: what a rank copies in a step, and what its host computes for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.program import Kind
from sim.report.numbers.breakdown import on_cpu
from sim.report.numbers.columns import Columns
from sim.report.units import seconds, size

#: Directions of copies (`sim.program.Copy`) as a person says them.
_WAYS = {"h2d": "to the GPU", "d2h": "to the host", "nvme_read": "from disk", "nvme_write": "to disk"}


@dataclass(frozen=True, slots=True)
class Copied:
    """Offloaded bytes of one rank's step.

    Attributes:
        ways: direction of a copy -> its bytes and its seconds, copies in flight at once counted each.
        on_cpu_s: seconds the host computes on what is outside the GPU: the optimizer.
    """

    ways: dict[str, tuple[float, float]]
    on_cpu_s: float

    def __str__(self) -> str:
        parts = [f"{size(held)} {_WAYS[way]} in {seconds(took)}" for way, (held, took) in self.ways.items()]
        return ", ".join([*parts, *([f"{seconds(self.on_cpu_s)} on the CPU"] if self.on_cpu_s else [])])

    def to_json(self) -> dict[str, Any]:
        """Plain data: bytes and seconds."""
        ways = {way: {"bytes": held, "seconds": took} for way, (held, took) in self.ways.items()}
        return {**ways, "on_cpu_s": self.on_cpu_s}


def copied(columns: Columns) -> Copied | None:
    """Copies and host computation of a rank's step; None where it has none."""
    copies, computed = columns.where(Kind.COPY), on_cpu(columns)
    if not len(copies) and not len(computed):
        return None
    took = (columns.end_s - columns.start_s) * columns.times
    calls = columns.program.copies
    ways: dict[str, tuple[float, float]] = {}
    for way in _WAYS:
        rows = np.array([row for row in copies if calls[columns.payload[row]].direction == way], dtype=np.int64)
        if len(rows):
            held = sum(calls[columns.payload[row]].size_bytes * int(columns.times[row]) for row in rows)
            ways[way] = float(held), float(took[rows].sum())
    return Copied(ways, float(took[computed].sum()))
