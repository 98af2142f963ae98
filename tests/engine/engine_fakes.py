"""Devices and networks of the engine's tests: times that can be worked out by hand.

A kernel's `flops` are its seconds alone and its `bytes` the seconds its thread blocks take to drain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.network import Coflow
from sim.program import CollectiveCall, Communicator, Job, Label, Program, ProgramBuilder, RankClass
from sim.work import Kernel

NAME = Label("layer", "forward", "task")


def kernel(seconds: float, drain_s: float = 0.0, launches: int = 1) -> Kernel:
    return Kernel("elementwise", "bf16", (1,), "", seconds, drain_s, "memory_bound", launches=launches)


@dataclass
class FakeDevice:
    """Each SM taken makes kernels 1% slower, each byte/s taken another `per_bps`; `slow` multiplies everything."""

    slow: float = 1.0
    per_bps: float = 0.0
    calls: int = 0

    def times(self, kernels: Sequence[Kernel], sms_taken: int = 0, hbm_taken_bps: float = 0.0) -> Any:
        self.calls += 1
        factor = self.slow * (1.0 + 0.01 * sms_taken + self.per_bps * hbm_taken_bps)
        return np.array([k.flops * factor for k in kernels])

    def drain_s(self, kernel: Kernel) -> float:
        return kernel.bytes

    def copy_s(self, direction: str, size_bytes: int) -> float:
        return float(size_bytes)


@dataclass
class FakeNetwork:
    """All flows of a kind use the links of `routes[kind]` (default: one common link "x"), once per instance."""

    latency_s: float = 0.0
    channels: int = 0
    hbm: float = 0.0
    cap_bps: float = 1e9
    capacities: Mapping[Any, float] = field(default_factory=lambda: {"x": 1.0})
    routes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    calls: int = 0

    def coflow(self, kind: str, size_bytes: int, ranks: Any, dtype: str = "bf16") -> Coflow:
        self.calls += 1
        links = self.routes.get(kind, ("x",))
        return Coflow(self.latency_s, float(size_bytes), links, (float(len(ranks)),) * len(links), self.cap_bps,
                      self.channels, self.hbm, 1.0, "Ring", "Simple")

    def capacity(self, link: Any) -> float:
        return self.capacities[link]


def gather(size_bytes: int, communicator: int = 0) -> CollectiveCall:
    return CollectiveCall("all_gather", size_bytes, "bf16", communicator)


def scatter(size_bytes: int, communicator: int = 0) -> CollectiveCall:
    return CollectiveCall("reduce_scatter", size_bytes, "bf16", communicator)


def segment(builder: ProgramBuilder, *seconds: float, host_s: float = 0.0, drain_s: float = 0.0) -> int:
    return builder.segment([kernel(s, drain_s) for s in seconds], [host_s] * len(seconds))


def folded(program: Program, communicators: int = 1) -> Job:
    """One class of two ranks."""
    ranks = np.arange(2, dtype=np.int64)
    return Job([program], [RankClass(0, ranks, 0, 0, tuple(range(communicators)))],
               [Communicator(f"c{i}", ranks[None, :], 1) for i in range(communicators)], 2)


def two_classes(programs: Sequence[Program], devices: tuple[int, int] = (0, 0), communicators: int = 1) -> Job:
    """Two ranks, each its own class, in the same communicators."""
    ranks = np.arange(2, dtype=np.int64)
    classes = [RankClass(i, ranks[i:i + 1], min(i, len(programs) - 1), devices[i], tuple(range(communicators)))
               for i in range(2)]
    return Job(list(programs), classes, [Communicator(f"c{i}", ranks[None, :], 2) for i in range(communicators)], 2)
