"""The verbs, joined: load a scenario, run it, run its sweep. This is the Python API, `import sim`.

    >>> import sim
    >>> result = sim.run("scenarios/llama2-7b-fsdp.yaml")   # doctest: +SKIP
    >>> result.step_time_s, result.memory.fits               # doctest: +SKIP
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from sim.engine import Machine, Timeline, simulate
from sim.errors import Fault, UserError
from sim.garbage import seldom_searched
from sim.hardware import Device, gpu, host_share
from sim.hardware.whatif import with_products
from sim.network import Network, Pushing, Topology, expected_maximum
from sim.parallel import Lowered, lower
from sim.parallel.variety import GpuKind
from sim.report.advice.largest import largest
from sim.report.advice.single import advise
from sim.report.build import build_result, step_energy_j, timed
from sim.report.memory_plan import MemoryPlan, StageMemory
from sim.report.numbers.inference import InferenceResult, inference_result
from sim.report.numbers.memory import MemoryResult, by_class, fullest
from sim.report.result import Result
from sim.report.tables import Frame, as_table
from sim.scenario import Loaded, Scenario, load_mapping, load_scenario
from sim.scenario.fields.schema import Inference
from sim.software import Stack, stack_of

if TYPE_CHECKING:
    from sim.report.scaling import Scaling

#: What `run` accepts: a resolved scenario, what `load` returned, the path of a file, or what one holds.
Source = Scenario | Loaded | str | Path | Mapping[str, Any]

#: Ranks that are simulated one by one at most: each takes as long as a whole class of them does folded.
MOST_UNFOLDED = 4096

_T = TypeVar("_T")


@dataclass
class Sweep:
    """The product of a scenario's axes.

    Attributes:
        axes: dotted field to its values.
        points: one result per possible point, in the order of the product (last axis fastest); each carries its `set`.
        skipped: `{set, reason}` of points that are impossible.
        interrupted: whether Ctrl-C ended it early; what was finished is here.
    """

    axes: dict[str, list[Any]]
    points: list[Result] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False

    def __repr__(self) -> str:
        """One line, for notebooks: `table()` has the figures."""
        skipped = f", {len(self.skipped):,} skipped" if self.skipped else ""
        return f"<Sweep over {', '.join(self.axes) or 'nothing'}: {len(self.points):,} points{skipped}>"

    def table(self) -> Frame:
        """One row per point: its `set`, then the columns of `Result.table`; a DataFrame where pandas is installed."""
        return as_table([point.row for point in self.points])

    def scaling(self) -> list[Scaling]:
        """Efficiency along the sweep's axis, and where communication starts to bound."""
        from sim.report.scaling import scaling

        return scaling(self.points, self.axes)

    def to_json(self) -> dict[str, Any]:
        """The object `drystep run --json` writes for a sweep (result.md)."""
        return {"points": [p.to_json() for p in self.points], **self.summary()}

    def summary(self) -> dict[str, Any]:
        """`to_json` without the points."""
        early = {"interrupted": True} if self.interrupted else {}
        lines = {"scaling": [one.to_json() for one in found]} if (found := self.scaling()) else {}
        return {"skipped": self.skipped, "axes": self.axes, **lines, **early}


def load(source: str | Path | Mapping[str, Any], sets: Sequence[str] = ()) -> Loaded:
    """Read and resolve a scenario.

    Args:
        source: the YAML file, or what one would hold, as a mapping.
        sets: `dotted.path=value` texts put on top, as `--set` on the command line.

    Raises:
        UserError: with every fault of the file.
    """
    if isinstance(source, Mapping):
        return load_mapping(source, sets)
    if not isinstance(source, str | Path):
        raise UserError(Fault(f"a scenario is the path of a file, or a mapping such as one holds, not a "
                              f"{type(source).__name__}"))
    return load_scenario(source, sets)


