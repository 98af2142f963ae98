"""The result of a run: every number of result.md, read off a Timeline without changing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from sim.engine import Machine, Timeline, simulate
from sim.parallel import Lowered
from sim.program import Kind
from sim.report.advice import Change
from sim.report.breakdown import (
    COMPUTE_STREAM,
    Breakdown,
    bound,
    kernel_counts,
    of_rank,
    step_flops,
)
from sim.report.budget import BudgetResult, budget_result
from sim.report.columns import Columns, of_class
from sim.report.inference import InferenceResult, inference_result, waits_for_memory
from sim.report.largest import Largest
from sim.report.loading import DataLoading
from sim.report.memory import MemoryResult, by_class, fullest
from sim.report.neighbours import Features, Validated, features, validated
from sim.report.queues import unusual_queues
from sim.report.stages import StageUse, stages_of
from sim.report.tables import Frame, as_table
from sim.report.traffic import traffic_list
from sim.report.troubles import Trouble, troubles
from sim.scenario.dump import dump
from sim.scenario.schema import Inference, Scenario


@dataclass(slots=True)
class Simulation:
    """What the prediction cost. `wall_s` is filled in by whoever ran all of it."""

    events: int
    tasks: int
    ranks_simulated: int
    ranks_represented: int
    wall_s: float = 0.0


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
        inference: of an inference run; its step is one request of every replica, its model FLOPs the kernels' own.
        group_ranks: size of each communicator of the critical class's program, by name.
        features: what makes published runs like this one.
        sensitivity: change of the step for 10% more of each resource, where it was asked for.
        set: the sweep point's dotted fields; empty for a plain run.
        advisor: works out what would make the job fit; searcher: the largest sizes that do.
        predictor: step time of another scenario, for what each trouble of the cluster costs.
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
    features: Features
    inference: InferenceResult | None = None
    budget: BudgetResult | None = None
    sensitivity: dict[str, float] | None = None
    warnings: list[str] = field(default_factory=list)
    set: dict[str, Any] = field(default_factory=dict)
    advisor: Callable[[], list[Change]] | None = field(default=None, repr=False)
    predictor: Callable[[Scenario], float] | None = field(default=None, repr=False)
    searcher: Callable[[], list[Largest]] | None = field(default=None, repr=False)
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

    @cached_property
    def largest(self) -> list[Largest]:
        """Largest micro-batch and longest sequence that fit, for a run of its own that does not."""
        return [] if self.memory.fits or self.searcher is None else self.searcher()

    @cached_property
    def troubles(self) -> list[Trouble]:
        """What of the cluster is not like the rest and what each costs, the dearest first; worked out when first asked
        for (one prediction each), and only for a run of its own."""
        return [] if self.predictor is None else troubles(self.scenario, self.step_time_s, self.predictor)

    @property
    def row(self) -> dict[str, Any]:
        """The main numbers, one column each; those of a sweep's point begin with its `set`.

        It needs no detail of the run, so results that were released (`release`) have a row as well.
        """
        exposed = {f"exposed_{kind}_{group}_s": seconds
                   for kind, groups in self.breakdown.exposed_communication.items()
                   for group, seconds in groups.items()}
        budget = {} if self.budget is None else {
            "days": self.budget.days, "gpu_hours": self.budget.gpu_hours, "cost": self.budget.cost,
            "energy_kwh": self.budget.energy_kwh, "goodput": self.budget.goodput}
        return {
            **{path: _plain(value) for path, value in self.set.items()},
            "name": self.scenario.name, "gpus": self.gpus, "gpu": self.gpu, "step_time_s": self.step_time_s,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu, "mfu": self.mfu, "hfu": self.hfu,
            "bound": self.bound, "exposed_communication_s": self.breakdown.exposed_s,
            **{f"{name}_s": seconds for name, seconds in self.breakdown.compute.items()}, **exposed,
            "pipeline_bubble_s": self.breakdown.pipeline_bubble, "host_s": self.breakdown.host,
            "offload_s": self.breakdown.offload, "device_used_bytes": self.memory.device_used_bytes,
            "capacity_bytes": self.memory.capacity_bytes, "fits": self.memory.fits, **budget}

    def table(self) -> Frame:
        """The main numbers as a table of one row: a pandas DataFrame, or a list of one mapping without pandas."""
        return as_table([self.row])

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

    @cached_property
    def stages(self) -> list[StageUse]:
        """What each stage of a pipeline did, worked out when first asked for; nothing without a pipeline."""
        detail = self.detail
        return stages_of(self.scenario, detail.lowered, detail.machine, detail.timeline, self.memory.stages)

    @property
    def validated(self) -> Validated:
        """The record of errors of published runs like this one."""
        return validated(self.features)

    def ask_sensitivity(self) -> dict[str, float]:
        """Work out `sensitivity`, one simulation per resource; `bound` then follows from it."""
        from sim.report.sensitivity import bound_by, sensitivity

        detail, step_s = self.detail, self.step_time_s
        self.sensitivity = sensitivity(detail.lowered.job, detail.machine, step_s, self.data_loading.reading_s)
        self.bound = bound_by(self.sensitivity, self.breakdown.pipeline_bubble / step_s)
        return self.sensitivity

    @property
    def traffic(self) -> list[dict[str, Any]]:
        """One entry per collective of the critical rank's step, in issue order."""
        detail = self.detail
        return traffic_list(detail.lowered.job, detail.timeline, detail.critical)

    def _changes(self) -> dict[str, Any]:
        found = {"changes": [change.to_json() for change in self.changes],
                 "largest": [one.to_json() for one in self.largest]}
        return {name: rows for name, rows in found.items() if rows}

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
            **({} if self.sensitivity is None else {"sensitivity": dict(self.sensitivity)}),
            **({"troubles": [one.to_json() for one in self.troubles]} if self.troubles else {}),
            "memory": self.memory.to_json() | self._changes(),
            "traffic": self.traffic,
            **({"stages": [stage.to_json() for stage in self.stages]} if self.stages else {}),
            "data_loading": self.data_loading.to_json(),
            "validated": self.validated.to_json(),
            **({} if self.inference is None else {"inference": self.inference.to_json()}),
            **({} if self.budget is None else {"budget": self.budget.to_json()}),
            "simulation": {
                "events": self.simulation.events, "tasks": self.simulation.tasks,
                "ranks_simulated": self.simulation.ranks_simulated,
                "ranks_represented": self.simulation.ranks_represented, "wall_s": self.simulation.wall_s,
            },
            "warnings": list(self.warnings),
        }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def build_result(scenario: Scenario, lowered: Lowered, machine: Machine, timeline: Timeline) -> Result:
    """Read every number of result.md off one simulated step.

    Args:
        scenario: resolved, every default filled in.
        lowered: what it was lowered to.
        machine: what the job ran on.
        timeline: its steady step.
    """
    job = lowered.job
    memory = fullest(by_class(scenario, lowered, machine.devices))
    loading, retrying_s, paging_s, step_s = timed(scenario, memory, timeline)
    critical, columns = _critical(lowered, timeline)
    simulated = job.classes[critical]
    program = job.programs[simulated.program]
    parts = of_rank(machine, columns, critical)
    parts = replace(parts, host=parts.host + loading.waiting_s + retrying_s, offload=parts.offload + paging_s)
    training, architecture = scenario.training, lowered.architecture
    of_micro_batch = architecture.forward_flops + architecture.backward_flops
    per_program = [step_flops(p) for p in job.programs]
    gpu = machine.devices[simulated.device].gpu
    hardware_flops = sum(per_program[c.program] * len(c.members) for c in job.classes)
    served = inference_result(scenario, lowered, timeline)
    samples = training.global_batch if served is None else scenario.data_parallel * architecture.batch
    result = Result(
        scenario=scenario, gpus=job.ranks, gpu=gpu.name, step_time_s=step_s,
        tokens_per_second=(samples * tokens_per_sample(scenario) / step_s if served is None
                           else served.tokens_per_second),
        samples_per_second=samples / step_s,
        model_flops=of_micro_batch / architecture.batch * samples if served is None else hardware_flops,
        hardware_flops=hardware_flops, inference=served,
        budget=budget_result(scenario, lowered, step_s, samples * tokens_per_sample(scenario),
                             step_energy_j(lowered, machine, step_s) if scenario.budget is not None else None),
        peak_flops_per_gpu=gpu.peak_flops(training.precision.compute), breakdown=parts,
        bound=bound(parts),
        memory=memory, data_loading=loading,
        simulation=Simulation(timeline.events, timeline.tasks, len(job.classes), job.ranks),
        group_ranks={name: job.communicators[c].size
                     for name, c in zip(program.communicators, simulated.communicators, strict=True) if c >= 0},
        features=features(scenario, lowered, gpu.arch),
        _detail=Detail(lowered, machine, timeline, critical))
    if served is not None and result.bound == "compute" and waits_for_memory(program, gpu.peak_flops,
                                                                             gpu.memory_bandwidth_bps):
        result.bound = "memory_bandwidth"
    result.warnings = _warnings(result)
    return result


class Timed(NamedTuple):
    """Seconds of a step: what its tasks take, and what the host adds for data, the allocator's retries and pages.

    Attributes:
        step_s: all of it.
    """

    loading: DataLoading
    retrying_s: float
    paging_s: float
    step_s: float


def timed(scenario: Scenario, memory: MemoryResult, timeline: Timeline) -> Timed:
    """The step of a simulated job whose fullest rank holds `memory`."""
    loading = _loading(scenario, timeline.step_time_s)
    retrying_s = memory.reserved.seconds if memory.short else 0.0
    paging_s = memory.paging.seconds if memory.paging is not None else 0.0
    return Timed(loading, retrying_s, paging_s, timeline.step_time_s + loading.waiting_s + retrying_s + paging_s)


def step_energy_j(lowered: Lowered, machine: Machine, step_s: float) -> float:
    """Energy of all GPUs over one step, joules: their boards alone."""
    counts = [kernel_counts(program) for program in lowered.job.programs]
    return sum(len(c.members) * machine.devices[c.device].energy_j(lowered.job.programs[c.program].kernels,
                                                                  counts[c.program], step_s)
               for c in lowered.job.classes)


def _loading(scenario: Scenario, work_s: float) -> DataLoading:
    """Every node reads the samples of its own replicas. A request is in memory when it arrives."""
    if isinstance(scenario.training.mode, Inference):
        return DataLoading(0.0, scenario.cluster.topology.host.storage, work_s)
    per_step = scenario.training.global_batch * (scenario.training.sample_bytes or 0.0) / scenario.cluster.nodes
    return DataLoading(per_step, scenario.cluster.topology.host.storage, work_s)


def tokens_per_sample(scenario: Scenario) -> int:
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


def _warnings(result: Result) -> list[str]:
    memory = result.memory
    found = [f"memory: {text}" for text in memory.warnings]
    if not memory.use.steady:
        leaks = {name: size for name, size in memory.use.net_bytes.items() if size}
        found.append(f"memory: the step does not return to the level at which it began ({leaks})")
    found += unusual_queues(result.scenario)
    loading = result.data_loading
    if loading.waiting_s > 0:
        found.append(f"data: training needs {loading.bytes_per_step / loading.work_s / 1e9:.3g} GB/s per node and "
                     f"storage reads {loading.storage_bytes_per_s / 1e9:.3g} GB/s: it bounds the step")
    if (own := result.scenario.cluster.gpu) is not None and any(v is not None for v in own.model_dump().values()):
        found.append(f"hardware: figures of this GPU are the scenario's own; how much of them kernels reach is taken "
                     f"from {result.gpu}, and so are published runs like this")
    detail = result.detail
    for device in sorted({c.device for c in detail.lowered.job.classes}):
        gpu = detail.machine.devices[device].gpu
        compute = result.scenario.training.precision.compute
        other = {"bf16": "fp16", "fp16": "bf16"}.get(compute)
        if other is not None and gpu.peak_flops(compute) * 2 < gpu.peak_flops(other):
            found.append(f"hardware: {gpu.name} has no tensor cores for {compute} "
                         f"({gpu.peak_flops(compute) / 1e12:.3g} TFLOP/s; {other}: "
                         f"{gpu.peak_flops(other) / 1e12:.3g})")
        if gpu.confidence != "high":
            found.append(f"hardware: kernel times of {gpu.name} are not calibrated on this GPU "
                         f"(confidence {gpu.confidence})")
    if not result.validated.count:
        kind = result.features
        found.append(f"validation: no published run of this kind ({kind.strategy}, {kind.generation}, "
                     f"{kind.framework}, {kind.gpus:,} GPU{'s' * (kind.gpus > 1)}) has been "
                     "compared: the error is not known")
    return found
