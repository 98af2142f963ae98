"""The caching allocator against cases worked out by hand from PyTorch's rules, and what must hold of any requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.memory.allocator import Allocator, OutOfMemoryError, Settings, rounded, segment_bytes
from sim.memory.allocator_parts import Block

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(("asked", "segment"), [
    (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
    (11 * MIB, 12 * MIB), (100 * MIB + 1, 102 * MIB),
])
def test_segments_are_of_the_sizes_pytorch_asks_for(asked: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(asked)
    assert allocator.reserved == segment == segment_bytes(-(-asked // 512) * 512)
GROWING = Settings(expandable_segments=True)


def test_small_requests_share_a_segment_and_are_rounded_to_512_bytes() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(1) for _ in range(4096)]
    assert (allocator.allocated, allocator.reserved) == (4096 * 512, 2 * MIB)
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB
    assert {b.size for b in blocks} == {512}


def test_a_large_block_keeps_up_to_one_mebibyte_too_much() -> None:
    allocator = Allocator()
    allocator.allocate(11 * MIB)  # in a segment of 12: the rest is no larger than 1 MiB, so it stays
    assert (allocator.allocated, allocator.asked) == (12 * MIB, 11 * MIB)
    allocator.allocate(10 * MIB + 512)
    assert allocator.allocated == 12 * MIB + 10 * MIB + 512  # 1.9995 MiB are split off


def test_the_smallest_block_that_is_large_enough_serves_on_the_same_stream_only() -> None:
    allocator = Allocator()
    large, fitting = allocator.allocate(40 * MIB), allocator.allocate(24 * MIB)
    allocator.free(large)
    allocator.free(fitting)
    assert allocator.allocate(23 * MIB).address == fitting.address
    allocator.allocate(23 * MIB, stream=1)
    assert allocator.reserved == (40 + 24 + 24) * MIB


def test_neighbours_merge_when_both_are_free() -> None:
    allocator = Allocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for part in (parts[1], parts[3], parts[2]):
        allocator.free(part)
    assert allocator.allocate(15 * MIB).address == parts[1].address
    assert allocator.reserved == 20 * MIB


def test_a_full_device_gives_back_whole_segments_and_tries_again() -> None:
    allocator = Allocator(50 * MIB)
    cached, split = allocator.allocate(20 * MIB), allocator.allocate(6 * MIB)
    allocator.free(cached)
    allocator.allocate(24 * MIB)
    assert (allocator.retries, allocator.released, allocator.reserved) == (1, 1, 44 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(12 * MIB)  # 14 MiB are free beside `split`, but that segment is not in one piece
        allocator.allocate(12 * MIB)
    assert not split.free


def test_expandable_segments_grow_where_fixed_ones_leave_holes() -> None:
    fixed, growing = Allocator(), Allocator(settings=GROWING)
    for allocator in (fixed, growing):
        for size in (40, 60, 80):
            allocator.free(allocator.allocate(size * MIB))
    assert (fixed.reserved, growing.reserved) == (180 * MIB, 80 * MIB)


def test_oversize_blocks_are_neither_split_nor_wasted() -> None:
    allocator = Allocator(settings=Settings(max_split_bytes=32 * MIB))
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(16 * MIB)
    assert allocator.reserved == 80 * MIB
    assert allocator.allocate(60 * MIB).size == 64 * MIB
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(40 * MIB)
    assert allocator.reserved == (80 + 100 + 40) * MIB


requests = st.lists(st.tuples(st.integers(1, 30 * MIB), st.integers(0, 2), st.integers(0, 40)), max_size=60)


@settings(max_examples=50, deadline=None)
@given(requests, st.booleans())
def test_blocks_never_overlap_and_reserved_is_never_below_allocated(
        wanted: list[tuple[int, int, int]], expandable: bool) -> None:
    allocator = Allocator(settings=Settings(expandable))
    live: list[Block] = []
    for size, stream, gone in wanted:
        live.append(allocator.allocate(size, stream))
        if gone < len(live):
            allocator.free(live.pop(gone))
        assert allocator.asked <= allocator.allocated <= allocator.reserved
        spans = sorted((b.address, b.address + b.size) for b in live)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        assert sum(b.size for b in live) == allocator.allocated
    for block in live:
        allocator.free(block)
    assert allocator.allocated == allocator.asked == 0
    assert sum(s.size for s in allocator.segments.values()) == allocator.reserved


events = st.lists(st.tuples(st.integers(0, 12), st.one_of(st.just(0), st.integers(1, 30 * MIB))), max_size=80)


@settings(max_examples=50, deadline=None)
@given(events, st.sampled_from([None, 64 * MIB, 200 * MIB]))
def test_a_row_of_events_is_what_single_calls_do(row: list[tuple[int, int]], limit: int | None) -> None:
    named: set[int] = set()
    made: list[tuple[int, int]] = []
    for number, size in row:  # a number is taken again only when its tensor is gone
        if bool(size) != (number in named):
            made.append((number, rounded(size) if size else 0))
            (named.add if size else named.discard)(number)
    one, other = Allocator(limit), Allocator(limit)
    live: dict[int, Block] = {}
    singly: dict[int, Block] = {}
    ends = []
    for allocator in (one, other):
        try:
            if allocator is one:
                allocator.play(live, made)
            else:
                for number, size in made:
                    if size:
                        singly[number] = allocator.allocate(size)
                    else:
                        allocator.free(singly.pop(number))
        except OutOfMemoryError:
            pass
        ends.append((allocator.allocated, allocator.asked, allocator.reserved, allocator.top_allocated,
                     allocator.top_asked, allocator.top_reserved, allocator.retries, allocator.released))
    assert ends[0] == ends[1]
    assert {n: (b.address, b.size) for n, b in live.items()} == {n: (b.address, b.size) for n, b in singly.items()}


class _Plain:
    """PyTorch's rules in the plainest form: each segment a row of (bytes, tensor or None), searched from end to end."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[tuple[int, int | None]]]] = []

    def allocate(self, tensor: int, size: int) -> None:
        small = size <= MIB
        fits = [(part, number, place) for number, (kind, row) in enumerate(self.segments) if kind == small
                for place, (part, owner) in enumerate(row) if owner is None and part >= size]
        if not fits:
            self.segments.append((small, [(segment_bytes(size), None)]))
            fits = [(segment_bytes(size), len(self.segments) - 1, 0)]
        part, number, place = min(fits)  # of equal ones the lowest address
        rest = part - size
        split = rest >= 512 if small else rest > MIB
        self.segments[number][1][place:place + 1] = [(size, tensor), (rest, None)] if split else [(part, tensor)]

    def free(self, tensor: int) -> None:
        for _, row in self.segments:
            row[:] = [(part, None if owner == tensor else owner) for part, owner in row]
            for place in range(len(row) - 1, 0, -1):
                if row[place][1] is row[place - 1][1] is None:
                    row[place - 1:place + 1] = [(row[place - 1][0] + row[place][0], None)]

    def blocks(self) -> list[int]:
        return sorted(part for _, row in self.segments for part, owner in row if owner is None)


@settings(max_examples=50, deadline=None)
@given(events)
def test_the_same_blocks_are_free_as_by_the_plainest_search(row: list[tuple[int, int]]) -> None:
    plain, fast = _Plain(), Allocator()
    live: dict[int, Block] = {}
    for number, size in row:
        if size and number not in live:
            plain.allocate(number, rounded(size))
            fast.play(live, [(number, rounded(size))])
        elif number in live:
            plain.free(number)
            fast.play(live, [(number, 0)])
        assert sorted(block.size for block in fast.cached()) == plain.blocks()
        assert fast.reserved == sum(part for _, cut in plain.segments for part, _ in cut)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60 * MIB)), min_size=1, max_size=60))
def test_events_in_a_row_do_what_one_request_after_another_does(wishes: list[tuple[int, int]]) -> None:
    """Of each wish the tensor goes if it is there, else it comes: `play` against `allocate` and `free`."""
    events, there = [], set()
    for number, size in wishes:
        events.append((number, 0 if number in there else rounded(size)))
        there ^= {number}
    written_out, one_by_one = Allocator(), Allocator()
    live: dict[int, Block] = {}
    other: dict[int, Block] = {}
    written_out.play(live, events)
    for number, size in events:
        if size:
            other[number] = one_by_one.allocate(size)
        else:
            one_by_one.free(other.pop(number))
    assert {n: (b.address, b.size, b.asked) for n, b in live.items()} == {
        n: (b.address, b.size, b.asked) for n, b in other.items()}
    assert [pool for pool in written_out.free_blocks() if pool] == [pool for pool in one_by_one.free_blocks() if pool]
    for name in ("allocated", "asked", "reserved", "top_allocated", "top_asked", "top_reserved"):
        assert getattr(written_out, name) == getattr(one_by_one, name)


def test_oversize_blocks_go_first_and_without_a_retry() -> None:
    """Only as much as is asked for, of the same stream; blocks below the limit stay."""
    allocator = Allocator(200 * MIB, Settings(max_split_bytes=32 * MIB))
    held = [allocator.allocate(size * MIB) for size in (100, 60, 20)]
    for block in held:
        allocator.free(block)
    allocator.allocate(90 * MIB, 1)  # another stream's: nothing of its own to give back
    assert (allocator.retries, allocator.released) == (1, 3)
    allocator = Allocator(200 * MIB, Settings(max_split_bytes=32 * MIB))
    held = [allocator.allocate(size * MIB) for size in (100, 60, 20)]
    for block in held:
        allocator.free(block)
    allocator.allocate(40 * MIB)  # the 60 would waste 20 MiB: it goes, and a new one comes
    assert (allocator.retries, allocator.released, allocator.reserved) == (0, 1, 160 * MIB)
