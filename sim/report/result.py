"""The result of a run: every number of result.md, read off a Timeline without changing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sim.engine import Machine, Timeline, simulate
from sim.parallel import Lowered
from sim.report import units
from sim.report.advice.largest import Largest
from sim.report.advice.trials import Change
from sim.report.numbers.bounding import Step, bound_of
from sim.report.numbers.breakdown import Breakdown
from sim.report.numbers.budget import BudgetResult
from sim.report.numbers.copied import Copied
from sim.report.numbers.inference import InferenceResult, latency_row
from sim.report.numbers.loading import DataLoading
from sim.report.numbers.memory import MemoryResult
from sim.report.numbers.more import SAVED
from sim.report.numbers.neighbours import Features, Validated, validated
from sim.report.numbers.stages import StageUse, stages_of
from sim.report.numbers.traffic import traffic_count, traffic_list
from sim.report.numbers.troubles import Trouble, troubles
from sim.report.tables import Frame, as_table
from sim.report.words import written
from sim.scenario.dump import dump
from sim.scenario.fields.schema import Scenario


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
        copied: what is copied to and from what lives outside the GPU; None where nothing is.
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
    memory: MemoryResult
    data_loading: DataLoading
    simulation: Simulation
    group_ranks: dict[str, int]
    features: Features
    inference: InferenceResult | None = None
    budget: BudgetResult | None = None
    copied: Copied | None = None
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
    def waits(self) -> dict[str, float]:
        """Seconds of the breakdown's `host` by what is waited for: training data (`data`), cached memory that the
        allocator gives back and takes again (`allocator`), and the host itself (`host`)."""
        data = self.data_loading.waiting_s
        allocator = self.memory.reserved.seconds if self.memory.short else 0.0
        return {"host": max(0.0, self.breakdown.host - data - allocator), "data": data, "allocator": allocator}

    def __repr__(self) -> str:
        """One line: what a notebook shows of a result that is not printed otherwise."""
        used, held = units.size(self.memory.shown_bytes), units.size(self.memory.capacity_bytes)
        return (f"<Result '{self.scenario.name}': {units.seconds(self.step_time_s)} on {self.gpus:,} × {self.gpu}, "
                f"MFU {100 * self.mfu:.1f}%, {used} of {held}{'' if self.memory.fits else ', does not fit'}>")

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
            **({} if self.inference is None else latency_row(self.inference)),
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
        _ = self.bound  # a sweep's table tells it
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
    def bound(self) -> str:
        """Where the next 10% would help most (`bound` of result.md), worked out when first asked for: it may take a few
        simulations more."""
        detail = self.detail
        return bound_of(self.breakdown, Step(detail.lowered.job, detail.machine, detail.timeline, detail.critical,
                                             self._waits_less_s))

    @property
    def _waits_less_s(self) -> float:
        """What 10% more of the storage's bandwidth, and 10% less of the allocator's retries, save of a step."""
        data = self.data_loading
        return min(data.waiting_s, SAVED * data.reading_s) + SAVED * self.waits["allocator"]

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
        from sim.report.numbers.sensitivity import bound_by, sensitivity

        detail, step_s = self.detail, self.step_time_s
        added_s = step_s - max(detail.timeline.step_time_s, self.data_loading.reading_s)
        self.sensitivity = sensitivity(detail.lowered.job, detail.machine, step_s, self.data_loading.reading_s, added_s)
        paging = self.memory.paging.seconds if self.memory.paging is not None else 0.0
        self.bound = bound_by(self.sensitivity, SAVED * self.breakdown.pipeline_bubble / step_s,
                              self._waits_less_s / step_s, SAVED * paging / step_s)
        return self.sensitivity

    @property
    def traffic(self) -> list[dict[str, Any]]:
        """One entry per collective of the critical rank's step, in issue order."""
        detail = self.detail
        return traffic_list(detail.lowered.job, detail.timeline, detail.critical)

    @property
    def collectives(self) -> int:
        """How many those are."""
        return traffic_count(self.detail.lowered.job, self.detail.critical)

    def _changes(self) -> dict[str, Any]:
        found = {"changes": [change.to_json() for change in self.changes],
                 "largest": [one.to_json() for one in self.largest]}
        return {name: rows for name, rows in found.items() if rows}

    def to_json(self, traffic: bool = True) -> dict[str, Any]:
        """The object `drystep run --json` writes (result.md).

        Args:
            traffic: with `traffic`, which in a pipeline of many micro-batches has hundreds of thousands of entries.
        """
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
            **({"traffic": self.traffic} if traffic else {}),
            **({"stages": [stage.to_json() for stage in self.stages]} if self.stages else {}),
            **({} if self.copied is None else {"copies": self.copied.to_json()}),
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
    return value if isinstance(value, str | int | float | bool) or value is None else written(value)


def has_tokens(scenario: Scenario) -> bool:
    """Whether a sample is a sequence of tokens; one of a table of layers is whatever the table counts."""
    return scenario.model.kind != "layers"


def tokens_per_sample(scenario: Scenario) -> int:
    """Tokens of one sequence; an encoder-decoder counts both sides (result.md, `model_flops`)."""
    both = scenario.model.kind == "encoder-decoder"
    return int(scenario.training.sequence + (scenario.training.decoder_sequence if both else 0))
