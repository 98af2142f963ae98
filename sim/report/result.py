"""The result of a run: every number of result.md, read off a Timeline without changing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from sim.engine import Machine, Timeline, simulate
from sim.hardware.outside import Outside
from sim.memory.ledger import MemoryUse, peak
from sim.memory.reserved import Reserved, replayed
from sim.parallel import Lowered
from sim.program import Kind, Program
from sim.report.advice import Change
from sim.report.breakdown import (
    COMPUTE_STREAM,
    Breakdown,
    bound,
    breakdown,
    inline_seconds,
    kernel_shares,
    step_flops,
)
from sim.report.columns import Columns, of_class
from sim.report.traffic import traffic_list
from sim.scenario.dump import dump
from sim.scenario.schema import Scenario

#: Below this share of free memory PyTorch's allocator starts to retry (result.md, `warnings`).
TIGHT_HEADROOM = 0.05


@dataclass(frozen=True)
class MemoryResult:
    """Memory of the fullest rank against its GPU.

    Attributes:
        use: the replayed ledger of the fullest rank.
        stages: one ledger per distinct program (pipeline stage), in order.
        capacity_bytes: what CUDA reports as total.
        complete: whether every layer's temporaries are counted from its module code, not estimated.
        program: of the fullest rank.
        outside: what the device holds beside tensors, or None where it is not counted.
    """

    use: MemoryUse
    stages: tuple[MemoryUse, ...]
    capacity_bytes: int
    complete: bool
    program: Program
    outside: Outside | None = None

    @property
    def limit_bytes(self) -> int:
        """What the caching allocator can have of the device."""
        return self.capacity_bytes - self.use.at_peak["context"]

    @cached_property
    def reserved(self) -> Reserved:
        """The caching allocator's replay, which is asked for when first needed: it costs more than all else here."""
        return replayed(self.program, self.limit_bytes, self.use.peak_allocated_bytes)

    @property
    def short(self) -> bool:
        """Whether the allocator has to give back cached blocks in every step. No allocator holds twice what it hands
        out, so that small jobs need no replay to know."""
        return 2 * self.use.peak_allocated_bytes > self.limit_bytes and bool(self.reserved.retries)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the highest point, with what the allocator's blocks waste."""
        return {**self.use.at_peak, "fragmentation": self.reserved.fragmentation_bytes}

    @property
    def reserved_bytes(self) -> int:
        """Blocks the caching allocator holds at most."""
        return self.use.peak_allocated_bytes + self.reserved.fragmentation_bytes

    @property
    def device_used_bytes(self) -> int:
        """What nvidia-smi shows: reserved blocks, the CUDA context, NCCL's buffers and cuBLAS's workspaces."""
        return self.reserved_bytes + self.use.at_peak["context"]

    @property
    def headroom_bytes(self) -> int:
        """Capacity that is left; negative when the job does not fit."""
        return self.capacity_bytes - self.device_used_bytes

    @property
    def fits(self) -> bool:
        """Whether every step gets through, if need be by giving back cached blocks."""
        return self.reserved.retries is not None

    def _outside(self) -> dict[str, Any] | None:
        beside = self.outside
        return None if beside is None else {
            "context_bytes": beside.context_bytes, "nccl_bytes": beside.nccl_bytes,
            "workspace_bytes": beside.workspace_bytes, "confidence": beside.confidence}

    def to_json(self) -> dict[str, Any]:
        """`memory` of result.md."""
        where = self.use.where
        return {
            "peak_allocated_bytes": self.use.peak_allocated_bytes, "peak_reserved_bytes": self.reserved_bytes,
            "device_used_bytes": self.device_used_bytes, "capacity_bytes": self.capacity_bytes, "fits": self.fits,
            "headroom_bytes": self.headroom_bytes, "complete": self.complete, "at_peak": self.at_peak,
            "allocator_retries": self.reserved.retries or 0,
            "where": None if where is None else {"section": where.section, "layer": where.layer, "phase": where.phase,
                                                 "task": where.task, "operator": where.operator},
            "phases": {name: dict(level) for name, level in self.use.phases.items()},
            "highest": dict(self.use.highest), "outside": self._outside(),
            "stages": [{"peak_allocated_bytes": stage.peak_allocated_bytes, "at_peak": dict(stage.at_peak),
                        "phases": {name: dict(level) for name, level in stage.phases.items()}}
                       for stage in self.stages],
        }


