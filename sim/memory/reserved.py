"""What PyTorch reserves for a Program: the caching allocator's answer, and what running short of memory does to it."""

from __future__ import annotations

from dataclasses import dataclass

from sim.catalog import table
from sim.memory.allocator import Allocator, Block, OutOfMemoryError
from sim.memory.pools import Pools
from sim.memory.tensors import TensorReplay
from sim.program import Program

_FIGURES = "memory/retries.yaml"

#: Steps after which nothing new is reserved: the first makes the optimizer states, the second works around them.
_STEPS = 2
#: Steps, behind the first, over which what is given back and taken again is averaged.
_STEPS_SHORT = 3
#: Repeats of a micro-step that are played in each of them.
_REPEATS_SHORT = 4
#: What the driver takes is known no closer (hardware/outside.yaml: 0.47 to 0.92 GiB on A100): a job that runs short by
#: less does not do so for certain, and published ones did not.
_UNSURE_BYTES = 2**30 // 5


@dataclass(frozen=True, slots=True)
class Reserved:
    """The allocator's share of one rank.

    Attributes:
        fragmentation_bytes: what is reserved at most, less the highest sum of tensors.
        retries: per steady step, times that cached segments had to be given back; None if that does not help.
        released: per steady step, segments given back so.
    """

    fragmentation_bytes: int
    retries: int | None = 0
    released: int = 0

    @property
    def seconds(self) -> float:
        """Host time that retries add to a steady step: each waits until the device is idle, segments are given back
        one by one, and as many are asked for again."""
        figures = table(_FIGURES)["seconds"]
        per_segment = float(figures["free"]["value"]) + float(figures["malloc"]["value"])
        return (self.retries or 0) * float(figures["synchronise"]["value"]) + self.released * per_segment


def replayed(program: Program, limit_bytes: int, allocated_bytes: int) -> Reserved:
    """The allocator's answer on a device of which it can have `limit_bytes`.

    Args:
        allocated_bytes: the program's highest sum of tensors (`sim.memory.ledger.peak`).
    """
    free = fragmentation_bytes(program)
    if allocated_bytes + free <= limit_bytes:
        return Reserved(free)
    if allocated_bytes > limit_bytes:
        return Reserved(free, None)
    if allocated_bytes + free <= limit_bytes + _UNSURE_BYTES:
        return Reserved(limit_bytes - allocated_bytes)
    # The replay's fragmentation is an estimate: published runs went through that it would stop, so what PyTorch
    # allocates alone decides whether a job fits.
    found = under_pressure(program, limit_bytes)
    return Reserved(limit_bytes - allocated_bytes, found.retries or 0, found.released)


def fragmentation_bytes(program: Program) -> int:
    """Reserved over allocated at most, on a device without limit."""
    pools = Pools()
    replay = TensorReplay(program, pools)
    replay.construct()
    for _ in range(_STEPS):
        replay.step()
    return pools.reserved - pools.top_asked


def under_pressure(program: Program, limit_bytes: int) -> Reserved:
    """The whole model replayed on a device whose allocator can have `limit_bytes`: whether giving back cached segments
    saves the step, and how often each steady step does so."""
    allocator = Allocator(limit_bytes)
    replay = _Pressed(program, allocator)
    allocator.settle = replay.settle
    try:
        replay.construct()
        replay.step()
        before = replay.counted()
        for _ in range(_STEPS_SHORT):
            replay.step()
    except OutOfMemoryError:
        return Reserved(max(0, allocator.top_reserved - allocator.top_asked), None, 0)
    retries, released = (round((now - then) / _STEPS_SHORT) for now, then in zip(replay.counted(), before, strict=True))
    return Reserved(max(0, allocator.top_reserved - allocator.top_asked), retries, released if retries else 0)


class _Pressed(TensorReplay[Block]):
    """A replay on a device with a limit, where a section may run short every time: of many repeats a few are played,
    and the rest counted as the mean of the last two."""

    def __init__(self, program: Program, allocator: Allocator) -> None:
        super().__init__(program, allocator)
        self.limited = allocator
        self.rest = (0.0, 0.0)

    def counted(self) -> tuple[float, float]:
        """Retries and segments given back so far, with those of repeats that were not played."""
        return self.limited.retries + self.rest[0], self.limited.released + self.rest[1]

    def _repeat(self, number: int, repeats: int) -> None:
        counts = [self.counted()]
        for _ in range(min(repeats, _REPEATS_SHORT)):
            self._run(number)
            counts.append(self.counted())
        left = max(0, repeats - _REPEATS_SHORT) / 2
        self.rest = (self.rest[0] + left * (counts[-1][0] - counts[-3][0]),
                     self.rest[1] + left * (counts[-1][1] - counts[-3][1])) if left else self.rest
