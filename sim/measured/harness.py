"""How a benchmark measured a collective: what the host of the harness adds, which no training step would see.

nccl-tests and its like issue calls back to back and divide by their number, so a small call costs whatever the host
needs to issue it when that is longer than the collective itself; all_reduce_bench.py (stas00/ml-engineering, recalled)
brackets every call with events after a barrier, so that its issue comes on top. On one node the usual command is one
process that drives all GPUs (`-g 8`, nccl-tests README), which launches on them in turn; several nodes need one process
per GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.network.figures import Figures

#: Words by which a sweep's description says that every GPU had its own process (the launchers that start them so).
_PER_GPU = re.compile(r"\b(mpi|mpirun|slurm|srun|batch|torchrun|process per gpu)\b", re.IGNORECASE)
_ONE = re.compile(r"\b(one process|single process|single-process|-g ?\d+)\b", re.IGNORECASE)
_KERNEL = re.compile(r"\bkernel time\b|\bkernel-only\b", re.IGNORECASE)
#: NCCL from which every GPU of a process is launched on its own (unverified; the sweeps of 2021 and 2023 differ so).
_PARALLEL_LAUNCH = (2, 12)
#: The release of a sweep that tells none and was launched as before `_PARALLEL_LAUNCH` (of the winter 2020/21).
_OLD_VERSION = "2.8"


@dataclass(frozen=True, slots=True)
class Harness:
    """How a sweep was measured.

    Attributes:
        processes: `gpu` (one per GPU) or `one` (a single process drives all GPUs of the node).
        timing: `call` (mean of calls issued back to back), `kernel` (duration of the kernel alone) or `event` (each
            call between two events, issued when the last is through, so that its host's time adds to it).
        per_channel: one launch for all GPUs of a process, each channel set up by the host (NCCL of 2021 and before).
    """

    processes: str
    timing: str
    per_channel: bool = False

    def floor_s(self, kind: str, ranks: int, channels: int = 1, figures: Figures | None = None) -> float:
        """Least time per call the host allows: one launch per GPU it drives, more for a group of sends, seconds."""
        if self.processes == "gpu" or self.timing in ("kernel", "event"):
            return 0.0
        figures = figures or Figures()
        each = figures["host_grouped_us.all" if self.per_channel else "host_us.call"]
        if kind == "all_to_all":
            own = figures["host_part_us.peer"] + (figures["host_part_us.channel"] if self.per_channel else 0.0)
            each += (ranks - 1) * own
        elif self.per_channel:
            each += channels * figures["host_part_us.channel"]
        return ranks * each * 1e-6

    def adds_s(self, figures: Figures) -> float:
        """What the host adds to every call, seconds: between events the GPU waits for its launch."""
        return figures["host_event_us.call"] * 1e-6 if self.timing == "event" else 0.0


def harness_of(sweep: Mapping[str, Any], generation: str = "") -> Harness:
    """From a sweep's `harness`, or else from its number of nodes, NCCL version and the words of its note and source.

    Where no version is told, GPUs that an NCCL of 2021 could drive are taken to have been measured with one.

    Args:
        sweep: a mapping with `ranks`, and where known `harness`, `nodes`, `nccl`, `note`, `source`.
        generation: of the GPUs (key of `generations` in links.yaml), "" if unknown.
    """
    given = sweep.get("harness") or {}
    text = f"{sweep.get('note') or ''} {sweep.get('source') or ''}".replace("-batch/", " batch ").replace("/", " ")
    several = int(sweep.get("nodes") or 1) > 1
    per_gpu = several or (bool(_PER_GPU.search(text)) and not _ONE.search(text))
    return Harness(processes=str(given.get("processes") or ("gpu" if per_gpu else "one")),
                   timing=str(given.get("timing") or ("kernel" if _KERNEL.search(text) else "call")),
                   per_channel=bool(given.get("per_channel", _old(str(sweep.get("nccl") or ""), generation))))


def nccl_version(sweep: Mapping[str, Any], generation: str = "") -> str:
    """NCCL's version behind a sweep: as told, else one of 2021 where it was measured as such launch, else "" (today's).

    Args:
        sweep, generation: as for `harness_of`.
    """
    told = str(sweep.get("nccl") or "")
    return told or (_OLD_VERSION if harness_of(sweep, generation).per_channel else "")


def _old(version: str, generation: str) -> bool:
    """Whether NCCL was one that launched for all GPUs of a process at once and set up channels on the host."""
    numbers = tuple(int(part) for part in version.split("+")[0].split()[0].split(".")[:2]) if version else ()
    return numbers < _PARALLEL_LAUNCH if numbers else generation in ("volta", "ampere")
