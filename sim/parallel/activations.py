"""Host-ordered memory of layers: activations and temporaries of forward, recomputation and backward, gradients.

A layer's tensors come from the model room's miniature of autograd (`sim.model.eager`), reduced to the highest point of
each direction and what is left behind; a technique adds its own buffers around them. Within a layer a technique's
buffers do not change, so the highest point of a step is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.model.architecture import Layer
from sim.model.eager import KINDS, NOTHING, Levels, Pass, Profile, layer_profile
from sim.parallel.step import COMPUTE, Plan
from sim.program import Label, MemoryOp, SectionBuilder
from sim.tensor_trace import LayerMemory, Trace


class Pool(NamedTuple):
    """A pool of layers' tensors, and the category it is counted in."""

    name: str
    category: str


_GRADIENTS, _SAVED = KINDS.index("gradients"), KINDS.index("activations")
_POOLS = tuple(f"layers: {kind}" for kind in KINDS)
#: Name of the parameter gradients that layers leave behind.
GRADIENT_POOL = _POOLS[_GRADIENTS]

#: What a layer hands to the next in forward, and gradients on their way back.
OUTPUT_POOL, FLOWING_POOL = (Pool(f"layers: {kind}", kind) for kind in ("activations", "workspace"))

#: The loss and its gradient, which whoever called `backward` holds until it is through: a block of the allocator each.
#: Of a pipeline only the last stage has them; that kilobyte is not counted.
_LOSS = ("loss and its gradient", 2 * 512, "workspace")

#: Fields of a `MemoryOp` after `before`.
_Change = tuple[str, int, str, int, tuple[int, ...], str]


class Activations:
    """What the layers of one micro-step hold. Call `forward` and `backward` before a layer's kernels are issued.

    Attributes:
        hooked: the technique does more inside the model's backward, behind the first layer's, and then calls `over`.
    """

    def __init__(self, plan: Plan, section: SectionBuilder, layers: int, *, keep_gradients: bool,
                 caches_casts: bool = True, blocks_keep: bool | None = None) -> None:
        """See `layer_profile` for what can be chosen.

        Args:
            blocks_keep: `keep_gradients` of blocks, default the others'.
        """
        self._plan, self._section, self._last = plan, section, layers - 1
        self._keep, self._caches_casts = keep_gradients, caches_casts
        self._blocks_keep = keep_gradients if blocks_keep is None else blocks_keep
        self._held, self._cached = NOTHING, NOTHING
        self._loss, self.hooked = False, False
        self._away = SavedTensors(plan, section) if plan.offload.moves_activations else None

    def forward(self, position: int, layer: Layer) -> None:
        """The layer's forward rises and settles; a row of blocks lets go of what it held before a head or bridge, or
        where the stage ends."""
        profile, changes, _ = self._of(position, layer)
        if self._away is not None:
            self._away.forward(position, profile.forward.net[_SAVED] if layer.kind == "block" else 0)
        if layer.kind in ("bridge", "head"):
            self._let_go(position)
        self._change(changes, "forward", position, profile.trace)
        if profile.held is not NOTHING:
            self._held = _sum(self._held, profile.held)
        if profile.cached is not NOTHING:
            self._cached = _sum(self._cached, profile.cached)
        if position == self._last:
            self._let_go(position)
            self._change(_changes(_negative(self._cached)), "cached", position)

    def _let_go(self, position: int) -> None:
        if self._held is not NOTHING:
            self._change(_changes(_negative(self._held)), "held", position)
            self._held = NOTHING

    def backward(self, position: int, layer: Layer) -> int:
        """Recomputation and backward of the layer.

        Returns:
            bytes of the parameter gradients it leaves behind (0 unless they are kept).
        """
        profile, _, changes = self._of(position, layer)
        if self._away is not None:
            self._away.backward(position)
        if layer.kind == "head" and self._plan.scenario.parallel.pipeline == 1:
            self._section.allocate(*_LOSS)
            self._loss = True
        self._change(changes, "backward", position, profile.trace)
        if position == 0 and not self.hooked:
            self.over()
        return profile.backward.net[_GRADIENTS]

    def over(self) -> None:
        """`backward` is through."""
        if self._loss:
            self._section.free(*_LOSS)
            self._loss = False

    def row(self, verb: str, positions: range, layers: Sequence[Layer]) -> list[int]:
        """`forward` or `backward` of layers in a row with nothing between them, in that direction's order. Equal rows
        of a job's programs are worked out once.

        Returns:
            of backward, what it returns for each layer, in the order of `positions`.
        """
        section, known = self._section.section, self._plan.compute.rows_of_memory
        start, first = len(section.memory), len(section.layers)
        key = (verb, positions, tuple(map(id, layers)), tuple([self._plan.policy(p) for p in positions]), self._last,
               self._keep, self._blocks_keep, self._caches_casts, len(section), start)
        if self._away is None and key in known:
            memory, described, left = known[key]
            section.memory += memory
            section.layers += described
            return left
        if verb == "forward":
            left = []
            for position, layer in zip(positions, layers, strict=True):
                self.forward(position, layer)
        else:
            left = [self.backward(position, layer)
                    for position, layer in reversed(list(zip(positions, layers, strict=True)))][::-1]
        known[key] = (section.memory[start:], section.layers[first:], left)
        return left

    def _of(self, position: int, layer: Layer) -> tuple[Profile, list[_Change], list[_Change]]:
        # what an embedding or a bridge holds depends on what the blocks keep
        ahead = layer.kind in ("embedding", "bridge") and position < self._last
        policy = self._plan.policy(position + ahead)
        keep = self._blocks_keep if layer.kind == "block" else self._keep

        def make() -> tuple[Profile, list[_Change], list[_Change]]:
            profile = layer_profile(layer, policy, keep, self._caches_casts)
            return profile, _pass(profile.forward), _pass(profile.backward)

        return self._plan.compute.memory_of(layer, (policy, keep, self._caches_casts), make)

    def _change(self, changes: list[_Change], verb: str, position: int, trace: Trace | None = None) -> None:
        section = self._section.section
        before, start = len(section), len(section.memory)
        section.memory += [MemoryOp._make((before, *change)) for change in changes]
        section.layers.append(LayerMemory(start, len(section.memory), verb, position, trace))


