"""A small hand-made job on a machine of round numbers: kernels take their bytes in ms, collectives their size in ms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from sim.engine import Machine, Timeline, simulate
from sim.hardware import gpu
from sim.model.architecture import Architecture
from sim.network import Coflow
from sim.parallel import Lowered
from sim.program import CollectiveCall, Communicator, Job, Label, Program, ProgramBuilder, RankClass
from sim.report.build import build_result
from sim.report.result import Result
from sim.scenario import resolve
from sim.work import Kernel

MS = 1e-3


class MilliDevice:
    """A kernel takes one ms per byte, whatever else runs."""

    gpu = gpu("a100-80g-sxm")

    def times(self, kernels: Sequence[Kernel], sms_taken: int = 0, hbm_taken_bps: float = 0.0) -> Any:
        return np.array([k.bytes * MS for k in kernels])

    def like(self, gpu: Any, clock_share: float = 1.0) -> MilliDevice:
        return self

    def drain_s(self, kernel: Kernel) -> float:
        return 0.0

    def copy_s(self, direction: str, size_bytes: float) -> float:
        return size_bytes * MS


class MilliNetwork:
    """A collective takes one ms per byte and shares nothing."""

    def scaled(self, intra: float = 1.0, inter: float = 1.0, latency: float = 1.0) -> MilliNetwork:
        return self

    def coflow(self, kind: str, size_bytes: int, ranks: Any, dtype: str = "bf16") -> Coflow:
        return Coflow(0.0, float(size_bytes), (), (), 1 / MS, 0, 0.0, 1.0, "Ring", "Simple")

    def capacity(self, link: Any) -> float:
        return 1 / MS


def kernel(category: str, ms: float, flops: float = 0.0) -> Kernel:
    return Kernel("elementwise", "bf16", (1,), "", flops, ms, category)


def gathering_program(micro_steps: int) -> Program:
    """Gather 3 ms, forward 4 ms, backward 6 ms beside a second gather of 2 ms, reduce 5 ms; then optimizer 1 ms.

    The reduce-scatter of a micro-step hides below the next one's forward, which its own gather delays.
    """
    builder = ProgramBuilder(("compute", "communication"), ("shard",))
    builder.resident = [("shards", 2**30, "parameters"), ("adam", 2**31, "optimizer_states")]
    forward = builder.segment([kernel("gemm", 3, 1e12), kernel("memory_bound", 1)], [0.0, 0.0])
    backward = builder.segment([kernel("gemm", 4, 2e12), kernel("attention", 2)], [0.0, 0.0])
    step = builder.section("micro-step")
    step.allocate("gathered", 2**28, "gathered_parameters")
    gather = step.collective(1, CollectiveCall("all_gather", 3, "bf16", 0), 0.0, Label("block0", "forward", "gather"))
    begun = step.kernels(0, forward, Label("block0", "forward", "forward"), waits=(gather,))
    step.collective(1, CollectiveCall("all_gather", 2, "bf16", 0), 0.0, Label("block0", "backward", "gather"))
    done = step.kernels(0, backward, Label("block0", "backward", "backward"))
    step.free("gathered", 2**28, "gathered_parameters")
    step.collective(1, CollectiveCall("reduce_scatter", 5, "fp32", 0), 0.0, Label("block0", "backward", "reduce"),
                    waits=(done,))
    step.host(0.0, Label("block0", "backward", "rate limiter"), waits=(begun,))  # bounds the host's lead
    builder.run(step, micro_steps)
    update = builder.section("optimizer step")
    update.kernels(0, builder.segment([kernel("optimizer", 1)], [0.0]), Label("optimizer", "optimizer", "adamw"),
                   joins=(1,))
    update.host(2 * MS, Label("step", "optimizer", "end of step"), joins=(0, 1))
    builder.run(update)
    return builder.build()


def job_of(program: Program, ranks: int = 8) -> Job:
    everyone = np.arange(ranks, dtype=np.int64)
    return Job([program], [RankClass(0, everyone, 0, 0, (0,) * len(program.communicators))],
               [Communicator("shard", everyone.reshape(1, -1), 1)], ranks)


def timeline_of(job: Job, skip_repeats: bool = True) -> tuple[Machine, Timeline]:
    machine = Machine([MilliDevice()], MilliNetwork(), job)  # type: ignore[list-item,arg-type]
    return machine, simulate(job, machine, skip_repeats=skip_repeats)


@pytest.fixture(scope="session")
def result_of() -> Callable[..., Result]:
    """Makes the result of `gathering_program(micro_steps)` on eight ranks."""
    def make(micro_steps: int = 1, skip_repeats: bool = True) -> Result:
        scenario = resolve({
            "name": "by hand", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
            "model": {"kind": "decoder", "layers": 1, "hidden": 64, "heads": 1, "vocab": 128},
            "training": {"micro_batch": 1, "global_batch": 8 * micro_steps, "sequence": 16, "precision": "fsdp-bf16"},
            "parallel": {"strategy": "fsdp"}})
        job = job_of(gathering_program(micro_steps))
        lowered = Lowered(job, Architecture((), False, 1, 16), None)  # type: ignore[arg-type]
        machine, timeline = timeline_of(job, skip_repeats)
        return build_result(scenario, lowered, machine, timeline)
    return make
