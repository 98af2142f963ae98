"""The allocator without limit, pool by pool, against the one that knows everything, and cases worked out by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.memory.allocator import Allocator, rounded
from sim.memory.allocator_parts import ROUND_BYTES, Block
from sim.memory.pools import Held, Pools

MIB = 2**20

#: Sizes around the rules' edges come up often, and so do equal ones.
sizes = st.one_of(st.sampled_from([512, 4096, MIB, MIB + 512, 2 * MIB, 10 * MIB - 512, 10 * MIB, 11 * MIB, 19 * MIB]),
                  st.integers(1, 40 * MIB))


def free_sizes(pools: Pools) -> list[int]:
    _, free = pools.state()  # type: ignore[misc]
    return sorted(size * ROUND_BYTES for pool in free for _, size in pool)


def held(pools: Pools, allocator: Allocator) -> None:
    """Both are in the same state."""
    assert (pools.asked, pools.top_asked, pools.reserved) == (allocator.asked, allocator.top_asked, allocator.reserved)
    assert free_sizes(pools) == sorted(block.size for block in allocator.cached())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(sizes, st.integers(0, 2), st.integers(0, 30), st.booleans()), max_size=80))
def test_single_requests_get_the_same_answers(wishes: list[tuple[int, int, int, bool]]) -> None:
    pools, allocator = Pools(), Allocator()
    live: list[tuple[Held, Block]] = []
    for size, stream, gone, dropped in wishes:
        live.append((pools.allocate(size, stream), allocator.allocate(size, stream)))
        if gone < len(live):
            one, other = live.pop(gone)
            if dropped:
                pools.drop(one)
                allocator.drop(other)
                held(pools, allocator)
            pools.free(one)
            allocator.free(other)
        held(pools, allocator)
    for one, other in live:
        pools.free(one)
        allocator.free(other)
    held(pools, allocator)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 9), sizes), max_size=25), min_size=1, max_size=4), st.integers(1, 4))
def test_rows_of_events_get_the_same_answers_however_often_they_come(rows: list[list[tuple[int, int]]],
                                                                     repeats: int) -> None:
    """Of each wish the tensor goes if it is there, else it comes; tensors live on from row to row."""
    pools, allocator = Pools(), Allocator()
    live: dict[int, Held] = {}
    other: dict[int, Block] = {}
    made = []
    for row in rows:
        there: set[int] = set()
        events = []
        for number, size in row:
            events.append((number, 0 if number in there else rounded(size)))
            there ^= {number}
        made.append([*((number, 0) for number in range(10)), *events])
    for events in made * repeats:
        pools.play(live, events)
        allocator.play(other, events)
        held(pools, allocator)
        assert {n: block.asked for n, block in live.items()} == {n: block.asked for n, block in other.items()}


def test_what_passes_takes_a_segment_once_and_leaves_it_whole() -> None:
    pools = Pools()
    for _ in range(3):
        pools.play({}, [(0, 30 * MIB), (0, 0), (1, 20 * MIB), (2, 512), (1, 0), (2, 0)])
    assert (pools.reserved, pools.asked, pools.top_asked) == (32 * MIB, 0, 30 * MIB)
    assert free_sizes(pools) == [2 * MIB, 30 * MIB]


def test_a_tensor_that_stays_is_freed_where_it_came_from() -> None:
    """The first of two tensors stays, is handed over under another number, and goes in a later row."""
    pools = Pools()
    live: dict[int, Held] = {}
    pools.play(live, [(0, 6 * MIB), (1, 6 * MIB), (1, 0)])
    assert set(live) == {0}
    assert free_sizes(pools) == [14 * MIB]
    pools.play(later := {7: live.pop(0)}, [(3, 14 * MIB), (7, 0), (3, 0)])
    assert not later
    assert (pools.reserved, free_sizes(pools)) == (20 * MIB, [20 * MIB])
