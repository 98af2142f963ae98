"""Micro-batches without a pipeline whose forward runs as one with the backward of the one before, so that tokens travel
to their experts while the other side computes: the first forward and the last backward are alone.

Source: megatron-core 0.14.0 to 0.16.0 pipeline_parallel/combined_1f1b.py, combined_1f1b_schedule_for_no_pipelining;
models/common/model_chunk_schedule_plan.py, TransformerModelChunkSchedulePlan.run: embedding and first backward, layers
two by two, what is left of the longer side, head.
"""

from __future__ import annotations

from itertools import groupby, pairwise

from sim.parallel.activations import Activations
from sim.parallel.data.bucketed import Bucketed
from sim.parallel.step import COMPUTE, MicroStep, end_of_step, fetch_batch, opened
from sim.program import Label, SectionBuilder


def write_pairs(data: Bucketed) -> None:
    """Write the sections of one optimizer step into the technique's builder."""
    plan = data.plan
    opened(data)
    steps = plan.micro_steps
    section = plan.builder.section(f"forward of {steps[0].batch}")
    fetch_batch(plan.stack, section)
    data.forward(section, steps[0], _activations(data, section, steps[0]))
    plan.builder.run(section)
    for (back, sequences), run in groupby((back, ahead.batch) for back, ahead in pairwise(steps)):
        section = plan.builder.section(f"forward of {sequences} and backward of {back.batch}")
        fetch_batch(plan.stack, section)
        _pair(data, section, MicroStep(sequences, first=False, reduce=False), back)
        plan.builder.run(section, len(list(run)))
    section = plan.builder.section(f"backward of {steps[-1].batch}")
    data.backward(section, steps[-1], _activations(data, section, steps[-1]))
    plan.builder.run(section)
    section = plan.builder.section("optimizer step")
    data.optimizer_step(section)
    end_of_step(plan, section)
    plan.builder.run(section)


def _activations(data: Bucketed, section: SectionBuilder, micro: MicroStep) -> Activations:
    return Activations(data.plan, section, len(data.plan.architecture.stack),
                       keep_gradients=data.keeps_gradients(micro))


def _pair(data: Bucketed, section: SectionBuilder, ahead: MicroStep, back: MicroStep) -> None:
    """A forward and the backward of the micro-batch before: layer by layer one keeps what the other lets go."""
    plan, stack = data.plan, data.plan.model(ahead.batch).stack
    behind = plan.model(back.batch).stack
    rising, falling = (_activations(data, section, micro) for micro in (ahead, back))
    for position, layer in enumerate(stack):
        mirrored = len(stack) - 1 - position
        rising.forward(position, layer)
        data.leave(mirrored, falling.backward(mirrored, behind[mirrored]))
    own = data.own_copies(back)
    segment = plan.compute.run_together(stack, behind, [plan.policy(p) for p in range(len(behind))], "with", (),
                                        tuple(kernel for layer in behind for kernel in own(layer.parameters)))
    section.kernels(COMPUTE, segment, Label("layers", "backward", "forward and backward"))
    data.backward_done(section, back, data.reduction.buckets if back.reduce and data.completes else ())
