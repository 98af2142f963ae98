"""What PyTorch reserves for a Program: the caching allocator's answer, and what running short of memory does to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from sim.catalog import table
from sim.memory.allocator import PLAIN, Allocator, OutOfMemoryError, Settings
from sim.memory.allocator_parts import Block
from sim.memory.pools import Pools
from sim.memory.tensors import B, Cache, TensorReplay
from sim.program import Program

_FIGURES = "memory/retries.yaml"

#: Steps after which nothing new is reserved: the first makes the optimizer states, the second works around them.
_STEPS = 2
#: Steps that are played where memory runs short, behind the first, and the last ones of them, which stand for those to
#: come. Cached segments may come to fit what is asked for. Where one of them needs no retry, the jitter of real runs is
#: taken to end the circle that a replay without any goes round in. Judged with published steps near the end of their
#: memory in view: about 50, missed by 15% with the circles' mean and by 13% so.
_STEPS_SHORT, _STEPS_COUNTED = 5, 3
#: Repeats of a micro-step that are played in each of them, and the last ones, whose mean stands for the rest.
_REPEATS_SHORT, _REPEATS_COUNTED = 4, 2
#: How much more or less the allocator may have than is predicted, and whether a step runs short may hang on it. What
#: the driver takes is known to a quarter of a GiB (hardware/outside.yaml: 0.47 to 0.92 on A100), NCCL's buffers and the
#: replay's own fragmentation no better; that all come to half a GiB is judged.
_MARGINS = tuple(round(2**30 * share) for share in (-0.5, 0.0, 0.5))


@dataclass(frozen=True, slots=True)
class Reserved:
    """The allocator's share of one rank.

    Attributes:
        fragmentation_bytes: what is reserved at most, less the highest sum of tensors.
        retries: per steady step, times that cached segments had to be given back, as expected over what is not known
            of the memory there is; None if that does not help.
        released_bytes: per steady step, bytes of the segments given back so.
    """

    fragmentation_bytes: int
    retries: float | None = 0.0
    released_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Host time that retries add to a steady step: each waits until the device is idle, and what is given back is
        unmapped, asked for again and mapped."""
        figures = table(_FIGURES)
        waiting_s = (self.retries or 0.0) * float(figures["synchronise"]["value"])
        return waiting_s + self.released_bytes / 2**30 * float(figures["remapped_per_gib"]["value"])


def held_bytes(fragmentation: int, limit_bytes: int, allocated_bytes: int) -> int:
    """What is reserved at most beyond tensors, of what would be on a device without limit (`fragmentation`): there is
    no more than the device has, where the tensors find room at all."""
    return fragmentation if allocated_bytes > limit_bytes else min(fragmentation, limit_bytes - allocated_bytes)


def replayed(program: Program, limit_bytes: int, allocated_bytes: int, settings: Settings = PLAIN,
             fragmentation: int | None = None) -> Reserved:
    """The allocator's answer on a device of which it can have `limit_bytes`, more or less (`_MARGINS`).

    Args:
        allocated_bytes: the program's highest sum of tensors (`sim.memory.ledger.peak`).
        settings: of the allocator.
        fragmentation: `fragmentation_bytes` where it is known already.
    """
    free = fragmentation_bytes(program, settings) if fragmentation is None else fragmentation
    held = held_bytes(free, limit_bytes, allocated_bytes)
    if allocated_bytes > limit_bytes:
        return Reserved(held, None)
    if allocated_bytes + free <= limit_bytes + _MARGINS[0]:
        return Reserved(held)
    # The replay's fragmentation is an estimate: published runs went through that it would stop, so what PyTorch
    # allocates alone decides whether a job fits. What such a run pays is what it pays with the least memory that the
    # replay gets through with: nothing would make the jobs nearest to the limit the quickest.
    answers: list[Reserved] = []
    for margin in _MARGINS:  # from the least memory on: what needs no retry there is taken to need none with more
        fits = allocated_bytes + free <= limit_bytes + margin or bool(answers and answers[-1].retries == 0)
        answers.append(Reserved(free) if fits else under_pressure(program, limit_bytes + margin, settings))
    going = [answer for answer in answers if answer.retries is not None] or [
        _with_more(program, limit_bytes, allocated_bytes + free, settings)]
    return Reserved(held, fmean(answer.retries or 0.0 for answer in going),
                    fmean(answer.released_bytes for answer in going))


