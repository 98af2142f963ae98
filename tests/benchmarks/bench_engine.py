"""How fast the engine is, next to SimPy itself: `python tests/benchmarks/bench_engine.py [--layers 80] [--repeat 20]`.

The step is a synthetic FSDP one: per layer an all-gather and a segment forward; an all-gather, a segment and a
reduce-scatter backward; all collectives on one communicator, contention on, the host synchronised at the step's end. It
is run on a warm machine (every profile, flow and share looked up before), as in a sweep or a test. The measure that can
be compared between computers is the cost of a task in units of one bare SimPy callback.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from simpy import Environment, Event

from sim.engine import Machine, longest_path, simulate
from sim.program import CollectiveCall, Communicator, Job, Label, ProgramBuilder, RankClass
from sim.work import Kernel


@dataclass(frozen=True)
class FlatCoflow:
    """One collective on one link of 100 GB/s."""

    size_bytes: float
    latency_s: float = 20e-6
    links: tuple[str, ...] = ("link",)
    loads: tuple[float, ...] = (1.0,)
    cap_bps: float = 100e9
    channels: int = 16
    hbm_bytes_per_byte: float = 2.0
    weight: float = 1.0


class FlatNetwork:
    """A network of one link."""

    def coflow(self, kind: str, size_bytes: int, ranks: Any, dtype: str = "bf16") -> FlatCoflow:
        return FlatCoflow(float(size_bytes))

    def capacity(self, link: Any) -> float:
        return 100e9


class FlatDevice:
    """Kernel times by operation count, slowed by the SMs that collectives take."""

    def times(self, kernels: Sequence[Kernel], sms_taken: int = 0, hbm_taken_bps: float = 0.0) -> Any:
        return np.array([k.flops / 300e12 * 132 / (132 - sms_taken) for k in kernels])

    def drain_s(self, kernel: Kernel) -> float:
        return 5e-6

    def copy_s(self, direction: str, size_bytes: int) -> float:
        return size_bytes / 25e9


def fsdp_job(layers: int, kernels_per_segment: int = 24, micro_steps: int = 1, host_s: float = 6e-6) -> Job:
    """An FSDP step of `layers` equal layers."""
    builder = ProgramBuilder(("compute", "all_gather", "reduce_scatter"), ("shard",))
    kernel = [Kernel("gemm", "bf16", (1, 4096, 4096, 1024 * (1 + i % 3)), "tn", 2.0 * 4096 * 4096 * 1024 * (1 + i % 3),
                     0.0, "gemm") for i in range(kernels_per_segment)]
    forward = builder.segment(kernel, [host_s] * len(kernel))
    backward = builder.segment(kernel * 2, [host_s] * (2 * len(kernel)))
    gather = CollectiveCall("all_gather", 400_000_000, "bf16", 0)
    scatter = CollectiveCall("reduce_scatter", 400_000_000, "bf16", 0)
    section = builder.section("micro-step")
    compute = -1
    before = -1
    for layer in range(layers):
        label = Label(f"block{layer}", "forward", "")
        waits = (before,) if before >= 0 else ()
        arrived = section.collective(1, gather, 20e-6, label, waits)
        before, compute = compute, section.kernels(0, forward, label, (arrived,))
    for layer in reversed(range(layers)):
        label = Label(f"block{layer}", "backward", "")
        arrived = section.collective(1, gather, 20e-6, label, (before,) if before >= 0 else ())
        before, compute = compute, section.kernels(0, backward, label, (arrived,))
        section.collective(2, scatter, 20e-6, label, (compute,))
    builder.run(section, micro_steps)
    step = builder.section("optimizer")
    step.kernels(0, forward, Label("optimizer", "optimizer", ""), (), (1, 2))
    step.host(100e-6, Label("", "optimizer", "sync"), (), (0, 1, 2))
    builder.run(step)
    ranks = np.arange(8, dtype=np.int64)
    return Job([builder.build()], [RankClass(0, ranks, 0, 0, (0,))], [Communicator("shard", ranks[None, :], 1)], 8)


def callbacks_per_s(count: int = 20_000) -> float:
    """SimPy's own rate: one event scheduled from the callback of the one before."""
    env = Environment()
    left = count

    def fired(_: Event) -> None:
        nonlocal left
        left -= 1
        if left:
            schedule()

    def schedule() -> None:
        event = Event(env)
        event._ok = True
        event._value = None
        event.callbacks = [fired]
        env.schedule(event, delay=1.0)

    schedule()
    begin = time.perf_counter()
    env.run()
    return count / (time.perf_counter() - begin)


def best_ms(call: Callable[[], object], repeat: int) -> float:
    """Shortest of `repeat` calls, milliseconds (the shortest is the one the rest of the computer disturbed least)."""
    best = float("inf")
    for _ in range(repeat):
        gc.collect()
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--micro-steps", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--host-us", type=float, default=6.0, help="host time per kernel, microseconds")
    parser.add_argument("--no-skip", action="store_true", help="simulate repeats and the second step as well")
    options = parser.parse_args(argv)
    job = fsdp_job(options.layers, micro_steps=options.micro_steps, host_s=options.host_us * 1e-6)
    machine = Machine([FlatDevice()], FlatNetwork(), job)
    skip = not options.no_skip
    cold = best_ms(lambda: simulate(job, Machine([FlatDevice()], FlatNetwork(), job), skip_repeats=skip), 3)
    timeline = simulate(job, machine, skip_repeats=skip)
    warm = best_ms(lambda: simulate(job, machine, skip_repeats=skip), options.repeat)
    bound = best_ms(lambda: longest_path(job, machine), 3)
    rate = max(callbacks_per_s() for _ in range(5))
    print(f"tasks {timeline.tasks}  events {timeline.events}  step {1e3 * timeline.step_time_s:.3f} ms")
    print(f"simulate, warm machine {warm:.2f} ms   new machine {cold:.2f} ms   longest path {bound:.2f} ms")
    print(f"SimPy callbacks {rate:,.0f}/s   one task costs {warm * 1e-3 / timeline.tasks * rate:.2f} bare callbacks")


if __name__ == "__main__":
    main()
