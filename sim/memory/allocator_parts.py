"""Blocks, their pools and segments, and the sizes that PyTorch's caching allocator goes by.

Constants: c10/core/AllocatorConfig.h (read in PyTorch 2.6.0).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

#: kMinBlockSize: every request is a multiple of it.
ROUND_BYTES = 512
#: kSmallSize: requests up to it are served from the small pool, from segments of kSmallBuffer.
SMALL_BYTES, SMALL_SEGMENT_BYTES = 2**20, 2 * 2**20
#: kMinLargeAlloc: requests below it share segments of kLargeBuffer; others have their own, a multiple of kRoundLarge.
LARGE_BYTES, SHARED_SEGMENT_BYTES, SEGMENT_ROUND_BYTES = 10 * 2**20, 20 * 2**20, 2 * 2**20

#: A free block is found by one number, its bytes above its address: integers compare several times as fast as tuples.
ADDRESS_BITS = 50


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
        key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def take(self, block: Block) -> None:
        """A free block that is merged or grows."""
        at = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[at], self.blocks[at]


@dataclass(slots=True)
class Segment:
    """What one cudaMalloc gave."""

    address: int
    size: int
    stream: int
    small: bool
