"""The caching allocator on a device without limit: the same answers as `sim.memory.allocator`, in less time.

Nothing is ever given back there, so pools (one per stream and size class) have nothing to do with one another: each
plays its own requests, and tensors that only one layer's pass knows of need no objects. Free blocks are kept by size:
most requests find one of their own size, and the rest search a short list of sizes. Bytes and addresses are counted in
units of `ROUND_BYTES`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from sim.memory.allocator import rounded, segment_bytes
from sim.memory.allocator_parts import ROUND_BYTES, SMALL_BYTES

#: What is left of a large block without being split off, at most (`should_split`).
_SLACK = SMALL_BYTES // ROUND_BYTES
#: Between segments, so that blocks of two of them never look like neighbours.
_GAP = 1
#: Addresses of one pool, so that a block's address tells its pool.
_SPACE = 2**36

#: Slot of a tensor, and its size where it comes, less than 0 where it goes; `_PASSING` for one that comes and goes at
#: once, which leaves everything as it was unless there is no room for it.
_Row = tuple[int, int]
_PASSING = -1
#: Address and size of all free blocks of a pool.
State = frozenset[tuple[int, int]]


class Held:
    """A tensor's block.

    Attributes:
        address: of the block.
        units: of the tensor.
        asked: bytes of the tensor; 0 once it is dropped.
        pool: whose block it is.
    """

    __slots__ = ("address", "asked", "pool", "units")

    def __init__(self, address: int, units: int, pool: Pool) -> None:
        self.address, self.units, self.pool = address, units, pool
        self.asked = units * ROUND_BYTES


class Pool:
    """Blocks of one stream and size class.

    Attributes:
        reserved: bytes of its segments.
    """

    __slots__ = ("_end", "_ends", "_larger", "_rows", "_sizes", "_slack", "_starts", "_state", "reserved")

    def __init__(self, number: int, small: bool) -> None:
        self.reserved = 0
        self._slack = 0 if small else _SLACK
        self._end = number * _SPACE
        self._starts: dict[int, int] = {}  # of free blocks: size by address
        self._ends: dict[int, int] = {}  # and address by end
        self._rows: dict[int, list[int]] = {}  # and addresses by size, ascending
        self._sizes: list[int] = []  # keys of `_rows`, ascending; a row may be empty
        self._larger: dict[int, int] = {}  # by address: sizes of blocks in use that are larger than their tensors
        self._state: State | None = None

    def state(self) -> State:
        """Address and size of all free blocks."""
        if self._state is None:
            self._state = frozenset(self._starts.items())
        return self._state

    def play(self, slots: list[int], rows: Sequence[_Row]) -> None:
        """Tensors come and go.

        Args:
            slots: addresses of the tensors, in the places that rows name; changed in place.
        """
        self._state = None
        starts, ends, by_size, larger = self._starts, self._ends, self._rows, self._larger
        sizes, slack, find = self._sizes, self._slack, bisect_left
        for slot, size in rows:
            if size > 0:
                row = by_size.get(size)
                if row:
                    if slot == _PASSING:
                        continue
                    address = slots[slot] = row.pop(0)
                    del starts[address], ends[address + size]
                    continue
                if slot == _PASSING:
                    while sizes and not by_size[sizes[-1]]:
                        del by_size[sizes.pop()]
                    if sizes and sizes[-1] > size:
                        continue
                    size, address = self._grow(size)
                    end = address + size
                else:
                    found, address = self._larger_block(size)
                    slots[slot] = address
                    rest = found - size
                    if rest <= slack:
                        del ends[address + found]
                        larger[address] = found
                        continue
                    address, end, size = address + size, address + found, rest
            else:
                address = slots[slot]
                end = address - size if address not in larger else address + larger.pop(address)
                if end in starts:
                    other = starts.pop(end)
                    row = by_size[other]
                    del row[find(row, end)]
                    end += other
                if address in ends:
                    before = ends.pop(address)
                    row = by_size[address - before]
                    del row[find(row, before)]
                    address = before
                size = end - address
            starts[address] = size
            ends[end] = address
            row = by_size.get(size)
            if row is None:
                by_size[size] = [address]
                insort(sizes, size)
            else:
                insort(row, address)

    def _larger_block(self, size: int) -> tuple[int, int]:
        """Size and address of the block that fits best, none being just as large; taken out by all but its end."""
        sizes, by_size = self._sizes, self._rows
        at = bisect_left(sizes, size)
        while at < len(sizes):
            row = by_size[sizes[at]]
            if row:
                address = row.pop(0)
                del self._starts[address]
                return sizes[at], address
            del by_size[sizes[at]], sizes[at]
        found, address = self._grow(size)
        self._ends[address + found] = address
        return found, address

    def _grow(self, size: int) -> tuple[int, int]:
        """Size and address of a new segment."""
        grown = segment_bytes(size * ROUND_BYTES)
        self.reserved += grown
        address, found = self._end, grown // ROUND_BYTES
        self._end = address + found + _GAP
        return found, address


class _Plan(NamedTuple):
    """A row of events, pool by pool.

    Attributes:
        rows: per pool: its events, and the states in which it was found to be left as it was by them (None where a
            tensor from outside goes, or one stays).
        slots: how many there are.
        taken: slots of tensors that were there before, and their numbers; made: slot, number, size and pool of those
            that stay.
        rise, net: bytes asked for at most, and in the end, above the beginning.
    """

    rows: tuple[tuple[Pool, list[_Row], set[State] | None], ...]
    slots: int
    taken: tuple[tuple[int, int], ...]
    made: tuple[tuple[int, int, int, Pool], ...]
    rise: int
    net: int


class Pools:
    """The allocator's state; see `sim.memory.allocator.Allocator`, whose names these are.

    Attributes:
        asked: bytes of tensors, each rounded to `ROUND_BYTES`, now; `top_asked`: at most.
    """

    def __init__(self) -> None:
        self.asked = self.top_asked = 0
        self._pools: dict[int, Pool] = {}
        self._single: dict[tuple[int, int], tuple[int, Pool, tuple[_Row, ...]]] = {}  # a tensor alone, by bytes, stream
        # Plans of a row of events, by the blocks that it takes over; the row lives as long, so that its id is its own.
        self._plans: dict[int, tuple[Sequence[tuple[int, int]], list[int], dict[object, _Plan]]] = {}

    @property
    def reserved(self) -> int:
        """Bytes of segments."""
        return sum(pool.reserved for pool in self._pools.values())

    def allocate(self, size: int, stream: int = 0) -> Held:
        """A block of at least `size` bytes."""
        known = self._single.get((size, stream))
        if known is None:
            asked = rounded(size)
            known = self._single[size, stream] = (asked, self._pool(stream, asked), ((0, asked // ROUND_BYTES),))
        asked, pool, rows = known
        slot = [0]
        pool.play(slot, rows)
        self.asked += asked
        if self.asked > self.top_asked:
            self.top_asked = self.asked
        return Held(slot[0], rows[0][1], pool)

    def drop(self, block: Held) -> None:
        """The tensor is gone, but another stream may still use its block, which is freed later (record_stream)."""
        self.asked -= block.asked
        block.asked = 0

    def free(self, block: Held) -> None:
        """Back into the cache, merged with free neighbours."""
        self.asked -= block.asked
        block.pool.play([block.address], ((0, -block.units),))

    def state(self) -> object:
        """What all answers to come depend on, beside the blocks in use, and the level."""
        return self.asked, tuple([pool.state() for pool in self._pools.values()])

    def play(self, live: dict[int, Held], events: Sequence[tuple[int, int]]) -> None:
        """Tensors that come and go in order on the first stream.

        Args:
            live: blocks by the tensor's number; changed in place.
            events: (number, bytes as `rounded` makes them); 0 bytes frees the tensor, if it is there. Not
                changed after.
        """
        known = self._plans.get(id(events))
        if known is None:
            known = self._plans[id(events)] = (events, _from_outside(events), {})
        _, outside, plans = known
        there = [live.get(number) for number in outside]
        kind = tuple([(block.units, block.pool) if block is not None else None for block in there])
        plan = plans.get(kind)
        if plan is None:
            plan = plans[kind] = self._planned(events, dict(zip(outside, there, strict=True)))
        slots = [0] * plan.slots
        for slot, number in plan.taken:
            slots[slot] = live.pop(number).address
        for pool, rows, idle in plan.rows:
            if idle is None:
                pool.play(slots, rows)
            elif (before := pool.state()) not in idle:
                pool.play(slots, rows)
                if before == pool.state():
                    idle.add(before)
        for slot, number, size, pool in plan.made:
            live[number] = Held(slots[slot], size, pool)
        if self.asked + plan.rise > self.top_asked:
            self.top_asked = self.asked + plan.rise
        self.asked += plan.net

    def _pool(self, stream: int, size: int) -> Pool:
        small = size <= SMALL_BYTES
        key = 2 * stream + small
        found = self._pools.get(key)
        if found is None:
            found = self._pools[key] = Pool(len(self._pools), small)
        return found

    def _planned(self, events: Sequence[tuple[int, int]], outside: dict[int, Held | None]) -> _Plan:
        """Events told apart by pool. A number that is used again is another tensor."""
        now: dict[int, tuple[int, int, Pool, bool]] = {}  # by number: slot, size, pool, whether it was there before
        taken = []
        for number, block in outside.items():
            if block is not None:
                taken.append((len(now), number))
                now[number] = (len(now), block.units, block.pool, True)
        slots, level, rise = len(now), 0, 0
        rows: dict[Pool, list[_Row]] = {}
        changed = set()
        for number, size in events:
            if size:
                pool, units = self._pool(0, size), size // ROUND_BYTES
                now[number] = (slots, units, pool, False)
                rows.setdefault(pool, []).append((slots, units))
                slots, level = slots + 1, level + size
                rise = max(rise, level)
            elif number in now:
                slot, units, pool, before = now.pop(number)
                rows.setdefault(pool, []).append((slot, -units))
                level -= units * ROUND_BYTES
                if before:
                    changed.add(pool)
        made = tuple((slot, number, units, pool) for number, (slot, units, pool, _) in now.items())
        changed |= {pool for _, _, _, pool in made}
        by_pool: list[tuple[Pool, list[_Row], set[State] | None]] = [
            (pool, _shorter(of), None if pool in changed else set()) for pool, of in rows.items()]
        return _Plan(tuple(by_pool), slots, tuple(taken), made, rise, level)


def _shorter(rows: list[_Row]) -> list[_Row]:
    """With tensors that are gone before the next one comes as passing ones: it does not matter in which order several
    go."""
    found: list[_Row] = []
    last = -1  # where in `found` the last one came
    for slot, size in rows:
        if size > 0:
            last = len(found)
        elif last >= 0 and found[last][0] == slot:
            found[last], last = (_PASSING, found[last][1]), -1
            continue
        found.append((slot, size))
    return found


def _from_outside(events: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of tensors that have to be there before."""
    own: set[int] = set()
    found: dict[int, None] = {}
    for number, size in events:
        if size:
            own.add(number)
        elif number not in own:
            found[number] = None
    return list(found)
