"""Collectives on the communicators of the cut dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from sim.program import CollectiveCall, InlineCall
from sim.work import DTYPE_BYTES, Kernel

#: Kernels and collectives of an operator, in the order of the compute stream.
Items = tuple[Kernel | InlineCall, ...]


@dataclass(frozen=True)
class Calls:
    """Makes inline collectives.

    Attributes:
        communicators: names of the program's communicators.
        dispatched: share of the rows for experts that travels (`expert.sent_once`).
    """

    communicators: tuple[str, ...]
    dispatched: float = 1.0

    def has(self, group: str) -> bool:
        """Whether the model is cut along that dimension."""
        return group in self.communicators

    def call(self, group: str, kind: str, elements: float, dtype: str, beside: tuple[Kernel, ...] = ()) -> InlineCall:
        """A collective over `elements` elements (the full buffer, see `sim.work`)."""
        size = round(elements * DTYPE_BYTES[dtype])
        return InlineCall(CollectiveCall(kind, size, dtype, self.communicators.index(group)), beside)


def plain(items: Items) -> tuple[Kernel, ...]:
    """The kernels among items."""
    return tuple(item for item in items if isinstance(item, Kernel))
