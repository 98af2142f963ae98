"""The Job: programs, the classes of ranks that run them, and the communicators these share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.program.columns import Program


@dataclass(slots=True)
class RankClass:
    """Ranks that behave alike; one of them is simulated.

    Attributes:
        representative: global rank that is simulated.
        members: global ranks of the class, shape (n,).
        program: what they run (index into `Job.programs`).
        device: index of their hardware kind (0 unless GPUs are mixed or one is slow).
        communicators: for each name of the program's communicators, the index into `Job.communicators`; -1 where the
            class takes no part (names are those of the whole job).
    """

    representative: int
    members: npt.NDArray[np.int64]
    program: int
    device: int
    communicators: tuple[int, ...]


@dataclass(slots=True)
class Communicator:
    """One simulated communicator.

    Attributes:
        name: e.g. "shard".
        ranks: global ranks of *all* instances it stands for, shape (instances, size): in a folded job every shard group
            of the job, of which one is simulated and all run in lockstep; unfolded, one row.
        parties: number of simulated classes that take part in one operation (the rendezvous count).
    """

    name: str
    ranks: npt.NDArray[np.int64]
    parties: int

    @property
    def size(self) -> int:
        """Ranks of one instance."""
        return int(self.ranks.shape[1])


@dataclass(slots=True)
class Job:
    """A whole run: programs, the classes of ranks that run them, and their communicators."""

    programs: list[Program]
    classes: list[RankClass]
    communicators: list[Communicator]
    ranks: int
