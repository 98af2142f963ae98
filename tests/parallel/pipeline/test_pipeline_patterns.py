"""Patterns of an order list against the list itself, written out action by action."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.parallel.pipeline.orders import Action, Costs, order, places
from sim.parallel.pipeline.patterns import NOTHING, Habits, Schedule, fold, rows
from sim.parallel.pipeline.transfers import Transfers


def longest_from(items: list[int], at: int, lengths: list[int]) -> tuple[int, int, int]:
    """The pattern that covers most from `at` on, counted repeat by repeat."""
    best = (at, 1, 1)
    for length in lengths:
        repeats = 1
        while items[at + repeats * length:at + (repeats + 1) * length] == items[at:at + length]:
            repeats += 1
        if repeats > 1 and len(items[at:at + length]) == length and repeats * length > best[1] * best[2]:
            best = (at, length, repeats)
    return best


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 6)), max_size=6),
       st.integers(1, 6))
def test_patterns_cover_most_from_where_they_begin(parts: list[tuple[list[int], int]], group: int) -> None:
    items = [item for some, times in parts for item in some * times]
    lengths = sorted({n * unit for n in (1, 2, 3) for unit in (1, group)})
    found = fold(items, group)
    at = 0
    for begin, length, repeats in found:
        assert (begin, length, repeats) == longest_from(items, at, lengths)
        at += length * repeats
    assert at == len(items)


@pytest.mark.parametrize(("name", "virtual", "pairs"), [
    ("1f1b", 1, False), ("gpipe", 1, True), ("interleaved", 3, True), ("interleaved", 2, False), ("zb-h1", 1, False),
    ("zb-v", 2, True), ("dualpipe", 2, True)])
@pytest.mark.parametrize("firsts", [False, True])
def test_rows_say_what_the_order_list_says(name: str, virtual: int, pairs: bool, firsts: bool) -> None:
    schedule = Schedule(name, 4, virtual, 16, Costs(1.0, 1.0, 1.0), 1.0)
    last = "W" if name in ("zb-h1", "zb-v", "dualpipe") else "B"
    moves = Transfers(places(name, 4, virtual))
    for rank, (row, actions) in enumerate(zip(rows(schedule, Habits(pairs, firsts)), order(*schedule), strict=True)):
        final = {a.chunk: a.micro for a in actions if a.kind == last}
        written = [batch for pattern in row.patterns for batch in pattern.batches * pattern.repeats]
        assert [own for batch in written for own in batch.actions] == [
            (a.kind, a.chunk, firsts and a.micro == 0 and a.kind != "F", a.kind == last and a.micro == final[a.chunk],
             NOTHING) for a in actions]
        awaited = [row.first, *(batch.needs for batch in written)]
        for batch, needs in zip(written, awaited, strict=False):
            asked = [moves.needed(rank, Action(kind, chunk, 0)) for kind, chunk, *_ in batch.actions]
            assert needs == tuple(edge for edge in asked if edge is not None)
        assert awaited[-1] == ()
        numbers = {pattern.number: pattern.batches for pattern in row.patterns}
        assert all(numbers[pattern.number] == pattern.batches for pattern in row.patterns)
        assert len(set(numbers.values())) == len(numbers)
