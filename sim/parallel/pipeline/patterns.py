"""What a rank writes of its order list: actions between two exchanges are a batch, batches that recur are a pattern.

Distinct actions are few, so a pattern is written once and named again and again. All of it follows from the schedule
alone and is remembered like the order lists themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sim.parallel.pipeline.orders import Action, Costs, order, places, split
from sim.parallel.pipeline.transfers import Edge, Transfers

#: What an action gathers of sharded parameters: nothing, its blocks, or its root too; of whole ones from `AHEAD` on:
#: AHEAD + c, those of chunk c, whose turn is to come.
NOTHING, BLOCKS, ALL, AHEAD = 0, 1, 2, 3


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
    all_first: bool = True


@dataclass(frozen=True)
class Habits:
    """What tells a stage's actions apart.

    Attributes:
        pairs: chunks that take turns exchange once per forward and backward: because exchanges block, or because both
            run as one.
        firsts: gradients of the first micro-batch are not treated like those of the others.
        fresh: a chunk's first forward is not like the others: its parameters are still on their way.
        turns: chunks are gathered ahead of their turn.
        keeps: whether sharded parameters stay whole behind a forward, and behind a backward that is not the last; None
            where parameters are not sharded.
    """

    pairs: bool
    firsts: bool
    keeps: tuple[bool, bool] | None = None
    fresh: bool = False
    turns: bool = False


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
    distinct, named = _described(together, needs, last, habits, _turns(rank, actions) if habits.turns else {})
    numbers: dict[tuple[int, ...], int] = {}
    found = []
    for begin, length, repeats in fold(named, chunks * len(moves.places.stage)):
        key = tuple(named[begin:begin + length])
        batches = tuple([distinct[name] for name in key])
        found.append(Pattern(batches, repeats, numbers.setdefault(key, len(numbers))))
    first = tuple([edge for a in together[0] if (edge := needs[a.kind, a.chunk])])
    return Row(first, tuple(found))


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


def _turns(rank: int, actions: Sequence[Action]) -> dict[Action, int]:
    """The chunk that is gathered in front of a forward: the one behind that whose first forward is `rank` forwards
    later, so that all ranks gather at once (Megatron-LM `schedules.py`, param_sync_virtual_microbatch_id)."""
    forwards = [action for action in actions if action.kind == "F"]
    found = {}
    for number, action in enumerate(forwards[rank:]):
        if action.micro == 0 and action.chunk > 0:
            found[forwards[number]] = action.chunk + 1
    return found


def _described(batches: Sequence[Sequence[Action]], needs: dict[tuple[str, int], Edge | None], last: str,
               habits: Habits, turns: Mapping[Action, int]) -> tuple[list[Batch], list[int]]:
    """What is written of every batch: the distinct ones, and the number of each in order. An order list is long and
    says little: all that is made per action is a number.

    Args:
        turns: of forwards in front of which a chunk is gathered, that chunk.
    """
    chunks = 1 + max(a.chunk for together in batches for a in together)
    final = {a.chunk: a.micro for together in batches for a in together if a.kind == last}
    gathers, firsts, fresh = _Gathers(habits.keeps), habits.firsts, habits.fresh
    owns: dict[tuple[tuple[str, int, bool, bool, int], ...], int] = {}
    numbers = []
    for together in batches:
        own = []
        for a in together:
            kind, chunk, micro = a
            end = kind == last and final[chunk] == micro
            first = micro == 0 and (fresh if kind == "F" else firsts)
            ahead = turns.get(a, chunks) if turns and kind == "F" else chunks
            own.append((kind, chunk, first, end, AHEAD + ahead if ahead < chunks else gathers.by(a, end)))
        numbers.append(owns.setdefault(tuple(own), len(owns)))
    actions = list(owns)
    pairs: dict[tuple[int, int], int] = {}
    named = [pairs.setdefault(pair, len(pairs)) for pair in zip(numbers, [*numbers[1:], -1], strict=True)]
    found = []
    for number, after in pairs:
        waits = actions[after] if after >= 0 else ()
        found.append(Batch(actions[number], tuple([edge for kind, chunk, *_ in waits if (edge := needs[kind, chunk])])))
    return _merged(found, named)


def _merged(found: Sequence[Batch], named: Sequence[int]) -> tuple[list[Batch], list[int]]:
    """Equal batches, which differ in what comes behind them but not in what that waits for, as one."""
    distinct: dict[Batch, int] = {}
    same = [distinct.setdefault(batch, len(distinct)) for batch in found]
    return list(distinct), [same[number] for number in named]


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
    numbers: dict[Hashable, int] = {}
    named = np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)
    size = len(named)
    breaks = {}  # by length: items that differ from the one so far in front of them
    for length in sorted({n * unit for n in (1, 2, 3) for unit in (1, group)}):
        if length < size:
            breaks[length] = [*(np.flatnonzero(named[length:] != named[:-length]) + length).tolist(), size]
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < size:
        best = (at, 1, 1)
        for length, ends in breaks.items():
            if at + length >= size:
                break
            repeats = (ends[bisect_left(ends, at + length)] - at) // length
            if repeats > 1 and repeats * length > best[1] * best[2]:
                best = (at, length, repeats)
        found.append(best)
        at += best[1] * best[2]
    return found
