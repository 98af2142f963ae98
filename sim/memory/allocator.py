"""PyTorch's caching allocator for CUDA, replayed: segments, blocks, best fit, split and merge, retries.

Addresses are made up (segments one after another); sizes are bytes. Rules and constants: c10/core/AllocatorConfig.h and
c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_allocation_size`, `get_free_block`, `should_split`,
`try_merge_blocks`, `alloc_block`, `release_available_cached_blocks`, `release_cached_blocks`; read in PyTorch 2.6.0).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: kMinBlockSize: every request is a multiple of it.
ROUND_BYTES = 512
#: kSmallSize: requests up to it are served from the small pool, from segments of kSmallBuffer.
SMALL_BYTES, SMALL_SEGMENT_BYTES = 2**20, 2 * 2**20
#: kMinLargeAlloc: requests below it share segments of kLargeBuffer; others have their own, a multiple of kRoundLarge.
LARGE_BYTES, SHARED_SEGMENT_BYTES, SEGMENT_ROUND_BYTES = 10 * 2**20, 20 * 2**20, 2 * 2**20

#: A free block is found by one number, its bytes above its address: integers compare several times as fast as tuples.
_ADDRESS_BITS = 50
#: Address space of an expandable segment, which grows in place: more than any device holds.
_EXPANDABLE_BYTES = 2**42


class OutOfMemoryError(Exception):
    """The device is full even after every cached block that can be given back has been."""


class Block:
    """A piece of a segment.

    Attributes:
        previous, following: neighbours in the segment.
        pool: list of free blocks it belongs to while free.
        free: whether the cache has it.
        segment: number of its segment.
        asked: bytes of the tensor in it, rounded to `ROUND_BYTES`; the rest of `size` is lost.
    """

    __slots__ = ("address", "asked", "following", "free", "pool", "previous", "segment", "size")

    def __init__(self, address: int, size: int, pool: Pool, segment: int) -> None:
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.previous: Block | None = None
        self.following: Block | None = None
        self.free = False
        self.asked = 0


class Pool:
    """Free blocks of one stream and size class, by bytes and address ascending: the first large enough fits best.

    Attributes:
        keys, blocks: bytes and address in one number, and the block, in the same order.
    """

    __slots__ = ("blocks", "keys", "small", "stream")

    def __init__(self, stream: int, small: bool) -> None:
        self.stream, self.small = stream, small
        self.keys: list[int] = []
        self.blocks: list[Block] = []

    def put(self, block: Block) -> None:
        """A block becomes free."""
        key = block.size << _ADDRESS_BITS | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def take(self, block: Block) -> None:
        """A free block that is merged or grows."""
        at = bisect_left(self.keys, block.size << _ADDRESS_BITS | block.address)
        del self.keys[at], self.blocks[at]


@dataclass(slots=True)
class Segment:
    """What one cudaMalloc gave."""

    address: int
    size: int
    stream: int
    small: bool


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
        expandable: one growing segment per stream and size class, so that free blocks at its end are always of use
            (PYTORCH_CUDA_ALLOC_CONF expandable_segments).
        max_split_bytes: blocks of at least so much are not split (max_split_size_mb); None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable: bool = False,
                 max_split_bytes: int | None = None) -> None:
        self.limit, self.expandable, self.max_split = limit_bytes, expandable, max_split_bytes
        self.allocated = self.reserved = self.top_allocated = self.top_reserved = 0
        self.asked = self.top_asked = 0
        self.retries = self.released = self.released_bytes = 0
        self.segments: dict[int, Segment] = {}
        self._pools: dict[int, Pool] = {}
        self._end = 0
        self._numbers = 0
        self._tails: dict[int, Block] = {}  # expandable: last block of each pool's segment
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
        at = bisect_left(keys, size << _ADDRESS_BITS)
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
        return self.free_blocks(), self.asked, self.allocated

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
        if self.expandable or self.max_split is not None:
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
        find, bits = bisect_left, _ADDRESS_BITS
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
        if self.expandable and block.following is None:
            self._tails[2 * block.pool.stream + block.pool.small] = block
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
        if small or self.expandable:
            return rest >= ROUND_BYTES
        return rest > SMALL_BYTES and (self.max_split is None or size < self.max_split)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool, block.segment)
        rest.previous, rest.following = block, block.following
        if block.following is not None:
            block.following.previous = rest
        block.following, block.size = rest, size
        rest.free = True
        if self.expandable and rest.following is None:
            self._tails[2 * rest.pool.stream + rest.pool.small] = rest
        rest.pool.put(rest)

    def _grow(self, size: int, pool: Pool) -> Block:
        """cudaMalloc, or pages mapped behind an expandable segment."""
        if self.expandable:
            return self._extend(size, pool)
        wanted = segment_bytes(size)
        self._make_room(wanted, size, pool)
        block = Block(self._end, wanted, pool, self._numbers)
        self._new_segment(wanted, pool)
        return block

    def _new_segment(self, size: int, pool: Pool) -> None:
        self.segments[self._numbers] = Segment(self._end, size, pool.stream, pool.small)
        self._numbers += 1
        self._end += _EXPANDABLE_BYTES if self.expandable else size
        self._reserve(size)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        if self.reserved > self.top_reserved:
            self.top_reserved = self.reserved

    def _extend(self, size: int, pool: Pool) -> Block:
        page = SMALL_SEGMENT_BYTES if pool.small else SHARED_SEGMENT_BYTES
        tail = self._tails.get(2 * pool.stream + pool.small)
        have = tail.size if tail is not None and tail.free else 0
        more = -(-(size - have) // page) * page
        self._make_room(more, size, pool)
        if tail is None:
            block = Block(self._end, more, pool, self._numbers)
            self._new_segment(more, pool)
        elif tail.free:
            tail.pool.take(tail)
            tail.size, tail.free, block = tail.size + more, False, tail
        else:
            block = Block(tail.address + tail.size, more, pool, tail.segment)
            block.previous, tail.following = tail, block
        if tail is not None:
            self.segments[tail.segment].size += more
            self._reserve(more)
        self._tails[2 * pool.stream + pool.small] = block
        return block

    def _make_room(self, wanted: int, size: int, pool: Pool) -> None:
        if self.limit is None or self.reserved + wanted <= self.limit:
            return
        if (self.max_split is not None and not self.expandable and self._release_oversize(size, pool, self.max_split)
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
        at = bisect_left(pool.keys, wanted << _ADDRESS_BITS)
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
        """Give back a cached segment, if the block is all of one."""
        if block.previous is None and block.following is None:
            block.pool.take(block)
            self.reserved -= block.size
            self.released += 1
            self.released_bytes += block.size
            del self.segments[block.segment]
            self._tails.pop(2 * block.pool.stream + block.pool.small, None)


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
