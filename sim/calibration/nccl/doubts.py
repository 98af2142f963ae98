"""What of a cluster's nccl-tests output was not read, and what speaks against its being of the topology it is fitted
to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sim.calibration.nccl.command import OPERATIONS
from sim.calibration.nccl.printed import Run

#: The name of a product in what CUDA or HIP calls a GPU: A100 of "NVIDIA A100-SXM4-80GB", 4090, MI300X, L40S.
_PRODUCT = re.compile(r"\b([A-Za-z]{0,3}\d{2,4}[A-Za-z]?)\b")
#: So many lines are named one by one.
_NAMED = 4


def doubts(read: Sequence[tuple[Run, str]], topology: Mapping[str, Any]) -> list[str]:
    """Warnings about tables and the files they stand in.

    Args:
        read: every table of every file.
        topology: what they are fitted to.
    """
    found = []
    for run, file in read:
        if run.op not in OPERATIONS:
            found.append(f"{file}:{run.line}: a table of {run.op} was not taken: its operation is not simulated")
            continue
        if run.unread:
            found.append(f"{file}: {_lines(run.unread)} of {run.op} not taken: no time in it")
        if run.wrong:
            found.append(f"{file}: {_lines(run.wrong)} of {run.op}, taken all the same, had wrong results (#wrong)")
    return [*found, *_other_gpus(read, topology)]


def _other_gpus(read: Iterable[tuple[Run, str]], topology: Mapping[str, Any]) -> list[str]:
    """A warning for every GPU that ranks name and the topology does not have."""
    gpu = topology.get("gpu")
    own = str(gpu.get("like", "") if isinstance(gpu, Mapping) else gpu or "").lower()
    told = []
    for run, file in read:
        product = _PRODUCT.search(run.gpu)
        if own.endswith((".yaml", ".yml")) or not own or product is None:
            continue
        if not re.search(rf"(?<![0-9]){re.escape(product.group(1).lower())}(?![0-9])", own):
            told.append(f"{file}: its ranks ran on '{run.gpu[:60]}', and the topology's GPU is {own}")
    return list(dict.fromkeys(told))


def _lines(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{'line' if len(numbers) == 1 else 'lines'} {named}{more}"
