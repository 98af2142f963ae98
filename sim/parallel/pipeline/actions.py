"""The words of a pipeline schedule: actions of a rank, their relative costs, and where the stages of the model live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.errors import Fault, UserError, nearest
from sim.scenario.fields.schema import TWO_CHUNKS, Scenario
from sim.software import Stack

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "dualpipe")
_WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved")
_ONE_CHUNK = ("gpipe", "1f1b")


class Action(NamedTuple):
    """One unit of work of a pipeline rank.

    Attributes:
        kind: "F" forward; "B" backward, of the inputs only where the schedule splits; "W" gradients of the weights.
        chunk: the rank's model chunk, 0-based.
        micro: micro-batch, 0-based; each direction of dualpipe counts its own.
    """

    kind: str
    chunk: int
    micro: int


class Costs(NamedTuple):
    """Relative times of one chunk and micro-batch, and from one stage to the next; any one unit.

    Attributes:
        backward: gradients of the inputs; where a schedule does not split, "B" takes backward + weight.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0


#: Forward, backward and weights take the same time, transfers none.
UNIFORM = Costs()


class Chunk(NamedTuple):
    """A place: chunk `chunk` of pipeline rank `rank`."""

    rank: int
    chunk: int


@dataclass(frozen=True)
class Places:
    """Where the stages are, and how micro-batches flow through them.

    Attributes:
        stage: stage of the model that chunk c of rank r holds, `stage[r][c]`.
        before: the chunk whose forward output `[r][c]` takes; None where the model begins.
        after: the chunk that takes its output; None where the model ends.
    """

    stage: list[list[int]]
    before: list[list[Chunk | None]]
    after: list[list[Chunk | None]]


def passing(scenario: Scenario, stack: Stack, schedule: str | None = None) -> str:
    """How stages wait for one another: "synchronised", "in turn", "stream" or "overlapped" (see `Stack.pipeline_p2p`).

    Schedules that split the backward run on a runtime of their own, which overlaps (Qi et al. 2024, section 5).
    Neighbours that call in turn agree on an order where one chunk alternates between passes; where chunks take turns
    batches are exchanged.
    `schedule` stands for the scenario's own, where another is tried.
    """
    schedule = schedule or scenario.parallel.schedule
    asked = scenario.parallel.overlap_p2p
    if asked is None:
        asked = stack.overlap_interleaved and schedule == "interleaved" and scenario.parallel.virtual_stages > 1
    if asked or split(schedule):
        return "overlapped"
    in_turn = stack.pipeline_p2p == "in turn"
    return "synchronised" if in_turn and schedule not in _ONE_CHUNK else stack.pipeline_p2p


def split(schedule: str) -> bool:
    """Whether gradients of weights ("W") are actions of their own."""
    return schedule not in _WHOLE_BACKWARD


def placement(schedule: str, pipeline: int, virtual: int) -> list[list[int]]:
    """Stage of the model that each chunk of each pipeline rank holds: shape (pipeline, chunks).

    * one chunk: rank r holds stage r;
    * interleaved: chunk c of rank r is stage c·p + r (Narayanan et al. 2021, arXiv 2104.04473, section 2.2);
    * zb-v: stages r and 2p - 1 - r (Qi et al. 2024, arXiv 2405.15362, figure 5);
    * dualpipe: of p stages, r for the one direction and p - 1 - r for the other, so each stage is held twice
      (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

    Raises:
        UserError: as `check`, without a number of micro-batches.
    """
    check(schedule, pipeline, virtual)
    if schedule == "zb-v":
        return [[rank, 2 * pipeline - 1 - rank] for rank in range(pipeline)]
    if schedule == "dualpipe":
        return [[rank, pipeline - 1 - rank] for rank in range(pipeline)]
    return [[chunk * pipeline + rank for chunk in range(virtual)] for rank in range(pipeline)]


def places(schedule: str, pipeline: int, virtual: int) -> Places:
    """Stages with their neighbours.

    In dualpipe each direction has all p stages: chunk 0 flows up the ranks and chunk 1 down.

    Raises:
        UserError: as `placement`.
    """
    stages = placement(schedule, pipeline, virtual)
    way = [[chunk if schedule == "dualpipe" else 0 for chunk in range(len(own))] for own in stages]
    at = {(way[rank][chunk], stage): Chunk(rank, chunk)
          for rank, own in enumerate(stages) for chunk, stage in enumerate(own)}

    def moved(by: int) -> list[list[Chunk | None]]:
        return [[at.get((way[rank][chunk], stage + by)) for chunk, stage in enumerate(own)]
                for rank, own in enumerate(stages)]

    return Places(stages, moved(-1), moved(1))


def predecessor(where: Places, rank: int, chunk: int) -> Chunk | None:
    """The chunk whose forward feeds this one; None at the beginning of the model."""
    return where.before[rank][chunk]


def successor(where: Places, rank: int, chunk: int) -> Chunk | None:
    """The chunk that this one's forward feeds; None at the end of the model."""
    return where.after[rank][chunk]


def batches_of(schedule: str, micro_batches: int) -> int:
    """Micro-batches that run through each chunk: all, but one half in each direction of dualpipe."""
    return micro_batches // 2 if schedule == "dualpipe" else micro_batches


def check(schedule: str, pipeline: int, virtual: int, micro_batches: int | None = None) -> None:
    """What a schedule needs.

    Raises:
        UserError: an unknown schedule; chunks, stages or micro-batches that it cannot order.
    """
    if schedule not in SCHEDULES:
        raise UserError(Fault(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}", field="parallel.schedule",
                              hint=nearest(schedule, SCHEDULES)))
    faults = [Fault(message, field=field) for field, message in _misfits(schedule, pipeline, virtual, micro_batches)]
    if faults:
        raise UserError(faults)


def _misfits(schedule: str, pipeline: int, virtual: int, micro_batches: int | None) -> Sequence[tuple[str, str]]:
    found = []
    if pipeline < 1:
        found.append(("parallel.pipeline", f"a pipeline has 1 or more stages, not {pipeline}"))
    if schedule in TWO_CHUNKS and virtual != 2:
        found.append(("parallel.virtual_stages", f"schedule {schedule} has 2 chunks per rank, not {virtual}"))
    elif schedule not in (*TWO_CHUNKS, "interleaved") and virtual != 1:
        found.append(("parallel.virtual_stages", f"schedule {schedule} has one chunk per rank, not {virtual}"))
    elif virtual < 1:
        found.append(("parallel.virtual_stages", f"a rank has 1 or more chunks, not {virtual}"))
    if schedule == "dualpipe" and pipeline % 2:
        found.append(("parallel.pipeline", f"schedule dualpipe needs an even number of ranks, not {pipeline}"))
    if micro_batches is None:
        return found
    if micro_batches < 1:
        found.append(("training.global_batch", f"a step has 1 or more micro-batches, not {micro_batches}"))
    elif schedule == "interleaved" and virtual > 1 and pipeline > 0 and micro_batches % pipeline:
        found.append(("training.global_batch", f"interleaved chunks take micro-batches in groups of pipeline {pipeline}"
                                               f", which does not divide {micro_batches} micro-batches"))
    elif schedule == "dualpipe" and (micro_batches % 2 or micro_batches < 2 * pipeline):
        found.append(("training.global_batch", f"schedule dualpipe needs an even number of micro-batches, at least "
                                               f"twice pipeline {pipeline}, not {micro_batches}"))
    return found