@dataclass(slots=True)
class Simulation:
    """What the prediction cost. `wall_s` is filled in by whoever ran all of it."""

    events: int
    tasks: int
    ranks_simulated: int
    ranks_represented: int
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DataLoading:
    """What reading the training data asks of each node; batches are read ahead, so the slower of reading and training
    sets the pace of a steady step.

    Attributes:
        bytes_per_step: of one node.
        storage_bytes_per_s: what the node reads (`host.storage`).
        work_s: the step without waiting for data.
    """

    bytes_per_step: float
    storage_bytes_per_s: float
    work_s: float

    @property
    def reading_s(self) -> float:
        """Time to read the data of one step."""
        return self.bytes_per_step / self.storage_bytes_per_s

    @property
    def waiting_s(self) -> float:
        """What reading adds to the step."""
        return max(0.0, self.reading_s - self.work_s)

    def to_json(self) -> dict[str, float]:
        """`data_loading` of the result: what training at full speed needs, what there is, what is waited."""
        return {"needed_bytes_per_second": self.bytes_per_step / self.work_s,
                "storage_bytes_per_second": self.storage_bytes_per_s, "waiting_s": self.waiting_s}


@dataclass(frozen=True, slots=True)
class Detail:
    """What a result was read from.

    Attributes:
        critical: index of the simulated class that computes longest; the breakdown and the traffic are its own.
    """

    lowered: Lowered
    machine: Machine
    timeline: Timeline
    critical: int


@dataclass
class Result:
    """One predicted run; fields and units as in result.md.

    Attributes:
        gpus: GPUs of the job; `gpu` is the catalogue's name of the critical rank's.
        group_ranks: size of each communicator of the critical class's program, by name.
        set: the sweep point's dotted fields; empty for a plain run.
        advisor: works out what would make the job fit.
    """

    scenario: Scenario
    gpus: int
    gpu: str
    step_time_s: float
    tokens_per_second: float
    samples_per_second: float
    model_flops: float
    hardware_flops: float
    peak_flops_per_gpu: float
    breakdown: Breakdown
    bound: str
    memory: MemoryResult
    data_loading: DataLoading
    simulation: Simulation
    group_ranks: dict[str, int]
    warnings: list[str] = field(default_factory=list)
    set: dict[str, Any] = field(default_factory=dict)
    advisor: Callable[[], list[Change]] | None = field(default=None, repr=False)
    _detail: Detail | None = field(default=None, repr=False)

    @property
    def detail(self) -> Detail:
        """Program, machine and timeline behind the numbers.

        Raises:
            RuntimeError: after `release`.
        """
        if self._detail is None:
            raise RuntimeError("the details of this result were released")
        return self._detail

    @cached_property
    def changes(self) -> list[Change]:
        """Single changes that would free memory, the best first; worked out when first asked for, and only for a run of
        its own that does not fit."""
        return [] if self.memory.fits or self.advisor is None else self.advisor()

    def release(self) -> None:
        """Drop Program, machine and timeline: a long sweep keeps its numbers only. No trace or JSON after this."""
        self._detail = None

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of one GPU."""
        return self.tokens_per_second / self.gpus

    @property
    def model_tflops_per_gpu(self) -> float:
        """TFLOP/s without recomputation."""
        return self.model_flops / self.step_time_s / self.gpus / 1e12

    @property
    def hardware_tflops_per_gpu(self) -> float:
        """TFLOP/s with recomputation."""
        return self.hardware_flops / self.step_time_s / self.gpus / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the dense peak of the compute dtype."""
        return self.model_tflops_per_gpu * 1e12 / self.peak_flops_per_gpu

    @property
    def hfu(self) -> float:
        """Hardware FLOP/s over the dense peak of the compute dtype."""
        return self.hardware_tflops_per_gpu * 1e12 / self.peak_flops_per_gpu

    @cached_property
    def slowdown(self) -> float:
        """Step time over that of the same program on a network of infinite speed, which is simulated when first asked
        for."""
        detail = self.detail
        infinite = simulate(detail.lowered.job, detail.machine.infinite()).step_time_s
        return self.step_time_s / max(infinite, self.data_loading.reading_s)

    @property
    def traffic(self) -> list[dict[str, Any]]:
        """One entry per collective of the critical rank's step, in issue order."""
        detail = self.detail
        return traffic_list(detail.lowered.job, detail.timeline, detail.critical)

    def _changes(self) -> dict[str, Any]:
        return {"changes": [change.to_json() for change in self.changes]} if self.changes else {}

    def to_json(self) -> dict[str, Any]:
        """The object `drystep run --json` writes (result.md)."""
        sets = {"set": dict(self.set)} if self.set else {}
        return {
            **sets,
            "scenario": dump(self.scenario),
            "step_time_s": self.step_time_s,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "samples_per_second": self.samples_per_second,
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "hardware_tflops_per_gpu": self.hardware_tflops_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "breakdown_s": self.breakdown.to_json(),
            "communication_s": self.breakdown.communication_json(),
            "contention_s": self.breakdown.contention,
            "slowdown": self.slowdown,
            "bound": self.bound,
            "memory": self.memory.to_json() | self._changes(),
            "traffic": self.traffic,
            "data_loading": self.data_loading.to_json(),
            "simulation": {
                "events": self.simulation.events, "tasks": self.simulation.tasks,
                "ranks_simulated": self.simulation.ranks_simulated,
                "ranks_represented": self.simulation.ranks_represented, "wall_s": self.simulation.wall_s,
            },
            "warnings": list(self.warnings),
        }