class SavedTensors:
    """Blocks' saved tensors on their way to the host in forward and back in backward.

    With streams of their own (torchtune's OffloadActivations) a block's tensors leave while the next block computes and
    are freed a block later; in backward they come while the block behind computes. Without (`save_on_cpu`) the copies
    stand in line with the kernels. Weights are not copied.
    """

    def __init__(self, plan: Plan, section: SectionBuilder) -> None:
        self._plan, self._section, self._offload = plan, section, plan.offload
        self._streams = plan.stack.offload_streams
        self._sizes: dict[int, int] = {}
        self._leaving: list[tuple[int, int]] = []  # positions and copies whose tensors are still on the device
        self._back: dict[int, int] = {}
        self._last = -1
        self._nothing = plan.compute.segment(())

    def forward(self, position: int, size_bytes: int) -> None:
        """Before the forward of `position`, which will keep `size_bytes`: the block before it starts to leave."""
        if self._last in self._sizes:
            self._leave(self._last)
        while len(self._leaving) > (1 if size_bytes and self._streams else 0):
            self._gone(*self._leaving.pop(0))
        if size_bytes > 0:
            self._sizes[position] = size_bytes
            self._offload.hold_saved(sum(self._sizes.values()))
        self._last = position

    def backward(self, position: int) -> None:
        """Before the backward of `position`: its tensors are there, those of the block in front are on their way."""
        if position in self._sizes:
            if position not in self._back:
                self._fetch(position)
            if self._streams:
                self._wait(position, "backward", self._back[position])
        if self._streams and position - 1 in self._sizes:
            self._fetch(position - 1)

    def _leave(self, position: int) -> None:
        stream = self._offload.stream("d2h") if self._streams else COMPUTE
        task = self._offload.store(self._section, self._sizes[position], self._label(position, "forward"),
                                   joins=(COMPUTE,), place=self._offload.activations, stream=stream)
        self._leaving.append((position, task))

    def _gone(self, position: int, task: int) -> None:
        """The copy is through: compute that reuses the memory waits for it."""
        if self._streams:
            self._wait(position, "forward", task)
        self._section.free(_POOLS[_SAVED], self._sizes[position], "activations")

    def _fetch(self, position: int) -> None:
        stream = self._offload.stream("h2d") if self._streams else COMPUTE
        self._section.allocate(_POOLS[_SAVED], self._sizes[position], "activations")
        self._back[position] = self._offload.fetch(
            self._section, self._sizes[position], self._label(position, "backward"), joins=(COMPUTE,),
            place=self._offload.activations, stream=stream)

    def _wait(self, position: int, phase: str, task: int) -> None:
        self._section.kernels(COMPUTE, self._nothing, self._label(position, phase), waits=(task,))

    def _label(self, position: int, phase: str) -> Label:
        return Label(self._plan.architecture.names[position], phase, "saved tensors")


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
