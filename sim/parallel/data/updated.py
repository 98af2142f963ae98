"""The optimizer's step of a rank with whole parameters: what it makes of gradients, and what is gathered behind."""

from __future__ import annotations

from sim.model import copied_gradient_bytes
from sim.parallel.compute import traffic_kernel
from sim.parallel.construction import FLATTENED
from sim.parallel.data.by_rank import gather_by_rank
from sim.parallel.data.contiguous import Contiguous
from sim.parallel.data.gathers import Gathers
from sim.parallel.data.held import Held
from sim.parallel.data.partition import NCCL, gather_parameters, look_through
from sim.parallel.data.sequence_sums import sum_over_sequence
from sim.parallel.muon import gather_dealt, is_muon, shares
from sim.parallel.step import COMPUTE, narrow_weights
from sim.parallel.update import update
from sim.program import Label, SectionBuilder

_WIDENED = "widened gradients"


class Updated(Held):
    """The last section of `sim.parallel.data.bucketed.Bucketed`.

    Attributes:
        at_once: parameters were updated in backward.
        reduces: gradients are reduced.
        hands_over: an optimizer on the host has taken this rank's part of every bucket.
        contiguous, gathers: gradients kept beside buckets, and gathers of updated parameters.
    """

    at_once: bool
    reduces: bool
    hands_over: bool
    contiguous: Contiguous
    gathers: Gathers

    def optimizer_step(self, section: SectionBuilder) -> None:
        """Optimizer on this rank's share, then the gather of updated parameters."""
        if self.at_once:
            narrow_weights(self.plan, section)
            return
        sum_over_sequence(self.plan, section, NCCL)
        reduction, stack = self.reduction, self.plan.architecture.stack
        each = [p.numel for layer in stack for p in layer.parameters]
        split = reduction.gradient_shards > 1
        # one tensor a rank: DeepSpeed's partition, whose norm is summed over ranks (stage_1_and_2.py,
        # get_grad_norm_direct)
        one = split or (reduction.shards > 1 and self.storage == FLATTENED)
        # of a part each, the norm is all ranks' (megatron-core 0.8.0 optimizer/clip_grads.py, get_grad_norm_fp32)
        parted = one or reduction.dealt or (reduction.shards > 1 and not reduction.norm_of_all)
        shared = shares(self.plan, reduction.dealt).slowest if is_muon(self.plan) else None
        numel, tensors = (self.plan.share(reduction.shards > 1), len(each)) if shared is None else (
            shared.numel, shared.tensors)
        largest = min(max(each, default=0), numel)
        if self._checked:
            look_through(section, largest)
        whole = reduction.shards == 1 and not split  # tensors as the model has them
        beside = self._beside(numel, each if whole else [])
        for name, size in beside.items():
            section.allocate(name, size, "workspace")
        task = update(self.plan, section, numel, 1 if one else tensors, (NCCL,) if self.reduces else (),
                      "data" if parted else None, 0 if one else largest, self.offload.state_widths()["gradients"],
                      self.plan.architecture.parameters if reduction.norm_of_all else 0, each if whole else (), shared)
        for name in reversed(beside):
            section.free(name, beside[name], "workspace")
        for position in range(len(stack) - 1, -1, -1):
            self.drop_gradients(section, position)
        self.contiguous.updated(section)
        if self.reduces:
            self._gather(section, task)
        if reduction.resident_gradients:
            self._zero(section)
        narrow_weights(self.plan, section)

    def drop_gradients(self, section: SectionBuilder, position: int) -> None:
        """A layer's gradients go."""
        raise NotImplementedError

    @property
    def _checked(self) -> bool:
        """Whether this rank's part of the gradients is flattened and looked through before the update."""
        return self.plan.stack.checks_in_double and self.reduction.shards > 1 and not (
            self.sums_wide or self.offload.moves_optimizer)

    def _beside(self, numel: int, each: list[int]) -> dict[str, int]:
        """Bytes of what stands beside the update, by name, in the order in which it is made.

        Gradients of DeepSpeed's fp16 optimizer are widened one by one, and the flat ones made of them while all stand
        (deepspeed 0.5.10 to 0.16.9 runtime/fp16/fused_optimizer.py, step: _flatten_dense_tensors([p.grad.to(data_type)
        ...])).

        Args:
            each: elements of the parameters, where the update has them one by one.
        """
        visit = self.hands_over and self.plan.stack.masters_visit
        widens = self.storage == FLATTENED and self.precision.compute == "fp16" and not self.offload.moves_optimizer
        widened = [round(copied_gradient_bytes(n, self.precision)) for n in each] if widens else []
        if any(widened):
            self.plan.builder.tensors[_WIDENED] = widened
        found = {"flattened gradients": round(numel * self.width) if self._checked else 0,
                 "updated masters": round(numel * self.offload.state_widths()["gradients"]) if visit else 0,
                 _WIDENED: sum(widened)}
        return {name: size for name, size in found.items() if size}

    def _gather(self, section: SectionBuilder, task: int) -> None:
        """Updated parameters come together, in the way of the reduction."""
        if self.reduction.dealt:
            gather_dealt(self.plan, section, task)
        elif self.reduction.by_rank:
            gather_by_rank(self.plan, section, task)
        elif self.reduction.gathers == "behind":
            self.gathers.behind(section, task)
        elif self.reduction.gather_elements:
            gather_parameters(self.plan, section, self.reduction.gather_elements, self.reduction.listed, task)

    def _zero(self, section: SectionBuilder) -> None:
        """Gradients that are added to a buffer start from nothing (megatron-core distributed/param_and_grad_buffer.py,
        reset: grad_data.zero_(); nanotron optim/gradient_accumulator.py, zero_grad)."""
        numel = self.plan.architecture.parameters
        kernel = traffic_kernel("zero", self.precision.gradients, numel, numel * self.width)
        section.kernels(COMPUTE, self.plan.compute.own((kernel,)), Label("gradients", "optimizer", "zero"))
