"""Host-ordered memory of layers: activations and temporaries of forward, recomputation and backward, gradients.

A layer's tensors come from the model room's miniature of autograd (`sim.model.eager`), reduced to the highest point of
each direction and what is left behind; a technique adds its own buffers around them. Within a layer a technique's
buffers do not change, so the highest point of a step is exact.
"""

from __future__ import annotations

from sim.model.architecture import Layer
from sim.model.eager import KINDS, NOTHING, Levels, Pass, Profile, layer_profile
from sim.parallel.step import COMPUTE, Plan
from sim.program import MemoryOp, SectionBuilder

_GRADIENTS = KINDS.index("gradients")
_POOLS = tuple(f"layers: {kind}" for kind in KINDS)
#: Name of the parameter gradients that layers leave behind.
GRADIENT_POOL = _POOLS[_GRADIENTS]


class Activations:
    """What the layers of one micro-step hold. Call `forward` and `backward` before a layer's kernels are issued."""

    def __init__(self, plan: Plan, section: SectionBuilder, layers: int, *, keep_gradients: bool) -> None:
        """`keep_gradients`: parameter gradients stay as new tensors; else they are added to existing ones."""
        self._plan, self._section, self._last, self._keep = plan, section, layers - 1, keep_gradients
        self._held, self._cached = NOTHING, NOTHING

    def profile(self, position: int, layer: Layer) -> Profile:
        """Memory of the layer at `position`."""
        policy = self._plan.policy(1 if position == 0 else position)
        return layer_profile(layer, policy, self._keep)

    def forward(self, position: int, layer: Layer) -> None:
        """The layer's forward rises and settles; before the head the model's forward lets go of what it held."""
        profile = self.profile(position, layer)
        if position == self._last:
            self._change(_negative(self._held))
        self._pass(profile.forward)
        self._held = _sum(self._held, profile.held)
        self._cached = _sum(self._cached, profile.cached)
        if position == self._last:
            self._change(_negative(self._cached))

    def backward(self, position: int, layer: Layer) -> int:
        """Recomputation and backward of the layer.

        Returns:
            bytes of the parameter gradients it leaves behind (0 unless they are kept).
        """
        profile = self.profile(position, layer)
        self._pass(profile.backward)
        return profile.backward.net[_GRADIENTS]

    def _pass(self, direction: Pass) -> None:
        self._change(direction.peak, direction.operator)
        self._change(tuple(n - p for n, p in zip(direction.net, direction.peak, strict=True)))

    def _change(self, levels: Levels, operator: str = "") -> None:
        """Releases first, so that no level in between is higher than both ends."""
        before, out = len(self._section.section), self._section.section.memory
        changes = sorted((size, kind) for kind, size in enumerate(levels) if size)
        out += [MemoryOp(before, _POOLS[kind], size, KINDS[kind], COMPUTE, (), operator)
                for size, kind in changes]


def _negative(levels: Levels) -> Levels:
    return tuple(-size for size in levels)


def _sum(one: Levels, other: Levels) -> Levels:
    return tuple(a + b for a, b in zip(one, other, strict=True))