def run(source: Source, *, fold: bool = True) -> Result:
    """Predict one steady training step. Of a source with a `sweep` this is the point that the file itself writes, and
    the result warns of it: `run_sweep` predicts them all.

    Args:
        fold: simulate one of each class of ranks that are alike; False simulates every rank, which takes as many times
            longer as there are ranks in a class and should say the same.

    Raises:
        UserError: the file is wrong, or asks for what is not simulated.
    """
    if isinstance(source, Scenario):
        return _advised(_predict(source, {}, fold))
    loaded = _loaded(source)
    try:
        result = _advised(_predict(loaded.scenario, {}, fold))
    except UserError as error:
        raise UserError(placed(fault, loaded) for fault in error.faults) from None
    if loaded.scenario.sweep:
        result.warnings.append(f"sweep: the file sweeps {', '.join(loaded.scenario.sweep)}, and this is the point it "
                               "writes itself: 'drystep run' (in Python run_sweep) predicts them all")
    return result


def run_sweep(source: Loaded | str | Path | Mapping[str, Any], *, progress: Callable[[int, int], None] | None = None,
              each: Callable[[Result], None] | None = None) -> Sweep:
    """Predict every point of a scenario's `sweep`; points that are impossible are listed with their reason.

    Args:
        source: what to run; without `sweep` the only point is the scenario itself.
        progress: called with (points done, points in all) after each point.
        each: called with each result as soon as it exists. The sweep then keeps its numbers only (`Result.release`), so
            that a hundred thousand points fit in memory.

    Raises:
        UserError: the file is wrong.
    """
    loaded = _loaded(source)
    sweep = Sweep({axis: list(values) for axis, values in loaded.sweep.items()})
    total = math.prod(len(values) for values in sweep.axes.values())
    try:
        for done, (sets, scenario) in enumerate(loaded.points(), 1):
            outcome = scenario if isinstance(scenario, str) else _attempt(_predict, scenario, sets)
            if isinstance(outcome, str):
                sweep.skipped.append({"set": dict(sets), "reason": outcome})
            else:
                sweep.points.append(outcome)
                if each is not None:
                    each(outcome)
                    outcome.release()
            if progress is not None:
                progress(done, total)
    except KeyboardInterrupt:
        sweep.interrupted = True
    return sweep


def plan_memory(source: Source) -> MemoryPlan:
    """Memory alone, without simulating a step: per phase and category, largest sizes that fit, rules of thumb.

    Raises:
        UserError: the file is wrong, or asks for what is not simulated.
    """
    if isinstance(source, Scenario):
        return _plan(source, {})
    loaded = _loaded(source)
    try:
        return _plan(loaded.scenario, {})
    except UserError as error:
        raise UserError(placed(fault, loaded) for fault in error.faults) from None


def plan_points(loaded: Loaded) -> Iterator[tuple[dict[str, Any], MemoryPlan | str, int]]:
    """Each point of a sweep as (set, its memory or why there is none, points in all)."""
    total = math.prod(len(values) for values in loaded.sweep.values())
    for sets, scenario in loaded.points():
        yield dict(sets), scenario if isinstance(scenario, str) else _attempt(_plan, scenario, sets), total


