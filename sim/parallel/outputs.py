"""What a trainer keeps of a micro-batch once its backward is over: the model's output, on which it evaluates metrics.

Composer's State holds the outputs until those of the next micro-batch take their place (composer/trainer/trainer.py,
_train_microbatch: `self.state.outputs = self.state.model(...)`), and evaluates training metrics behind backward
(_eval_train_metrics): cross-entropy under autocast makes fp32 logits and their log-softmax.
"""

from __future__ import annotations

from sim.parallel.step import MicroStep, Plan
from sim.program import SectionBuilder
from sim.work import DTYPE_BYTES

#: Name of the buffer.
OUTPUTS = "model outputs"


def outputs_bytes(plan: Plan, micro: MicroStep) -> int:
    """Bytes of the logits that are kept; 0 where a stack keeps none or the loss never has them all."""
    if not plan.stack.outputs_kept or plan.scenario.training.chunked_loss:
        return 0
    program = plan.architecture.stack[-1].program
    dtype = plan.scenario.training.precision.compute if program is None else program.style.act
    return round(_logits(plan, micro) * DTYPE_BYTES[dtype])


def release_outputs(plan: Plan, section: SectionBuilder, micro: MicroStep, *, again: bool = False) -> None:
    """In front of the head's forward the last outputs go, and behind its backward (`again`) what it kept of the new
    ones stays: a loss that keeps the logits for backward holds the same tensor. Another loss has let go of them by
    then, so that the buffer stands for them all along."""
    held = outputs_bytes(plan, micro)
    if not held or plan.stack.loss != "fused":
        return
    if again:
        section.allocate(OUTPUTS, held, "logits")
    else:
        section.free(OUTPUTS, held, "logits")


def evaluate(plan: Plan, section: SectionBuilder, micro: MicroStep) -> None:
    """Metrics on the outputs, one after another: fp32 logits and their log-softmax come and go."""
    size = round(_logits(plan, micro) * DTYPE_BYTES["fp32"])
    for number in range(plan.stack.metric_losses):
        for name in ("cast", "log-softmax"):
            section.allocate(f"metric {name}:{number}", size, "logits")
        for name in ("cast", "log-softmax"):
            section.free(f"metric {name}:{number}", size, "logits")


def _logits(plan: Plan, micro: MicroStep) -> int:
    return micro.batch * plan.architecture.sequence * plan.scenario.model.vocab
