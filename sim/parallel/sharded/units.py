"""Units of gathering: which layers one all-gather brings together, and how many bytes padding makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sim.model.architecture import Architecture, Layer, Parameter
from sim.model.tuning import Frozen
from sim.parallel.step import is_matrix


@dataclass(frozen=True, slots=True)
class Unit:
    """What one all-gather brings together.

    Attributes:
        name: "root", "block0" ...
        numel: parameters; padded: with the padding that makes every rank's share equal.
        tensors: parameter tensors in it.
        shards: elements of each tensor that this rank keeps (the fullest rank's).
        frozen: tensors that are gathered with it but not trained.
        routed: the part of `padded` that is gathered over the ranks which hold the same experts.
        own: elements this rank keeps.
        numels: elements of each parameter in it, in registration order.
        wide: the part of `dense` that no narrow product reads (embedding, head, norms): where matrices are gathered in
            8 bits, these are not.
        wholes: elements of each tensor as it is gathered, padding included.
    """

    name: str
    numel: int
    padded: int
    tensors: int
    shards: tuple[int, ...]
    frozen: tuple[Frozen, ...] = ()
    routed: int = 0
    own: int = 0
    numels: tuple[int, ...] = ()
    wide: int = 0
    wholes: tuple[int, ...] = ()

    @property
    def dense(self) -> int:
        """The part of `padded` that is gathered over the whole shard group."""
        return self.padded - self.routed


def flat_padding(parameters: Iterable[Parameter], factor: int) -> int:
    """FSDP 1 pads the flat parameter to a multiple of the shard group (PyTorch, `_flat_param.py`)."""
    numel = sum(p.numel for p in parameters)
    return math.ceil(numel / factor) * factor


@lru_cache(maxsize=256)
def pieces(numels: tuple[int, ...], factor: int) -> NDArray[np.int64]:
    """Parameters that each rank's equal share of a flat parameter has a part of, shape (factor,)."""
    share = -(-sum(numels) // factor)
    found, ends = np.zeros(factor + 1, dtype=np.int64), np.cumsum(numels)
    for end, numel in zip(ends, numels, strict=True):
        if numel:
            found[(end - numel) // share] += 1
            found[(end - 1) // share + 1] -= 1
    counts: NDArray[np.int64] = np.cumsum(found)[:-1]
    return counts


def row_padding(parameters: Iterable[Parameter], factor: int) -> int:
    """FSDP 2 pads dim 0 of every parameter to a multiple of the shard group (PyTorch, `_fsdp_param.py`)."""
    return sum(math.ceil(p.shape[0] / factor) * factor * (p.numel // p.shape[0]) for p in parameters)


def row_shards(parameters: Iterable[Parameter], factor: int) -> tuple[int, ...]:
    """Elements of each parameter's shard on rank 0 (FSDP 2)."""
    return tuple(math.ceil(p.shape[0] / factor) * (p.numel // p.shape[0]) for p in parameters)


def units_of(architecture: Architecture, wrap: str | int, factor: int, by_row: bool,
             routed_factor: int = 0) -> list[Unit]:
    """One unit per position of the stack; positions whose layer is in the root unit get the root.

    Blocks with parameters are units of their own (with a size-based `wrap`, if they have at least that many);
    everything else (embeddings, bridge, final norm, head) belongs to the root unit.

    Args:
        routed_factor: ranks over which routed experts are sharded, where that is another group (0 = the same).
    """
    pad = row_padding if by_row else flat_padding
    least = 1 if wrap == "block" else max(1, int(wrap))

    def shards(parameters: Sequence[Parameter], factor: int) -> tuple[int, ...]:
        if not parameters:
            return ()
        return row_shards(parameters, factor) if by_row else (flat_padding(parameters, factor) // factor,)

    def unit(name: str, layers: Sequence[Layer]) -> Unit:
        parameters = [p for layer in layers for p in layer.parameters]
        routed = [p for p in parameters if p.routed and routed_factor]
        dense = [p for p in parameters if not (p.routed and routed_factor)]
        whole, apart = pad(dense, factor), pad(routed, routed_factor or 1)
        wide = [p for layer in layers for p in layer.parameters if not is_matrix(layer, p)]
        own, others = shards(dense, factor), shards(routed, routed_factor)
        return Unit(name, sum(p.numel for p in parameters), whole + apart, len(parameters), (*own, *others),
                    tuple(f for layer in layers for f in layer.frozen), apart,
                    whole // factor + apart // (routed_factor or 1), tuple(p.numel for p in parameters),
                    pad(wide, factor), (*(n * factor for n in own), *(n * routed_factor for n in others)))

    own = [layer.kind == "block" and _size(layer) >= least for layer in architecture.stack]
    root = unit("root", [layer for layer, mine in zip(architecture.stack, own, strict=True) if not mine])
    made: dict[int, Unit] = {}
    units = []
    for position, (layer, mine) in enumerate(zip(architecture.stack, own, strict=True)):
        if not mine:
            units.append(root)
            continue
        if id(layer) not in made:
            made[id(layer)] = unit("", [layer])
        units.append(replace(made[id(layer)], name=architecture.names[position]))
    return units


def _size(layer: Layer) -> int:
    """Parameters of a layer, trained or not."""
    return layer.numel + sum(f.numel for f in layer.frozen)
