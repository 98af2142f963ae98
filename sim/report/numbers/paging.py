"""Optimizer states in unified memory (bitsandbytes' paged optimizers): where their pages are, what moving them takes.

Such states are no part of the caching allocator: `get_paged` asks cudaMallocManaged (bitsandbytes functional.py), whose
pages live on the device while nobody needs the room, and in host memory otherwise (Dettmers et al. 2023, arXiv
2305.14314, section 3, paged optimizers). An optimizer step passes over all of them in one order. The driver evicts what
was migrated longest ago (Ganguly et al. 2019, ISCA, section 2.3), which of such a cycle is always what is needed next:
states that do not fit as a whole are brought in, and others evicted before them, from the first page to the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.catalog import table
from sim.hardware import HostShare

_FIGURES = "hardware/host.yaml"


@dataclass(frozen=True, slots=True)
class Paging:
    """Pages of one rank.

    Attributes:
        states_bytes: in unified memory.
        room_bytes: what tensors and the CUDA context leave of the device.
        share: the rank's way to its host.
    """

    states_bytes: int
    room_bytes: int
    share: HostShare

    @property
    def resident_bytes(self) -> int:
        """Pages on the device at most."""
        return min(self.states_bytes, max(0, self.room_bytes))

    @property
    def host_bytes(self) -> int:
        """Pages in host memory at the fullest moment of the device."""
        return self.states_bytes - self.resident_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes brought in per optimizer step, and evicted too."""
        return self.states_bytes if self.host_bytes else 0

    @property
    def seconds(self) -> float:
        """Time per optimizer step in which pages travel: an eviction stands before each page that comes."""
        share = float(table(_FIGURES)["unified_share"]["value"])
        return self.moved_bytes * (1 / self.share.h2d_bps + 1 / self.share.d2h_bps) / share
