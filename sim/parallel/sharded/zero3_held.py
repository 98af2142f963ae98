"""What DeepSpeed's ZeRO-3 holds for the whole step, on the device and in host memory, and how it was made."""

from __future__ import annotations

from collections.abc import Hashable
from math import ceil

from sim.model.tuning import Frozen
from sim.parallel.construction import stepped, widened
from sim.parallel.offload import PARAMETER_BUFFER, PARAMETER_BUFFERS, Offload
from sim.parallel.sharded.arrivals import Tensor, tensor_of
from sim.parallel.sharded.quantised import WEIGHTS
from sim.parallel.sharded.secondary import Secondary
from sim.parallel.sharded.uses import Uses
from sim.parallel.step import Plan, blocks, frozen_bytes, state_bytes, state_copies
from sim.scenario.fields.schema import Precision
from sim.work import DTYPE_BYTES


class Zero3Held:
    """The states of `sim.parallel.sharded.zero3.Zero3`.

    Attributes:
        ranks: over which parameters are split.
        bucket: elements of the reduce bucket.
        wide, wire: dtypes of gathered parameters and of gradients on their way.
        fetching: whether parameters have to be fetched at all.
        resident: elements of each parameter that is whole at all times.
        looked_up: elements of each that stays whole from a step's first gather of it to the optimizer.
    """

    plan: Plan
    offload: Offload
    precision: Precision
    secondary: Secondary
    uses: Uses
    ranks: int
    bucket: float
    wide: str
    wire: str
    fetching: bool
    resident: list[int]
    looked_up: dict[Hashable, int]

    def states(self) -> None:
        """Everything split over all ranks, small parameters whole as well.

        The order is the real one (runtime/zero/stage3.py, _setup_for_real_optimizer: fp32 partitions, zeros for the
        first gradients, the bucket, the gradients' partition), since it decides what is reserved.
        """
        plan, numel = self.plan, self.plan.architecture.parameters
        self.know()
        apart = [size for layer in plan.architecture.stack for tensor in layer.frozen
                 for size in tensor.beside(plan.stack.constants_apart)]
        constants = sum(map(blocks, apart))
        frozen = (frozen_bytes(plan.architecture.stack) - constants) / self.ranks
        plan.resident("constants of frozen parameters", constants, "parameters", apart)
        if self.outside("parameters"):
            self.offload.hold("frozen parameters", frozen, "parameters", pinned=True)
        else:
            plan.resident("frozen parameters", frozen, "parameters")
        widths = state_bytes(plan)
        for category in ("parameters", "master_parameters", "optimizer_states"):
            if not self.outside(category):
                size, copies = numel * widths[category] / self.ranks, state_copies(plan, category)
                plan.resident(category, size, category, [size / copies] * copies)
        self.construction()
        self.host_states(-(-numel // self.ranks))
        if self.fetching:
            plan.resident("reduce bucket", self.bucket * DTYPE_BYTES[self.wire], "buffers")
        if not self.outside("gradients"):
            plan.resident("gradients", numel * widths["gradients"] / self.ranks, "gradients")
        if self.fetching:
            plan.resident("persistent parameters", sum(self.resident) * DTYPE_BYTES[self.wide], "parameters")

    def construction(self) -> None:
        """What is made on the way and gone before the first step (runtime/zero/stage3.py: `.clone().float()` of the
        fp16 partition; initialize_optimizer_states, zeros of the largest sub-group's size). Parameters leave nothing:
        their partitions pass through the host, and the cache is emptied (`defragment`)."""
        builder, stack = self.plan.builder, self.plan.stack
        master, states = (builder.tensors.get(name) for name in ("master_parameters", "optimizer_states"))
        if not master or self.offload.moves_optimizer:
            return
        narrow = DTYPE_BYTES[self.precision.parameters] / DTYPE_BYTES[self.precision.master]
        made, zeros = widened([ceil(size * narrow) for size in master], master), sum(master)
        if states and stack.states_made_first and not self.offload.pages_optimizer:
            builder.construction["optimizer_states"] = stepped(zeros, states)
        else:
            number = max(number for number, _ in made) + 1
            made = (*made, (number, zeros), (number, 0))
        builder.construction["master_parameters"] = made

    def know(self) -> None:
        """Second shards of all that is ever let go of, and of what is not trained for good."""
        uses = list(self.uses.of(self.plan.architecture.stack))
        frozen = {name for use in uses for p, (name, _) in zip(use.part.parameters, use.wanted, strict=False)
                  if isinstance(p, Frozen)}
        wanted = {name: numel for use in uses for name, numel in use.wanted}
        self.secondary.know([w for w in wanted.items() if w[0] not in frozen],
                            [w for w in wanted.items() if w[0] in frozen])

    def outside(self, category: str) -> bool:
        """Whether a state lives in host memory or on disks: gradients where the optimizer is."""
        return self.offload.moves_parameters if category == "parameters" else self.offload.moves_optimizer

    def host_states(self, numel: int) -> None:
        """Host memory of this rank's `numel` parameters: the half partition, the gradients' pinned partition, and what
        the optimizer works on."""
        if self.offload.parameters == "cpu":
            self.offload.hold("parameters", numel * DTYPE_BYTES[self.precision.parameters], "parameters", pinned=True)
        elif self.offload.moves_parameters:
            self.offload.hold("parameter buffers", PARAMETER_BUFFERS * PARAMETER_BUFFER
                              * DTYPE_BYTES[self.precision.parameters], "buffers", pinned=True)
        if self.offload.moves_optimizer:
            self.offload.hold("gradient partition", numel * DTYPE_BYTES[self.precision.gradients], "gradients",
                              pinned=True)
            largest = max(layer.numel for layer in self.plan.architecture.stack)
            self.offload.hold_optimizer(numel, largest)

    def lasting(self) -> dict[Hashable, Tensor]:
        """Tensors of parameters that stay whole until the optimizer steps."""
        width, size = DTYPE_BYTES[self.wide], blocks if self.precision.gather == WEIGHTS else round
        return {name: (tensor_of(name), size(numel * width)) for name, numel in self.looked_up.items()}