class Trial:
    """One scenario lowered once, whose step is simulated only when it is asked for: memory alone often says enough.

    Attributes:
        memory: of the fullest rank.

    Raises:
        UserError: the scenario asks for what is not simulated.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.lowered = scenario, lower(scenario)
        self.memory = fullest(by_class(scenario, self.lowered, _devices(scenario, self.lowered)))

    @cached_property
    def machine(self) -> Machine:
        """What the job runs on."""
        return machine_for(self.scenario, self.lowered)

    @cached_property
    def timeline(self) -> Timeline:
        """Its steady step."""
        return simulate(self.lowered.job, self.machine)

    def step_time_s(self) -> float:
        """Seconds of a step, as `run` predicts them."""
        return timed(self.scenario, self.memory, self.timeline).step_s

    def work_s(self) -> float:
        """Seconds of a step that waits for neither data nor retries of the allocator."""
        return self.timeline.step_time_s


class Measured(NamedTuple):
    """What a search asks of a scenario.

    Attributes:
        memory: of the fullest rank.
        step_s, step_j: seconds of a step (of a request) and its energy on all GPUs' boards, joules; None where it does
            not fit.
        served: of a request that fits, its latencies.
    """

    memory: MemoryResult
    step_s: float | None = None
    step_j: float | None = None
    served: InferenceResult | None = None


@seldom_searched()
def memory_of(scenario: Scenario) -> MemoryResult:
    """Memory of the fullest rank.

    Raises:
        UserError: the scenario asks for what is not simulated.
    """
    return Trial(scenario).memory


@seldom_searched()
def _plan(scenario: Scenario, sets: Mapping[str, Any]) -> MemoryPlan:
    lowered = lower(scenario)
    devices = _devices(scenario, lowered)
    memories = by_class(scenario, lowered, devices)
    alike: dict[tuple[int, str], list[int]] = {}  # classes that only their neighbours or clocks tell apart
    for number, one in enumerate(lowered.job.classes):
        alike.setdefault((one.program, devices[one.device].gpu.name), []).append(number)
    cut, mixed = scenario.parallel.pipeline > 1, len({name for _, name in alike}) > 1
    stages = tuple(
        StageMemory((f"stage {program}" if cut else "every rank") + (f" on {name}" if mixed else ""),
                    lowered.job.classes[numbers[0]].representative,
                    sum(len(lowered.job.classes[number].members) for number in numbers),
                    lowered.layers_of(numbers[0]), memories[numbers[0]])
        for (program, name), numbers in sorted(alike.items()))

    most = fullest(memories)
    return MemoryPlan(scenario, devices[0].gpu.name, lowered, stages, lambda: largest(scenario, memory_of, most),
                      lambda: advise(scenario, most, Trial, _step_s(scenario, lowered, most)), dict(sets))


def _step_s(scenario: Scenario, lowered: Lowered, memory: MemoryResult) -> float:
    """Seconds of a step of what is lowered and measured."""
    return timed(scenario, memory, simulate(lowered.job, machine_for(scenario, lowered))).step_s


def machine_for(scenario: Scenario, lowered: Lowered) -> Machine:
    """The machine a lowered scenario runs on."""
    _, network = hardware_for(scenario, lowered.stack.rank_jitter_s)
    if lowered.variety.colours is not None:
        network = network.watching(np.array([c.representative for c in lowered.job.classes], dtype=np.int64))
    return Machine(_devices(scenario, lowered), network, lowered.job)


def _devices(scenario: Scenario, lowered: Lowered) -> list[Device]:
    """The hardware kinds of a lowered scenario, as `RankClass.device` counts them."""
    device = hardware_for(scenario, lowered.stack.rank_jitter_s)[0]
    return [_of_kind(device, kind, lowered.stack.product_rate) for kind in lowered.variety.kinds]


def _of_kind(device: Device, kind: GpuKind, product_rate: float) -> Device:
    """The cluster's device, or one that differs from it as `kind` says."""
    if kind == GpuKind():
        return device
    card = with_products(gpu(kind.gpu), product_rate) if kind.gpu else device.gpu
    card = replace(card, memory_bandwidth_bps=card.memory_bandwidth_bps * kind.memory_bandwidth)
    return device.like(card, kind.clock)


def hardware_for(scenario: Scenario, jitter_s: float = 0.0) -> tuple[Device, Network]:
    """GPU and links of a scenario's cluster, remembered.

    Args:
        jitter_s: of ranks that meet in a collective.
    """
    software = scenario.software
    stack = stack_of(software)
    peers = _peer_sums(scenario, stack)
    key = (f"{scenario.cluster.model_dump_json()}{software.nccl.model_dump_json()}{jitter_s} {stack.product_rate} "
           f"{_pushing(scenario, stack)} {stack.nccl_release} {peers} {software.cuda_graphs}")
    if key not in _HARDWARE:
        if len(_HARDWARE) >= 16:
            _HARDWARE.pop(next(iter(_HARDWARE)))
        _HARDWARE[key] = _hardware(scenario, jitter_s, stack)
    return _HARDWARE[key]


#: Devices and networks of the last clusters: they remember kernel and link answers, never a run's.
_HARDWARE: dict[str, tuple[Device, Network]] = {}


def _pushing(scenario: Scenario, stack: Stack) -> Pushing | None:
    """What all-to-alls are beside NCCL's."""
    moe = scenario.model.moe
    if moe is None or not stack.dispatch_once:
        return None
    return Pushing(stack.dispatch_kernel, moe.top_k, 2 * scenario.model.hidden)


def _peer_sums(scenario: Scenario, stack: Stack) -> str:
    """Whose kernels small sums are; "" for NCCL's."""
    mode = scenario.training.mode
    return stack.sums_kernel if isinstance(mode, Inference) and mode.inference.all_reduce == "peers" else ""


def _hardware(scenario: Scenario, jitter_s: float, stack: Stack) -> tuple[Device, Network]:
    """The GPU and the links of a scenario's cluster."""
    cluster = scenario.cluster
    overrides = cluster.gpu.model_dump() if cluster.gpu is not None else None
    asked = scenario.software.nccl.model_dump()
    network = Network(Topology.from_mapping(cluster.template()), cluster.nodes, cluster.gpus_per_node,
                      cluster.intra_gbps_per_gpu, cluster.inter_gbps_per_node,
                      asked | {"version": asked["version"] or stack.nccl_release}, jitter_s,
                      _pushing(scenario, stack),
                      _peer_sums(scenario, stack))
    share = host_share(cluster.topology.host, cluster.gpus_per_node, cluster.topology.intra.gpus_per_switch or 1)
    drawn = 1 if cluster.clock_spread else cluster.nodes * cluster.gpus_per_node  # else their clocks are known
    card = with_products(gpu(cluster.topology.gpu, overrides), stack.product_rate)
    return Device(card, host=share, deviation=expected_maximum(drawn), graphs=scenario.software.cuda_graphs), network


@seldom_searched()
def _predict(scenario: Scenario, sets: Mapping[str, Any], fold: bool = True) -> Result:
    if not fold and scenario.gpus > MOST_UNFOLDED:
        raise UserError(Fault(f"{scenario.gpus:,} ranks are more than are simulated one by one ({MOST_UNFOLDED:,})",
                              "--unfolded", hint="use fewer nodes for the check: --set cluster.nodes=..."))
    started = time.perf_counter()
    lowered = lower(scenario, fold=fold)
    machine = machine_for(scenario, lowered)
    result = build_result(scenario, lowered, machine, simulate(lowered.job, machine))
    result.set = dict(sets)
    result.simulation.wall_s = time.perf_counter() - started
    return result


@seldom_searched()
def measure(scenario: Scenario) -> Measured:
    """Memory, step and energy alone; what does not fit is not simulated.

    Raises:
        UserError: the scenario asks for what is not simulated.
    """
    trial = Trial(scenario)
    if not trial.memory.fits:
        return Measured(trial.memory)
    step_s = trial.step_time_s()
    return Measured(trial.memory, step_s, step_energy_j(trial.lowered, trial.machine, step_s),
                    inference_result(scenario, trial.lowered, trial.timeline))


def _advised(result: Result) -> Result:
    """The result, able to say what would make it fit and what each trouble of its cluster costs."""
    result.predictor = lambda scenario: Trial(scenario).step_time_s()
    result.searcher = lambda: largest(result.scenario, memory_of, result.memory)
    result.advisor = lambda: advise(result.scenario, result.memory, Trial, result.step_time_s)
    return result


def _attempt(predict: Callable[[Scenario, Mapping[str, Any]], _T], scenario: Scenario,
             sets: Mapping[str, Any]) -> _T | str:
    """What is predicted of a sweep's point, or why nothing is."""
    try:
        return predict(scenario, sets)
    except UserError as error:
        return "; ".join(": ".join(part for part in (f.field, f.message) if part) for f in error.faults)


def placed(fault: Fault, loaded: Loaded) -> Fault:
    """A fault of a later room with the file and line of the field, or of the nearest parent that was written."""
    if fault.file or not fault.field:
        return fault
    file, line = loaded.document.place(fault.field)
    return replace(fault, file=file, line=line)


def _loaded(source: Loaded | str | Path | Mapping[str, Any]) -> Loaded:
    return source if isinstance(source, Loaded) else load(source)
