"""A memory snapshot that PyTorch's viewer opens (pytorch.org/memory_viz, or `python -m torch.cuda._memory_viz`).

Format: what `torch.cuda.memory._snapshot()` returns and `_dump_snapshot` pickles, a mapping with `segments` (each with
its blocks), `device_traces` (one list of events per device) and `allocator_settings`; sources: torch/cuda/memory.py
(`_snapshot`), torch/csrc/cuda/memory_snapshot.cpp, torch/cuda/_memory_viz.py. Only built-in types are pickled, so that
neither writing nor reading needs this package or torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim.memory.allocator import PLAIN, Allocator, OutOfMemoryError, Settings
from sim.memory.allocator_parts import Block, Pool
from sim.memory.order import Buffers
from sim.memory.tensors import TensorReplay
from sim.program import MemoryOp, Program, Section
from sim.report.numbers.memory import MemoryResult
from sim.report.whole_file import whole_file
from sim.tensor_trace import LayerMemory

#: Where the first segment lies: the viewer takes an address of 0 for none.
_BASE = 0x7F0000000000
#: Microseconds between events: the replay has an order, no times.
_TICK_US = 1
#: A protocol that readers in JavaScript know too.
_PROTOCOL = 4
#: PyTorch's defaults of what the replay does not know.
_DEFAULTS = {"garbage_collection_threshold": 0.0, "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
             "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {}}

Frames = list[dict[str, Any]]
#: What a frame is of, and its name; innermost first.
Named = tuple[tuple[str, str], ...]


def write_snapshot(path: Path, memory: MemoryResult, layers: Sequence[str]) -> None:
    """Write the snapshot of the fullest rank to a file (see `snapshot`).

    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(path) as part, part.open("wb") as file:
        pickle.dump(snapshot(memory.program, layers, memory.limit_bytes if memory.pressed else None,
                             memory.settings), file, _PROTOCOL)


def snapshot(program: Program, layers: Sequence[str], limit_bytes: int | None = None,
             settings: Settings = PLAIN) -> dict[str, Any]:
    """Construction, first step and one steady step of a rank, as the caching allocator sees them.

    Frames name, innermost first, the category, the operator or tensor, the layer, the phase, the section and the step.
    Of a micro-step that repeats two runs are there. Where memory runs out the last event is `oom`.

    Args:
        layers: names of the model's layers, by position.
        limit_bytes: what the allocator can have of the device; None for no limit.
        settings: of the allocator.
    """
    recorder = _Recorder(limit_bytes, settings)
    replay = _NamedReplay(program, recorder, layers)
    try:
        replay.construct()
        for step in ("first step", "steady step"):
            replay.begin(step)
            replay.step()
    except OutOfMemoryError:
        pass
    return {"segments": recorder.blocks(), "device_traces": [recorder.events], "external_annotations": [],
            "allocator_settings": _told(settings)}


def _told(settings: Settings) -> dict[str, Any]:
    split = settings.max_split_bytes
    said = ["expandable_segments:True"] * settings.expandable_segments
    said += [] if split is None else [f"max_split_size_mb:{split // 2**20}"]
    return {"PYTORCH_CUDA_ALLOC_CONF": ",".join(said), "max_split_size": -1 if split is None else split,
            "expandable_segments": settings.expandable_segments, **_DEFAULTS}


