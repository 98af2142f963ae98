"""Weights of a request that ranks share out: the forwards of FSDP 2 and ZeRO-3 with the kernels of inference.

Which parameters are gathered when, how far ahead, and when they go is the technique's own code; only what runs between
the gathers differs, and what is held: weights, and nothing of an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from sim.model.architecture import Layer, Operator
from sim.model.inference.rank import Rank
from sim.parallel.sharded.fsdp2 import Fsdp2
from sim.parallel.sharded.units import Unit
from sim.parallel.sharded.uses import Use, Uses
from sim.parallel.sharded.zero3 import Zero3
from sim.parallel.step import COMPUTE, MicroStep, Plan, blocks
from sim.program import Label, ProgramBuilder, SectionBuilder
from sim.work import DTYPE_BYTES, Kernel


class Segments(Protocol):
    """Makes the segment of a layer's forward, or of some of its operators, behind other kernels; None for nothing."""

    def __call__(self, rank: Rank, layer: Layer, operators: Sequence[Operator] = (),
                 before: tuple[Kernel, ...] = ()) -> int | None: ...


class _Served(Protocol):
    rank: Rank
    task: int

    def weights(self) -> None: ...
    def pass_over(self, section: SectionBuilder) -> None: ...


class Shards:
    """Weights as a technique of training shares them out."""

    def __init__(self, plan: Plan, technique: _Served) -> None:
        self.plan, self.technique = plan, technique
        self.builder: ProgramBuilder = plan.builder

    def hold(self, rank: Rank, layers: Sequence[Layer]) -> None:
        """This rank's part of them."""
        self.technique.weights()

    def forward(self, section: SectionBuilder, rank: Rank, own: range, waits: tuple[int, ...]) -> int:
        """All layers; there is no stage before or behind."""
        self.technique.rank = rank
        self.technique.pass_over(section)
        return self.technique.task


class ServedFsdp2(Fsdp2):
    """FSDP 2's forward again and again. The root unit (embedding, last norm, head) is not resharded behind a forward,
    so it is whole from the first on.

    Source: torch 2.6.0 distributed/fsdp/_fully_shard/_fsdp_state.py, _lazy_init ("Do not reshard root after forward"),
    _fsdp_param_group.py, unshard (returns where parameters are whole).
    """

    rank: Rank
    task = -1

    def __init__(self, plan: Plan, segments: Segments) -> None:
        super().__init__(plan)
        self.made = segments
        self.parts, self.buffer = {}, None

    def weights(self) -> None:
        """Shards in the dtype of parameters, on the GPU or pinned in the host's memory, and the whole root."""
        width = DTYPE_BYTES[self.plan.scenario.training.precision.parameters]
        for unit in self.distinct:
            if self.offload.moves_parameters:
                self.offload.hold(f"parameters:{unit.name}", unit.own * width, "parameters", pinned=True)
        if not self.offload.moves_parameters:
            self.plan.resident("parameters", sum(blocks(n * width) for u in self.distinct for n in u.shards),
                               "parameters", [n * width for u in self.distinct for n in u.shards])
        self.plan.resident("whole root", self.gathered_bytes(self.root), "gathered_parameters")

    def pass_over(self, section: SectionBuilder) -> None:
        """One forward."""
        self.forward_pass(section, self.rank.architecture().stack)

    def unshard(self, section: SectionBuilder, unit: Unit, phase: str, waits: tuple[int, ...] | list[int],
                joins: tuple[int, ...] = ()) -> int | None:
        """Of all units but the root."""
        return None if unit is self.root else super().unshard(section, unit, phase, waits, joins)

    def copy_out(self, section: SectionBuilder, unit: Unit) -> tuple[Kernel, ...]:
        """Likewise."""
        return () if unit is self.root else super().copy_out(section, unit)

    def free_buffer(self, section: SectionBuilder, unit: Unit | None) -> None:
        """Likewise."""
        if unit is not self.root:
            super().free_buffer(section, unit)

    def forward(self, section: SectionBuilder, position: int, layer: Layer, waits: Sequence[int],
                joins: Sequence[int] = (), before: tuple[Kernel, ...] = ()) -> int:
        """A layer of inference."""
        segment = self.made(self.rank, layer, (), before)
        assert segment is not None, "every layer of one stack runs"
        self.task = section.kernels(COMPUTE, segment, Label(self.layer_label(position), "forward", layer.kind), waits,
                                    joins)
        return self.task


class _Forwards(Uses):
    """The trace of a forward alone."""

    def of(self, stack: Sequence[Layer]) -> Iterator[Use]:
        """Every use of it, in order."""
        for position, layer in enumerate(stack):
            for number, part in enumerate(self.parts_of(layer)):
                yield self.use(position, layer, part, "forward", number == 0)


class ServedZero3(Zero3):
    """ZeRO-3's coordinator over the trace of a forward."""

    rank: Rank
    task = -1

    def __init__(self, plan: Plan, segments: Segments) -> None:
        super().__init__(plan)
        self.made = segments
        self.uses = _Forwards(plan, self.fetching)
        self.looked_up = {}  # no backward leaves anything whole
        self.decide()

    def weights(self) -> None:
        """This rank's partitions, on the GPU or outside, and small parameters whole."""
        precision, width = self.precision, DTYPE_BYTES[self.precision.parameters]
        partitions = [-(-p.numel // self.ranks) * width for layer in self.plan.architecture.stack
                      for p in layer.parameters]
        if self.offload.parameters == "cpu":  # pinned one by one (partition_parameters.py, _partition_param)
            for number, size in enumerate(partitions):
                self.offload.hold(f"partition {number}", size, "parameters", pinned=True)
        elif self.offload.moves_parameters:
            self.host_states(0)
        else:
            self.plan.resident("partitions", sum(partitions), "parameters")
        if self.fetching:
            small = sum(self.resident) * DTYPE_BYTES[precision.gather]
            self.plan.resident("persistent parameters", small, "parameters")

    def pass_over(self, section: SectionBuilder) -> None:
        """One forward."""
        self.plan.architecture = self.rank.architecture()
        self.micro_step(section, MicroStep(self.plan.architecture.batch, True, False))

    def compute(self, section: SectionBuilder, use: Use, waits: tuple[int, ...], copies: tuple[Kernel, ...]) -> int:
        """One use in inference; parameters that have just arrived are laid out first."""
        if self.moved is not None:
            waits = (*waits, self.moved)
        segment = self.made(self.rank, use.layer, use.part.operators, copies)
        assert segment is not None, "every sub-module of one stack runs"
        self.task = section.kernels(COMPUTE, segment, self.label(use, use.layer.kind), waits)
        self.computed = (self.task,)
        return self.task
