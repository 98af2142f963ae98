"""Where ranks sit: process groups as arrays of global ranks, and ranks that behave alike as classes.

Floor 3. The only object that is asked for ranks and groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.program import Communicator, RankClass

Ranks = npt.NDArray[np.int64]
#: Dimensions whose ranks hold the same parameters: they see other samples, or other parts of the same ones.
REPLICAS = ("context", "data")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions and which of them are neighbours.

    Attributes:
        sizes: ranks along each dimension; their product is the job's ranks.
        order: dimensions from the innermost (neighbouring ranks) to the outermost.
    """

    sizes: Mapping[str, int]
    order: Sequence[str]

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return int(np.prod([self.sizes[d] for d in self.order], dtype=np.int64))

    def group(self, dimension: str | Sequence[str], size: int | None = None, stride: int = 1) -> Ranks:
        """All groups along a dimension, or along several taken as one: shape (instances, members).

        Args:
            dimension: name of the dimension, or names of several; the innermost of them varies fastest.
            size: members of a group, default all ranks of the dimension; must divide it together with `stride`.
            stride: distance of members along the dimension: (size=f, stride=1) are shard groups of f neighbours,
                (size=d/f, stride=f) the replica groups across them.
        """
        names = (dimension,) if isinstance(dimension, str) else tuple(dimension)
        outward = list(reversed(self.order))
        grid = np.arange(self.ranks, dtype=np.int64).reshape([self.sizes[d] for d in outward])
        along = [i for i, d in enumerate(outward) if d in names]
        moved = np.moveaxis(grid, along, range(grid.ndim - len(along), grid.ndim))
        length = math.prod(self.sizes[d] for d in names)
        size = length // stride if size is None else size
        split = moved.reshape(-1, length // (size * stride), size, stride)
        return np.ascontiguousarray(np.moveaxis(split, 2, 3).reshape(-1, size))

    def coordinate(self, dimension: str) -> Ranks:
        """Every rank's place along a dimension, shape (ranks,)."""
        inner = math.prod(self.sizes[d] for d in self.order[:list(self.order).index(dimension)])
        return np.arange(self.ranks, dtype=np.int64) // inner % self.sizes[dimension]

    def moved(self, dimension: str, here: int, there: int) -> Ranks:
        """Pairs of ranks that differ along a dimension only: shape (instances, 2), from `here` to `there`."""
        pairs = self.group(dimension)
        return np.ascontiguousarray(pairs[:, [here, there]])


def equitable_classes(colours: Ranks, groups: Mapping[str, Ranks]) -> Ranks:
    """The coarsest equitable partition of ranks (partition refinement, colour refinement of Weisfeiler and Leman).

    Two ranks end in one class when they start with the same colour (role and hardware) and, for every kind of group,
    their groups hold the same classes with the same multiplicities.

    Args:
        colours: initial colour per rank, shape (ranks,).
        groups: per communicator name, shape (instances, members).

    Returns:
        class number per rank, shape (ranks,), numbered by first appearance.
    """
    _, current = np.unique(colours, return_inverse=True)
    count = int(current.max()) + 1
    while count > 1:
        signature = [current]
        for ranks in groups.values():
            _, kind = np.unique(np.sort(current[ranks], axis=1), axis=0, return_inverse=True)
            column = np.full(current.shape, -1, dtype=np.int64)
            column[ranks] = kind.reshape(-1, 1)
            signature.append(column)
        _, refined = np.unique(np.stack(signature, axis=1), axis=0, return_inverse=True)
        current, before, count = refined.reshape(-1), count, int(refined.max()) + 1
        if count == before:
            break
    _, first, inverse = np.unique(current, return_index=True, return_inverse=True)
    rank_of = np.argsort(np.argsort(first))
    return rank_of[inverse].astype(np.int64)


def simulated_ranks(classes: Ranks, groups: Mapping[str, Ranks],
                    devices: Ranks | None = None, programs: Ranks | None = None) -> tuple[list[RankClass],
                                                                                          list[Communicator]]:
    """One simulated rank per class, and the communicators they share.

    Args:
        classes: class per rank (equitable with respect to `groups`); `arange(ranks)` simulates every rank.
        groups: per communicator name, in the order of `Program.communicators`; a number behind a "/" tells groups of
            one name apart.
        devices: hardware kind per rank, default all 0.
        programs: program per rank, default all 0.
    """
    communicators: list[Communicator] = []
    of_rank: dict[str, Ranks] = {}
    if not classes.any():  # one class: every group is like every other, and no sorting of ten thousands of rows
        alike = [Communicator(name, ranks, 1) for name, ranks in groups.items()]
        device = 0 if devices is None else int(devices[0])
        return [RankClass(0, np.arange(len(classes)), 0, device, tuple(range(len(alike))))], alike
    for name, ranks in groups.items():
        signatures, kind = np.unique(np.sort(classes[ranks], axis=1), axis=0, return_inverse=True)
        kind = kind.reshape(-1)
        column = np.full(classes.shape, -1, dtype=np.int64)
        column[ranks] = (kind + len(communicators)).reshape(-1, 1)
        of_rank[name] = column
        for number, signature in enumerate(signatures):
            of_kind = ranks[kind == number]
            communicators.append(Communicator(name.partition("/")[0], of_kind, len(np.unique(signature))))
    result = []
    order = np.argsort(classes, kind="stable")
    bounds = np.flatnonzero(np.diff(classes[order], prepend=-1))
    for number, members in enumerate(np.split(order, bounds[1:])):
        representative = int(members[0])
        result.append(RankClass(
            representative=representative, members=members.astype(np.int64),
            program=int(programs[representative]) if programs is not None else 0,
            device=int(devices[representative]) if devices is not None else 0,
            communicators=tuple(int(of_rank[name][representative]) for name in groups)))
        assert number == int(classes[representative])
    return result, communicators