def build_result(scenario: Scenario, lowered: Lowered, machine: Machine, timeline: Timeline) -> Result:
    """Read every number of result.md off one simulated step.

    Args:
        scenario: resolved, every default filled in.
        lowered: what it was lowered to.
        machine: what the job ran on.
        timeline: its steady step.
    """
    job, loading = lowered.job, _loading(scenario, timeline.step_time_s)
    memory = _memory(lowered, machine)
    retrying_s = memory.reserved.seconds if memory.short else 0.0
    step_s = timeline.step_time_s + loading.waiting_s + retrying_s
    critical, columns = _critical(lowered, timeline)
    simulated = job.classes[critical]
    program = job.programs[simulated.program]
    profiles = [machine.profile(critical, 0, i) for i in range(len(program.segments))]
    flows = [machine.flows[number].alone_s if number >= 0 else 0.0 for number in machine.class_flows[critical]]
    parts = breakdown(columns, kernel_shares(program, profiles), np.array([p.total_s for p in profiles]),
                      inline_seconds(program, flows))
    parts = replace(parts, host=parts.host + loading.waiting_s + retrying_s)
    training, architecture = scenario.training, lowered.architecture
    of_micro_batch = architecture.forward_flops + architecture.backward_flops
    per_program = [step_flops(p) for p in job.programs]
    gpu = machine.devices[simulated.device].gpu
    result = Result(
        scenario=scenario, gpus=job.ranks, gpu=gpu.name, step_time_s=step_s,
        tokens_per_second=training.global_batch * _tokens_per_sample(scenario) / step_s,
        samples_per_second=training.global_batch / step_s,
        model_flops=of_micro_batch / architecture.batch * training.global_batch,
        hardware_flops=sum(per_program[c.program] * len(c.members) for c in job.classes),
        peak_flops_per_gpu=gpu.peak_flops(training.precision.compute), breakdown=parts,
        bound=bound(parts),
        memory=memory, data_loading=loading,
        simulation=Simulation(timeline.events, timeline.tasks, len(job.classes), job.ranks),
        group_ranks={name: job.communicators[c].size
                     for name, c in zip(program.communicators, simulated.communicators, strict=True) if c >= 0},
        _detail=Detail(lowered, machine, timeline, critical))
    result.warnings = _warnings(result)
    return result


def _loading(scenario: Scenario, work_s: float) -> DataLoading:
    """Every node reads the samples of its own replicas."""
    per_step = scenario.training.global_batch * (scenario.training.sample_bytes or 0.0) / scenario.cluster.nodes
    return DataLoading(per_step, scenario.cluster.topology.host.storage, work_s)


def _tokens_per_sample(scenario: Scenario) -> int:
    """Tokens of one sequence; an encoder-decoder counts both sides (result.md, `model_flops`)."""
    both = scenario.model.kind == "encoder-decoder"
    return int(scenario.training.sequence + (scenario.training.decoder_sequence if both else 0))


def _critical(lowered: Lowered, timeline: Timeline) -> tuple[int, Columns]:
    """The class whose compute stream is busy longest, the first of equals, and its step."""
    best, chosen = -1.0, None
    for number in range(len(lowered.job.classes)):
        columns = of_class(lowered.job, timeline, number)
        if len(lowered.job.classes) == 1:
            return number, columns
        rows = (columns.kind == Kind.KERNELS) & (columns.stream == COMPUTE_STREAM)
        busy = float(((columns.end_s - columns.start_s) * columns.times)[rows].sum())
        if busy > best:
            best, chosen = busy, (number, columns)
    assert chosen is not None, "a job has at least one class"
    return chosen


def _memory(lowered: Lowered, machine: Machine) -> MemoryResult:
    """The rank with the least headroom, and every distinct program."""
    job = lowered.job
    uses = tuple(peak(program) for program in job.programs)
    results = [MemoryResult(uses[c.program], uses, int(machine.devices[c.device].gpu.usable_memory_bytes),
                            lowered.memory_complete, job.programs[c.program], lowered.outside) for c in job.classes]
    return min(results, key=lambda m: m.limit_bytes - m.use.peak_allocated_bytes)


def _warnings(result: Result) -> list[str]:
    memory, found = result.memory, []
    if not memory.complete:
        found.append("memory: model states are exact; temporaries of layers whose module code is not written down "
                     "are estimated from what they keep for backward")
    near = 2 * memory.use.peak_allocated_bytes > memory.limit_bytes
    share = memory.headroom_bytes / memory.capacity_bytes if near else 1.0
    if memory.short and memory.fits:
        found.append(f"memory: the allocator runs short {memory.reserved.retries} times in every step and gives back "
                     f"cached blocks, which adds {1e3 * memory.reserved.seconds:.0f} ms to it")
    elif 0 <= share < TIGHT_HEADROOM:
        found.append(f"memory: only {100 * share:.1f}% of the GPU's memory is left; allocator retries are likely")
    if not memory.use.steady:
        leaks = {name: size for name, size in memory.use.net_bytes.items() if size}
        found.append(f"memory: the step does not return to the level at which it began ({leaks})")
    loading = result.data_loading
    if loading.waiting_s > 0:
        found.append(f"data: training needs {loading.bytes_per_step / loading.work_s / 1e9:.3g} GB/s per node and "
                     f"storage reads {loading.storage_bytes_per_s / 1e9:.3g} GB/s: it bounds the step")
    detail = result.detail
    for device in sorted({c.device for c in detail.lowered.job.classes}):
        gpu = detail.machine.devices[device].gpu
        if gpu.confidence != "high":
            found.append(f"hardware: kernel times of {gpu.name} are not calibrated on this GPU "
                         f"(confidence {gpu.confidence})")
    return found


def leaves(tree: Mapping[str, Any]) -> float:
    """Sum of all numbers of a nested mapping, e.g. of `breakdown_s`."""
    return sum(leaves(v) if isinstance(v, Mapping) else float(v) for v in tree.values())
