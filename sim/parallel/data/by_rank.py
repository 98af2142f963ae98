"""Updated parameters gathered as nanotron does it: every parameter is cut over the ranks, one all-gather of lists moves
all pieces, and each is copied to its place by a call of its own.

With many ranks and tensors the host's work on pieces is what shows: slices to say where they lie, views to unpack the
list, one copy each. Source: nanotron 0.1 to 0.4 (2024) optim/zero.py, _all_gather_params; distributed.py,
all_gather_coalesced; PyTorch ProcessGroupNCCL.cpp, allgather (lists of equal tensors go through one flat tensor).
"""

from __future__ import annotations

from dataclasses import replace

from sim.parallel.compute import traffic_kernel
from sim.parallel.step import COMPUTE, Plan, collective
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES, Kernel

#: Views per piece in front of the gather and behind it: the slice and `_flatten_dense_tensors`;
#: `_unflatten_dense_tensors` (narrow and view_as, in C++, for one of Python's).
_VIEWS_BEFORE, _VIEWS_BEHIND = 2, 1


def gather_by_rank(plan: Plan, section: SectionBuilder, updated: int) -> None:
    """The gather of all parameters behind the optimizer.

    Args:
        updated: the optimizer's task.
    """
    gather, ranks = plan.scenario.training.precision.gather, plan.replicas
    tensors = sum(len(layer.parameters) for layer in plan.architecture.stack)
    numel = plan.architecture.parameters
    size = round(numel * DTYPE_BYTES[gather])
    pieces, view_s = tensors * ranks, plan.stack.host_view_s
    label = Label("parameters", "optimizer", "pieces")
    section.host(pieces * _VIEWS_BEFORE * view_s, label)
    moved = 2.0 * size
    flat = _flattened(size, ranks)
    for name, one in flat:
        section.allocate(name, one, "workspace")
    packed = section.kernels(COMPUTE, plan.compute.own((_copy(gather, numel, moved, ranks + 1),)), label,
                             waits=(updated,))
    call = collective(plan, "all_gather", size, gather, "data")
    gathered = section.collective(1, call, plan.stack.host_collective_s, Label("parameters", "optimizer", "all_gather"),
                                  (packed,))
    unpacked = section.kernels(COMPUTE, plan.compute.own((_copy(gather, numel, moved, ranks),)), label,
                               waits=(gathered,))
    section.host(pieces * _VIEWS_BEHIND * view_s, label)
    section.kernels(COMPUTE, plan.compute.own((_copy(gather, numel, moved, pieces),)), label, waits=(unpacked,))
    for name, one in flat:
        section.free(name, one, "workspace")


def _flattened(size: int, ranks: int) -> list[tuple[str, int]]:
    """Tensors that stand beside the parameters: the list that goes in and one for every rank that comes out, flattened
    (distributed.py, all_gather_coalesced), and the tensor that c10d's all-gather of lists goes through."""
    piece = size // ranks
    return [("flattened input", piece), *((f"flattened of rank {rank}", piece) for rank in range(ranks)),
            ("flattened parameters", piece * ranks)]


def _copy(dtype: str, numel: int, moved: float, launches: int) -> Kernel:
    """Copies that move so many bytes in so many launches."""
    return replace(traffic_kernel("parameter pieces", dtype, numel, moved), launches=launches)
