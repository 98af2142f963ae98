"""A Program's steps through the caching allocator, tensor by tensor: construction, first step, steady steps.

The ledger sums up what a layer does; here its tensors come and go one by one (`LayerMemory.trace`), and a technique's
own buffers between them. What needs an event of another stream before its block can be used again (record_stream) comes
back when the host has waited for work issued later, or at the end of the section (`Allocator`'s caller has no clock).
cudaMalloc waits for the device (CUDA C++ Programming Guide, implicit synchronization; CUDACachingAllocator.cpp,
alloc_block: "cudaMalloc sync call"), so a host that runs ahead takes new memory one segment at a time, with everything
released before in its reach.
PyTorch's optimizers make their states in the first step, after everything else has been cached.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from sim.memory.allocator import rounded
from sim.memory.order import ACTIVATIONS, Buffers, Item, Passed, asked, in_order, knows_layers
from sim.program import Kind, MemoryOp, Program, Section
from sim.tensor_trace import INPUT, OUTPUT_GRADIENT, TIED, LayerMemory, Trace

_GRADIENTS = "layers: gradients"
_STATES = "optimizer_states"
_TEMPORARIES = "optimizer temporaries"


class Piece(Protocol):
    """A block, whatever else its allocator knows of it.

    Attributes:
        address: what tells it from all others in use.
        asked: bytes of its tensor, rounded.
    """

    address: int
    asked: int


B = TypeVar("B", bound=Piece)


class Cache(Protocol[B]):
    """What a replay asks of an allocator (`sim.memory.allocator.Allocator`, `sim.memory.pools.Pools`)."""

    asked: int
    top_asked: int

    @property
    def reserved(self) -> int: ...
    def allocate(self, size: int, stream: int = 0) -> B: ...
    def free(self, block: B) -> None: ...
    def drop(self, block: B) -> None: ...
    def play(self, live: dict[int, B], events: Sequence[tuple[int, int]]) -> None: ...
    def state(self) -> object: ...


class _Layer(NamedTuple, Generic[B]):
    """A layer of one micro-step: which, and its live tensors by number."""

    position: int
    live: dict[int, B]
    trace: Trace


class TensorReplay(Generic[B]):
    """Walks one rank's steps through an allocator.

    A section that starts where it started before, and left everything as it was then, is skipped: nothing would come of
    it (a class that has to see every run sets `skips` to false).
    """

    skips = True

    def __init__(self, program: Program, allocator: Cache[B]) -> None:
        self.program, self.allocator = program, allocator
        self._orders: dict[int, list[Item]] = {}
        self._parted: dict[tuple[str, int, int, bool], tuple[str, tuple[int, ...], object]] = {}
        self._named: dict[str, deque[tuple[int, B]]] = {}
        self._debts: dict[str, int] = {}
        # A trace's events with rounded sizes; the trace beside them lives as long, so that its id stays its own.
        self._rounded: dict[int, tuple[list[tuple[int, int]], tuple[tuple[int, int], ...]]] = {}
        self._waiting: deque[tuple[int, B]] = deque()  # freed, but another stream may still read: (task before, block)
        self._layers: dict[int, deque[_Layer[B]]] = {}
        self._last: _Layer[B] | None = None  # whose output the next layer reads
        self._received: B | None = None  # the next layer's input, from another stage
        self._gradient: B | None = None  # of the last backward's input
        self._tied: deque[B] = deque()
        self._has_states = False
        self._first: dict[str, list[B]] = {}
        self._launches: list[int] | None = None
        self._whole = knows_layers(program)
        self._alike: dict[int, int] = {}
        self._sections: dict[object, int] = {}  # by what they ask of the allocator
        self._idle: dict[int, set[object]] = {}  # by section: states that it leaves as they are

    def construct(self) -> None:
        """What the model holds before its first step."""
        for name, size, category in self.program.resident:
            if category != "context" and (category != _STATES or name in self.program.construction):
                if name in self.program.first:
                    self._first[name] = [self.allocator.allocate(rounded(one)) for one in self.program.first[name]]
                else:
                    self._make(name, size, category)
        self.allocator.top_asked = self.allocator.asked  # what counts is the steps' highest point, as in the ledger

    def step(self) -> None:
        """One optimizer step."""
        if self._has_states and self._first:
            self._replace_first()
        schedule = self.program.schedule
        for place, (number, repeats) in enumerate(schedule):
            if place == len(schedule) - 1 and not self._has_states:
                self._states()
            section = self.program.sections[number]
            level = sum(op.size_bytes for op in section.memory)
            if level:
                for _ in range(repeats):
                    self._run(number)
            else:
                self._repeat(number, repeats)
        self._debts.clear()

    def _repeat(self, number: int, repeats: int) -> None:
        """A section that ends with as much as it began with: what it asks for the third time it had the second time."""
        for _ in range(min(repeats, 2)):
            if self.skips:
                self._run_or_skip(number)
            else:
                self._run(number)

    def settle(self) -> None:
        """The device is idle, after cudaMalloc or for a retry: what other streams read is free."""
        while self._waiting:
            self.allocator.free(self._waiting.popleft()[1])

    def pieces(self, name: str, size: int) -> list[int]:
        """Bytes of each tensor of a resident entry or a pool."""
        return self.program.tensors.get(name) or [size]

    def _states(self) -> None:
        self._has_states = True
        for name, size, category in self.program.resident:
            if category == _STATES and name not in self.program.construction:
                self._make(name, size, category)

    def _replace_first(self) -> None:
        """The first step is over: what stood for resident entries goes, and they come."""
        for name, size, category in self.program.resident:
            blocks = self._first.pop(name, [])
            for block in blocks:
                self.allocator.free(block)
            if blocks:
                self._make(name, size, category)

    def _make(self, name: str, size: int, category: str) -> None:
        allocator, live = self.allocator, dict[int, B]()
        for number, piece in self.program.construction.get(name) or enumerate(map(rounded, self.pieces(name, size))):
            if piece:
                live[number] = allocator.allocate(piece)
            else:
                allocator.free(live.pop(number))

    # ------------------------------------------------------------------------------------------------- a section
    def _run_or_skip(self, number: int) -> None:
        idle, before = self._idle.setdefault(self._first_alike(number), set()), self._state()
        if before in idle:
            return
        self._run(number)
        if before is not None and before == self._state():
            idle.add(before)

    def _first_alike(self, number: int) -> int:
        """The first section seen that asks the same of the allocator."""
        if number not in self._alike:
            self._alike[number] = self._sections.setdefault(asked(self._order(number)), number)
        return self._alike[number]

    def _state(self) -> object:
        """All that a section's run depends on, by address, and the level it starts from, which decides its height;
        None in the middle of a micro-step."""
        if self._waiting or any(self._layers.values()):
            return None
        last = self._last
        single = tuple(block.address if block is not None else -1 for block in (self._received, self._gradient))
        held = tuple((name, tuple((size, block.address) for size, block in pool)) for name, pool in self._named.items())
        live = () if last is None else (last.trace.output, *((n, b.address) for n, b in last.live.items()))
        return (self.allocator.state(), held, live, single,
                tuple(b.address for b in self._tied), tuple(self._debts.items()))

    def _run(self, number: int) -> None:
        for item in self._order(number):
            if isinstance(item, Buffers):
                self._operation(item)
            elif isinstance(item, LayerMemory):
                self._layer(item)
            elif isinstance(item, Passed):
                self._handed(item.op)
            else:
                self._wait(item.until)
        self._wait(len(self.program.sections[number]))

    def _order(self, number: int) -> list[Item]:
        if number not in self._orders:
            section = self.program.sections[number]
            self._orders[number] = [self._buffers(item) if isinstance(item, MemoryOp) else item
                                    for item in in_order(section, self._whole, self._over(section))]
        return self._orders[number]

    def _over(self, section: Section) -> list[int]:
        """By number of the task that the host comes to: the last one that is over by then, because the launch queue
        holds no more than what was launched behind it; -1 for none."""
        if not any(op.used_on for op in section.memory):
            return []
        if self._launches is None:
            self._launches = self.program.launches()
        kernels, launched = int(Kind.KERNELS), [0]
        for kind, payload in zip(section.kind, section.payload, strict=True):
            launched.append(launched[-1] + (self._launches[payload] if kind == kernels and payload >= 0 else 0))
        queue = self.program.launch_queue
        return [bisect_right(launched, now - queue) - 2 for now in launched]

    def _wait(self, until: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= until + 1:
            self.allocator.free(waiting.popleft()[1])

    # ------------------------------------------------------------------------------------------------- techniques
    def _buffers(self, op: MemoryOp) -> Buffers:
        key = (op.tensor, op.size_bytes, op.stream, bool(op.used_on))
        known = self._parted.get(key)
        if known is None:
            name = op.tensor if op.tensor.startswith("layers") else op.tensor.partition(":")[0]
            sizes = tuple(self._parts(op.tensor, abs(op.size_bytes)))
            known = self._parted[key] = (name, sizes, (name, sizes, op.size_bytes > 0, op.stream, bool(op.used_on)))
        return Buffers(op, *known)

    def _operation(self, item: Buffers) -> None:
        op, name, sizes, _ = item
        held = self._named.get(name)
        if op.size_bytes > 0:
            if held is None:
                held = self._named[name] = deque()
            allocator, stream = self.allocator, op.stream
            for size in sizes:
                reserved = allocator.reserved if self._waiting else 0
                held.append((size, allocator.allocate(size, stream)))
                if self._waiting and allocator.reserved > reserved:
                    self.settle()
        elif held is not None:
            free = self.allocator.free
            for size in sizes:
                for block in (held.popleft()[1],) if held and held[0][0] == size else self._found(name, size):
                    if op.used_on:
                        self.allocator.drop(block)
                        self._waiting.append((op.before, block))
                    else:
                        free(block)

    def _parts(self, tensor: str, size: int) -> list[int]:
        """Tensors of one operation. The optimizer's temporaries are as large as its states, several times over, or one
        tensor at a time."""
        if tensor != _TEMPORARIES or tensor in self.program.tensors:
            return self.pieces(tensor, size)
        whole = sum(self.program.tensors.get(_STATES, ()))
        if not whole or 4 * size < whole:
            return [size]
        return [max(1, round(piece * size / whole)) for piece in self.pieces(_STATES, 0)]

    def _found(self, name: str, size: int) -> list[B]:
        """The oldest tensor of that name and size; of a pool that falls in other parts than it rose, the oldest."""
        held = self._named[name]
        for place, (made, block) in enumerate(held):
            if made == size:
                del held[place]
                return [block]
        debt, found = self._debts.get(name, 0) + size, []
        while held and held[0][0] <= debt:
            made, block = held.popleft()
            debt -= made
            found.append(block)
        self._debts[name] = debt if held else 0
        return found

    # ------------------------------------------------------------------------------------------------- layers
    def _layer(self, mark: LayerMemory) -> None:
        if mark.verb == "forward":
            self._forward(mark.position, mark.trace)
        elif mark.verb == "backward":
            self._backward(mark.position, mark.trace)
        else:
            for layers in self._layers.values():
                one = layers[-1] if layers else None
                for number in () if one is None else one.trace.held if mark.verb == "held" else one.trace.cached:
                    self._drop(one, number)

    def _drop(self, layer: _Layer[B] | None, number: int) -> None:
        block = layer.live.pop(number, None) if layer is not None else None
        if block is not None:
            self.allocator.free(block)

    def _events(self, live: dict[int, B], events: tuple[tuple[int, int], ...]) -> None:
        known = self._rounded.get(id(events))
        if known is None:
            rows = [(number, rounded(size) if size else 0) for number, size in events]
            known = self._rounded[id(events)] = (rows, events)
        allocator = self.allocator
        reserved = allocator.reserved if self._waiting else 0
        allocator.play(live, known[0])
        if self._waiting and allocator.reserved > reserved:
            self.settle()

    def _forward(self, position: int, trace: Trace | None) -> None:
        assert trace is not None
        one: _Layer[B] = _Layer(position, {}, trace)
        last = self._last
        given = self._received
        if given is None and last is not None:
            given = last.live.pop(last.trace.output, None)
        if given is not None:
            one.live[INPUT] = given
        self._received = None
        self._layers.setdefault(position, deque()).append(one)
        self._events(one.live, trace.forward)
        self._last = one

    def _handed(self, op: MemoryOp) -> None:
        """A tensor between stages: a layer's input or its output's gradient comes, its output or its input's gradient
        goes."""
        allocator, gradient = self.allocator, self._gradient
        if op.tensor == ACTIVATIONS:
            if op.size_bytes > 0:
                self._received = allocator.allocate(op.size_bytes, op.stream)
            elif self._last is not None:
                self._drop(self._last, self._last.trace.output)
        elif op.size_bytes > 0:
            self._gradient = allocator.allocate(op.size_bytes, op.stream)
        elif gradient is not None:
            allocator.free(gradient)
            self._gradient = None

    def _backward(self, position: int, trace: Trace | None) -> None:
        assert trace is not None
        layers = self._layers.get(position)
        one = layers.popleft() if layers else _Layer(position, {}, trace)
        live = one.live
        if self._gradient is not None:
            live[OUTPUT_GRADIENT], self._gradient = self._gradient, None
        if self._tied and any(number == TIED for number, _ in trace.backward + tuple((n, 0) for n in trace.kept)):
            live[TIED] = self._tied.popleft()
        self._events(live, trace.backward)
        if trace.input_gradient in live:
            self._gradient = live.pop(trace.input_gradient)
        if trace.tied in live:
            self._tied.append(live.pop(trace.tied))
        held = self._named.setdefault(_GRADIENTS, deque())
        held.extend((live[number].asked, live.pop(number)) for number in trace.kept if number in live)
        for block in live.values():
            self.allocator.free(block)
