"""Segments that grow by pages: holes, pages and blocks stay consistent, and what is wasted is worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.memory.allocator import Allocator, OutOfMemoryError, Settings
from sim.memory.allocator_parts import Block
from sim.memory.expandable import Hole

MIB = 2**20
PAGE = 20 * MIB
GROWING = Settings(expandable_segments=True)


def allocator(limit: int | None = None) -> Allocator:
    return Allocator(limit, GROWING)


def test_pages_are_mapped_as_needed_and_blocks_split_to_the_byte() -> None:
    one = allocator()
    first = one.allocate(30 * MIB)
    assert (first.size, one.reserved) == (30 * MIB, 2 * PAGE)
    second = one.allocate(15 * MIB)  # 10 MiB are left of the second page: one more, behind them
    assert (second.address, second.size, one.reserved) == (first.address + first.size, 15 * MIB, 3 * PAGE)
    assert one.allocate(512).pool.small and one.reserved == 3 * PAGE + 2 * MIB


def test_a_larger_request_grows_over_the_free_end() -> None:
    """Where fixed segments would keep 40 MiB and take 100 more."""
    one = allocator()
    one.free(one.allocate(40 * MIB))
    block = one.allocate(100 * MIB)
    assert (block.size, one.reserved, one.allocated) == (100 * MIB, 100 * MIB, 100 * MIB)


def test_pages_inside_a_segment_are_given_back_and_their_addresses_used_again() -> None:
    one = allocator(200 * MIB)
    low, middle, high = (one.allocate(60 * MIB) for _ in range(3))
    one.free(middle)
    far = one.allocate(80 * MIB)  # 180 of 200 MiB are reserved, 60 of them free: given back, then 80 at the end
    assert (one.retries, one.released_bytes, one.reserved) == (1, 60 * MIB, 200 * MIB)
    assert far.address == high.address + high.size
    one.free(high)
    one.free(far)
    one.free(low)
    assert one.allocated == 0
    again = one.allocate(200 * MIB)  # from the first address on, over the hole where `middle` was
    assert again.address == low.address and one.reserved == 200 * MIB


def test_a_free_block_gives_back_whole_pages_only() -> None:
    one = allocator(60 * MIB)
    kept = one.allocate(15 * MIB)
    one.free(one.allocate(40 * MIB))  # 15..55 of 60 MiB mapped; pages 20..40 and 40..60 are free whole
    small = one.allocate(30 * MIB)
    assert small.address == kept.address + kept.size and one.retries == 0
    with pytest.raises(OutOfMemoryError):
        one.allocate(50 * MIB)  # page 40..60 is given back, page 20..40 is in use by `small`
    assert one.retries == 1 and one.reserved == 60 * MIB  # 15..45 is in use: three pages


def test_a_block_that_cannot_grow_is_taken_before_one_that_can() -> None:
    """`get_free_block`: the free end of a segment counts as large as its address space."""
    one = allocator()
    hole, kept = one.allocate(50 * MIB), one.allocate(10 * MIB)
    one.free(one.allocate(45 * MIB))
    one.free(hole)
    assert one.allocate(42 * MIB).address == hole.address  # though 45 MiB at the end fit closer
    assert not kept.free


def test_streams_do_not_share_pages() -> None:
    one = allocator()
    one.free(one.allocate(40 * MIB, 0))
    one.allocate(40 * MIB, 1)
    assert one.reserved == 80 * MIB


requests = st.lists(st.tuples(st.one_of(st.integers(1, 3 * MIB), st.integers(1, 90 * MIB)), st.integers(0, 1),
                              st.lists(st.integers(0, 40), max_size=3)), max_size=60)


@settings(max_examples=80, deadline=None)
@given(requests, st.sampled_from([None, 100 * MIB, 400 * MIB]))
def test_blocks_and_holes_tile_each_segment(wanted: list[tuple[int, int, list[int]]], limit: int | None) -> None:
    one = allocator(limit)
    live: list[Block] = []
    for size, stream, gone in wanted:
        try:
            live.append(one.allocate(size, stream))
        except OutOfMemoryError:
            assert limit is not None and one.reserved + 2 * size + PAGE > limit - len(live) * PAGE
        for place in gone:
            if place < len(live):
                one.free(live.pop(place))
        _check(one, live, limit)
    for block in live:
        one.free(block)
    for block in one.cached():
        one._release(block)
    assert one.reserved == one.allocated == 0


def _check(one: Allocator, live: list[Block], limit: int | None) -> None:
    assert one.allocated <= one.reserved <= (limit or one.reserved) and one.allocated == sum(b.size for b in live)
    chains: dict[int, Block] = {}
    for block in [*live, *one.cached()]:
        while block.previous is not None:
            block = block.previous
        assert chains.setdefault(block.segment, block) is block
    mapped = 0
    for number, first in chains.items():
        row = [first]
        while row[-1].following is not None:
            row.append(row[-1].following)
        segment = one.segments[number]
        page = (2 if segment.small else 20) * MIB
        assert row[0].address == segment.address and isinstance(row[-1], Hole)
        for left, right in pairwise(row):
            assert left.address + left.size == right.address and right.previous is left
            assert not (left.free and right.free) and not (isinstance(left, Hole) and isinstance(right, Hole))
        holes = [block for block in row if isinstance(block, Hole)]
        assert all((hole.address - segment.address) % page == 0 and hole.size > 0 for hole in holes)
        pages = sum(block.size for block in row if not isinstance(block, Hole))
        assert pages == segment.size and pages % page == 0
        mapped += pages
    assert mapped == one.reserved
