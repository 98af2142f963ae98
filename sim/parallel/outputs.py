"""What a trainer keeps of a micro-batch when its backward is over: the model's output, on which it evaluates metrics.

Composer's State holds the outputs until those of the next micro-batch take their place (composer/trainer/trainer.py,
_train_microbatch: `self.state.outputs = self.state.model(...)`), and evaluates training metrics behind backward
(_eval_train_metrics). LitGPT's loop has logits in a variable that the next micro-batch's take.
"""

from __future__ import annotations

from sim.model.layers.chunked import by_position
from sim.parallel.step import MicroStep, Plan
from sim.program import SectionBuilder
from sim.work import DTYPE_BYTES

_NAME, _CATEGORY = "model outputs", "logits"
#: Of DeepSpeed's pipeline engine (runtime/pipe/schedule.py, TrainSchedule.num_pipe_buffers: two at the last stage).
_ENGINE_OUTPUTS = 2


class Outputs:
    """The logits of the last micro-batch, then of this one.

    In front of the head's forward the last ones go (in truth behind its product, but then the loss finds their place),
    and the head holds the new ones until its backward is over, behind which they stay.
    """

    def __init__(self, plan: Plan, micro: MicroStep) -> None:
        program = plan.architecture.stack[-1].program
        dtype = plan.scenario.training.precision.compute if program is None else program.style.act
        self.losses, kept = plan.stack.metric_losses, plan.stack.outputs_kept
        if program is not None and plan.stack.logits_held and by_position(program.style):
            dtype, kept = "fp32" if program.style.widens_logits else dtype, True
        self.logits = micro.batch * plan.architecture.sequence * plan.scenario.model.vocab
        #: Bytes that are kept; 0 where a stack keeps none, or its loss never has them all.
        self.kept_bytes = round(self.logits * DTYPE_BYTES[dtype]) if kept and (
            not plan.scenario.training.chunked_loss) else 0

    def begin(self, section: SectionBuilder) -> None:
        """The micro-step begins."""
        if self.kept_bytes:
            section.allocate(_NAME, self.kept_bytes, _CATEGORY)

    def replaced(self, section: SectionBuilder) -> None:
        """The head's forward comes."""
        if self.kept_bytes:
            section.free(_NAME, self.kept_bytes, _CATEGORY)

    def kept(self, section: SectionBuilder) -> None:
        """The head's backward is over."""
        self.begin(section)

    def end(self, section: SectionBuilder) -> None:
        """Metrics on the outputs, one after another: autocast leaves log-softmax in the logits' dtype, which
        cross_entropy states, and casts what nll_loss reads to fp32 (ATen LossNLL.cpp; autocast_mode.h,
        fp32_set_opt_dtype). The next micro-step's section begins with these outputs."""
        if not self.kept_bytes:
            return
        wide = round(self.logits * DTYPE_BYTES["fp32"])
        for number in range(self.losses):
            tensors = ((f"metric log-softmax:{number}", self.kept_bytes), (f"metric in fp32:{number}", wide))
            for name, size in tensors:
                section.allocate(name, size, _CATEGORY)
            for name, size in tensors:
                section.free(name, size, _CATEGORY)
        self.replaced(section)


def stage_outputs(plan: Plan) -> list[float]:
    """Bytes of each of the logits that the last stage holds on to between micro-batches (DeepSpeed's pipeline
    engine, `_exec_forward_pass`: what is in a buffer goes when the next micro-batch that has the buffer is through the
    forward, so at the head it stands beside the new ones). That engine refuses ZeRO-2 and ZeRO-3, which run models
    that return their loss."""
    scenario = plan.scenario
    if plan.architecture.stack[-1].kind != "head" or scenario.parallel.strategy in ("zero2", "zero3"):
        return []
    logits = plan.architecture.batch * plan.architecture.sequence * scenario.model.vocab / scenario.parallel.tensor
    count, width = plan.stack.stage_outputs, DTYPE_BYTES["fp32"]
    if not count and plan.stack.engine_buffers and scenario.parallel.pipeline > 1:  # a model of one's own ends narrow
        count, width = _ENGINE_OUTPUTS, DTYPE_BYTES[scenario.training.precision.compute]
    return [logits * width] * min(count, scenario.micro_steps)
