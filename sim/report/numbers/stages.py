"""What each stage of a pipeline did in a step: busy, waiting for other stages, exposed transfers, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sim.engine import Machine, Timeline
from sim.memory.ledger import MemoryUse
from sim.parallel import Lowered
from sim.program import Job
from sim.report.numbers.breakdown import POINT_TO_POINT, of_rank
from sim.report.numbers.columns import of_class
from sim.scenario.fields.schema import Scenario


@dataclass(frozen=True, slots=True)
class StageUse:
    """One stage's step on its representative rank; the seconds sum to the step.

    Attributes:
        stage: number; rank: representative; ranks: how many are alike.
        blocks: of the model, on this stage.
        busy_s: computing; bubble_s: waiting for another stage.
        transfers_s: exposed sends and receives; collectives_s: other exposed communication.
        host_s: waiting for the host or for offloaded tensors.
        peak_allocated_bytes: of tensors; capacity_bytes: of the GPU.
    """

    stage: int
    rank: int
    ranks: int
    blocks: int
    busy_s: float
    bubble_s: float
    transfers_s: float
    collectives_s: float
    host_s: float
    peak_allocated_bytes: int
    capacity_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


def stages_of(scenario: Scenario, lowered: Lowered, machine: Machine, timeline: Timeline,
              uses: Sequence[MemoryUse]) -> list[StageUse]:
    """Every stage in order; nothing for a job without a pipeline. Of a stage whose ranks are not all alike (a slow GPU)
    the replica of those that compute longest is told.

    Args:
        uses: memory of each program.
    """
    if scenario.parallel.pipeline < 2:
        return []
    job, found = lowered.job, []
    for number, simulated in enumerate(job.classes):
        parts = of_rank(machine, of_class(job, timeline, number), number)
        transfers = sum(s for kind in POINT_TO_POINT for s in parts.exposed_communication.get(kind, {}).values())
        found.append(StageUse(
            simulated.program, simulated.representative, len(simulated.members),
            _blocks(lowered, number), parts.compute_s, parts.pipeline_bubble, transfers, parts.exposed_s - transfers,
            parts.host + parts.offload, uses[simulated.program].peak_allocated_bytes,
            int(machine.devices[simulated.device].gpu.usable_memory_bytes)))
    if len(found) == len(job.programs):
        return found
    busiest = max(range(len(found)), key=lambda number: found[number].busy_s)
    return sorted((found[number] for number in replica_of(job, busiest)), key=lambda s: s.stage)


def replica_of(job: Job, number: int) -> list[int]:
    """The classes that pass tensors on to class `number` or from it, itself included: one for each pipeline stage."""
    chain, ends = {number}, [number]
    while ends:
        here = job.classes[ends.pop()]
        links = {c for c in here.communicators if c >= 0 and job.communicators[c].name == "pipeline"}
        for other, there in enumerate(job.classes):
            if other not in chain and links.intersection(there.communicators):
                chain.add(other)
                ends.append(other)
    return sorted(chain, key=lambda one: job.classes[one].program)


def critical(stages: Sequence[StageUse]) -> StageUse:
    """The stage the others wait for: the one that computes longest, the first of equals."""
    return max(stages, key=lambda s: (round(s.busy_s, 9), -s.stage))


def _blocks(lowered: Lowered, number: int) -> int:
    """Blocks of the model that a class of ranks holds."""
    architecture = lowered.architecture
    numbers = dict(zip(architecture.names, architecture.block_numbers, strict=True))
    return sum(1 for name in lowered.layers_of(number) if numbers.get(name))
