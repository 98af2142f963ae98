"""Tensors on their way between pipeline stages: which rank sends what to whom, and how the receiver waits.

Every directed pair of neighbours, direction of the pass and chunk has a communicator of its own, so that what two ranks
exchange in one batch moves at the same time (NCCL groups them). Sources: Megatron-LM `p2p_communication.py`
(batch_isend_irecv, then a synchronisation; scatter/gather over tensor ranks: Narayanan et al. 2021, arXiv 2104.04473,
section 4.1), torch.distributed.pipelining `stage.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sim.parallel.pipeline.actions import Action, Places


class Edge(NamedTuple):
    """Tensors of one pass from a chunk of one rank to a chunk of another."""

    source: int
    target: int
    forward: bool
    chunk: int


@dataclass(frozen=True)
class Transfers:
    """What an action passes on to another rank, and what it waits for from one."""

    places: Places

    def sent(self, rank: int, action: Action) -> Edge | None:
        """What an action passes on to another rank; nothing if it stays here or ends here."""
        if action.kind == "W":
            return None
        there = (self.places.after if action.kind == "F" else self.places.before)[rank][action.chunk]
        if there is None or there.rank == rank:
            return None
        return Edge(rank, there.rank, action.kind == "F", action.chunk)

    def needed(self, rank: int, action: Action) -> Edge | None:
        """What an action waits for from another rank."""
        if action.kind == "W":
            return None
        there = (self.places.before if action.kind == "F" else self.places.after)[rank][action.chunk]
        if there is None or there.rank == rank:
            return None
        return Edge(there.rank, rank, action.kind == "F", there.chunk)
