"""One pipeline rank as a Program: its order list written as sections of compute and transfers. How its parameters and
gradients are held is said by `whole.py` and `sharded.py`.

An action (forward, backward or weight gradients of one micro-batch in one chunk) is one segment; what it sends and what
the next action waits for follow it in one batch. Distinct actions are few, so a section is written once and the
schedule names it again and again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sim.model.architecture import Layer
from sim.parallel.activations import FLOWING_POOL, OUTPUT_POOL, Activations
from sim.parallel.compute import traffic_kernel
from sim.parallel.model.calls import Items
from sim.parallel.pipeline.engine_buffers import STANDING, EngineBuffers
from sim.parallel.pipeline.orders import Action
from sim.parallel.pipeline.patterns import Batch, Habits, Pattern, Schedule, rows
from sim.parallel.pipeline.standing import standing
from sim.parallel.pipeline.transfers import Edge, Transfers
from sim.parallel.pipeline.weights import kept_for_weights
from sim.parallel.pipeline.written import Exchange, Mark, Piece, Written
from sim.parallel.step import COMPUTE, MicroStep, Plan, blocks, fetch_batch
from sim.program import CollectiveCall, InlineCall, Label, MemoryOp, SectionBuilder
from sim.tensor_trace import LayerMemory
from sim.work import DTYPE_BYTES, Kernel

#: Names of what a rank keeps of its micro-batches for the whole step.
_TRANSFERS, _OUTPUTS = "transfers of all micro-batches", "outputs of all micro-batches"


@dataclass(frozen=True)
class Passing:
    """How stages pass tensors on.

    Attributes:
        whole: elements of one micro-batch's tensor between two layers of a rank.
        elements, dtype: of it as a rank sends it.
        gather: elements the receiver gathers from its tensor ranks before it goes on, 0 = it has all.
        waits: "synchronised" (host and compute wait for the whole batch), "in turn" (as well, and one transfer of it
            begins when the other has ended), "stream" (compute waits), "overlapped" (compute waits for what it needs).
        partitioned: what is gathered is DeepSpeed's PartitionedTensor (`_gathered`).
    """

    whole: int
    elements: int
    dtype: str
    gather: int
    waits: str
    partitioned: bool = False

    @property
    def blocks(self) -> bool:
        """Whether the host waits until a batch of transfers has ended."""
        return self.waits in ("synchronised", "in turn")


@dataclass
class Stage:
    """Writes the program of one pipeline rank.

    Attributes:
        rank, depth: pipeline rank, and how many there are.
        plan: of the rank's own layers, all chunks in a row.
        chunks: positions of each chunk in the plan's architecture.
        edges: communicator of every edge that touches the rank.
        streams: stream of every edge.
        tied: elements of the table of which first and last stage hold copies; 0 where this one has none.
        separate: weight gradients are actions of their own.
        merged: a forward and the backward behind it run as one, so that tokens travel to experts beside compute.
    """

    rank: int
    depth: int
    plan: Plan
    chunks: Sequence[range]
    transfers: Transfers
    passing: Passing
    edges: dict[Edge, int]
    streams: dict[Edge, int]
    tied: int
    separate: bool
    merged: bool
    written: Written = field(default_factory=Written)
    _calls: dict[Edge, int] = field(default_factory=dict)
    _exchanged: list[tuple[int, Edge]] = field(default_factory=list)
    _left: list[tuple[int, int]] = field(default_factory=list)
    _buffers: EngineBuffers | None = None

    def __post_init__(self) -> None:
        passing = self.passing
        if self.plan.stack.engine_buffers and passing.waits == "in turn":
            width = DTYPE_BYTES[passing.dtype]
            self._buffers = EngineBuffers(passing.whole * width, passing.elements * width)

    def write(self, schedule: Schedule) -> None:
        """All sections of a step, in order; what recurs is written once and repeated."""
        plan = self.plan
        made: dict[int, SectionBuilder] = {}
        layers = tuple(map(id, plan.architecture.stack))
        self.written.hold(layers, plan.builder, self._states)
        pairs = self.merged or self.passing.waits != "overlapped"
        fresh = self._fresh()
        habits = Habits(pairs, not self._resident(), self._keeps(), bool(fresh), fresh == "aligned")
        row = rows(schedule, habits)[self.rank]
        if plan.stack.stage_tensors_kept:
            self._stand(row.patterns, schedule.micro_batches)
        if self._buffers is not None:
            plan.builder.resident = [one for one in plan.builder.resident if one[0] not in STANDING]
            self._buffers.stand(plan, receives=any(edge.forward and edge.target == self.rank for edge in self.edges),
                                sends=any(edge.forward and edge.source == self.rank for edge in self.edges))
        self._begin()
        self._first_receive(row.first)
        own, slots = self._likeness(), {edge: slot for slot, edge in enumerate(self.edges)}
        calls = [self._call(edge) for edge in self.edges]
        for batches, repeats, number in row.patterns:
            section = made.get(number)
            if section is None:
                section = made[number] = plan.builder.section(", ".join(
                    [f"{_NAMES[kind]} of chunk {chunk}" for batch in batches for kind, chunk, *_ in batch.actions]))
                for batch in batches:
                    self._again_or_anew(section, batch, own, slots, calls)
            plan.builder.run(section, repeats)
        self._write_end(own)

    def _write_end(self, own: int) -> None:
        """What stands behind the last batch, two sections: the optimizer's states come between them in the first step.
        It is written once for all stages whose batches left the same behind."""
        end, builder = self._end(), self.plan.builder
        sections = self.written.ends.get((own, end)) if end is not None else None
        if sections is None:
            sections = builder.section("gradients of all micro-batches"), builder.section("optimizer step")
            self.written.ends[own, end] = sections
            self._earlier(sections[0], True)
            self._reduce_late(sections[0])
            self._finish(sections[1])
            self._earlier(sections[1], False)
        for section in sections:
            if len(section.section) or section.section.memory:
                builder.run(section)

    def _stand(self, patterns: Sequence[Pattern], micro_batches: int) -> None:
        """Declare what the runtime keeps of this rank's micro-batches, which differs among stages of equal layers."""
        chunks, needed, sent = range(len(self.chunks)), self.transfers.needed, self.transfers.sent
        forward = [Action("F", chunk, 0) for chunk in chunks]
        last = self.plan.architecture.stack[-1].kind == "head"
        found = standing(patterns, micro_batches, [c for c in chunks if needed(self.rank, forward[c])],
                         [c for c in chunks if sent(self.rank, forward[c])], last=last)
        builder, scenario = self.plan.builder, self.plan.scenario
        builder.resident = [one for one in builder.resident if one[0] not in (_TRANSFERS, _OUTPUTS)]
        one = blocks(self.passing.elements * DTYPE_BYTES[self.passing.dtype])
        self.plan.resident(_TRANSFERS, found.transfers * one, "buffers", [one] * found.transfers)
        tokens = self.plan.architecture.batch * self.plan.architecture.sequence
        logits = blocks(tokens * scenario.model.vocab / scenario.parallel.tensor * DTYPE_BYTES[self.passing.dtype])
        self.plan.resident(_OUTPUTS, found.outputs * logits, "logits", [logits] * found.outputs)

    def _end(self) -> Hashable:
        """What the end of the step depends on beside the layers; None where stages do not share theirs."""
        return None

    def _likeness(self) -> int:
        """A number that stages share which write the same batches alike, but for the communicators of their edges."""
        own = self.transfers
        known: dict[Edge | None, int] = {edge: slot for slot, edge in enumerate(self.edges)}
        passes = tuple([(known.get(own.sent(self.rank, action)), known.get(own.needed(self.rank, action)))
                        for chunk in range(len(self.chunks)) for action in (Action("F", chunk, 0),
                                                                            Action("B", chunk, 0))])
        edges = tuple([(edge.source == self.rank, edge.forward) for edge in self.edges])
        layers = tuple([(chunk, tuple(map(id, self._layers(number)))) for number, chunk in enumerate(self.chunks)])
        return self.written.likeness((layers, edges, passes))

    def _again_or_anew(self, section: SectionBuilder, batch: Batch, own: int, slots: dict[Edge, int],
                       calls: list[int]) -> None:
        """Write a batch, or what it was when this stage or another wrote it before."""
        if not self._recurs(batch):
            self._act(section, batch)
            return
        key = (own, batch.actions, tuple([slots[edge] for edge in batch.needs]))
        piece = self.written.pieces.get(key)
        if piece is not None:
            piece.add(section.section, calls.__getitem__)
            self._leave(piece.left)
            return
        begin = Mark.of(section.section)
        self._exchanged, self._left = [], []
        self._act(section, batch)
        exchanges = [Exchange(task - begin.tasks, slots[edge]) for task, edge in self._exchanged]
        self.written.pieces[key] = Piece(section.section, begin, Mark.of(section.section), exchanges, self._left)

    def _recurs(self, batch: Batch) -> bool:
        """Whether a batch is written alike by any stage of the same layers, whenever it comes."""
        return False

    def _leave(self, left: Sequence[tuple[int, int]]) -> None:
        """Gradients that layers leave behind, (position, bytes) each."""

    def _states(self) -> None:
        """Memory that is held for the whole step."""
        raise NotImplementedError

    def _resident(self) -> bool:
        """Whether gradients live in a buffer, so that the first micro-batch's are like the others'."""
        return False

    def _fresh(self) -> str:
        """How whole parameters come to a chunk's first forward (`Reduction.gathers`); "" where they are there."""
        return ""

    def _begin(self) -> None:
        """What a rank does before it receives anything."""

    def _arrive(self, section: SectionBuilder, action: Action, micro: MicroStep, gathers: int) -> None:
        """What stands in front of a forward so that its parameters, and those of chunks behind it, are there."""

    def _keeps(self) -> tuple[bool, bool] | None:
        """Whether sharded parameters stay whole behind a forward, and behind a backward that is not the last."""
        return None

    # ------------------------------------------------------------------------------------------------------ actions
    def _act(self, section: SectionBuilder, batch: Batch) -> None:
        verbs = {"F": self._forward, "B": self._backward, "W": self._weights}
        moved: list[Edge] = []
        tasks: list[int] = []
        one = self.merged and self._merges(batch)
        ahead = batch.actions[0][1]
        for kind, chunk, first, final, gathers in batch.actions:
            arrived = self.transfers.needed(self.rank, Action(kind, chunk, 0))
            if arrived is not None:
                self._arrives(section, arrived)
            action, micro = Action(kind, chunk, 0), MicroStep(self.plan.architecture.batch, first, final)
            if not one:
                if kind == "F":
                    fetch_batch(self.plan.stack, section)
                    self._earlier(section, True)
                task = verbs[kind](section, action, micro, self._waited(action), gathers)
                if kind == "F":
                    self._earlier(section, False)
            else:  # written with the backward; what the forward sends waits for all compute in front of it
                if kind == "F":
                    self._arrive(section, action, micro, gathers)
                task = self._pair(section, Action("F", ahead, 0), action, micro) if kind == "B" else -1
            if kind == "B" and arrived is not None and self._buffers is not None:
                self._buffers.backward(section, False)
            edge = self.transfers.sent(self.rank, action)
            if edge is not None:
                moved.append(edge)
                tasks.append(task)
        self._exchange(section, batch, [(edge, (task,) if task >= 0 else ())
                                        for edge, task in zip(moved, tasks, strict=True)])

    def _exchange(self, section: SectionBuilder, batch: Batch, sends: Sequence[tuple[Edge, tuple[int, ...]]]) -> None:
        """What a batch of actions sends, and what the next needs.

        In turn, each transfer is a call of its own on the stream of the kernels (`torch.distributed.send`, `recv`), and
        neighbours call in the same order: outputs before gradients (DeepSpeed `runtime/pipe/schedule.py`,
        TrainSchedule.steps: a forward's slot receives, then sends a gradient; a backward's the other way round).
        """
        needs: list[tuple[Edge, tuple[int, ...]]] = [(edge, ()) for edge in batch.needs]
        in_turn = self.passing.waits == "in turn"
        received = in_turn and batch.actions[-1][0] == "B" and any(edge.forward for edge in batch.needs)
        before: tuple[int, ...] = ()
        for edge, waits in [*needs, *sends] if received else [*sends, *needs]:
            task = self._transfer(section, edge, (*waits, *before))
            before = (task,) if in_turn else ()
            if edge.source == self.rank:
                self._leaves(section, edge)
        if self.passing.blocks and (sends or needs):
            label = Label("pipeline", _PHASES[batch.actions[-1][0]], "synchronise")
            streams = tuple(self.streams[edge] for edge, _ in (*sends, *needs))
            section.host(self.plan.stack.host_exchange_s, label, joins=streams)

    def _waited(self, action: Action) -> tuple[int, ...]:
        """Streams the action's kernels join."""
        if self.passing.waits == "stream":
            return tuple(self.streams.values())
        need = self.transfers.needed(self.rank, action)
        return () if need is None else (self.streams[need],)

    def _transfer(self, section: SectionBuilder, edge: Edge, waits: Sequence[int]) -> int:
        """NCCL's stream waits for the kernels in front of a send or receive (c10d ProcessGroupNCCL.cpp, pointToPoint:
        syncStream), but where receives are posted early."""
        kind = "send" if edge.source == self.rank else "recv"
        label = Label("pipeline", "forward" if edge.forward else "backward", kind)
        joins = () if waits or (kind == "recv" and self.passing.waits == "overlapped") else (COMPUTE,)
        task = section.collective(self.streams[edge], self._call(edge), self.plan.stack.host_collective_s, label,
                                  waits, joins)
        self._exchanged.append((task, edge))
        return task

    def _call(self, edge: Edge) -> int:
        """Row of the transfer over an edge."""
        known = self._calls.get(edge)
        if known is None:
            size = round(self.passing.elements * DTYPE_BYTES[self.passing.dtype])
            kind = "send" if edge.source == self.rank else "recv"
            call = CollectiveCall(kind, size, self.passing.dtype, self.edges[edge])
            known = self._calls[edge] = self.plan.builder.collective(call)
        return known

    def _passed(self, section: SectionBuilder, edge: Edge, sign: int) -> None:
        """A stage's output or its input's gradient changes hands: layers count theirs as taken over by their neighbour.

        The sender drops an output as soon as it is on its way (Megatron-LM `schedules.py`, deallocate_output_tensor).
        """
        pool = OUTPUT_POOL if edge.forward else FLOWING_POOL
        size = sign * blocks(self.passing.whole * DTYPE_BYTES[self.passing.dtype])
        memory = section.section.memory
        memory.append(MemoryOp(len(section.section), pool.name, size, pool.category))
        section.section.layers.append(LayerMemory(len(memory) - 1, len(memory), "passed", -1, None))

    def _earlier(self, section: SectionBuilder, begins: bool) -> None:
        """What the last stage's engine has of an earlier micro-batch comes to count, or goes."""
        last = self.plan.architecture.stack[-1].kind == "head"
        if self._buffers is not None and last and any(edge.target == self.rank for edge in self.edges if edge.forward):
            self._buffers.earlier(section, begins)

    def _arrives(self, section: SectionBuilder, edge: Edge) -> None:
        """A tensor of another stage is there, as the stage's engine comes by it."""
        own = self._buffers
        if own is None:
            self._passed(section, edge, 1)
            return
        if edge.forward:
            own.received(section, True)
        else:
            own.backward(section, True)
        own.gather(section, True)
        self._passed(section, edge, 1)
        own.gather(section, False)

    def _leaves(self, section: SectionBuilder, edge: Edge) -> None:
        """A tensor is on its way to another stage."""
        own = self._buffers
        if own is not None and edge.forward and own.partitioned:
            own.sent(section)
        self._passed(section, edge, -1)
        if own is not None and not edge.forward:
            own.received(section, False)
        elif own is not None and not own.partitioned:
            own.sent(section)

    def _first_receive(self, needs: Sequence[Edge]) -> None:
        if needs:
            section = self.plan.builder.section("first receive")
            for edge in needs:
                self._transfer(section, edge, ())
            self.plan.builder.run(section)

    def _layers(self, chunk: int) -> list[Layer]:
        return [self.plan.architecture.stack[position] for position in self.chunks[chunk]]

    def _forward(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                 gathers: int = 0) -> int:
        layers = self._layers(action.chunk)
        memory = Activations(self.plan, section, self.chunks[action.chunk].stop, keep_gradients=False)
        memory.row("forward", self.chunks[action.chunk], layers)
        segment = self.plan.compute.run(layers, self._gathered(action))
        return self._kernels(section, segment, Label(f"chunk{action.chunk}", "forward", "forward"), waiting)

    def _backward(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                  gathers: int = 0) -> int:
        """One backward pass of a chunk; returns its last task, -1 if there is none."""
        raise NotImplementedError

    def _merges(self, batch: Batch) -> bool:
        """Whether a batch is a forward and a backward that can run as one."""
        return False

    def _pair(self, section: SectionBuilder, forward: Action, backward: Action, micro: MicroStep) -> int:
        """A forward and a backward of another micro-batch as one; returns its task."""
        raise NotImplementedError

    def _accumulated(self, layers: Sequence[Layer], micro: MicroStep) -> tuple[Kernel, ...]:
        """Traffic behind the fresh gradients of layers."""
        raise NotImplementedError

    def _reduce_late(self, section: SectionBuilder) -> None:
        """Gradients that have not been reduced beside backward are."""

    def _finish(self, section: SectionBuilder) -> None:
        """The optimizer, once gradients of all stages are complete."""
        raise NotImplementedError

    def _weights(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                 gathers: int = 0) -> int:
        layers = self._layers(action.chunk)
        held = self._held_for_weights(action.chunk)
        if held:
            section.free("kept for weight gradients", held, "activations")
        segment = self.plan.compute.run_backward(layers, ["none"] * len(layers), "only", (),
                                                 self._accumulated(layers, micro))
        return self._kernels(section, segment, Label(f"chunk{action.chunk}", "backward", "weight gradients"), waiting)

    def _kernels(self, section: SectionBuilder, segment: int, label: Label, waiting: tuple[int, ...]) -> int:
        return -1 if segment < 0 else section.kernels(COMPUTE, segment, label, joins=waiting)

    def _gathered(self, action: Action) -> Items:
        """What an action gathers from its tensor ranks of what another stage sent.

        DeepSpeed's PartitionedTensor (`runtime/utils.py`, full; read in 0.5.10) gathers into zeros through a list of
        tensors and clones the result, and a stage drops its own output but for a share, which backward gathers again
        (`runtime/pipe/engine.py`, _exec_backward_pass).
        """
        passing = self.passing
        if not passing.gather or self.transfers.needed(self.rank, action) is None:
            return ()
        size = round(passing.gather * DTYPE_BYTES[passing.dtype])
        communicator = self.plan.builder.communicators.index("tensor")
        call = InlineCall(CollectiveCall("all_gather", size, passing.dtype, communicator))
        if not passing.partitioned:
            return (call,)
        zeros = traffic_kernel("zeros", passing.dtype, passing.gather, size)
        copies = [traffic_kernel(name, passing.dtype, passing.gather, 2 * size)
                  for name in ("gathered tensors into place", "clone")]
        once: Items = (zeros, call, *copies)
        return once * 2 if action.kind == "B" else once

    def _held_for_weights(self, chunk: int) -> int:
        known = self.plan.compute.memory_of
        return sum(known(layer, "kept for weights", partial(kept_for_weights, layer)) for layer in self._layers(chunk))


_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
_PHASES = {"F": "forward", "B": "backward", "W": "backward"}