class _Recorder(Allocator):
    """An allocator that writes down every event, and whose blocks know what they are for.

    Attributes:
        events: in order.
        within: what the host is at.
    """

    def __init__(self, limit_bytes: int | None, settings: Settings = PLAIN) -> None:
        super().__init__(limit_bytes, settings)
        self.events: list[dict[str, Any]] = []
        self.within: Named = ()
        self._known: dict[Named, Frames] = {}  # lists that are shared are pickled once
        self._held: dict[int, tuple[Block, int, Frames]] = {}  # by address: block, bytes asked for, frames
        self._dropped: set[int] = set()

    def allocate(self, size: int, stream: int = 0) -> Block:
        """See `Allocator`."""
        try:
            block = super().allocate(size, stream)
        except OutOfMemoryError:
            self._event("oom", None, size, stream, device_free=(self.limit or 0) - self.reserved)
            raise
        self._held[block.address] = (block, size, self._frames())
        self._event("alloc", _BASE + block.address, size, stream)
        return block

    def drop(self, block: Block) -> None:
        """See `Allocator`."""
        self._dropped.add(block.address)
        self._event("free_requested", _BASE + block.address, self._held[block.address][1], block.pool.stream)
        super().drop(block)

    def free(self, block: Block) -> None:
        """See `Allocator`."""
        address, stream = block.address, block.pool.stream
        _, size, _ = self._held.pop(address)
        if address in self._dropped:
            self._dropped.discard(address)
        else:
            self._event("free_requested", _BASE + address, size, stream)
        self._event("free_completed", _BASE + address, size, stream)
        super().free(block)

    def _new_segment(self, size: int, pool: Pool) -> None:
        self._event("segment_alloc", _BASE + self._end, size, pool.stream)
        super()._new_segment(size, pool)

    def _remapped(self, address: int, size: int, pool: Pool) -> None:
        super()._remapped(address, size, pool)
        self._event("segment_map" if size > 0 else "segment_unmap", _BASE + address, abs(size), pool.stream)

    def _release(self, block: Block) -> None:
        segment = self.segments[block.segment]
        super()._release(block)
        if block.segment not in self.segments:
            self._event("segment_free", _BASE + segment.address, segment.size, segment.stream)

    def _event(self, action: str, address: int | None, size: int, stream: int, **more: int) -> None:
        where = {} if address is None else {"addr": address}
        self.events.append({"action": action, **where, "size": size, "stream": stream, "device": 0,
                            "frames": self._frames(), "time_us": _TICK_US * (len(self.events) + 1), **more})

    def _frames(self) -> Frames:
        if self.within not in self._known:
            self._known[self.within] = [{"filename": of, "line": 0, "name": name} for of, name in self.within if name]
        return self._known[self.within]

    def blocks(self) -> list[dict[str, Any]]:
        """Segments as they are now, each with its blocks in order of address; of one that grows every stretch that has
        pages."""
        held = [block for block, _, _ in self._held.values()]
        stretches: list[list[Block]] = []
        for block in sorted([*held, *self.cached()], key=lambda b: b.address):
            last = stretches[-1][-1] if stretches else None
            if last is not None and last.segment == block.segment and last.address + last.size == block.address:
                stretches[-1].append(block)
            else:
                stretches.append([block])
        return [self._segment(row) for row in stretches]

    def _segment(self, row: Sequence[Block]) -> dict[str, Any]:
        segment, blocks = self.segments[row[0].segment], [self._block(block) for block in row]

        def total(*states: str, of: str = "size") -> int:
            return sum(block[of] for block in blocks if block["state"] in states)

        return {
            "device": 0, "address": _BASE + row[0].address, "total_size": sum(block.size for block in row),
            "stream": segment.stream, "allocated_size": total("active_allocated"),
            "active_size": total("active_allocated", "active_pending_free"),
            "requested_size": total("active_allocated", "active_pending_free", of="requested_size"),
            "segment_type": "small" if segment.small else "large", "segment_pool_id": (0, 0),
            "is_expandable": self.settings.expandable_segments, "frames": [], "blocks": blocks}

    def _block(self, block: Block) -> dict[str, Any]:
        _, size, frames = self._held.get(block.address, (block, 0, []))
        state = ("inactive" if block.address not in self._held else
                 "active_pending_free" if block.address in self._dropped else "active_allocated")
        return {"address": _BASE + block.address, "size": block.size, "requested_size": size, "state": state,
                "frames": frames}


class _NamedReplay(TensorReplay[Block]):
    """A replay that tells its recorder what it is at."""

    skips = False

    def __init__(self, program: Program, recorder: _Recorder, layers: Sequence[str]) -> None:
        super().__init__(program, recorder)
        self._recorder, self._names = recorder, layers
        self._step: tuple[str, str] = ("step", "model construction")
        self._section = Section("")
        self._made: tuple[tuple[str, str], ...] = ()

    def begin(self, step: str) -> None:
        """A step of the run begins."""
        self._step = ("step", step)

    def _make(self, name: str, size: int, category: str) -> None:
        self._recorder.within = (("category", category), ("tensor", name), self._step)
        super()._make(name, size, category)

    def _run(self, number: int) -> None:
        self._section = self.program.sections[number]
        super()._run(number)

    def _operation(self, item: Buffers) -> None:
        self._at(item.op)
        super()._operation(item)

    def _handed(self, op: MemoryOp) -> None:
        self._at(op)
        super()._handed(op)

    def _at(self, op: MemoryOp) -> None:
        section, labels = self._section, self.program.labels
        label = labels[section.label[min(op.before, len(section) - 1)]] if len(section) else None
        place = (("layer", label.layer), ("phase", label.phase)) if label is not None else ()
        self._recorder.within = (("category", op.category), ("tensor", op.tensor), ("operator", op.operator), *place,
                                 ("section", section.name), self._step)

    def _layer(self, mark: LayerMemory) -> None:
        name = self._names[mark.position] if 0 <= mark.position < len(self._names) else ""
        phase = mark.verb if mark.verb in ("forward", "backward") else "forward"
        outer = (("layer", name), ("phase", phase), ("section", self._section.name), self._step)
        self._made = mark.trace.made if mark.trace is not None else ()
        self._outer = self._recorder.within = outer
        super()._layer(mark)

    def _events(self, live: dict[int, Block], events: tuple[tuple[int, int], ...]) -> None:
        for number, size in events:
            operator, category = self._made[number] if 0 <= number < len(self._made) else ("", "")
            self._recorder.within = (("category", category), ("operator", operator), *self._outer)
            if size:
                live[number] = self._recorder.allocate(size)
            elif number in live:
                self._recorder.free(live.pop(number))
        self._recorder.within = self._outer
