"""What DeepSpeed's pipeline engine holds of micro-batches beside what the layers of a stage count.

Whole tensors: what comes is received into one buffer, cloned into the micro-batch's place and cloned once more for the
layers; the first clone goes when its gradient has been sent, a stage's output when its backward is over. Gradients come
into one buffer, which the layers count. Shares of tensor ranks (PartitionedTensor): one buffer for inputs and one for
gradients; a whole tensor is gathered into zeros and cloned, and the layers count the clone; an output shrinks to a
share of its own, from which backward makes the whole tensor again.

Source: deepspeed 0.5.10 to 0.16.9 runtime/pipe/engine.py, _exec_recv_activations (pipe_recv_buf), _exec_forward_pass
(inputs, output_tensors), _exec_recv_grads (grad_layer), _exec_backward_pass, _exec_send_grads; runtime/utils.py,
PartitionedTensor.full. 0.9.5 and 0.14.4 run on a driver that does nothing (tests/driver/deepspeed_pipe.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.parallel.step import Plan, blocks
from sim.program import SectionBuilder

_RECEIVED, _SENT, _AGAIN = "received inputs", "outputs of stages", "outputs made whole again"
_BUFFERS, _LEAVES = "stage's buffers", "input of the micro-batch before, and its gradient"
_EARLIER = ("input of an earlier micro-batch", "its gradient")
_FLAT = "gathered share by share"
#: Names of what a stage holds for the whole step, which differs among stages of equal layers.
STANDING = (_BUFFERS, _LEAVES)


@dataclass(frozen=True)
class EngineBuffers:
    """Of one stage.

    Attributes:
        whole, share: bytes of a tensor between two layers, and of what a rank sends of it.
    """

    whole: float
    share: float

    @property
    def partitioned(self) -> bool:
        """Whether tensor ranks send a share each."""
        return self.share < self.whole

    def stand(self, plan: Plan, *, receives: bool, sends: bool) -> None:
        """Buffers that stay from the first step on; a stage `receives` inputs, and `sends` outputs. The last one's
        outputs stay (`sim.parallel.outputs.stage_outputs`), and their graph with them: its leaf and that one's
        gradient, of the micro-batch before."""
        buffers = [self.share] * (receives + (sends and self.partitioned))
        plan.resident(_BUFFERS, sum(map(blocks, buffers)), "buffers", buffers)
        if receives and not sends and plan.scenario.micro_steps > 1:
            plan.resident(_LEAVES, 2 * blocks(self.whole), "activations", [self.whole] * 2)

    def earlier(self, section: SectionBuilder, begins: bool) -> None:
        """At the last stage, the leaf and its gradient of one more micro-batch: what a forward replaces is there until
        its output is, and the optimizer finds those of two."""
        for name in _EARLIER:
            self._change(section, name, self.whole, begins, "activations")

    def gather(self, section: SectionBuilder, begins: bool) -> None:
        """The flat tensor of zeros comes, or goes when it has been cloned."""
        if self.partitioned:
            self._change(section, _FLAT, self.whole, begins, "workspace")

    def received(self, section: SectionBuilder, begins: bool) -> None:
        """An input comes, or its gradient has been sent."""
        if not self.partitioned:
            self._change(section, _RECEIVED, self.whole, begins, "activations")

    def sent(self, section: SectionBuilder) -> None:
        """An output that the layers count no longer stays, or a share of it."""
        self._change(section, _SENT, self.share, True, "activations")

    def backward(self, section: SectionBuilder, begins: bool) -> None:
        """The backward of a micro-batch whose output was sent begins, or is over."""
        if self.partitioned:
            if begins:
                self.gather(section, True)
            self._change(section, _AGAIN, self.whole, begins, "activations")
            if begins:
                self.gather(section, False)
        if not begins:
            self._change(section, _SENT, self.share, False, "activations")

    @staticmethod
    def _change(section: SectionBuilder, name: str, size: float, begins: bool, category: str) -> None:
        change = section.allocate if begins else section.free
        change(name, blocks(size), category)
