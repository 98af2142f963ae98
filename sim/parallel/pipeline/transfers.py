"""Tensors on their way between pipeline stages: which rank sends what to whom, and how the receiver waits.

Every directed pair of neighbours, direction of the pass and chunk has a communicator of its own, so that what two ranks
exchange in one batch moves at the same time (NCCL groups them). Sources: Megatron-LM `p2p_communication.py`
(batch_isend_irecv, then a synchronisation; scatter/gather over tensor ranks: Narayanan et al. 2021, arXiv 2104.04473,
section 4.1), torch.distributed.pipelining `stage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.parallel.pipeline.orders import Action


class Edge(NamedTuple):
    """Tensors of one pass from a chunk of one rank to a chunk of another."""

    source: int
    target: int
    forward: bool
    chunk: int


class Chunk(NamedTuple):
    """A chunk of a pipeline rank."""

    rank: int
    chunk: int


@dataclass(frozen=True)
class Transfers:
    """Who follows whom.

    Attributes:
        after: for every chunk the chunk its output goes to, None for the last stage of the model.
        before: for every chunk the one its input comes from, None for the first stage.
    """

    after: dict[Chunk, Chunk | None]
    before: dict[Chunk, Chunk | None]

    def sent(self, rank: int, action: Action) -> Edge | None:
        """What an action passes on to another rank; nothing if it stays here or ends here."""
        here = Chunk(rank, action.chunk)
        if action.kind == "W":
            return None
        there = self.after[here] if action.kind == "F" else self.before[here]
        if there is None or there.rank == rank:
            return None
        return Edge(rank, there.rank, action.kind == "F", action.chunk)

    def needed(self, rank: int, action: Action) -> Edge | None:
        """What an action waits for from another rank."""
        here = Chunk(rank, action.chunk)
        if action.kind == "W":
            return None
        there = self.before[here] if action.kind == "F" else self.after[here]
        if there is None or there.rank == rank:
            return None
        return Edge(there.rank, rank, action.kind == "F", there.chunk)


def transfers(placement: Sequence[Sequence[int]]) -> Transfers:
    """Neighbours of every chunk, where chunk c of rank r holds stage `placement[r][c]` of the model."""
    of_stage = {stage: Chunk(rank, chunk) for rank, own in enumerate(placement) for chunk, stage in enumerate(own)}
    after = {here: of_stage.get(stage + 1) for stage, here in of_stage.items()}
    before = {here: of_stage.get(stage - 1) for stage, here in of_stage.items()}
    return Transfers(after, before)
