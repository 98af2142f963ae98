"""What an optimizer with split states does: its part's gradients are looked through, parameters gathered.

Sources: DeepSpeed 0.4 to 0.9 runtime/zero/stage2.py, later stage_1_and_2.py; runtime/utils.py, all_gather_dp_groups;
Megatron-LM distrib_optimizer.py.
"""

from __future__ import annotations

from sim.parallel.compute import traffic_kernel
from sim.parallel.step import COMPUTE, Plan, collective
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES

NCCL = 1
#: Bytes per element of the copies in which a tensor is looked through: fp32 for what is not finite (`_has_inf_or_nan`),
#: fp64 for its norm (`get_grad_norm_direct`).
_LOOKED_THROUGH = (("finite gradients", 4), ("gradient norm", 8))


def look_through(section: SectionBuilder, largest: int) -> None:
    """Gradients are looked through one by one; only the largest's copies leave something in the allocator's cache.

    Args:
        largest: elements of the largest piece of a gradient in the rank's part.
    """
    for name, width in _LOOKED_THROUGH:
        section.allocate(name, largest * width, "workspace")
        section.free(name, largest * width, "workspace")


def gather_parameters(plan: Plan, section: SectionBuilder, limit: int, listed: bool, updated: int) -> None:
    """All-gather of parameters, after the optimizer and exposed: in one call, or in chunks where they are listed.

    Args:
        limit: elements of a chunk.
        listed: into lists of tensors, which PyTorch brings into one flat tensor and copies out of it. The host does not
            wait, and the flat tensor is free only when its gather is over (c10d ProcessGroupNCCL.cpp, allgather:
            newLikeFlat, recordStream), so those of several gathers stand beside one another.
        updated: the optimizer's task.
    """
    routed, wire = plan.routed, plan.scenario.training.precision.gather
    for group, whole in (("data", plan.architecture.parameters - routed), ("expert_data", routed)):
        if not whole or plan.shards(group) == 1:
            continue
        for number, numel in enumerate(_chunks(whole, limit, listed)):
            size = round(numel * DTYPE_BYTES[wire])
            call = collective(plan, "all_gather", size, wire, plan.within(group))
            if listed:
                section.allocate("flat list", size, "workspace")
            section.collective(NCCL, call, plan.stack.host_collective_s,
                               Label(f"parameters{number}", "optimizer", "all_gather"), (updated,))
            if listed:
                section.free("flat list", size, "workspace", used_on=(NCCL,))
    touch = traffic_kernel("parameters ready", wire, 1, 1.0)
    section.kernels(COMPUTE, plan.compute.own((touch,)), Label("parameters", "optimizer", "wait"), joins=(NCCL,))


def _chunks(numel: int, limit: int, listed: bool) -> list[float]:
    """Elements of each gather: of lists as many as whole chunks fit, all alike; else all in one (DeepSpeed runtime/
    utils.py, all_gather_into_tensor_dp_groups)."""
    if listed:
        count = max(1, numel // limit)
        return [numel / count] * count
    return [float(numel)]
