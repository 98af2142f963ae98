"""Device memory beside the job's tensors: CUDA context and kernels, NCCL's buffers, cuBLAS workspaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.catalog import table

_GIB = 2**30
_FIGURES = "hardware/outside.yaml"
#: How sure a figure is, the surest first.
CONFIDENCE = ("measured", "inferred", "assumed")
#: Ways in which a context loads kernels, the fullest first.
LOADING = ("all", "fewer", "lazy")
#: Compute capability from which a generation's figures hold.
_GENERATIONS = ((10.0, "B200"), (9.0, "H100"), (8.0, "A100"), (7.0, "V100"), (0.0, "other"))
_HOPPER = 9.0


@dataclass(frozen=True, slots=True)
class Outside:
    """Bytes of each part on one rank, and how sure the least sure of them is (`CONFIDENCE`).

    Attributes:
        context_bytes: CUDA context and loaded kernels.
        nccl_bytes: buffers of the communicators.
        workspace_bytes: cuBLAS workspaces, which the allocator reserves.
    """

    context_bytes: int
    nccl_bytes: int
    workspace_bytes: int
    confidence: str

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return self.context_bytes + self.nccl_bytes + self.workspace_bytes


def outside(compute_capability: str, kernel_loading: str, nccl_bytes: int) -> Outside:
    """What a rank holds beside tensors.

    Args:
        compute_capability: of the GPU, e.g. "9.0"; text that is no number (AMD) takes the general figures.
        kernel_loading: all, fewer or lazy; a generation without a figure for it takes the one before.
        nccl_bytes: buffers of the rank's communicators (`sim.network.buffers`), which follow from NCCL's source.
    """
    figures = table(_FIGURES)
    capability = _capability(compute_capability)
    generation = next(name for least, name in _GENERATIONS if capability >= least)
    known = figures["context"][generation]
    context = next(known[way] for way in LOADING[LOADING.index(kernel_loading)::-1] if way in known)
    workspace = figures["cublas"]["hopper" if capability >= _HOPPER else "before_hopper"]
    sureness = max((context["confidence"], "inferred" if nccl_bytes else "measured"), key=CONFIDENCE.index)
    return Outside(_bytes(context), nccl_bytes, _bytes(workspace), sureness)


def _bytes(figure: dict[str, Any]) -> int:
    return round(float(figure["value"]) * _GIB)


def _capability(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
