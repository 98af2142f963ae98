"""Where the slices of a cut model depend on one another: an operator's kernels with the collectives around them.

The model room says what depends on what (`sim.model.architecture.Joint`); which collective that becomes, and what hides
it, is decided here, one function a technique. A model that is not cut passes through unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from sim.model.architecture import Layer, Operator
from sim.parallel.model import context, expert, overlap, tensor
from sim.parallel.model.calls import Calls, Items
from sim.parallel.places import CUTS
from sim.software import Stack


@dataclass(frozen=True)
class Joints:
    """How joints become collectives in one job.

    Attributes:
        calls: the communicators of the cut dimensions.
        sequence: activations between tensor regions are cut along the sequence.
        hides: the weight gradients hide the reduction of the input gradient (`Stack.tensor_overlap`).
        pipelined: products and collectives are cut into pieces that overlap (async tensor parallelism).
        keeps: gathered inputs are kept for backward (`Stack.gathered_inputs_kept`).
        shares: tokens travel to their experts and back beside the shared experts.
        pieces: how such products reduce what they make (`Stack.tensor_pieces`).
        parts: tensor ranks.
        margin: SMs of the GPU over those of a product that is reduced in pieces (`Stack.tensor_margin_sms`).
        shared_scale: what in 8 bits they scale alike (`Stack.shared_scale`).
        copies: what is copied along the sequence (`Stack.copied_along`).
        compiled: torch.compile writes what stands beside products.
    """

    calls: Calls
    sequence: bool
    hides: bool
    pipelined: bool
    keeps: bool
    shares: bool = False
    pieces: str = "ring"
    parts: int = 1
    shared_scale: str = "none"
    margin: float = 1.0
    copies: str = "none"
    compiled: bool = False

    @property
    def expert(self) -> int | None:
        """Number of the communicator on which tokens travel to their experts."""
        return self.calls.communicators.index("expert") if self.calls.has("expert") else None

    def forward(self, operator: Operator) -> Items:
        """An operator's forward."""
        return self._turned(operator, operator.forward, "forward")

    def again(self, operator: Operator) -> Items:
        """What selective recomputation runs again of an operator."""
        return self._turned(operator, operator.core_again or operator.forward, "forward")

    def backward(self, operator: Operator) -> Items:
        """An operator's backward."""
        return self._turned(operator, operator.backward, "backward")

    def checkpoint(self, layer: Layer) -> Items:
        """What brings a recomputed layer's input together where tensor ranks share it."""
        style = layer.program.style if layer.program is not None else None
        if style is None or layer.kind != "block" or style.checkpoint_parts == 1:
            return ()
        return (self.calls.call("tensor", "all_gather", style.tokens * style.hidden, style.residual),)

    def row(self, turned: Sequence[tuple[str, Items]]) -> Items:
        """Operators one after another: name and items of each, in the order of the direction."""
        return overlap.beside_shared(turned) if self.shares else tuple(chain.from_iterable(i for _, i in turned))

    def _turned(self, operator: Operator, kernels: Items, direction: str) -> Items:
        joint = operator.joint
        if joint is not None and joint.kind == "heads":  # which may have no kernels of its own
            return context.exchanged(self.calls, joint, kernels)
        if joint is None or not kernels:
            return kernels
        if joint.kind in ("counts", "context_counts"):
            return expert.counted(self.calls, joint, kernels) if direction == "forward" else kernels
        if joint.kind in ("dispatch", "combine"):
            return expert.around(self.calls, joint, kernels, direction)
        if joint.kind == "gather":
            return context.gathered(self.calls, joint, kernels, direction)
        if joint.kind in ("ring", "rotate"):
            return context.around(self.calls, joint, kernels, direction)
        style = tensor.Style(self.sequence, self.hides, self.pipelined, self.keeps, self.pieces, self.parts,
                             self.shared_scale, self.margin, self.copies, self.compiled)
        return tensor.around(self.calls, joint, kernels, direction, style)


class Uncut:
    """A model that is not cut."""

    expert: int | None = None

    def forward(self, operator: Operator) -> Items:
        """An operator's forward."""
        return operator.forward

    def again(self, operator: Operator) -> Items:
        """What selective recomputation runs again of an operator."""
        return operator.core_again or operator.forward

    def backward(self, operator: Operator) -> Items:
        """An operator's backward."""
        return operator.backward

    def checkpoint(self, layer: Layer) -> Items:
        """What brings a recomputed layer's input together: it is whole."""
        return ()

    def row(self, turned: Sequence[tuple[str, Items]]) -> Items:
        """Operators one after another."""
        return tuple(chain.from_iterable(items for _, items in turned))


def joints(stack: Stack, communicators: Sequence[str], *, sequence: bool, pipelined: bool,
           dispatched: float = 1.0, shares: bool = False, parts: int = 1, sms: int = 0,
           sequences: int = 1) -> Joints | Uncut:
    """Joints of a job whose programs have these communicators; see `Joints` and `Calls`.

    Args:
        sms: of the GPU.
        sequences: of a micro-batch.
    """
    calls = Calls(tuple(communicators), dispatched)
    if not any(name in communicators for name in CUTS):
        return Uncut()
    return Joints(calls, sequence, stack.tensor_overlap, pipelined, stack.gathered_inputs_kept, shares,
                  stack.tensor_pieces, parts, stack.shared_scale, sms / (sms - stack.tensor_margin_sms) if sms else 1.0,
                  stack.copied_along(sequences), stack.compile)