def _with_more(program: Program, limit_bytes: int, enough_bytes: int, settings: Settings) -> Reserved:
    """The answer with the least memory above the margins that saves the step, to half as much again: 1, 1.5, 2, 3 …
    GiB; with `enough_bytes` nothing is given back."""
    more = 2**30
    while limit_bytes + more < enough_bytes:
        for extra in (more, more * 3 // 2):
            answer = under_pressure(program, limit_bytes + extra, settings)
            if answer.retries is not None:
                return answer
        more *= 2
    return Reserved(0)


def fragmentation_bytes(program: Program, settings: Settings = PLAIN) -> int:
    """Reserved over allocated at most, on a device without limit."""
    return _fragmentation(program, Pools()) if settings == PLAIN else _fragmentation(program, Allocator(None, settings))


def _fragmentation(program: Program, cache: Cache[B]) -> int:
    replay = TensorReplay(program, cache)
    replay.construct()
    for _ in range(_STEPS):
        replay.step()
    return cache.reserved - cache.top_asked


def under_pressure(program: Program, limit_bytes: int, settings: Settings = PLAIN) -> Reserved:
    """The whole model replayed on a device whose allocator can have `limit_bytes`: whether giving back cached segments
    saves the step, and how often each steady step does so."""
    allocator = Allocator(limit_bytes, settings)
    replay = _Pressed(program, allocator)
    allocator.settle = replay.settle
    try:
        replay.construct()
        replay.step()
        retries, released = _steady(replay.step, replay.counted)
    except OutOfMemoryError:
        return Reserved(max(0, allocator.top_reserved - allocator.top_asked), None)
    return Reserved(max(0, allocator.top_reserved - allocator.top_asked), retries, released)


def _steady(step: Callable[[], None], counted: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Retries and bytes given back per step, over the last ones played; none if one of them needed none."""
    for _ in range(_STEPS_SHORT - _STEPS_COUNTED):
        step()
    counts = [counted()]
    for _ in range(_STEPS_COUNTED):
        step()
        counts.append(counted())
        if counts[-1] == counts[-2]:
            return 0.0, 0.0
    retries, released = ((now - then) / _STEPS_COUNTED for now, then in zip(counts[-1], counts[0], strict=True))
    return retries, released


class _Pressed(TensorReplay[Block]):
    """A replay on a device with a limit, where a section may run short every time: of many repeats a few are played,
    and the rest counted as the mean of the last ones."""

    def __init__(self, program: Program, allocator: Allocator) -> None:
        super().__init__(program, allocator)
        self.limited = allocator
        self.rest = (0.0, 0.0)

    def counted(self) -> tuple[float, float]:
        """Retries and bytes given back so far, with those of repeats that were not played."""
        return self.limited.retries + self.rest[0], self.limited.released_bytes + self.rest[1]

    def _repeat(self, number: int, repeats: int) -> None:
        for _ in range(min(repeats, _REPEATS_SHORT - _REPEATS_COUNTED)):
            self._run(number)
        before = self.counted()
        for _ in range(min(repeats - _REPEATS_SHORT, 0) + _REPEATS_COUNTED):
            self._run(number)
        share = max(0, repeats - _REPEATS_SHORT) / _REPEATS_COUNTED
        retries, released = (share * (now - then) for now, then in zip(self.counted(), before, strict=True))
        self.rest = self.rest[0] + retries, self.rest[1] + released
