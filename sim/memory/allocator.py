"""PyTorch's caching allocator for CUDA, replayed: segments, blocks, best fit, split and merge, retries.

Addresses are made up (segments one after another); sizes are bytes. Rules and constants: c10/core/AllocatorConfig.h and
c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_allocation_size`, `get_free_block`, `should_split`,
`try_merge_blocks`, `alloc_block`, `release_available_cached_blocks`, `release_cached_blocks`; read in PyTorch 2.6.0).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.memory.allocator_parts import (
    ADDRESS_BITS,
    LARGE_BYTES,
    ROUND_BYTES,
    SEGMENT_ROUND_BYTES,
    SHARED_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    Pool,
    Segment,
)
from sim.memory.expandable import SPACE_BYTES, Expandable


class OutOfMemoryError(Exception):
    """The device is full even after every cached block that can be given back has been."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What PYTORCH_CUDA_ALLOC_CONF asks for.

    Attributes:
        expandable_segments: see `sim.memory.expandable`.
        max_split_bytes: blocks of at least so much are not split (max_split_size_mb); None for no limit.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None


#: PyTorch's defaults.
PLAIN = Settings()


class Allocator:
    """One device's allocator.

    Attributes:
        allocated, reserved: bytes of blocks in use and of segments, now; `top_allocated`, `top_reserved`: highest.
        asked, top_asked: bytes of tensors, which blocks may exceed.
        retries: times that cached blocks had to be given back before cudaMalloc succeeded; `released`: segments given
            back so, `released_bytes` what they held.
        segments: by number.

    Args:
        limit_bytes: what cudaMalloc can give; None for no limit.
        settings: what differs from PyTorch's defaults.
    """

    def __init__(self, limit_bytes: int | None = None, settings: Settings = PLAIN) -> None:
        self.limit, self.settings, self.max_split = limit_bytes, settings, settings.max_split_bytes
        self.allocated = self.reserved = self.top_allocated = self.top_reserved = 0
        self.asked = self.top_asked = 0
        self.retries = self.released = self.released_bytes = 0
        self.segments: dict[int, Segment] = {}
        self._pools: dict[int, Pool] = {}
        self._end = 0
        self._numbers = 0
        self._growing = (Expandable(self.segments, self._new_space, self._remapped) if settings.expandable_segments
                         else None)
        #: Frees what waits for another stream: `release_cached_blocks` waits for those events first.
        self.settle: Callable[[], None] = lambda: None

    def allocate(self, size: int, stream: int = 0) -> Block:
        """A block of at least `size` bytes.

        Raises:
            OutOfMemoryError: cudaMalloc fails, and fails again after cached segments are given back.
        """
        size = -(-size // ROUND_BYTES) * ROUND_BYTES or ROUND_BYTES
        small = size <= SMALL_BYTES
        key = 2 * stream + small
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(stream, small)
        keys = pool.keys
        at = bisect_left(keys, size << ADDRESS_BITS)
        if self._growing is not None:
            at = self._growing.fitting(pool.blocks, at)
        if at < len(keys) and (self.max_split is None or not self._unfit(size, pool.blocks[at].size)):
            del keys[at]
            block = pool.blocks.pop(at)
            block.free = False
        else:
            block = self._grow(size, pool)
        rest = block.size - size
        if rest and self._splits(size, rest, small):
            self._split(block, size)
        block.asked = size
        allocated = self.allocated = self.allocated + block.size
        asked = self.asked = self.asked + size
        if asked > self.top_asked:
            self.top_asked = asked
        if allocated > self.top_allocated:
            self.top_allocated = allocated
        return block

    def state(self) -> object:
        """What all answers to come depend on, beside the blocks in use, and the level."""
        holes = () if self._growing is None else self._growing.state()
        return self.free_blocks(), self.asked, self.allocated, holes

    def free_blocks(self) -> tuple[tuple[int, ...], ...]:
        """What the cache has, by stream and size class: as long as it is the same, and tensors lie where they lay, the
        same requests get the same answers."""
        return tuple(tuple(self._pools[key].keys) for key in sorted(self._pools))

    def play(self, live: dict[int, Block], events: Sequence[tuple[int, int]]) -> None:
        """Tensors that come and go in order on the first stream: `allocate` and `free`, written out for speed.

        Args:
            live: blocks by the tensor's number; changed in place.
            events: (number, bytes as `rounded` makes them); 0 bytes frees the tensor, if it is there.
        """
        if self.settings != PLAIN:
            for number, size in events:
                if size:
                    live[number] = self.allocate(size)
                elif number in live:
                    self.free(live.pop(number))
            return
        counts = [self.allocated, self.asked, self.top_allocated, self.top_asked]
        try:
            self._play(live, events, counts)
        finally:
            self.allocated, self.asked, self.top_allocated, self.top_asked = counts

    def _play(self, live: dict[int, Block], events: Sequence[tuple[int, int]], counts: list[int]) -> None:
        pools = [self._pools.setdefault(key, Pool(0, bool(key))) for key in (0, 1)]
        allocated, asked, top_allocated, top_asked = counts
        find, bits = bisect_left, ADDRESS_BITS
        for number, size in events:
            if size:
                pool = pools[size <= SMALL_BYTES]
                keys = pool.keys
                at = find(keys, size << bits)
                if at < len(keys):
                    del keys[at]
                    block = pool.blocks.pop(at)
                    block.free = False
                else:
                    counts[:] = allocated, asked, top_allocated, top_asked
                    self.allocated, self.asked = allocated, asked
                    block = self._grow(size, pool)
                    allocated, asked = self.allocated, self.asked
                rest = block.size - size
                if rest > SMALL_BYTES or (rest and size <= SMALL_BYTES):
                    address, behind = block.address + size, block.following
                    other = Block(address, rest, pool, block.segment)
                    other.previous, other.following, other.free = block, behind, True
                    if behind is not None:
                        behind.previous = other
                    block.following, block.size = other, size
                    key = rest << bits | address
                    at = find(keys, key)
                    keys.insert(at, key)
                    pool.blocks.insert(at, other)
                    allocated += size
                else:
                    allocated += size + rest
                block.asked = size
                asked += size
                if asked > top_asked:
                    top_asked = asked
                if allocated > top_allocated:
                    top_allocated = allocated
                live[number] = block
            elif number in live:
                block = live.pop(number)
                size = block.size
                allocated -= size
                asked -= block.asked
                pool = block.pool
                keys, blocks = pool.keys, pool.blocks
                before, behind = block.previous, block.following
                if before is not None and before.free:
                    at = find(keys, before.size << bits | before.address)
                    del keys[at], blocks[at]
                    size += before.size
                    before.following = behind
                    if behind is not None:
                        behind.previous = before
                    block = before
                if behind is not None and behind.free:
                    at = find(keys, behind.size << bits | behind.address)
                    del keys[at], blocks[at]
                    size += behind.size
                    after = block.following = behind.following
                    if after is not None:
                        after.previous = block
                block.free, block.size = True, size
                key = size << bits | block.address
                at = find(keys, key)
                keys.insert(at, key)
                blocks.insert(at, block)
        counts[:] = allocated, asked, top_allocated, top_asked

    def drop(self, block: Block) -> None:
        """The tensor is gone, but another stream may still use its block, which is freed later (record_stream)."""
        self.asked -= block.asked
        block.asked = 0

    def free(self, block: Block) -> None:
        """Back into the cache, merged with free neighbours."""
        self.allocated -= block.size
        self.asked -= block.asked
        before, behind = block.previous, block.following
        if before is not None and before.free:
            before.pool.take(before)
            before.size += block.size
            before.following = behind
            if behind is not None:
                behind.previous = before
            block = before
        if behind is not None and behind.free:
            behind.pool.take(behind)
            block.size += behind.size
            block.following = behind.following
            if behind.following is not None:
                behind.following.previous = block
        block.free = True
        block.pool.put(block)

    def cached(self) -> list[Block]:
        """Free blocks, pool by pool, the smallest first."""
        return [block for pool in self._pools.values() for block in pool.blocks]

    # ------------------------------------------------------------------------------------------------- the rules
    def _unfit(self, size: int, found: int) -> bool:
        """Oversize blocks serve oversize requests only, with little waste (`get_free_block`)."""
        limit = self.max_split
        if limit is None:
            return False
        return (size < limit <= found) or (size >= limit and found >= size + SHARED_SEGMENT_BYTES)

    def _splits(self, size: int, rest: int, small: bool) -> bool:
        if small or self._growing is not None:
            return rest >= ROUND_BYTES
        return rest > SMALL_BYTES and (self.max_split is None or size < self.max_split)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool, block.segment)
        rest.previous, rest.following = block, block.following
        if block.following is not None:
            block.following.previous = rest
        block.following, block.size = rest, size
        rest.free = True
        rest.pool.put(rest)

    def _grow(self, size: int, pool: Pool) -> Block:
        """cudaMalloc, or pages mapped into an expandable segment."""
        if self._growing is not None:
            return self._extend(size, pool, self._growing)
        wanted = segment_bytes(size)
        self._make_room(wanted, size, pool)
        block = Block(self._end, wanted, pool, self._numbers)
        self._new_segment(wanted, pool)
        return block

    def _new_segment(self, size: int, pool: Pool) -> None:
        self.segments[self._numbers] = Segment(self._end, size, pool.stream, pool.small)
        self._numbers += 1
        self._end += size
        self._reserve(size)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        if self.reserved > self.top_reserved:
            self.top_reserved = self.reserved

    def _extend(self, size: int, pool: Pool, growing: Expandable) -> Block:
        room = growing.room(size, pool)
        self._make_room(room.pages_bytes, size, pool)
        room = growing.room(size, pool)  # what was given back may have been a part of it
        if self.limit is not None and self.reserved + room.pages_bytes > self.limit:
            raise OutOfMemoryError(f"{room.pages_bytes:,} bytes of pages asked for")
        block = growing.map(room.first, size, pool)
        block.free = False
        return block

    def _new_space(self, pool: Pool) -> int:
        """An expandable segment without any pages."""
        self.segments[self._numbers] = Segment(self._end, 0, pool.stream, pool.small)
        self._numbers += 1
        self._end += SPACE_BYTES
        return self._numbers - 1

    def _remapped(self, address: int, size: int, pool: Pool) -> None:
        """Pages came (positive) or went."""
        if size > 0:
            self._reserve(size)
        else:
            self.reserved += size
            self.released += 1
            self.released_bytes -= size

    def _make_room(self, wanted: int, size: int, pool: Pool) -> None:
        if self.limit is None or self.reserved + wanted <= self.limit:
            return
        if (self.max_split is not None and self._growing is None and self._release_oversize(size, pool, self.max_split)
                and self.reserved + wanted <= self.limit):
            return
        self.retries += 1
        self.settle()
        for block in self.cached():
            self._release(block)
        if self.reserved + wanted > self.limit:
            raise OutOfMemoryError(f"{wanted:,} bytes asked for, {self.limit - self.reserved:,} left")

    def _release_oversize(self, size: int, pool: Pool, least: int) -> bool:
        """Give back the smallest oversize block of the stream that is as large as what is asked for, or the largest
        ones until they are together; no event is waited for, and it does not count as a retry
        (`release_available_cached_blocks`)."""
        wanted, given = max(size, least), 0
        at = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if at < len(pool.blocks):
            self._release(pool.blocks[at])
            return True
        for block in reversed(pool.blocks.copy()):
            if given >= wanted or block.size < least:
                break
            given += block.size
            self._release(block)
        return given >= wanted

    def _release(self, block: Block) -> None:
        """Give back a cached segment, if the block is all of one, or the pages it covers of one that can shrink."""
        if self._growing is not None:
            self._growing.unmap(block)
        elif block.previous is None and block.following is None:
            block.pool.take(block)
            self.reserved -= block.size
            self.released += 1
            self.released_bytes += block.size
            del self.segments[block.segment]


def rounded(size: int) -> int:
    """Bytes of the block that a request for `size` is looked for with (`round_size`)."""
    return -(-size // ROUND_BYTES) * ROUND_BYTES or ROUND_BYTES


def segment_bytes(size: int) -> int:
    """What is asked of cudaMalloc for a request that no cached block serves."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < LARGE_BYTES:
        return SHARED_SEGMENT_BYTES
    return -(-size // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES
