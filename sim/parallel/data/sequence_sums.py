"""Gradients of what every tensor rank holds whole but uses on its own tokens alone, summed behind all others.

Source: megatron-core 0.2.0 to 0.8.0 distributed/finalize_model_grads.py, _allreduce_layernorm_grads: those marked
`sequence_parallel` (norms, biases behind row-cut products, a router) are flattened, reduced in one call over the tensor
ranks and copied back tensor by tensor. Run on a driver that does nothing (`tests/driver`), 0.8.0: one call of so many
bytes a step.
"""

from __future__ import annotations

from dataclasses import replace

from sim.parallel.compute import traffic_kernel
from sim.parallel.step import COMPUTE, Plan, collective
from sim.program import Label, SectionBuilder
from sim.work import DTYPE_BYTES

#: In the names of such parameters, among Megatron's modules.
_ALIKE = ("norm.", "linear_proj.bias", "linear_fc2.bias", "mlp.gate.weight")


def sum_over_sequence(plan: Plan, section: SectionBuilder, stream: int) -> None:
    """Flatten, reduce on `stream`, copy back; nothing on other stacks, or where tensor ranks do not cut the sequence.
    """
    parallel, dtype = plan.scenario.parallel, plan.scenario.training.precision.gradients
    if not plan.stack.sums_sequence_gradients or not parallel.sequence_parallel or parallel.tensor == 1:
        return
    sizes = [p.numel for layer in plan.architecture.stack for p in layer.parameters
             if any(part in p.name for part in _ALIKE)]
    if not sizes:
        return
    numel, label = sum(sizes), Label("optimizer", "optimizer", "gradients along the sequence")
    size = numel * DTYPE_BYTES[dtype]
    flat = traffic_kernel("flattened", dtype, numel, 2 * size)
    back = replace(flat, launches=len(sizes), kernel="by_tensor")
    task = section.kernels(COMPUTE, plan.compute.own((flat,)), label, joins=(stream,))
    call = collective(plan, "all_reduce", size, dtype, "tensor")
    task = section.collective(stream, call, plan.stack.host_collective_s, label, waits=(task,))
    section.kernels(COMPUTE, plan.compute.own((back,)), label, waits=(task,))
