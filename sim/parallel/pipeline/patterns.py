"""What a rank writes of its order list: actions between two exchanges are a batch, batches that recur are a pattern.

Distinct actions are few, so a pattern is written once and named again and again. All of it follows from the schedule
alone and is remembered like the order lists themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from sim.parallel.pipeline.orders import Action, Costs, order, places, split
from sim.parallel.pipeline.transfers import Edge, Transfers

#: What an action gathers of sharded parameters: nothing, its blocks, or its root too.
NOTHING, BLOCKS, ALL = 0, 1, 2


class Batch(NamedTuple):
    """Actions between two exchanges, (kind, chunk, first, final, gathers) each, and what the next batch waits for."""

    actions: tuple[tuple[str, int, bool, bool, int], ...]
    needs: tuple[Edge, ...]


class Pattern(NamedTuple):
    """Batches that run one after another, so many times; equal batches have the same number within a row."""

    batches: tuple[Batch, ...]
    repeats: int
    number: int


class Row(NamedTuple):
    """A rank's step: what it receives before its first action, and its patterns in order."""

    first: tuple[Edge, ...]
    patterns: tuple[Pattern, ...]


class Schedule(NamedTuple):
    """An order list, by what `sim.parallel.pipeline.orders.order` makes it of."""

    name: str
    pipeline: int
    virtual: int
    micro_batches: int
    costs: Costs
    kept_for_weights: float
    ahead: int = 0


@dataclass(frozen=True)
class Habits:
    """What tells a stage's actions apart.

    Attributes:
        pairs: chunks that take turns exchange once per forward and backward: because exchanges block, or because both
            run as one.
        firsts: gradients of the first micro-batch are not treated like those of the others.
        keeps: whether sharded parameters stay whole behind a forward, and behind a backward that is not the last; None
            where parameters are not sharded.
    """

    pairs: bool
    firsts: bool
    keeps: tuple[bool, bool] | None = None


@lru_cache(maxsize=32)
def rows(schedule: Schedule, habits: Habits) -> tuple[Row, ...]:
    """What every rank writes.

    Raises:
        UserError: as `order`.
    """
    orders = order(*schedule)
    moves = Transfers(places(schedule.name, schedule.pipeline, schedule.virtual))
    last = "W" if split(schedule.name) else "B"
    apart = schedule.name == "dualpipe"
    return tuple(_row(rank, actions, moves, last, schedule.virtual, apart, habits)
                 for rank, actions in enumerate(orders))


def _row(rank: int, actions: Sequence[Action], moves: Transfers, last: str, chunks: int, apart: bool,
         habits: Habits) -> Row:
    pairs = habits.pairs and chunks > 1
    needs = {(kind, chunk): moves.needed(rank, Action(kind, chunk, 0)) for kind in "FBW" for chunk in range(chunks)}
    together = batched(actions, pairs, apart)
    described = _described(together, needs, last, habits)
    numbers: dict[tuple[Batch, ...], int] = {}
    found = []
    for begin, length, repeats in fold(described, chunks * len(moves.places.stage)):
        batches = tuple(described[begin:begin + length])
        found.append(Pattern(batches, repeats, numbers.setdefault(batches, len(numbers))))
    return Row(_needed(together[0], needs), tuple(found))


def _needed(batch: Sequence[Action], needs: dict[tuple[str, int], Edge | None]) -> tuple[Edge, ...]:
    return tuple([edge for a in batch if (edge := needs[a.kind, a.chunk])])


def batched(actions: Sequence[Action], pairs: bool, apart: bool = False) -> list[tuple[Action, ...]]:
    """Actions between two exchanges: one, but a forward and the backward behind it where chunks take turns (`pairs`)
    and exchanges block (Megatron-LM `schedules.py`, send_forward_backward_recv_forward_backward).

    Args:
        apart: only pairs of two directions are made (dualpipe).
    """
    if not pairs or next((i for i, a in enumerate(actions) if a.kind == "B"), 0) >= sum(a.kind == "F" for a in actions):
        return [(action,) for action in actions]
    batches: list[tuple[Action, ...]] = []
    i = 0
    while i < len(actions):
        paired = (actions[i].kind == "F" and i + 1 < len(actions) and actions[i + 1].kind == "B"
                  and (not apart or actions[i].chunk != actions[i + 1].chunk))
        batches.append(tuple(actions[i:i + 2]) if paired else (actions[i],))
        i += len(batches[-1])
    return batches


def _described(batches: Sequence[Sequence[Action]], needs: dict[tuple[str, int], Edge | None], last: str,
               habits: Habits) -> list[Batch]:
    """What is written of every batch: equal batches are one."""
    final = {a.chunk: a.micro for together in batches for a in together if a.kind == last}
    gathers = _Gathers(habits.keeps)
    following = [*(_needed(together, needs) for together in batches[1:]), ()]
    found: list[Batch] = []
    for together, after in zip(batches, following, strict=True):
        own = []
        for a in together:
            end = a.kind == last and final[a.chunk] == a.micro
            own.append((a.kind, a.chunk, habits.firsts and a.micro == 0 and a.kind != "F", end, gathers.by(a, end)))
        found.append(Batch(tuple(own), after))
    return found


class _Gathers:
    """What actions gather of sharded parameters, asked for in order: what is whole follows from those before."""

    def __init__(self, keeps: tuple[bool, bool] | None) -> None:
        self._keeps = keeps
        self._whole: dict[int, int] = {}  # by chunk; ALL: everything is, BLOCKS: only the root is

    def by(self, action: Action, final: bool) -> int:
        """What one action gathers."""
        if self._keeps is None:
            return NOTHING
        if action.kind == "W":
            if final:
                self._whole[action.chunk] = NOTHING
            return NOTHING
        whole = self._whole.get(action.chunk, NOTHING)
        stays = self._keeps[action.kind == "B"]
        self._whole[action.chunk] = NOTHING if final else ALL if stays else BLOCKS
        return {NOTHING: ALL, BLOCKS: BLOCKS, ALL: NOTHING}[whole]


def fold(items: Sequence[Hashable], group: int) -> list[tuple[int, int, int]]:
    """A list as (begin, length, repeats) of patterns that recur one after another.

    Args:
        group: length over which chunks take turns (chunks x stages); patterns of one to three items, and of one to
            three groups, are looked for.
    """
    lengths = sorted({n * unit for n in (1, 2, 3) for unit in (1, group)})
    numbers: dict[Hashable, int] = {}
    named = [numbers.setdefault(item, len(numbers)) for item in items]
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < len(named):
        best = (at, 1, 1)
        for length in lengths:
            end = at + length
            while end < len(named) and named[end] == named[end - length]:
                end += 1
            repeats = (end - at) // length
            if repeats > 1 and repeats * length > best[1] * best[2]:
                best = (at, length, repeats)
        found.append(best)
        at += best[1] * best[2]
    return found
