"""Host-ordered memory of layers: activations and temporaries of forward, recomputation and backward, gradients.

A layer's tensors come from the model room's miniature of autograd (`sim.model.eager`), reduced to the highest point of
each direction and what is left behind; a technique adds its own buffers around them. Within a layer a technique's
buffers do not change, so the highest point of a step is exact.
"""

from __future__ import annotations

from sim.model.architecture import Layer
from sim.model.eager import KINDS, NOTHING, Levels, Pass, Profile, layer_profile
from sim.parallel.step import COMPUTE, Plan
from sim.program import LayerMemory, MemoryOp, SectionBuilder, Trace

_GRADIENTS = KINDS.index("gradients")
_POOLS = tuple(f"layers: {kind}" for kind in KINDS)
#: Name of the parameter gradients that layers leave behind.
GRADIENT_POOL = _POOLS[_GRADIENTS]

#: Fields of a `MemoryOp` after `before`.
_Change = tuple[str, int, str, int, tuple[int, ...], str]


class Activations:
    """What the layers of one micro-step hold. Call `forward` and `backward` before a layer's kernels are issued."""

    def __init__(self, plan: Plan, section: SectionBuilder, layers: int, *, keep_gradients: bool,
                 caches_casts: bool = True) -> None:
        """See `layer_profile` for what can be chosen."""
        self._plan, self._section, self._last = plan, section, layers - 1
        self._keep, self._caches_casts = keep_gradients, caches_casts
        self._held, self._cached = NOTHING, NOTHING
        self._known: dict[tuple[int, str], tuple[Profile, list[_Change], list[_Change]]] = {}

    def forward(self, position: int, layer: Layer) -> None:
        """The layer's forward rises and settles; before a head or bridge a row of blocks lets go of what it held."""
        profile, changes, _ = self._of(position, layer)
        if layer.kind in ("bridge", "head") and self._held is not NOTHING:
            self._change(_changes(_negative(self._held)), "held", position)
            self._held = NOTHING
        self._change(changes, "forward", position, profile.trace)
        if profile.held is not NOTHING:
            self._held = _sum(self._held, profile.held)
        if profile.cached is not NOTHING:
            self._cached = _sum(self._cached, profile.cached)
        if position == self._last:
            self._change(_changes(_negative(self._cached)), "cached", position)

    def backward(self, position: int, layer: Layer) -> int:
        """Recomputation and backward of the layer.

        Returns:
            bytes of the parameter gradients it leaves behind (0 unless they are kept).
        """
        profile, _, changes = self._of(position, layer)
        self._change(changes, "backward", position, profile.trace)
        return profile.backward.net[_GRADIENTS]

    def _of(self, position: int, layer: Layer) -> tuple[Profile, list[_Change], list[_Change]]:
        # what an embedding or a bridge holds depends on what the blocks keep
        policy = self._plan.policy(position + 1 if layer.kind in ("embedding", "bridge") else position)
        key = (id(layer), policy)
        if key not in self._known:
            profile = layer_profile(layer, policy, self._keep, self._caches_casts)
            self._known[key] = (profile, _pass(profile.forward), _pass(profile.backward))
        return self._known[key]

    def _change(self, changes: list[_Change], verb: str, position: int, trace: Trace | None = None) -> None:
        section = self._section.section
        before, start = len(section), len(section.memory)
        section.memory += [MemoryOp._make((before, *change)) for change in changes]
        section.layers.append(LayerMemory(start, len(section.memory), verb, position, trace))


def _pass(direction: Pass) -> list[_Change]:
    """Up to the highest point, then to the end."""
    left = tuple(n - p for n, p in zip(direction.net, direction.peak, strict=True))
    return _changes(direction.peak, direction.operator) + _changes(left)


def _changes(levels: Levels, operator: str = "") -> list[_Change]:
    """Releases first, so that no level in between is higher than both ends."""
    ordered = sorted((size, kind) for kind, size in enumerate(levels) if size)
    return [(_POOLS[kind], size, KINDS[kind], COMPUTE, (), operator) for size, kind in ordered]


def _negative(levels: Levels) -> Levels:
    return tuple(-size for size in levels)


def _sum(one: Levels, other: Levels) -> Levels:
    return tuple(a + b for a, b in zip(one, other, strict=True))
