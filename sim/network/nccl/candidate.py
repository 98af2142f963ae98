"""One way NCCL could serve a call: its latency over its size, its load on every link, and the coflow it becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from sim.network.fabric.fair_share import LinkId
from sim.network.fabric.routes import Loads
from sim.network.nccl.tuner import Judgement

#: Bytes on the wire per byte of payload: LL 8 of 16, LL128 120 of 128 (nccl src/include/device.h).
WIRE = {"LL": 2.0, "LL128": 128 / 120, "Simple": 1.0}
#: Bytes of a call from which another channel is opened: bytes a thread x threads (nccl src/graph/tuning.cc,
#: threadThresholds; src/enqueue.cc). A ring in LL multiplies them by its ranks.
OPENS = {"LL": 8 * 512, "LL128": 8 * 640, "Simple": 64 * 512}
#: A full chunk of a Simple ring, two slices of it: 4 of the 8 steps of a 4 MiB buffer; and the least slice, a 32nd of a
#: full one (nccl src/include/collectives.h, ALLREDUCE_CHUNKSTEPS; src/init.cc, DEFAULT_BUFFSIZE; prims_simple.h).
_CHUNK_BYTES, LEAST_SLICE = 1 << 21, 1 << 15
#: Up to NCCL 2.4 a slice is a full one before there is a second (all-reduce's ring of 2.4.2, 2.5.6, 2.7.8 and 2.8.3
#: disassembled: what halves a chunk stands in all but the first).
WHOLE_SLICE = 1 << 20


@dataclass(frozen=True, slots=True)
class Coflow:
    """One operation of one instance as the engine sees it.

    Attributes:
        latency_s: time before and after bytes move at the rate: launch, steps and hops, pipeline ramp.
        size_bytes: work to move.
        links, loads: bytes over each link per byte of `size_bytes`, all instances in lockstep.
        cap_bps: limit from channels, protocol and rings, bytes/s of `size_bytes`.
        channels: SMs held.
        hbm_bytes_per_byte: device-memory traffic per byte of `size_bytes` on each GPU.
        weight: share in max-min (channels x queue pairs).
        algorithm, protocol: as NCCL names them.
    """

    latency_s: float
    size_bytes: float
    links: tuple[LinkId, ...]
    loads: tuple[float, ...]
    cap_bps: float
    channels: int
    hbm_bytes_per_byte: float
    weight: float
    algorithm: str
    protocol: str


@dataclass(frozen=True, slots=True)
class Slices:
    """How a Simple ring passes chunks on: each in two slices, so that one is sent while the next is awaited.

    A rank works through its slices one after another, and a chunk cannot start before its predecessor's has arrived: of
    both cycles the slower one sets the pace (the largest cycle mean of a max-plus system). Full chunks repeat.

    Attributes:
        steps: of the ring; cells: ranks x channels, which share the call's bytes.
        overhead_s: of a rank per slice: waiting, flags, fences; step_s: from a slice's start at one rank to that at the
            next, beyond its bytes, as a mean over the ring's edges.
        crossing: share of edges whose slices pass a NIC's buffers, which holds them once more.
        last_s: per byte of a call on one node, of the pass that follows a rank's last send: it copies what came last
            out of its buffer, or sums it there, while its link idles (nccl src/device/all_gather.h, reduce_scatter.h,
            all_reduce.h: n steps where n - 1 send).
        least_bytes: of a slice that is followed by another.
    """

    steps: int
    cells: float
    overhead_s: float
    step_s: float
    crossing: float
    last_s: float = 0.0
    least_bytes: int = LEAST_SLICE

    def beyond_s(self, size_bytes: float, moving_s: float) -> float:
        """Time of a call beyond the `moving_s` of its bytes, seconds."""
        chunk = size_bytes / self.cells
        rounds = self.steps * max(1.0, chunk / _CHUNK_BYTES)
        slices = min(2.0, max(1.0, chunk / self.least_bytes))
        slice_s = moving_s / rounds / slices
        beyond = rounds * max(slices * self.overhead_s, self.step_s + (1.0 + self.crossing - slices) * slice_s)
        return beyond + size_bytes * self.last_s


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a tree passes chunks on: each is whole at a rank before it goes on, the next one follows behind it.

    Attributes:
        most_bytes: a full chunk of one channel; halvings: (so many chunks per channel and call, bytes) in NCCL's order:
            where a call has fewer, chunks are halved as long as they are larger than that (nccl src/enqueue.cc,
            calcCollChunking).
        heads: ranks of a node that share a channel's bytes before they become chunks.
        path_s: from a chunk's first rank to its last, per byte of it; own_s: of a rank, per byte.
        pace_s: of a rank per chunk beside its bytes; turn_s: least time between chunks of which a connection's slots
            hold only so many.
    """

    most_bytes: float
    halvings: tuple[tuple[float, float], ...]
    heads: int
    path_s: float
    own_s: float
    pace_s: float
    turn_s: float

    def chunk_bytes(self, share_bytes: float) -> float:
        """A chunk where a channel and head has `share_bytes` of the call."""
        chunk = self.most_bytes
        for least, floor in self.halvings:
            while share_bytes < least * chunk and chunk > floor:
                chunk /= 2
        return min(chunk, share_bytes)

    def beyond_s(self, channel_bytes: float, moving_s: float) -> float:
        """Time of a call of `channel_bytes` per open channel beyond the `moving_s` of its bytes, seconds."""
        share = channel_bytes / self.heads
        chunk = self.chunk_bytes(share)
        count = share / chunk
        each_s = moving_s / count
        later_s = max(0.0, max(self.pace_s + chunk * self.own_s, self.turn_s) - each_s)
        return max(0.0, chunk * self.path_s - each_s) + (count - 1.0) * later_s


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far a sender is ahead of its receiver: it is through when what it sends lies in its buffers.

    Attributes:
        last_s: from the sender's last flag to the receiver's; buffer_bytes, copy_bps: of the sender's channels.
    """

    last_s: float
    buffer_bytes: float
    copy_bps: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """An (algorithm, protocol) that could serve a call, before the size is known.

    Attributes:
        judged: NCCL's estimate of it, None where there is no choice.
        latency_s: base and steps of the smallest call; ramp_s: most the pipeline's filling adds; ramp_bytes: size from
            which it adds it all.
        opens_bytes: a call opens one channel per so many bytes; channel_bps: what one moves, in bytes of the call.
        slices: of a Simple ring; chunks: of a tree; first_bytes: of a call, what one channel's threads take at once,
            within the steps; ahead: of a lone send whose receiver fetches it; copies: of small sends that the fabric's
            provider copies out of the GPU, as (up to this size of the call, seconds); last_bytes: of a channel, what
            its receiver still copies out of its buffer when all has arrived; last_bps: so fast; least_channels: that a
            call opens whatever its size.
        floors: least time over a fabric whose edges pass one message at a time, as (from this size on, seconds),
            largest size first.
        loads: per byte of the call; factor: multiplies every load; cap_bps; channels; hbm: as in `Coflow`.
    """

    algorithm: str
    protocol: str
    judged: Judgement | None
    latency_s: float
    ramp_s: float
    ramp_bytes: float
    opens_bytes: float
    channel_bps: float
    floors: tuple[tuple[float, float], ...]
    loads: Loads
    factor: float
    cap_bps: float
    channels: int
    hbm: float
    slices: Slices | None = None
    first_bytes: float = 0.0
    ahead: Ahead | None = None
    copies: tuple[float, float] = (0.0, 0.0)
    last_bytes: float = 0.0
    last_bps: float = 1.0
    chunks: Chunks | None = None
    least_channels: int = 1

    def open_channels(self, size_bytes: float) -> int:
        """Channels a call opens, hence SMs it holds."""
        return min(self.channels, max(self.least_channels, int(size_bytes / self.opens_bytes)))

    def latency_at(self, size_bytes: float, rate_bps: float) -> float:
        """Time of a call beyond its bytes at `rate_bps`, seconds.

        Chunks of a pipeline grow with the call until they are full, so its filling costs X (1 - (1 - r)^2) with
        r = sqrt(size / ramp_bytes): the square-root law of optimal chunks below, constant above. While channels are
        still closed the others move all bytes.
        """
        moving = size_bytes / rate_bps
        r = min(1.0, sqrt(size_bytes / self.ramp_bytes))
        time = self.latency_s + self.ramp_s * r * (2.0 - r) + (self.copies[1] if size_bytes <= self.copies[0] else 0.0)
        if self.slices:
            time += self.slices.beyond_s(size_bytes, moving)
        each = size_bytes / min(max(float(self.least_channels), size_bytes / self.opens_bytes), self.channels)
        time += min(each, self.last_bytes) / self.last_bps
        stretch = max(0.0, max(0.0, each - self.first_bytes) / self.channel_bps - moving)
        time += stretch
        if self.chunks:
            time += self.chunks.beyond_s(each, moving + stretch)
        for least, floor in self.floors:
            if size_bytes >= least:
                time = max(time, floor - moving)
                break
        return max(time, 0.0)

    def sender_s(self, size_bytes: float, rate_bps: float) -> float:
        """Time of the sender's own kernel, seconds; that of the call where it is no lone send."""
        whole = self.latency_at(size_bytes, rate_bps) + size_bytes / rate_bps
        if self.ahead is None:
            return whole
        beyond = max(0.0, size_bytes - self.ahead.buffer_bytes) / rate_bps
        filled = min(size_bytes, self.ahead.buffer_bytes) / self.ahead.copy_bps
        return min(whole, self.latency_s - self.ahead.last_s + filled + beyond)

    def rate(self, capacity: Callable[[LinkId], float]) -> float:
        """Rate alone, bytes/s of the call's size."""
        rate = self.cap_bps
        for link, load in self.loads:
            if load > 0:
                rate = min(rate, capacity(link) / (load * self.factor))
        return rate


def build(choice: Candidate, size_bytes: int, alone_bps: float) -> Coflow:
    """The coflow of a call of `size_bytes` served by `choice`, which alone runs at `alone_bps`."""
    channels = choice.open_channels(size_bytes)
    return Coflow(
        latency_s=choice.latency_at(size_bytes, alone_bps), size_bytes=float(size_bytes),
        links=tuple(link for link, _ in choice.loads), loads=tuple(load * choice.factor for _, load in choice.loads),
        cap_bps=choice.cap_bps, channels=channels, hbm_bytes_per_byte=choice.hbm, weight=float(choice.channels),
        algorithm=choice.algorithm, protocol=choice.protocol)
