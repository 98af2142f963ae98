"""How a result is read: every number of result.md off one simulated step, and what the user is warned of."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sim.engine import Machine, Timeline
from sim.network import Topology
from sim.parallel import Lowered
from sim.program import Job, Kind
from sim.report.numbers.breakdown import COMPUTE_STREAM, kernel_counts, of_rank, step_flops
from sim.report.numbers.budget import budget_result
from sim.report.numbers.columns import Columns, of_class
from sim.report.numbers.copied import copied
from sim.report.numbers.inference import inference_result
from sim.report.numbers.loading import DataLoading
from sim.report.numbers.memory import MemoryResult, by_class, fullest
from sim.report.numbers.neighbours import features
from sim.report.result import Detail, Result, Simulation, tokens_per_sample
from sim.report.warned.asked import in_vain
from sim.report.warned.attention import of_whole_sequences
from sim.report.warned.elsewhere import elsewhere
from sim.report.warned.queues import unusual_queues
from sim.report.warned.unsaid import unsaid_host, unsaid_network
from sim.report.warned.unused import buckets_in_vain, fsdp_of_another, without_ranks
from sim.report.warned.widths import uneven
from sim.scenario.fields.schema import Inference, Scenario

#: From this part of the FLOPs on, attention that causal kernels skip makes MFU another figure than most expect.
_MUCH_SKIPPED = 0.2
#: And from this part on what is between documents does.
_MUCH_BETWEEN = 0.05


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
        peak_flops_per_gpu=_peak_flops(job, machine, training.matrix_dtype), breakdown=parts,
        memory=memory, data_loading=loading,
        simulation=Simulation(timeline.events, timeline.tasks, len(job.classes), job.ranks),
        group_ranks={name: job.communicators[c].size
                     for name, c in zip(program.communicators, simulated.communicators, strict=True) if c >= 0},
        features=features(scenario, lowered, gpu.kernels), copied=copied(columns),
        _detail=Detail(lowered, machine, timeline, critical))
    result.warnings = _warnings(result)
    return result


def _peak_flops(job: Job, machine: Machine, dtype: str) -> float:
    """Dense peak of a GPU, FLOP/s; of a mixed cluster the mean over its GPUs."""
    peaks = [(machine.devices[c.device].gpu.peak_flops(dtype), len(c.members)) for c in job.classes]
    if len({peak for peak, _ in peaks}) == 1:
        return peaks[0][0]
    return sum(peak * members for peak, members in peaks) / job.ranks


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


def _skipped_share(result: Result) -> float:
    """Share of a training step's model FLOPs that causal attention kernels do not do: half of theirs."""
    if result.scenario.training.mode != "train":
        return 0.0
    whole = result.detail.lowered.architecture
    causal = sum(k.flops for layer in whole.stack for operator in layer.operators
                 for k in (*operator.forward, *operator.backward) if k.causal)
    return causal / 2 / max(whole.forward_flops + whole.backward_flops, 1.0)


def _warnings(result: Result) -> list[str]:
    memory = result.memory
    found = [f"memory: {text}" for text in memory.warnings]
    if not memory.use.steady:
        leaks = {name: size for name, size in memory.use.net_bytes.items() if size}
        found.append(f"memory: the step does not return to the level at which it began ({leaks})")
    found += [*unusual_queues(result.scenario), *unsaid_network(result.scenario), *unsaid_host(result.scenario),
              *in_vain(result.scenario), *without_ranks(result.scenario), *buckets_in_vain(result.scenario),
              *fsdp_of_another(result.scenario), *elsewhere(result.scenario)]
    loading = result.data_loading
    if loading.waiting_s > 0:
        found.append(f"data: training needs {loading.bytes_per_step / loading.work_s / 1e9:.3g} GB/s per node and "
                     f"storage reads {loading.storage_bytes_per_s / 1e9:.3g} GB/s: it bounds the step")
    if (skipped := _skipped_share(result)) >= _MUCH_SKIPPED:
        found.append(f"mfu: attention is counted in full, as PyTorch's FlopCounterMode does; without the half that "
                     f"causal kernels skip MFU is {100 * result.mfu * (1 - skipped):.1f}%")
    if result.scenario.training.packed:
        more = of_whole_sequences(result.scenario, result.detail.lowered.architecture)
        if more >= 1.0 + _MUCH_BETWEEN:
            found.append("mfu: attention is counted within documents, as FlopCounterMode does with cumulative lengths; "
                         f"counted over whole sequences, as torchtitan does, MFU is {100 * result.mfu * more:.1f}%")
    own = result.scenario.cluster.gpu
    if own is not None and any(v is not None for v in own.model_dump().values()):
        card = result.scenario.cluster.topology.gpu
        like = result.gpu if isinstance(card, str) else card["like"]
        found.append(f"hardware: figures of this GPU are the scenario's own; how much of them kernels reach is taken "
                     f"from {like}, and so are published runs like this")
    detail = result.detail
    for device in sorted({c.device for c in detail.lowered.job.classes}):
        gpu = detail.machine.devices[device].gpu
        compute = result.scenario.training.matrix_dtype
        other = {"bf16": "fp16", "fp16": "bf16"}.get(compute)
        given = own is not None and own.tflops is not None and compute in own.tflops  # the other is the catalogue's
        if other is not None and not given and gpu.peak_flops(compute) * 2 < gpu.peak_flops(other):
            found.append(f"hardware: {gpu.name} has no tensor cores for {compute} "
                         f"({gpu.peak_flops(compute) / 1e12:.3g} TFLOP/s; {other}: "
                         f"{gpu.peak_flops(other) / 1e12:.3g})")
        if gpu.confidence != "high":
            found.append(f"hardware: kernel times of {gpu.name} are not calibrated on this GPU "
                         f"(confidence {gpu.confidence})")
    cluster = result.scenario.cluster
    if cluster.gpus_per_node > 1 and not Topology.from_mapping(cluster.template()).intra.peers:
        found.append(f"network: GPUs of this kind of node ({result.gpu}) do not reach one another over PCIe: what goes "
                     "between them takes the way through the host, whose pace has not been measured")
    critical = detail.lowered.job.classes[detail.critical]
    program = detail.lowered.job.programs[critical.program]
    found += uneven(result.scenario, detail.machine.devices[critical.device], program.kernels,
                    kernel_counts(program).tolist(), result.step_time_s)
    if not result.validated.count or result.validated.generations:
        kind = result.features
        what = "inference" if kind.mode.startswith("infer") else kind.strategy
        others = result.validated.generations
        told = f"what the record holds is of other GPUs ({', '.join(others)}); " if others else ""
        found.append(f"validation: {told}no published run of this kind ({what}, {kind.generation}, "
                     f"{kind.framework}, {kind.gpus:,} GPU{'s' * (kind.gpus > 1)}) has been "
                     "compared: the error is not known")
    return found
