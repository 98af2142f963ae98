"""Expandable segments: address space that is reserved at once and gets its pages as blocks need them.

Instead of a cudaMalloc per segment, each stream and size class has one range of addresses; pages of 2 MiB (small) or
20 MiB (large) are mapped where nothing fits, behind or between what is in use, and taken away wherever a free block
covers whole ones. Rules: c10/cuda/CUDACachingAllocator.cpp (`get_free_block`, `find_expandable_block`,
`try_allocate_expandable_block`, `map_block`, `unmap_block`, `release_blocks`; note "Expandable Segments"), from memory
of PyTorch 2.1 to 2.6. That mapping pages does not wait for the device, as cudaMalloc does, is not followed: the replay
has no clock (`sim.memory.tensors`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from sim.memory.allocator_parts import SHARED_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, Block, Pool, Segment

#: Address space of a segment: more than any device holds.
SPACE_BYTES = 2**42


class Hole(Block):
    """Addresses without pages behind them. Never `free`, so that no free block merges with it."""

    __slots__ = ()


class Room(NamedTuple):
    """Where a request goes: the first block or hole of it, and the bytes of pages it needs."""

    first: Block
    pages_bytes: int


class Expandable:
    """The growing segments of one allocator.

    Args:
        segments: of the allocator, by number; their sizes are what is mapped.
        opened: makes the segment of a pool, all of it still a hole, and tells its number.
        changed: told of pages that are mapped (positive) or taken away: address, bytes, pool.
    """

    def __init__(self, segments: dict[int, Segment], opened: Callable[[Pool], int],
                 changed: Callable[[int, int, Pool], None]) -> None:
        self._segments, self._opened, self._changed = segments, opened, changed
        self._holes: dict[int, list[Hole]] = {}

    def state(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Where holes are and how large: what answers to come depend on beside the free blocks."""
        return tuple(tuple((hole.address, hole.size) for hole in self._holes[key]) for key in sorted(self._holes))

    def fitting(self, blocks: Sequence[Block], at: int) -> int:
        """Place of the free block to take where the one at `at` is the smallest that suffices: a block that pages can
        be added to counts as large as it can grow, so one that cannot is taken before it (`get_free_block`)."""
        while at + 1 < len(blocks) and _grown(blocks[at + 1]) < _grown(blocks[at]):
            at += 1
        return at

    def room(self, size: int, pool: Pool) -> Room:
        """The first stretch of free blocks and holes that is long enough."""
        for hole in self._of(pool):
            before = hole.previous
            first: Block = before if before is not None and before.free else hole
            covered, pages, at = 0, 0, first
            while covered < size:
                if isinstance(at, Hole):
                    pages += min(at.size, _up(size - covered, _page(pool)))
                covered += at.size
                if at.following is None or not (at.following.free or isinstance(at.following, Hole)):
                    break
                at = at.following
            if covered >= size:
                return Room(first, pages)
        raise AssertionError("a segment's last hole is larger than any request")

    def map(self, first: Block, size: int, pool: Pool) -> Block:
        """One block of at least `size` bytes from `first` on, its holes filled with pages."""
        holes = self._of(pool)
        block = Block(first.address, 0, pool, first.segment)
        block.previous, at = first.previous, first
        while block.size < size:
            if isinstance(at, Hole):
                pages = min(at.size, _up(size - block.size, _page(pool)))
                self._segments[at.segment].size += pages
                self._changed(at.address, pages, pool)
                block.size += pages
                at.address += pages
                at.size -= pages
                if at.size:
                    break
                holes.remove(at)
            else:
                pool.take(at)
                block.size += at.size
            assert at.following is not None
            at = at.following
        if at.free:  # what lies behind pages that filled a hole
            pool.take(at)
            block.size += at.size
            assert at.following is not None
            at = at.following
        block.following, at.previous = at, block
        if block.previous is not None:
            block.previous.following = block
        return block

    def unmap(self, block: Block) -> int:
        """Take away the pages that a free block covers whole; how many bytes they are."""
        pool, page, base = block.pool, _page(block.pool), self._segments[block.segment].address
        begin, end = base + _up(block.address - base, page), base + (block.address + block.size - base) // page * page
        if begin >= end:
            return 0
        pool.take(block)
        hole = Hole(begin, end - begin, pool, block.segment)
        pieces = [Block(at, to - at, pool, block.segment) for at, to in
                  ((block.address, begin), (end, block.address + block.size)) if to > at]
        row = [one for one in (block.previous, *pieces, hole, block.following) if one is not None]
        row.sort(key=lambda one: one.address)
        for one, other in pairwise(row):
            one.following, other.previous = other, one
        if block.previous is None:
            row[0].previous = None
        for piece in pieces:
            piece.free = True
            pool.put(piece)
        self._insert(hole, pool)
        self._segments[block.segment].size -= end - begin
        self._changed(begin, begin - end, pool)
        return end - begin

    def _insert(self, hole: Hole, pool: Pool) -> None:
        """Into the list, joined with the holes beside it."""
        holes = self._of(pool)
        behind, before = hole.following, hole.previous
        if isinstance(behind, Hole):
            holes.remove(behind)
            hole.size += behind.size
            hole.following = behind.following
            if behind.following is not None:
                behind.following.previous = hole
        if isinstance(before, Hole):
            before.size += hole.size
            before.following = hole.following
            if hole.following is not None:
                hole.following.previous = before
        else:
            insort(holes, hole, key=lambda one: one.address)

    def _of(self, pool: Pool) -> list[Hole]:
        key = 2 * pool.stream + pool.small
        if key not in self._holes:
            number = self._opened(pool)
            self._holes[key] = [Hole(self._segments[number].address, SPACE_BYTES, pool, number)]
        return self._holes[key]


def _grown(block: Block) -> int:
    """Bytes a free block can grow to."""
    return block.size + (block.following.size if isinstance(block.following, Hole) else 0)


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else SHARED_SEGMENT_BYTES


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
